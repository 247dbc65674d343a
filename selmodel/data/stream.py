"""Virtual streams: the order in which a corpus is read, as four integers per stream.

The order of a run is a function of its `Order` and of the corpus alone. V streams each read their own rows
and pack them into sequences; global sequence g is the (g // V)-th of stream g % V. Devices and workers only
share the streams out among themselves, so their number never shows in the batches, and a run resumes from
4 * V integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from selmodel.data.documents import Block, Documents
from selmodel.data.packing import BlockCursor
from selmodel.data.sharing import ShardGroup
from selmodel.errors import UserError

# A stream of a tiny corpus finds no row of its own in most epochs. It meets one after about as many epochs as
# there are streams; this many times more without one (probability below exp(-200)) is a fault, not bad luck.
EPOCHS_WITHOUT_A_ROW = 200

# How the user types the settings of an order.
OPTIONS = {
    "seed": "data.seed",
    "streams": "data.streams",
    "context_length": "model.context_length",
    "batch_size": "data.batch_size",
}


class StreamState(NamedTuple):
    """Where a stream stands: the next token to read.

    `shard` indexes the stream's own list of shards of that epoch, `row` is the row in that shard, `offset`
    counts the tokens of that row (its ids, then EOS) already used.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Order:
    """The settings that define which tokens stand where in which batch.

    Raises:
        UserError: a value is out of range, or batch_size is neither a multiple nor a divisor of streams.
    """

    seed: int
    streams: int
    context_length: int
    batch_size: int

    def __post_init__(self) -> None:
        faults = [
            f"{OPTIONS[name]}={value!r}: expected an integer of at least {least}"
            for name, value in asdict(self).items()
            for least in [0 if name == "seed" else 1]
            if not isinstance(value, int) or isinstance(value, bool) or value < least
        ]
        if faults:
            raise UserError("; ".join(faults))
        if not compatible(self.batch_size, self.streams):
            batches = _nearest(self.batch_size, lambda b: compatible(b, self.streams))
            streams = _nearest(self.streams, lambda v: compatible(self.batch_size, v))
            raise UserError(
                f"data.batch_size={self.batch_size} with data.streams={self.streams}: the global batch must "
                f"be a multiple of the number of streams, or divide it. Near choices: "
                f"{_either('data.batch_size', batches)}, or {_either('data.streams', streams)}."
            )

    def check_world(self, world_size: int) -> None:
        """Raises UserError, with what would work, unless `world_size` devices can share the batches."""
        if self.batch_size % world_size == 0 and self.streams % world_size == 0:
            return
        common = math.gcd(self.batch_size, self.streams)
        devices = [d for d in range(1, common + 1) if common % d == 0]
        pairs = []
        for batch_size in _nearest(self.batch_size, lambda b: b % world_size == 0):
            streams = _nearest(self.streams, lambda v: v % world_size == 0 and compatible(batch_size, v))  # noqa: B023
            pairs += [f"data.batch_size={batch_size} data.streams={v}" for v in streams]
        raise UserError(
            f"data.batch_size={self.batch_size} and data.streams={self.streams} on {world_size} devices: "
            "both must be divisible by the number of devices. These settings run on "
            f"{', '.join(map(str, devices))} device(s); {world_size} devices run with {' or '.join(pairs)}."
        )


def compatible(batch_size: int, streams: int) -> bool:
    """Whether the streams take part equally often in every batch, or in every round of batches."""
    return batch_size % streams == 0 or streams % batch_size == 0


def _nearest(value: int, works: Callable[[int], bool]) -> list[int]:
    """The value itself if it works, else the nearest that do below and above it."""
    if works(value):
        return [value]
    below = next((v for v in range(value - 1, 0, -1) if works(v)), None)
    above = next((v for v in range(value + 1, 2 * value * value + 2) if works(v)), None)
    return [v for v in (below, above) if v is not None]


def _either(name: str, values: list[int]) -> str:
    return " or ".join(f"{name}={value}" for value in values)


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n) that depends on (seed, epoch) alone: int64 [n].

    Sorting raw generator output, instead of asking for a permutation, keeps the order the same for every
    version of NumPy: bit generators are promised to be stable, the methods built on them are not.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(keys, kind="stable")


