"""Checkpoint files: plain contents, a checksum, whole or not there, and the one before kept.

A checkpoint is a dictionary of plain containers and tensors, so that ``torch.load(path, weights_only=True)`` reads it
and nothing in it can run code. The file is the zip archive that ``torch.save`` writes, with the SHA-256 of all of it in
the archive's comment; ``unzip`` and ``torch.load`` read it as any other. The archive's own sums are not enough: torch
does not look at them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from selmodel.data.caching import umask
from selmodel.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1
LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"  # what last.ckpt was before
BEST = "best.ckpt"
DAMAGED = ".damaged"  # added to the name of one that was passed over
_END = b"PK\x05\x06"  # the archive's last record: 22 bytes, the last two of them the length of the comment after it
_END_SIZE = 22
_LABEL = b"selmodel-sha256:"
_COMMENT_SIZE = len(_LABEL) + 64
_BLOCK = 1 << 20


class AtomicCheckpointIO(CheckpointIO):
    """Writes to a temporary name, flushes to disk, reads it back, renames: a file of the final name is always whole.

    ``last.ckpt`` stays beside the new one as ``previous.ckpt``. A disk that refuses raises nothing here, where the
    other processes of a run would wait for this one; it is left in ``failure``, for all to learn of.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None  # of the last attempt to save

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: Any = None) -> None:
        _check_plain(checkpoint)
        try:
            write_checkpoint(checkpoint, Path(path))
        except OSError as error:
            self.failure = error

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> dict:
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


class _Counted:
    """A file that is only appended to, its SHA-256 taken on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()
        self.tail = b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self.file.write(view)
        except OSError as error:
            self.error = error
            raise
        self.sum.update(view)
        self.tail = (self.tail + bytes(view[-_END_SIZE:]))[-_END_SIZE:]
        return len(view)

    def flush(self) -> None:
        self.file.flush()


def write_checkpoint(checkpoint: dict, path: Path) -> None:
    """Write a checkpoint that is there as a whole or not at all; of ``last.ckpt`` the one before is kept.

    Raises:
        OSError: the disk refuses, or does not give back what was written. What was there before stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            counted = _Counted(file)
            try:
                torch.save(checkpoint, counted)
            except Exception:
                if counted.error is not None:  # torch says something of its own
                    raise counted.error from None
                raise
            if counted.tail[:4] != _END or counted.tail[-2:] != b"\0\0":
                raise RuntimeError("torch.save no longer ends its archives as expected; the checksum has no place")
            digest = counted.sum.hexdigest()
            file.seek(-2, os.SEEK_END)
            file.write(_COMMENT_SIZE.to_bytes(2, "little") + _LABEL + digest.encode())
            file.flush()
            os.fsync(file.fileno())
        if (fault := damage(temporary)) is not None:
            raise OSError(errno.EIO, f"what was written does not read back: {fault}")
        os.chmod(temporary, 0o666 & ~umask())  # mkstemp makes files that only their owner may read
        if path.name == LAST and path.exists():
            _keep(path, path.with_name(PREVIOUS))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)


def _keep(path: Path, as_path: Path) -> None:
    """Give the file of ``path`` the name ``as_path`` too, so that at no moment there is none of the name ``path``."""
    link = path.with_name(f".{as_path.name}.{os.getpid()}.tmp")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
    except OSError:  # a file system without links
        os.replace(path, as_path)
    else:
        os.replace(link, as_path)


