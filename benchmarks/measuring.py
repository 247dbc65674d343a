"""Timing several contenders in turns, and the memory that one call takes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 2**20


class Skipped(Exception):
    """A contender that cannot or need not run; the message says why."""


def in_turns(
    calls: dict[str, Callable[[], object]], rounds: int, patience: float, device: torch.device
) -> dict[str, float | Skipped]:
    """Median seconds of each call. Every round runs all of them, in an order that rotates from round to round.

    A first, untimed round warms up. A call that takes longer than `patience` seconds there is not run again and
    skipped; so is one that raises Skipped.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    skipped: dict[str, Skipped] = {}
    for turn in range(rounds + 1):
        names = [name for name in calls if name not in skipped]
        for name in names[turn % max(len(names), 1) :] + names[: turn % max(len(names), 1)]:
            try:
                took = _seconds(calls[name], device)
            except Skipped as reason:
                skipped[name] = reason
                continue
            if turn:
                seconds[name].append(took)
            elif took > patience:
                skipped[name] = Skipped(f"one call took {took:.0f} s, more than --patience {patience:g}")
    return {name: skipped[name] if name in skipped else statistics.median(seconds[name]) for name in calls}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(prepare: Callable[..., Callable[[], object]], *arguments: object, device: torch.device) -> int:
    """Memory that `prepare(*arguments)()` takes at its highest, beyond what `prepare` has left behind.

    On CUDA by the allocator's count. On the CPU by the resident size of a fresh process, which `prepare` should have
    call something small first, so that libraries are loaded. Both are pickled, so they live at the top of a module.
    Raises Skipped with the process's error.
    """
    if device.type == "cuda":
        call = prepare(*arguments)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, torch.get_num_threads(), prepare, arguments))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = "the process ended without a result (out of memory?)"
    process.join()
    if isinstance(result, str):
        raise Skipped(result)
    return result


def _measure(sender, threads: int, prepare: Callable[..., Callable[[], object]], arguments: tuple) -> None:
    torch.set_num_threads(threads)
    try:
        call = prepare(*arguments)
        gc.collect()
        give_back_freed()
        before = resident_bytes()
        reset = reset_peak()
        call()
        sender.send((peak_resident_bytes() if reset else _highest_ever()) - before)
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def give_back_freed() -> None:
    """Have the allocator return what is free (glibc), so that it counts again when it is taken again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Bytes of this process in memory now (Linux; elsewhere the most there ever were)."""
    return _status("VmRSS") or _highest_ever()


def peak_resident_bytes() -> int:
    """The most there were since `reset_peak`."""
    return _status("VmHWM") or _highest_ever()


def reset_peak() -> bool:
    """Begin anew with the peak; False where the system does not offer it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _highest_ever() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device) -> int:
    """Memory that a contender may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine(device: torch.device) -> str:
    """What it was measured on, in a line."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    models = [x.split(":")[1].strip() for x in _cpuinfo() if x.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def progress(text: str) -> None:
    """A line on the terminal that the next one replaces; nothing where stderr is a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
