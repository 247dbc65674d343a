"""Two real processes: states gathered from both, runs that move to and from one process, and data that runs out."""

from __future__ import annotations

import socket
import time
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from corpus import NumberSource, NumberTokenizer, Simulation, number_source, oracle_batches

from selmodel.data.datamodule import DataModule

ORDER = {"streams": 8, "batch_size": 8, "context_length": 7}
SETTINGS = {"two": 0, "two-workers": 2}  # workers per process
STEPS = 12
STOP = 5


def module_of(source=None, **options) -> DataModule:
    return DataModule(source or number_source(4, rows=60), NumberTokenizer(), **{**ORDER, **options})


def train(module: DataModule, steps: int, ahead: int = 0) -> list[torch.Tensor]:
    """Trains on `steps` batches, with `ahead` more fetched."""
    batches = list(islice(iter(module.train_dataloader()), steps + ahead))[:steps]
    for batch in batches:
        module.mark_trained(batch)
    return [batch["tokens"] for batch in batches]


def two_processes(rank: int, port: int, folder) -> None:
    """Everything these tests ask of a pair of processes; the answers go to files.

    A process that was itself spawned would spawn its workers, which takes seconds for each; they fork instead.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        for name, workers in SETTINGS.items():
            # From the beginning, with batches fetched ahead when the state is taken.
            module = module_of(workers=workers, multiprocessing_context="fork")
            batches = train(module, STOP, ahead=2)
            torch.save((batches, module.state_dict()), folder / f"{name}-start-{rank}.pt")
            # From a state that one process wrote.
            module = module_of(workers=workers, multiprocessing_context="fork")
            module.load_state_dict(torch.load(folder / "one.pt", weights_only=True))
            batches = train(module, STEPS - STOP)
            torch.save((batches, module.state_dict()), folder / f"{name}-rest-{rank}.pt")

        began = time.monotonic()
        few = module_of(NumberSource({"train": [["2", "3", "4", "5", "6"]], "validation": [["2"]]}))
        torch.save((train(few, 20), time.monotonic() - began), folder / f"few-{rank}.pt")

        module = module_of(validation_sequences=23, validation_batch_size=4)
        sums = torch.zeros(3, dtype=torch.float64)
        steps = 0
        for batch in module.val_dataloader():
            weight = batch["weight"].double()[:, None]
            # One collective per batch: a rank with fewer batches would leave the other waiting.
            part = torch.stack([(weight * batch["tokens"][:, 1:]).sum(), weight.sum() * 7, batch["bytes"].sum()])
            dist.all_reduce(part)
            sums += part
            steps += 1
        torch.save((sums, steps), folder / f"validation-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes did; see `two_processes`."""
    folder = tmp_path_factory.mktemp("distributed")
    one = module_of()
    train(one, STOP)
    torch.save(one.state_dict(), folder / "one.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.spawn(two_processes, (port, folder), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("two processes did not end within 120 s")
    return folder


def answers(folder, name: str) -> list[tuple]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]


def global_batches(folder, name: str) -> np.ndarray:
    """Row b of a global batch is row b // 2 of rank b % 2."""
    (first, _), (second, _) = answers(folder, name)
    return np.stack([torch.stack(pair, 1).flatten(0, 1).numpy() for pair in zip(first, second, strict=True)])


def expected() -> np.ndarray:
    return np.stack(list(islice(oracle_batches(number_source(4, rows=60), seed=0, **ORDER), STEPS)))


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_read_what_one_reads(folder, name):
    np.testing.assert_array_equal(global_batches(folder, f"{name}-start"), expected()[:STOP])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_state_is_gathered_from_both(folder, name):
    one = torch.load(folder / "one.pt", weights_only=True)
    for _, state in answers(folder, f"{name}-start"):
        assert state["step"] == one["step"] == STOP
        assert state["order"] == one["order"]
        assert torch.equal(state["streams"], one["streams"])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_moves_from_one_process_to_two(folder, name):
    np.testing.assert_array_equal(global_batches(folder, f"{name}-rest"), expected()[STOP:])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 3), (4, 0)])
def test_a_run_moves_from_two_processes_to_others(folder, name, world_size, workers):
    (_, state), _ = answers(folder, f"{name}-start")
    run = Simulation(number_source(4, rows=60), world_size, workers, state=state, **ORDER)
    np.testing.assert_array_equal(run.train(STEPS - STOP), expected()[STOP:])


def test_five_rows_on_two_processes_wrap_in_bounded_time(folder):
    for batches, seconds in answers(folder, "few"):
        assert len(batches) == 20
        assert {int(token) for batch in batches for token in batch.flatten()} == {0, 1, 2, 3, 4, 5, 6}
        assert seconds < 30


def test_validation_sums_of_two_processes_are_those_of_one(folder):
    data = module_of(validation_sequences=23).validation_set
    for sums, steps in answers(folder, "validation"):
        assert steps == 3  # 12 rows each, one of them padding, by fours
        assert sums.tolist() == [data.tokens[:, 1:].sum(), 23 * 7, data.n_bytes]