def assignment(stream: int, streams: int, shards: int, seed: int, epoch: int) -> list[tuple[int, int, int]]:
    """What a stream reads in an epoch: [(shard number, first row, row step)], in order.

    At least as many shards as streams: whole shards stream, stream + streams, ... of the epoch's permutation.
    Fewer: the streams that share a shard take every c-th row of it, shifted by one from epoch to epoch, so
    that each row is read once per epoch and no stream stays without rows in a tiny corpus.
    """
    order = permutation(shards, seed, epoch)
    if shards >= streams:
        return [(int(shard), 0, 1) for shard in order[stream::streams]]
    sharers = math.ceil((streams - stream % shards) / shards)
    return [(int(order[stream % shards]), (stream // shards - epoch) % sharers, sharers)]


class Stream:
    """One endless stream of the training split: documents of its rows, each followed by EOS, epoch after epoch.

    Args:
        documents: the corpus.
        index: which of the `streams` streams this is.
        streams: number of streams, V.
        seed: seed of the order of shards.
        state: where to start; seeking costs one partial shard, whatever was read before.
        group: with fewer shards than streams, the streams of this process that share its shard.
    """

    def __init__(
        self,
        documents: Documents,
        index: int,
        streams: int,
        seed: int,
        state: StreamState = StreamState(),  # noqa: B008 (immutable)
        group: ShardGroup | None = None,
    ) -> None:
        self.documents = documents
        self.index = index
        self.streams = streams
        self.seed = seed
        self.group = group
        self._start = StreamState(*(int(v) for v in state))
        self._epoch, self._shard, self._step = 0, 0, 1  # of the cursor's block
        self._cursor = BlockCursor(self._blocks())

    def fill(self, tokens: np.ndarray) -> None:
        """Writes the next len(tokens) tokens of the stream into `tokens` [m].

        Raises:
            UserError: the corpus has no row at all, or changed since the state was recorded.
        """
        if self._cursor.block is None:
            self._seek()
        self._cursor.take(tokens)

    @property
    def state(self) -> StreamState:
        """The place of the next token."""
        block = self._cursor.block
        if block is None:
            return self._start
        place = self._cursor.document()
        if place is None:  # everything of the block is used: its last row is over
            return StreamState(self._epoch, self._shard, int(block.rows[-1]) + self._step, 0)
        document, offset = place
        return StreamState(self._epoch, self._shard, int(block.rows[document]), offset)

    def _seek(self) -> None:
        start, cursor = self._start, self._cursor
        cursor.next_block()  # never False: the blocks are endless
        if start.offset == 0:
            return
        place = StreamState(self._epoch, self._shard, int(cursor.block.rows[0]))
        if place != start._replace(offset=0) or start.offset >= cursor.block.ends[0]:
            shards = assignment(self.index, self.streams, self._n_shards, self.seed, start.epoch)
            name = self.documents.shards("train")[shards[start.shard][0]]
            raise UserError(
                f"stream {self.index} cannot resume at token {start.offset} of row {start.row} of shard {name}: "
                "the row is gone or shorter than when the state was recorded. Resume with the corpus and "
                "data.on_bad_shard of the first run, or start a new run."
            )
        cursor.position = start.offset

    def _blocks(self) -> Iterator[Block]:
        self._n_shards = len(self.documents.shards("train"))
        epoch, first_shard, row, _ = self._start
        empty_epochs = 0
        while True:
            found = False
            shards = assignment(self.index, self.streams, self._n_shards, self.seed, epoch)
            for place, (shard, first, step) in enumerate(shards[first_shard:], start=first_shard):
                # The first row of this stream's share at or after the recorded one.
                start = row + (first - row) % step
                shared = self.group.rows_of(self.index, epoch) if self.group else None
                for block in self.documents.blocks("train", shard, start, step, shared=shared):
                    self._epoch, self._shard, self._step = epoch, place, step
                    found = True
                    yield block
                row = 0
            epoch, first_shard, row = epoch + 1, 0, 0
            empty_epochs = 0 if found else empty_epochs + 1
            if empty_epochs:
                self._check_not_empty(empty_epochs)

    def _check_not_empty(self, empty_epochs: int) -> None:
        if empty_epochs == 1 and not has_rows(self.documents):
            name = self.documents.shards("train")[0]
            raise UserError(
                f"the training split has no usable row in any of its {self._n_shards} shard(s), from {name} on. "
                "Point data at a corpus with documents."
            )
        if empty_epochs > EPOCHS_WITHOUT_A_ROW * max(self.streams, self._n_shards):
            raise UserError(
                f"data.streams={self.streams}: stream {self.index} found no row in {empty_epochs} epochs. "
                "The corpus is too small for so many streams; lower data.streams."
            )


def has_rows(documents: Documents) -> bool:
    """Whether any shard of the training split has a row."""
    shards = range(len(documents.shards("train")))
    return any(next(iter(documents.blocks("train", shard)), None) is not None for shard in shards)
