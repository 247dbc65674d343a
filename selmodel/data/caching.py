"""Files that one process makes and others wait for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from selmodel.errors import UserError

logger = logging.getLogger(__name__)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. UserError where its folder cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # gone when all went well, or its folder was never there
            draft.unlink()


def umask() -> int:
    """The rights that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def one_process(path: Path, what: str) -> Iterator[None]:
    """Hold the lock for making `path`, a file or folder; say so where another process holds it.

    Look again inside whether `path` is there: the process before may have made it. The operating system frees
    the lock of a process that dies.
    """
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("waiting for another process to make %s (%s)", what, path)
            lock.acquire()
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: cannot be written ({error.strerror or error}). Choose a folder that can be written, or free space"
    )
