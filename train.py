"""Train a language model: ``python train.py attention=selective data=docstrings model.depth=4``."""

from selmodel.cli import main
from selmodel.training.run import train

if __name__ == "__main__":
    main(train, "train")
