"""Evaluate a checkpoint: ``python evaluate.py checkpoint=RUN/last.ckpt suite=perplexity``."""

import sys

try:
    from selmodel.cli import main
    from selmodel.evaluation.run import evaluate
except KeyboardInterrupt:  # they take seconds
    sys.exit(130)

if __name__ == "__main__":
    main(evaluate, "evaluate", literal=("text",))
