"""selmodel: pretraining of language models with standard and selective attention."""

__version__ = "0.1.0"
