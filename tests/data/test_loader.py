"""The batches of a run are the same for every number of devices, workers and shards, and after every resume."""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import subprocess
from collections import Counter
from itertools import islice, pairwise, product

import numpy as np
import pytest
import torch
from corpus import EOS, NumberSource, NumberTokenizer, Simulation, number_source, oracle_batches

from selmodel.data.documents import TextDocuments
from selmodel.data.loader import TrainLoader
from selmodel.data.packing import document_ids
from selmodel.data.stream import Order
from selmodel.errors import UserError

# The tests start more workers than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SETTINGS = list(product((1, 2, 4), (0, 1, 3)))  # (devices, workers)
SETTINGS_IDS = [f"devices{world}-workers{workers}" for world, workers in SETTINGS]


@pytest.mark.parametrize(("world_size", "workers"), SETTINGS, ids=SETTINGS_IDS)
@pytest.mark.parametrize("shards", [1, 4, 16])
def test_batches_are_the_same_for_every_number_of_devices_and_workers(shards, world_size, workers):
    source = number_source(shards, rows=60)
    # A batch larger than the number of streams, as large, and smaller.
    for batch_size, streams in [(16, 8)] if workers else [(16, 8), (8, 8), (4, 16)]:
        run = Simulation(source, world_size, workers, streams=streams, batch_size=batch_size, context_length=7)
        expected = oracle_batches(source, streams=streams, batch_size=batch_size, context_length=7, seed=0)
        for got, wanted in zip(run.train(25), expected, strict=False):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("world_size", "workers"), SETTINGS, ids=SETTINGS_IDS)
@pytest.mark.parametrize("shards", [1, 4, 16])
def test_every_row_is_read_once_per_epoch(shards, world_size, workers):
    """With one target per sequence, the state after a batch says to which epoch each of its tokens belongs."""
    source = number_source(shards, rows=24, longest=5)
    everything = Counter(int(t) for texts in source.splits["train"] for text in texts for t in [*text.split(), EOS])
    run = Simulation(source, world_size, workers, streams=8, batch_size=8, context_length=1)
    epochs: dict[int, list[int]] = {}
    while run.module.states[:, 0].min() < 2:
        (batch,) = run.train(1)
        for target, epoch in zip(batch[:, 1], run.module.states[:, 0], strict=True):
            epochs.setdefault(int(epoch), []).append(int(target))
    assert Counter(epochs[0]) == everything
    assert Counter(epochs[1]) == everything
    assert epochs[0] != epochs[1]


def test_smaller_batches_than_streams_resume_between_rounds():
    """Batches of 4 out of 16 streams: a state holds streams of this round beside those of the last."""
    settings = {"streams": 16, "batch_size": 4, "context_length": 7}
    source = number_source(4, rows=60)
    expected = list(islice(oracle_batches(source, seed=0, **settings), 23))
    for stop in range(1, 12):
        first = Simulation(source, 2, 0, **settings)
        first.train(stop)
        second = Simulation(source, 4, 0, state=first.module.state_dict(), **settings)
        np.testing.assert_array_equal(second.train(23 - stop), expected[stop:])


@pytest.mark.parametrize("shards", [1, 16])
def test_three_resumes_in_a_row_change_nothing(shards):
    assert_chain_of_runs_equals_one_run(shards, [(4, 3), (2, 0), (1, 3), (2, 1)], seed=shards)


@pytest.mark.slow
def test_a_run_resumes_in_any_setting_from_any_other():
    """One run that goes through every ordered pair of settings."""
    pairs = list(product(SETTINGS, SETTINGS))
    assert_chain_of_runs_equals_one_run(4, path_through(pairs), seed=0)


def assert_chain_of_runs_equals_one_run(shards: int, settings: list[tuple[int, int]], seed: int) -> None:
    source = number_source(shards, rows=60)
    order = {"streams": 8, "batch_size": 8, "context_length": 7}
    expected = oracle_batches(source, seed=0, **order)
    rng, state, step = random.Random(seed), None, 0
    for world_size, workers in settings:
        run = Simulation(source, world_size, workers, state=state, **order)
        for got in run.train(rng.randrange(1, 8)):
            np.testing.assert_array_equal(got, next(expected), err_msg=f"step {step} of {settings}")
            step += 1
        state = run.module.state_dict()


def path_through(pairs):
    """A sequence of settings in which every given pair occurs in a row (Hierholzer's algorithm)."""
    onward: dict = {}
    for a, b in pairs:
        onward.setdefault(a, []).append(b)
    path, stack = [], [pairs[0][0]]
    while stack:
        if onward.get(stack[-1]):
            stack.append(onward[stack[-1]].pop())
        else:
            path.append(stack.pop())
    path.reverse()
    assert set(pairwise(path)) == set(pairs)
    return path


