"""Small corpora in C4's layout, and training runs on them inside the test process."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import hydra
import pytest

from selmodel.cli import CONFIGS
from selmodel.config import register_resolvers

WORDS = """
the a of to and in is that it was for on are as with they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people
""".split()  # noqa: SIM905


def write_shard(path: Path, texts: list[str]) -> None:
    """A json.gz shard in C4's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for text in texts:
            row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.example"}
            file.write(json.dumps(row) + "\n")


def write_corpus(root: Path, *, shards: int = 3, rows: int = 60, seed: int = 0) -> Path:
    """Random sentences of common words: ``shards`` training shards and one for validation."""
    generator = random.Random(seed)

    def text() -> str:
        return " ".join(generator.choice(WORDS) for _ in range(generator.randint(5, 120))) + ".\n"

    for i in range(shards):
        write_shard(root / "en" / f"c4-train.{i:05d}-of-{shards:05d}.json.gz", [text() for _ in range(rows)])
    write_shard(root / "en" / "c4-validation.00000-of-00001.json.gz", [text() for _ in range(rows)])
    return root


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The folder of a small corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """A cache folder that the tests of one process share, so that the tokenizer is trained once."""
    return tmp_path_factory.mktemp("cache")


TINY = (
    "data=local",
    "model.depth=2",
    "model.d_model=32",
    "model.head_dim=16",
    "model.context_length=32",
    "tokenizer.vocab_size=400",
    "data.batch_size=8",
    "data.streams=8",
    "data.workers=0",
    "data.validation_sequences=10",
    "optim.lr=1e-2",
    "trainer=cpu",
    "trainer.max_steps=12",
    "trainer.val_check_interval=5",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_steps=5",
    "sample.tokens=5",
)


@pytest.fixture
def tiny(corpus, cache_dir):
    """Composes the configuration of a tiny run: ``tiny(run_dir, *overrides)``."""
    register_resolvers()

    def compose(run_dir: Path, *overrides: str):
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(
                "train",
                [
                    *(option for option in TINY if not (option == "data=local" and "data=tokens" in overrides)),
                    f"data.root={corpus}",
                    f"cache_dir={cache_dir}",
                    f"runs_root={run_dir.parent}",
                    f"run_dir={run_dir}",
                    *overrides,
                ],
            )

    return compose
