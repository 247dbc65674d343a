"""Evaluate a checkpoint: ``python evaluate.py checkpoint=RUN/last.ckpt suite=perplexity``."""

from selmodel.cli import main
from selmodel.evaluation.run import evaluate

if __name__ == "__main__":
    main(evaluate, "evaluate", literal=("text",))
