"""A corpus made of numbers, and the order of its batches written down token by token.

Every token of a document is a number of its own, so a test reads from a batch which row each token came from. The
oracle shares only the permutation of shards with the package; everything else it does one token at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from selmodel.data.datamodule import DataModule
from selmodel.data.loader import TrainLoader
from selmodel.data.reader import SkipCounter
from selmodel.data.stream import permutation

BOS, EOS = 0, 1
FIRST_ID = 2


class NumberTokenizer:
    """The text "17 4 99" is the tokens 17, 4, 99."""

    def __init__(self, vocab_size: int = 1 << 20, name: str = "numbers") -> None:
        self.vocab_size = vocab_size
        self.bos_id, self.eos_id = BOS, EOS
        self.hash = hashlib.sha256(name.encode()).hexdigest()
        self.encoded = 0  # texts encoded so far

    def encode(self, text: str) -> np.ndarray:
        self.encoded += 1
        return np.array(text.split(), dtype=np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return " ".join(str(i) for i in ids if i >= FIRST_ID)

    def state(self) -> dict:
        return {"kind": "numbers", "hash": self.hash}

    def token_bytes(self, text: str, ids) -> np.ndarray:
        sizes = [len(word) + 1 for word in text.split()]  # each number with the space after it
        if sizes:
            sizes[-1] -= 1
        return np.array(sizes, dtype=np.int64)


class FakeShard(str):
    """A shard that is its own name."""

    @property
    def name(self) -> str:
        return str(self)


class NumberSource:
    """Documents held in memory: {split: [shard: [text of row 0, ...]]}; a row that is None is skipped."""

    name = "numbers"

    def __init__(self, splits: dict[str, list[list[str | None]]]) -> None:
        self.splits = splits
        self.read = 0  # rows given out so far
        self.skipped = SkipCounter()

    def prepare(self) -> None:
        pass

    def shards(self, split: str) -> list[FakeShard]:
        return [FakeShard(f"{split}-{i:05d}") for i in range(len(self.splits[split]))]

    def rows(self, shard: FakeShard, start: int = 0, step: int = 1) -> Iterator[tuple[int, str]]:
        split, index = shard.rsplit("-", 1)
        texts = self.splits[split][int(index)]
        for row in range(start, len(texts), step):
            if texts[row] is None:
                self.skipped.skip_row(shard.name, row, "no number")
            else:
                self.read += 1
                yield row, texts[row]

    def describe(self) -> dict:
        text = repr({split: [len(rows) for rows in shards] for split, shards in self.splits.items()})
        return {"kind": "numbers", "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}


def number_source(shards: int, rows: int, *, seed: int = 0, longest: int = 12, validation: int = 40):
    """A source whose `rows` training documents, spread unevenly over `shards`, have tokens that occur nowhere else."""
    rng = np.random.default_rng(seed)
    ids = count(FIRST_ID)

    def document() -> str:
        return " ".join(str(next(ids)) for _ in range(rng.integers(0, longest + 1)))

    train: list[list[str | None]] = [[] for _ in range(shards)]
    for _ in range(rows):
        train[rng.integers(shards)].append(document())
    return NumberSource({"train": train, "validation": [[document() for _ in range(validation)]]})


def oracle_tokens(source: NumberSource, stream: int, streams: int, seed: int):
    """The tokens of a stream one by one, each with (epoch, shard, row) of the row it came from."""
    shards = source.splits["train"]
    for epoch in count():
        order = permutation(len(shards), seed, epoch)
        for shard in range(len(shards)) if len(shards) >= streams else [stream % len(shards)]:
            if len(shards) >= streams and shard % streams != stream:
                continue
            number = order[shard]
            for row, text in enumerate(shards[number]):
                sharers = math.ceil((streams - stream % len(shards)) / len(shards))
                if len(shards) < streams and (row + epoch) % sharers != stream // len(shards):
                    continue
                if text is None:
                    continue
                for token in [*text.split(), EOS]:
                    yield int(token), (epoch, int(number), row)


def oracle_batches(source: NumberSource, *, streams: int, batch_size: int, context_length: int, seed: int):
    """The global batches, int64 [batch_size, context_length + 1], one by one."""
    tokens = [oracle_tokens(source, s, streams, seed) for s in range(streams)]
    for step in count():
        rows = []
        for row in range(batch_size):
            stream = tokens[(step * batch_size + row) % streams]
            rows.append([BOS, *(token for token, _ in islice(stream, context_length))])
        yield np.array(rows)


class Simulation:
    """A training run on `world_size` devices in one process: every device's loader, one data module for all."""

    def __init__(self, source, world_size: int, workers: int, *, state=None, tokenizer=None, **options) -> None:
        self.module = module = DataModule(source, tokenizer or NumberTokenizer(), workers=workers, **options)
        if state is not None:
            module.load_state_dict(state)
        self.loaders = [
            TrainLoader(
                module.documents,
                module.order,
                rank=rank,
                world_size=world_size,
                start=lambda: (module.step, module.states),
                workers=workers,
            )
            for rank in range(world_size)
        ]
        self.iterators = None

    def train(self, steps: int) -> np.ndarray:
        """The next global batches, int64 [steps, batch_size, context_length + 1], marked as trained."""
        if self.iterators is None:
            self.iterators = [iter(loader) for loader in self.loaders]
        world_size, global_batches = len(self.loaders), []
        for _ in range(steps):
            batches = [next(iterator) for iterator in self.iterators]
            rows = np.empty((self.module.order.batch_size, self.module.order.context_length + 1), dtype=np.int64)
            for rank, batch in enumerate(batches):
                rows[rank::world_size] = batch["tokens"]
                self.module.mark_trained(batch)
            global_batches.append(rows)
        return np.stack(global_batches)
