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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 2**20


class Skipped(Exception):
    """A contender that cannot or need not run; the message says why."""


def in_turns(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    patience: float,
    device: torch.device,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, float | Skipped]:
    """Median seconds of each call. Every round runs all of them, in an order that rotates from round to round.

    A first, untimed round warms up. A call that takes longer than `patience` seconds there is run once more, since
    the first may have compiled, and if that is no faster it is skipped; so is one that raises Skipped. `report` is
    told what runs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    skipped: dict[str, Skipped] = {}
    for turn in range(rounds + 1):
        names = [name for name in calls if name not in skipped]
        for name in names[turn % max(len(names), 1) :] + names[: turn % max(len(names), 1)]:
            report(f"{name}, {f'round {turn} of {rounds}' if turn else 'warming up'}")
            try:
                took = _seconds(calls[name], device)
                if turn == 0 and took > patience:
                    took = _seconds(calls[name], device)
            except Skipped as reason:
                skipped[name] = reason
                continue
            if turn:
                seconds[name].append(took)
            elif took > patience:
                skipped[name] = Skipped(f"one call took {took:.0f} s, more than --patience {patience:g}")
    return {name: skipped[name] if name in skipped else statistics.median(seconds[name]) for name in calls}


def guarded(function: Callable, *arguments: object) -> object:
    """`function(*arguments)`, where any error is a reason to skip a contender, Skipped, not the end of a benchmark."""
    try:
        return function(*arguments)
    except Skipped:
        raise
    except Exception as error:
        raise Skipped(first_line(error)) from error


def first_line(error: Exception) -> str:
    """The error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


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

    On CUDA by the allocator's count. On the CPU by the resident size of a fresh process, in which `prepare` should
    call something small first, so that libraries are loaded. It is sent there by name, so it lives at the top of a
    module. Raises Skipped with the process's error.
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
    with tempfile.TemporaryDirectory() as folder:
        # A file, since tensors sent to a process go through /dev/shm, which is small in many containers.
        file = Path(folder) / "arguments.pt"
        torch.save(arguments, file)
        process = context.Process(target=_measure, args=(sender, torch.get_num_threads(), prepare, file))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            result = "the process that measures memory ended without a result (out of memory?)"
        process.join()
    if isinstance(result, str):
        raise Skipped(result)
    return result


def _measure(sender, threads: int, prepare: Callable[..., Callable[[], object]], file: Path) -> None:
    torch.set_num_threads(threads)
    try:
        call = prepare(*torch.load(file, weights_only=False))
        gc.collect()
        give_back_freed()
        before = resident_bytes()
        reset = reset_peak()
        call()
        sender.send((peak_resident_bytes() if reset else _highest_ever()) - before)
    except Exception as error:
        sender.send(first_line(error))


def give_back_freed() -> None:
    """Have the allocator return what is free (glibc), so that it counts again when it is taken again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Bytes of this process in memory now (Linux; elsewhere the most there ever were)."""
    return _kilobytes("/proc/self/status", "VmRSS") or _highest_ever()


def peak_resident_bytes() -> int:
    """The most there were since `reset_peak`."""
    return _kilobytes("/proc/self/status", "VmHWM") or _highest_ever()


def reset_peak() -> bool:
    """Begin anew with the peak; False where the system does not offer it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(file: str, field: str) -> int | None:
    """A field of one of the kernel's files that count in kB, in bytes; None where there is none."""
    return next((int(line.split()[1]) * 1024 for line in _lines(file) if line.startswith(f"{field}:")), None)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def _highest_ever() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device) -> int:
    """Memory that a contender may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # What the page cache would give up counts as free; the C library's figure leaves it out.
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _kilobytes("/proc/meminfo", "MemAvailable") or pages


def machine(device: torch.device) -> str:
    """What it was measured on, in a line."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    threads = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores"
    return f"{models[0] if models else 'CPU'}, {threads}, torch {torch.__version__}"


def progress(text: str) -> None:
    """A line on the terminal that the next one replaces; nothing where stderr is a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def usable_device(name: str) -> torch.device:
    """The device called `name`. Raises ValueError, with what there is, for one that cannot be used here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; take cpu")
    return device
