"""Train the tokenizer ahead of a run: ``python data/train_tokenizer.py data=local data.root=DIR tokenizer.path=FILE``.

Takes the options of train.py. A run trains a missing tokenizer by itself; this makes it beforehand, for many runs.
"""

import sys

from selmodel.cli import main
from selmodel.training.setup import build_corpus


def train_tokenizer(cfg):
    _, tokenizer = build_corpus(cfg)
    print(f"{tokenizer.name}: {tokenizer.vocab_size} ids, sha256 {tokenizer.hash}")


if __name__ == "__main__":
    sys.argv.append("hydra.run.dir=${cache_dir}")  # there is no run, and so no run directory
    main(train_tokenizer, "train")
