"""Sharing a shard: every reader gets its own rows, the shard is unpacked once, and waiting text is bounded."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from corpus import NumberSource, NumberTokenizer, Simulation, number_source, oracle_batches

from selmodel.data.documents import TextDocuments
from selmodel.data.sharing import EPOCHS_AHEAD, ShardGroup, SharedRows
from selmodel.data.stream import Stream
from selmodel.errors import UserError


class Shard:
    """Rows "0", "1", ... and a note of every time they are read."""

    def __init__(self, rows: int, text: str = "{}") -> None:
        self.rows = rows
        self.text = text
        self.opened: list[tuple[int, int]] = []

    def read(self, start: int, step: int):
        self.opened.append((start, step))
        return ((row, self.text.format(row)) for row in range(start, self.rows, step))


def read_in_turns(shared: SharedRows, shard: Shard, order) -> dict[int, list[int]]:
    """Rows of each reader, when `order` names whose turn it is."""
    readers = {reader: shared.rows(reader, shard.read) for reader in shared.starts}
    rows: dict[int, list[int]] = {reader: [] for reader in readers}
    for reader in order:
        for row, text in [next(readers[reader], (None, ""))]:
            if row is not None:
                assert text == str(row)
                rows[reader].append(row)
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_readers_in_any_order_get_their_rows_from_one_pass(seed):
    starts = {0: 3, 1: 7, 2: 2}
    shard = Shard(50)
    order = random.Random(seed).choices([0, 1, 2], k=200)
    rows = read_in_turns(SharedRows(starts, 3, limit=10_000), shard, order)
    assert rows == {reader: list(range(start, 50, 3)) for reader, start in starts.items()}
    assert shard.opened == [(2, 1)]


@pytest.mark.parametrize("limit", [0, 5, 40])
def test_a_reader_far_behind_reads_on_alone(limit):
    shard = Shard(60)
    order = [0] * 30 + [1] * 5 + [0] * 10 + [2] * 30 + [1] * 30  # reader 0 runs ahead, then 2
    rows = read_in_turns(SharedRows({0: 0, 1: 1, 2: 2}, 3, limit), shard, order)
    assert rows == {reader: list(range(reader, 60, 3)) for reader in range(3)}
    assert len(shard.opened) > 1


def test_a_fault_reaches_every_reader():
    def read(start, step):
        yield 0, "0"
        raise UserError("row 1 is bad")

    shared = SharedRows({0: 0, 1: 1}, 2, limit=100)
    first, second = (shared.rows(reader, read) for reader in (0, 1))
    assert next(first) == (0, "0")
    for reader in (second, first):
        with pytest.raises(UserError, match="row 1 is bad"):
            next(reader)


def test_a_group_gives_all_its_streams_the_same_pass_and_keeps_none():
    # Streams 1, 4 and 7 share; stream 4 begins an epoch later, stream 7 in row 20 of epoch 0.
    group = ShardGroup({1: (0, 0), 4: (1, 0), 7: (0, 20)}, lambda stream, epoch: ((stream // 3 - epoch) % 3, 3), 99)
    first = group.rows_of(1, 0)
    assert first.starts == {0: 0, 2: 20}
    assert group.rows_of(7, 0) is first
    passes = [group.rows_of(stream, 1) for stream in (1, 4, 7)]
    assert passes[0] is passes[1] is passes[2] is not first
    assert passes[0].starts == {2: 2, 0: 0, 1: 1}
    assert not group._passes


def test_nothing_waits_for_a_stream_that_is_epochs_behind():
    group = ShardGroup({0: (0, 0), 1: (0, 0)}, lambda stream, epoch: ((stream - epoch) % 2, 2), 10**9)
    shard = Shard(100, "{} " + "x" * 10_000)
    tracemalloc.start()
    for epoch in range(50):  # stream 1 never comes
        for _ in group.rows_of(0, epoch).rows(-epoch % 2, shard.read):
            pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (EPOCHS_AHEAD + 3) * 50 * 10_000  # 50 rows of an epoch are for stream 1
    assert group.rows_of(1, 3) is None
    recent = group.rows_of(1, 48)
    assert [row for row, _ in recent.rows(1, shard.read)] == list(range(1, 100, 2))


@pytest.mark.parametrize(("shards", "world_size", "workers"), [(1, 1, 0), (4, 1, 0), (4, 2, 2), (6, 2, 0)])
def test_batches_are_the_same_with_shared_reading_and_without(monkeypatch, shards, world_size, workers):
    source = number_source(shards, rows=80)
    options = {"streams": 16, "batch_size": 16, "context_length": 5}
    expected = oracle_batches(source, seed=0, **options)
    run = Simulation(source, world_size, workers, **options)
    for batch in run.train(15):
        np.testing.assert_array_equal(batch, next(expected))
    resumed = Simulation(source, 1, 0, state=run.module.state_dict(), **options)
    monkeypatch.setattr("selmodel.data.loader.WAITING_CHARS", 50)  # readers are sent away
    for batch in resumed.train(40):
        np.testing.assert_array_equal(batch, next(expected))


class CountingSource(NumberSource):
    """Counts rows passed over as well, as a reader of a packed file passes over them."""

    passed = 0

    def rows(self, shard, start=0, step=1):
        last = start
        for row, text in super().rows(shard, start, step):
            self.passed += row - last + 1
            last = row + 1
            yield row, text


@pytest.mark.parametrize(("shards", "workers"), [(1, 0), (4, 0)])
def test_a_shard_is_unpacked_once_per_epoch(shards, workers):
    source = CountingSource(number_source(shards, rows=400).splits)
    run = Simulation(source, 1, workers, streams=16, batch_size=16, context_length=5)
    while run.module.states[:, 0].max() < 1:
        run.train(1)
    shared = source.passed
    assert shared <= 2 * 400  # the streams in front have begun the next epoch
    alone = CountingSource(source.splits)
    streams = [Stream(TextDocuments(alone, NumberTokenizer()), index, 16, seed=0) for index in range(16)]
    for stream in streams:
        while stream.state.epoch < 1:
            stream.fill(np.empty(5, dtype=np.int32))
    assert alone.passed > 3 * shared
