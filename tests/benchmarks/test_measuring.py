"""What the benchmarks measure with: turns, medians, and memory against a known allocation."""

from __future__ import annotations

import functools
from pathlib import Path

import measuring
import pytest
import torch

CPU = torch.device("cpu")


def allocate(mib: int):
    """A call that holds `mib` MiB while it runs, and none after it."""
    return functools.partial(hold, mib)


def hold(mib: int) -> None:
    torch.ones(mib * 2**18).sum()


def fail():
    raise RuntimeError("it broke")


@pytest.mark.parametrize("mib", [32, 200])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured on Linux")
def test_peak_memory_of_a_known_allocation(mib):
    peak = measuring.peak_bytes(allocate, mib, device=CPU) / 2**20
    assert mib - 1 <= peak <= mib + 8  # pages of the allocator and of the code that runs


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured on Linux")
def test_what_was_freed_before_does_not_count_as_there():
    """In blocks so small that the allocator keeps them when they are freed."""
    assert 30 <= measuring.peak_bytes(allocate_twice, 32, device=CPU) / 2**20 <= 40


def hold_in_pieces(mib: int) -> None:
    sum(x.sum() for x in [torch.ones(2**14) for _ in range(mib * 16)])


def allocate_twice(mib: int):
    hold_in_pieces(mib)
    return functools.partial(hold_in_pieces, mib)


def test_a_process_that_fails_says_why():
    with pytest.raises(measuring.Skipped, match="RuntimeError: it broke"):
        measuring.peak_bytes(lambda_free_failure, device=CPU)


def lambda_free_failure():
    return fail


def add(a: torch.Tensor, b: torch.Tensor):
    assert a.stride() == (1, 3)  # tensors reach the process as they are laid out
    assert torch.equal(a + b, torch.full((3, 2), 3.0))
    return lambda: None


def test_tensors_reach_the_process_that_measures():
    assert measuring.peak_bytes(add, torch.ones(2, 3).T, torch.full((3, 2), 2.0), device=CPU) < 2**23


def test_turns_rotate_and_every_contender_runs_alike():
    order = []
    calls = {name: functools.partial(order.append, name) for name in "abc"}
    result = measuring.in_turns(calls, rounds=3, patience=9, device=CPU)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"  # the first is the warm-up
    assert all(0 <= seconds < 1 for seconds in result.values())


def test_what_is_skipped_is_not_called_again(monkeypatch):
    calls = []

    def unable():
        calls.append("unable")
        raise measuring.Skipped("not here")

    def slow():
        calls.append("slow")
        clock[0] += 30.0

    clock = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    result = measuring.in_turns({"unable": unable, "slow": slow, "fast": lambda: None}, 2, patience=20, device=CPU)
    assert calls == ["unable", "slow", "slow"]  # twice: the first may have compiled
    assert str(result["unable"]) == "not here"
    assert "took 30 s, more than --patience 20" in str(result["slow"])
    assert result["fast"] == 0.0


def test_a_first_call_that_compiles_does_not_count(monkeypatch):
    durations = iter([100.0, 3.0, 4.0, 5.0])  # compiling, warming up, and two rounds
    clock = [0.0]

    def call():
        clock[0] += next(durations)

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    assert measuring.in_turns({"a": call}, rounds=2, patience=20, device=CPU) == {"a": 4.5}


def test_any_error_is_a_reason_to_skip():
    with pytest.raises(measuring.Skipped, match=r"^RuntimeError: it broke$"):
        measuring.guarded(fail)
    with pytest.raises(measuring.Skipped, match=r"^not here$"):
        measuring.guarded(not_here)


def not_here():
    raise measuring.Skipped("not here")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "--device gpu: expected cpu, cuda or cuda:N"),
        ("meta", "--device meta: expected cpu, cuda or cuda:N"),
        ("cuda:99", "--device cuda:99: this machine has .* CUDA devices; take cpu"),
    ],
)
def test_devices_that_are_not_there_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        measuring.usable_device(name)


def test_the_median_is_of_the_timed_rounds(monkeypatch):
    durations = iter([100.0, 1.0, 7.0, 2.0])  # the first is the warm-up
    clock = [0.0]

    def call():
        clock[0] += next(durations)

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    assert measuring.in_turns({"a": call}, rounds=3, patience=1000, device=CPU) == {"a": 2.0}
