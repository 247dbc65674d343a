"""Saying where a run stands that makes no steps: a silent wait tells nobody what it waits for."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import lightning as L

from selmodel.data.loader import STACK_SIGNAL

log = logging.getLogger(__name__)

# Of Linux's /proc/PID/stat, third field.
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a disk or network file system",
    "T": "stopped",
    "Z": "dead",
}


class StallWatch(L.Callback):
    """Tells, in each process of a run, where it stands when nothing has moved for long; it ends nothing.

    What counts as moving: the end of a training step, and of a batch of a validation. Told are the main thread's stack,
    and of each worker that reads data whether it runs, with its own stack on standard error.

    Args:
        minutes: without a move, before the first report and between two; None: no watch.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._moved = 0.0
        self._step = 0
        self._rank = self._world_size = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.minutes is None:
            return
        self._rank, self._world_size, self._step = trainer.global_rank, trainer.world_size, trainer.global_step
        self._moved = time.monotonic()
        self._end.clear()
        main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(main,), name="stall watch", daemon=True)
        self._thread.start()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._moved, self._step = time.monotonic(), trainer.global_step

    def on_validation_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._moved = time.monotonic()

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._stop()  # Lightning leaves out the teardown then

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def _watch(self, main: int) -> None:
        seconds = 60.0 * self.minutes
        reported = self._moved
        while not self._end.wait(min(seconds / 10, 5.0)):
            now = time.monotonic()
            if now - max(self._moved, reported) >= seconds:
                reported = now
                log.warning("%s", self.report(now - self._moved, main))

    def report(self, idle: float, main: int) -> str:
        """Where this process stands: ``idle`` seconds since the last move; ``main`` is the thread that trains."""
        lines = [
            f"no step for {idle / 60:.1f} minutes, after step {self._step}: process {os.getpid()} on "
            f"{socket.gethostname()}, rank {self._rank} of {self._world_size}, stands in"
        ]
        frame = sys._current_frames().get(main)
        stack = traceback.format_stack(frame) if frame is not None else ["  (its training thread is gone)\n"]
        lines += [line.rstrip("\n") for line in stack]
        lines += [_child(process) for process in multiprocessing.active_children()]
        return "\n".join(lines)


def _child(process: Any) -> str:
    """A line on a child process; a running one is asked for its stack, which it prints itself."""
    state = _state(process.pid)
    line = f"its process {process.pid} ({process.name}) is {_STATES.get(state, 'running')}"
    if state in ("T", "Z"):
        return f"{line}; kill -CONT {process.pid} wakes it" if state == "T" else line
    if STACK_SIGNAL is None or not _answers(process.pid, STACK_SIGNAL):  # any other would be ended by it
        return line
    os.kill(process.pid, STACK_SIGNAL)
    return f"{line}; its stack follows on standard error"


def _answers(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where that is not known."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _state(pid: int) -> str:
    """Letter of the state of a process on Linux; empty where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
