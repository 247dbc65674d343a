"""Train a language model: ``python train.py attention=selective data=docstrings model.depth=4``."""

import sys

try:
    from selmodel.cli import main
    from selmodel.training.run import train
except KeyboardInterrupt:  # they take seconds
    sys.exit(130)

if __name__ == "__main__":
    main(train, "train")
