"""Running a sweep's jobs as processes of this machine, a few at once.

Each job is ``python train.py OVERRIDES run_dir=SWEEP/JOB``, a process of its own: it begins with nothing that another
job has left behind (seeds, threads, loggers), and one that is killed takes no other with it. That it goes on where an
earlier start ended is the affair of train.py; which jobs need a start is told from their files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from selmodel.errors import UserError
from selmodel.sweep.grid import Job
from selmodel.sweep.status import ERROR_FILE, FAILED, FINISHED, RUNNING, job_status
from selmodel.training.interrupt import Interrupted

log = logging.getLogger(__name__)

TAIL = 40  # lines of what a job said last, kept for its error
OUTPUT_FILE = "output.log"  # all that a job's starts have written
# What the terminal shows of a job; the rest is in its output.log.
SHOWN = re.compile(
    r"step \d|resuming |error: |building |waiting |tokenizer .* is missing|.*[Ww]arning|stopped by |.* diverged"
)
# Options that decide how many threads a process computes with.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check_parallel(value: object) -> int:
    """The option ``sweep.parallel``. Raises UserError where it is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"sweep.parallel={value}: expected a whole number of at least 1, the jobs that run at once")
    return value


class ProcessPool:
    """Runs jobs, at most ``parallel`` at once, each held to its share of the machine.

    Args:
        directory: of the sweep.
        parallel: jobs at once.
        command: what starts train.py.
    """

    def __init__(self, directory: Path, parallel: int, command: Sequence[str]) -> None:
        self.directory = directory
        self.parallel = parallel
        self.command = list(command)
        self._running: dict[subprocess.Popen, _Output] = {}
        self._stopped_by: int | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Run ``jobs`` to the end, those that are finished or running elsewhere left alone.

        A job that fails leaves ``error.txt`` in its folder and does not stop the others.

        Raises:
            Interrupted: SIGINT or SIGTERM came; it was passed on, and the jobs have saved their state and stopped.
        """
        waiting = deque(enumerate(jobs, start=1))
        slots = list(range(self.parallel))
        of_slot: dict[subprocess.Popen, tuple[int, Job]] = {}
        with self._signals_passed_on():
            while of_slot or (waiting and self._stopped_by is None):
                while waiting and slots and self._stopped_by is None:
                    number, job = waiting.popleft()
                    state = job_status(self.directory / job.name, job).state
                    if state in (FINISHED, RUNNING):
                        log.info("[%d/%d] %s: %s", number, len(jobs), job.name, _WHY_LEFT[state])
                        continue
                    log.info("[%d/%d] %s", number, len(jobs), job.name)
                    slot = slots.pop(0)
                    of_slot[self._start(job, slot)] = slot, job
                ended = [process for process in of_slot if process.poll() is not None]
                for process in ended:
                    slot, job = of_slot.pop(process)
                    slots.append(slot)
                    self._end(process, job)
                if not ended and of_slot:
                    time.sleep(0.05)
        if self._stopped_by is not None:
            finished = sum(job_status(self.directory / job.name, job).state == FINISHED for job in jobs)
            raise Interrupted(self._stopped_by, finished, "finished job")

    def _start(self, job: Job, slot: int) -> subprocess.Popen:
        directory = self.directory / job.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR_FILE).unlink(missing_ok=True)
        process = subprocess.Popen(
            [*self.command, *job.overrides, f"run_dir={quoted(str(directory))}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | share_of_machine(slot, self.parallel) | {"PYTHONUNBUFFERED": "1"},
            # A group of its own: Ctrl-C in a terminal reaches this process alone, which passes it on once.
            start_new_session=True,
        )
        prefix = f"{job.name}: " if self.parallel > 1 else ""
        self._running[process] = _Output(process, prefix, directory / OUTPUT_FILE)
        return process

    def _end(self, process: subprocess.Popen, job: Job) -> None:
        output = self._running.pop(process)
        output.join()
        code = process.returncode
        if code == 0 or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            return
        error = explanation(code, list(output.tail))
        directory = self.directory / job.name
        if job_status(directory, job).state == RUNNING:
            log.info("%s: is being trained by another process", job.name)
            return
        (directory / ERROR_FILE).write_text(error + "\n")
        log.info("%s: failed: %s", job.name, error.splitlines()[0])

    @contextlib.contextmanager
    def _signals_passed_on(self):
        def stop(number: int, frame: object) -> None:
            self._stopped_by = number
            for process in list(self._running):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in self._running:  # only if this process itself fails
                process.terminate()


_WHY_LEFT = {FINISHED: "finished before", RUNNING: "is being trained by another process"}


class _Output:
    """Writes a job's lines to a file as they come, shows some, and keeps the last ones."""

    def __init__(self, process: subprocess.Popen, prefix: str, path: Path) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._process, self._prefix, self._path = process, prefix, path
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for line in self._process.stdout:
                self.tail.append(line.rstrip("\n"))
                with contextlib.suppress(OSError):  # a full disk, a terminal that is gone: the job goes on
                    file.write(line)
                    file.flush()
                    if SHOWN.match(line):
                        sys.stdout.write(f"{self._prefix}{line}")
                        sys.stdout.flush()

    def join(self) -> None:
        # A process that the job has left behind may hold the pipe open; the job itself has ended.
        self._thread.join(timeout=5)


def explanation(code: int, lines: list[str]) -> str:
    """Why a job ended with ``code``, from the lines it wrote last."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    for first, line in reversed(list(enumerate(lines))):
        if line.startswith("error: "):
            return "\n".join([line.removeprefix("error: "), *(rest.strip() for rest in lines[first + 1 :])]).rstrip()
    said = [line for line in lines if line.strip()]
    last = said[-1] if said else "nothing was written"
    return "\n".join([f"exit status {code}: {last}", *said[-20:-1]])


def share_of_machine(slot: int, parallel: int) -> dict[str, str]:
    """Environment of the job in ``slot`` of ``parallel``: its threads, and its GPUs where there are enough.

    Nothing for a job that runs alone.
    """
    if parallel == 1:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // parallel))
    share = dict.fromkeys(THREAD_VARIABLES, threads)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if len(devices) >= parallel:
        share["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot::parallel])
    return share


def quoted(text: str) -> str:
    """``text`` as a value on Hydra's command line, where a backslash is one unless quotes follow."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def failed(directory: Path, jobs: Sequence[Job]) -> list[str]:
    """Names of the jobs that failed."""
    return [job.name for job in jobs if job_status(directory / job.name, job).state == FAILED]