def damage(path: Path) -> str | None:
    """What is wrong with the bytes of a checkpoint file; None for one that is whole, or that has no checksum.

    Raises:
        OSError: it cannot be read, whatever it holds.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < _END_SIZE or file.read(4) != b"PK\x03\x04":
            return "is empty" if size == 0 else f"its {size:,} bytes are no archive"
        file.seek(max(0, size - _END_SIZE - _COMMENT_SIZE))
        ending = file.read()
        if ending[-_END_SIZE:][:4] == _END and ending[-2:] == b"\0\0":
            return None  # written without one
        if ending[:4] != _END or not ending[_END_SIZE:].startswith(_LABEL):
            return f"is cut off or damaged at its end ({size:,} bytes)"
        if int.from_bytes(ending[_END_SIZE - 2 : _END_SIZE], "little") != _COMMENT_SIZE:
            return f"is damaged at its end ({size:,} bytes)"
        stored = ending[_END_SIZE + len(_LABEL) :].decode("ascii", errors="replace")
        file.seek(0)
        total, left = hashlib.sha256(), size - _COMMENT_SIZE - 2
        while left:
            block = file.read(min(_BLOCK, left))
            if not block:
                return "is shorter than it was a moment ago"
            total.update(block)
            left -= len(block)
        total.update(b"\0\0")  # the length of the comment, as it was when the sum was taken
    return None if total.hexdigest() == stored else f"its checksum does not fit its contents ({size:,} bytes)"


def _check_plain(value: Any, path: str = "checkpoint") -> None:
    """Refuse what ``weights_only=True`` would refuse to load, while the run can still be saved otherwise.

    Exact types: a subclass (``TorchVersion`` of ``str``, ``OrderedDict`` excepted, which torch allows) would not load.
    """
    if type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            if type(key) not in (str, int):
                raise TypeError(f"{path}: key {key!r} of type {type(key).__name__} cannot go into a checkpoint")
            _check_plain(inner, f"{path}.{key}")
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{path}[{index}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in (str, int, float, bool, bytes, type(None)):
        raise TypeError(f"{path}: a {type(value).__module__}.{type(value).__name__} cannot go into a checkpoint")


class DamagedCheckpoint(UserError):
    """A checkpoint file that is there and can be read, and whose contents are not whole.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        others = [name for name in (LAST, PREVIOUS, BEST) if name != path.name and path.with_name(name).is_file()]
        hint = f"beside it: {', '.join(others)}" if others else "no other checkpoint is beside it"
        super().__init__(f"checkpoint={path}: {reason}; it is damaged or not a checkpoint; {hint}")
        self.reason = reason


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict:
    """Read a checkpoint without unpickling arbitrary objects, its checksum verified where it has one.

    Raises:
        DamagedCheckpoint: the file is not whole.
        UserError: it is missing, cannot be read, or is not a checkpoint that this version reads.
    """
    path = Path(path)
    if path.is_dir():
        path = path / LAST
    if not path.is_file():
        near = sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        hint = "found beside it: " + ", ".join(p.name for p in near) if near else "no checkpoint is beside it"
        raise UserError(f"checkpoint={path}: no such file; expected RUN/{LAST} or RUN/{BEST}; {hint}")
    try:
        fault = damage(path)
        if fault is None:
            checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise UserError(
            f"checkpoint={path}: cannot be read ({error.strerror or error}); mend that, or name another one"
        ) from error
    except Exception as error:  # zip, pickle, EOF and runtime errors, by the kind of damage
        raise DamagedCheckpoint(
            path, f"cannot be read ({type(error).__name__}, {path.stat().st_size:,} bytes)"
        ) from error
    if fault is not None:
        raise DamagedCheckpoint(path, fault)
    stored = checkpoint.get("selmodel") if isinstance(checkpoint, dict) else None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError(
            f"checkpoint={path}: not a checkpoint that this version reads; expected one of format {FORMAT}, written by "
            "train.py"
        )
    return checkpoint


def newest_checkpoint(directory: Path) -> tuple[Path | None, dict | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint of a run: ``last.ckpt``, unless another is of a later step and was written later.

    Returns:
        its path, its contents (both None where there is no checkpoint file at all), and the damaged ones that were
        passed over, each with what is wrong with it.

    Raises:
        UserError: there are checkpoints and none is whole, or one cannot be read at all.
    """
    last, *others = (directory / name for name in (LAST, PREVIOUS, BEST))
    candidates = sorted((path for path in others if path.exists()), key=_claimed_step, reverse=True)
    if last.exists():
        # A kill may come between best.ckpt and last.ckpt of one step. But one put in the place of last.ckpt by hand, to
        # go back to it, is the one to take.
        newer = [path for path in candidates if _claimed_step(path) > _claimed_step(last) and _is_later(path, last)]
        candidates = [*newer, last, *(path for path in candidates if path not in newer)]
    passed: list[tuple[Path, str]] = []
    for path in candidates:
        try:
            return path, read_checkpoint(path), passed
        except DamagedCheckpoint as error:
            passed.append((path, error.reason))
    if passed:
        raise UserError(
            f"{directory}: none of its checkpoints is whole: "
            + "; ".join(f"{path.name} {reason}" for path, reason in passed)
            + ". Put back a copy of one, or begin anew in another run_dir=..."
        )
    return None, None, []


def _is_later(path: Path, other: Path) -> bool:
    """Whether a file was written after another."""
    return path.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _claimed_step(path: Path) -> float:
    """The step that a checkpoint says it is of, without reading its tensors; below all where it cannot say."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["selmodel"]["step"]
    except Exception:  # by the kind of damage; reading it whole will tell
        return -math.inf


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither taken for a whole one nor lost; returns the new path."""
    number, target = 1, path.with_name(path.name + DAMAGED)
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}{DAMAGED}-{number}")
    os.replace(path, target)
    return target


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of checkpoints that a kill has cut short."""
    for path in directory.glob(".*.ckpt.*.tmp"):
        path.unlink(missing_ok=True)


def _flush_directory(directory: Path) -> None:
    """Make a rename durable; file systems that cannot open a directory for this are left as they are."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