def loader(source, workers=0, **options) -> TrainLoader:
    order = Order(seed=0, streams=8, context_length=7, batch_size=8)
    documents = TextDocuments(source, options.pop("tokenizer", NumberTokenizer()))
    start = options.pop("start", lambda: (0, np.zeros((8, 4), dtype=np.int64)))
    return TrainLoader(documents, order, start=start, workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_contents(workers):
    batch = next(iter(loader(number_source(4, rows=60), workers, document_mask=True)))
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].shape == (8, 8)
    assert batch["document_ids"].dtype == torch.int32
    np.testing.assert_array_equal(batch["document_ids"], document_ids(batch["tokens"].numpy(), EOS))
    assert batch["step"] == 0
    assert batch["state"].dtype == np.int64
    assert batch["state"].shape == (8, 5)
    assert batch["state"][:, 0].tolist() == list(range(8))
    assert "document_ids" not in next(iter(loader(number_source(4, rows=60), workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_global_random_states_alone(workers):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    batches = iter(loader(number_source(4, rows=60), workers))
    for _ in range(3):
        next(batches)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    np.testing.assert_array_equal(np.random.get_state()[1], before[2])


def test_start_is_asked_when_the_iteration_begins():
    source = number_source(4, rows=60)
    position = [0, np.zeros((8, 4), dtype=np.int64)]
    late = loader(source, start=lambda: tuple(position))
    batches = list(islice(iter(late), 3))
    position[0] = 2
    for batch in batches[:2]:
        position[1][batch["state"][:, 0]] = batch["state"][:, 1:]
    again = next(iter(late))
    assert again["step"] == 2
    assert torch.equal(again["tokens"], batches[2]["tokens"])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_faults_in_the_corpus_reach_the_user_as_they_are(workers):
    empty = NumberSource({"train": [[], []], "validation": [["2"]]})
    before = set(multiprocessing.active_children())
    with pytest.raises(UserError, match=r"^the training split has no usable row in any of its 2 shard") as caught:
        next(iter(loader(empty, workers)))
    # The workers are gone, although the traceback of `caught` still holds the frames of the iteration.
    assert set(multiprocessing.active_children()) == before
    assert caught.tb is not None


@pytest.mark.parametrize("workers", [0, 3])
def test_skipped_rows_of_all_workers_are_counted(workers):
    source = number_source(4, rows=60)
    for texts in source.splits["train"]:
        texts[::3] = [None] * len(texts[::3])
    skipped = sum(text is None for texts in source.splits["train"] for text in texts)
    train = loader(source, workers)
    batches = iter(train)
    while min(next(batches)["state"][:, 1]) < 1:  # until every stream is past epoch 0
        pass
    total = train.skipped if workers else train.documents.skipped
    assert total[0] >= skipped


@pytest.mark.slow
def test_workers_that_start_afresh_make_the_same_batches():
    source = number_source(4, rows=60)
    expected = oracle_batches(source, streams=8, batch_size=8, context_length=7, seed=0)
    for batch, wanted in zip(
        islice(iter(loader(source, 2, multiprocessing_context="spawn")), 5), expected, strict=False
    ):
        np.testing.assert_array_equal(batch["tokens"], wanted)


class CautiousTokenizer(NumberTokenizer):
    """Checks that garbage collection goes on in a worker, without the objects the worker was born with."""

    def encode_batch(self, texts):
        if not gc.isenabled() or gc.get_freeze_count() < 10_000:
            raise UserError(f"collects: {gc.isenabled()}, kept out: {gc.get_freeze_count()}")
        return super().encode_batch(texts)


def test_workers_do_not_collect_what_they_inherited():
    """Another loader's iterator, collected in a worker, would set about ending processes that are not its own."""
    batches = iter(loader(number_source(4, rows=60), 2, tokenizer=CautiousTokenizer()))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    next(batches)
    batches.close()


def test_workers_end_with_the_iteration():
    before = set(multiprocessing.active_children())
    batches = iter(loader(number_source(4, rows=60), 2))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    batches.close()
    assert not workers & set(multiprocessing.active_children())


@pytest.fixture
def two_workers():
    """(batches, their worker processes)"""
    before = set(multiprocessing.active_children())
    batches = iter(loader(number_source(4, rows=60), 2))
    next(batches)
    yield batches, set(multiprocessing.active_children()) - before
    batches.close()


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1", "USR2"])
def test_a_stop_signal_to_the_whole_job_does_not_stop_the_workers(two_workers, name):
    """The training process gets it too, and needs its workers until it has saved its state."""
    batches, workers = two_workers
    # From another process: from this one, SIGTERM is an order to end.
    subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    for _ in range(20):
        next(batches)
    assert all(worker.is_alive() for worker in workers)
    batches.close()
    assert not any(worker.is_alive() for worker in workers)


def test_workers_obey_the_training_process(two_workers):
    _, workers = two_workers
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader would report their end
    try:
        for worker in workers:
            worker.terminate()
            worker.join(timeout=10)
            assert worker.exitcode == 0
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_more_workers_than_streams():
    source = number_source(2, rows=20)
    run = Simulation(source, 1, 3, streams=2, batch_size=2, context_length=5)
    expected = oracle_batches(source, streams=2, batch_size=2, context_length=5, seed=0)
    for got, wanted in zip(run.train(5), expected, strict=False):
        np.testing.assert_array_equal(got, wanted)
