"""One writer for a run's directory, on one machine and on many that share a file system.

A file lock keeps out other processes of this machine. On a file system that several machines share it may not, so the
writer also leaves a note, ``.owner.json``: host, process, SLURM job, and a time that it renews. A note of another
machine bars the way while its job is alive, or, where that cannot be asked, while it is being renewed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from selmodel.data.caching import write_atomically
from selmodel.errors import UserError
from selmodel.training.cluster import job_is_alive, slurm_job

log = logging.getLogger(__name__)

LOCK, NOTE = ".lock", ".owner.json"
RENEWED_EVERY = 60.0  # seconds
# A note this old is that of a writer that is gone. Clocks of machines differ, and a full disk may delay a renewal.
STALE_AFTER = 600.0


@contextlib.contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Keep every other writer out of ``run_dir`` meanwhile.

    Raises:
        UserError: another process or job is training there, with its host and job; or the directory cannot be written.
    """
    lock = filelock.FileLock(run_dir / LOCK)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with lock.acquire(timeout=0):
            try:
                _refuse_another_machines(run_dir)
                with _note(run_dir):
                    yield
            finally:
                if {path.name for path in run_dir.iterdir()} <= {LOCK}:  # nothing was begun
                    (run_dir / LOCK).unlink(missing_ok=True)
    except filelock.Timeout:
        raise UserError(
            f"run_dir={run_dir}: another process is training there{_who(read_note(run_dir))}; wait for it or stop it, "
            "or choose another run_dir"
        ) from None
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(run_dir)):
            raise
        raise UserError(f"run_dir={run_dir}: cannot be written ({error.strerror}); choose another run_dir") from error


def read_note(run_dir: Path) -> dict[str, Any]:
    """The note of the run's writer; empty where there is none, or none that can be read."""
    try:
        content = json.loads((run_dir / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_alive(note: dict[str, Any]) -> bool:
    """Whether the writer of a note, on another machine, is still there."""
    job_id = note.get("job_id")
    if job_id is not None:
        alive = job_is_alive(str(job_id))
        if alive is not None:
            return alive
    renewed = note.get("renewed")
    return isinstance(renewed, int | float) and time.time() - renewed < STALE_AFTER


def _refuse_another_machines(run_dir: Path) -> None:
    note = read_note(run_dir)
    # The lock tells of this machine's processes: a note of one that is gone says nothing.
    if not note or note.get("host") == socket.gethostname() or _is_this_job(note):
        return
    if is_alive(note):
        raise UserError(
            f"run_dir={run_dir}: another machine is training there{_who(note)}; wait for it or stop it, or choose "
            f"another run_dir. If it is gone for certain, remove {run_dir / NOTE}"
        )
    log.info("run_dir: a writer that is gone has left its note%s; going on", _who(note))


def _is_this_job(note: dict[str, Any]) -> bool:
    """Whether the note is of an earlier start of this very job, which was requeued to another node."""
    job = slurm_job()
    return job is not None and str(note.get("job_id")) == job.target


def _who(note: dict[str, Any]) -> str:
    if not note:
        return ""
    job = f", SLURM job {note['job_id']}" if note.get("job_id") else ""
    return f" ({note.get('host', 'unknown host')}, process {note.get('pid', '?')}{job})"


@contextlib.contextmanager
def _note(run_dir: Path) -> Iterator[None]:
    job = slurm_job()
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job_id": None if job is None else job.target,
        "began": time.time(),
    }

    def write() -> None:
        write_atomically(run_dir / NOTE, json.dumps(content | {"renewed": time.time()}).encode())

    done = threading.Event()

    def renew() -> None:
        while not done.wait(RENEWED_EVERY):
            with contextlib.suppress(OSError, UserError):
                write()

    write()
    thread = threading.Thread(target=renew, daemon=True, name="run directory's note")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            (run_dir / NOTE).unlink(missing_ok=True)
