"""Checkpoint files: whole or damaged, told apart at every bit; the one before kept; a disk that refuses."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import zipfile

import pytest
import torch

from selmodel.errors import UserError
from selmodel.training import checkpoint_file
from selmodel.training.checkpoint_file import (
    BEST,
    LAST,
    PREVIOUS,
    AtomicCheckpointIO,
    DamagedCheckpoint,
    damage,
    newest_checkpoint,
    read_checkpoint,
    remove_leftovers,
    set_aside,
    write_checkpoint,
)


def content(step=1, size=300):
    weights = torch.arange(size, dtype=torch.float32) + step
    return {"selmodel": {"format": 1, "step": step}, "state_dict": {"weight": weights}, "name": "ä"}


def test_what_was_written_is_read_by_us_by_torch_and_by_zip(tmp_path):
    path = tmp_path / LAST
    write_checkpoint(content(), path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["weight"], content()["state_dict"]["weight"])
    assert torch.load(path, weights_only=True)["name"] == "ä"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [LAST]


def test_the_checksum_is_that_of_the_archive_as_torch_wrote_it(tmp_path):
    """By hand: the comment cut off, and its length put back to 0."""
    write_checkpoint(content(), tmp_path / LAST)
    whole = (tmp_path / LAST).read_bytes()
    label, _, digest = whole[-80:].decode().partition(":")
    assert label == "selmodel-sha256"
    archive = whole[:-82] + b"\0\0"
    assert digest == hashlib.sha256(archive).hexdigest()
    (tmp_path / "plain").write_bytes(archive)
    assert torch.load(tmp_path / "plain", weights_only=True)["name"] == "ä"


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    path = tmp_path / LAST
    write_checkpoint(content(), path)
    whole = path.read_bytes()
    generator = random.Random(0)
    # all of the beginning and the end, where the archive's own records are, and places between
    places = {*range(40), *range(len(whole) - 150, len(whole)), *generator.sample(range(len(whole)), 150)}
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(path)
    for length in {*range(30), *range(len(whole) - 120, len(whole)), *generator.sample(range(len(whole)), 50)}:
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(path)


def test_one_written_without_a_checksum_is_still_read(tmp_path):
    torch.save(content(5), tmp_path / LAST)
    assert damage(tmp_path / LAST) is None
    assert read_checkpoint(tmp_path / LAST)["selmodel"]["step"] == 5


def test_the_one_before_is_kept_and_best_has_none(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(content(step), tmp_path / LAST)
        write_checkpoint(content(step), tmp_path / BEST)
    steps = {name: read_checkpoint(tmp_path / name)["selmodel"]["step"] for name in (LAST, PREVIOUS, BEST)}
    assert steps == {LAST: 3, PREVIOUS: 2, BEST: 3}
    assert len(list(tmp_path.iterdir())) == 3


def test_it_is_kept_where_a_file_system_has_no_links(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for step in (1, 2, 3):
        write_checkpoint(content(step), tmp_path / LAST)
    assert read_checkpoint(tmp_path / PREVIOUS)["selmodel"]["step"] == 2


def test_at_no_moment_is_there_none(tmp_path, monkeypatch):
    """Killed at any call that changes the folder, the newest whole checkpoint is the old one or the new one."""
    write_checkpoint(content(1), tmp_path / LAST)
    write_checkpoint(content(2), tmp_path / LAST)

    class Killed(BaseException):
        pass

    for stop_at in range(1, 10):
        calls = iter(range(1, 100))

        def counted(call, calls=calls, stop_at=stop_at):
            def wrapped(*arguments, **options):
                if next(calls) == stop_at:
                    raise Killed
                return call(*arguments, **options)

            return wrapped

        before = read_checkpoint(tmp_path / LAST)["selmodel"]["step"]
        with monkeypatch.context() as patched:
            for name in ("link", "replace", "chmod", "fsync"):
                patched.setattr(os, name, counted(getattr(os, name)))
            try:
                write_checkpoint(content(before + 1), tmp_path / LAST)
            except Killed:
                finished = False
            else:
                finished = True
        path, found, passed = newest_checkpoint(tmp_path)
        assert path.name == LAST
        assert not passed
        assert found["selmodel"]["step"] in ((before + 1,) if finished else (before, before + 1))
        remove_leftovers(tmp_path)
        if finished:
            break
    assert finished


def test_what_does_not_read_back_never_takes_the_name(tmp_path, monkeypatch):
    write_checkpoint(content(1), tmp_path / LAST)
    monkeypatch.setattr(checkpoint_file, "damage", lambda path: "is wrong")
    with pytest.raises(OSError, match="does not read back: is wrong"):
        write_checkpoint(content(2), tmp_path / LAST)
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / LAST)["selmodel"]["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_a_full_disk_is_a_failure_and_not_an_exception(tmp_path):
    """A limit on the size of files stands for the disk; a file larger than it cannot be written."""
    io = AtomicCheckpointIO()
    io.save_checkpoint(content(1), tmp_path / LAST)
    assert io.failure is None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        io.save_checkpoint(content(2, size=100_000), tmp_path / LAST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert io.failure.errno == errno.EFBIG
    assert read_checkpoint(tmp_path / LAST)["selmodel"]["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_a_fault_of_the_program_is_not_taken_for_one_of_the_disk(tmp_path):
    with pytest.raises(TypeError, match=r"checkpoint\.path: a pathlib.* cannot go into a checkpoint"):
        AtomicCheckpointIO().save_checkpoint(content() | {"path": tmp_path}, tmp_path / LAST)
    assert not list(tmp_path.iterdir())


def test_the_newest_whole_one_is_found(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, None, [])
    write_checkpoint(content(4), tmp_path / BEST)
    assert newest_checkpoint(tmp_path)[0].name == BEST
    write_checkpoint(content(3), tmp_path / LAST)
    write_checkpoint(content(4), tmp_path / BEST)
    assert newest_checkpoint(tmp_path)[0].name == BEST  # a kill came between the two
    write_checkpoint(content(4), tmp_path / LAST)
    assert newest_checkpoint(tmp_path)[0].name == LAST
    write_checkpoint(content(5), tmp_path / LAST)
    assert newest_checkpoint(tmp_path)[0].name == LAST
    write_checkpoint(content(3), tmp_path / PREVIOUS)
    write_checkpoint(content(2), tmp_path / LAST)  # by hand, to go back
    assert newest_checkpoint(tmp_path)[1]["selmodel"]["step"] == 2
    write_checkpoint(content(3), tmp_path / PREVIOUS)
    (tmp_path / LAST).write_bytes(b"")
    path, found, passed = newest_checkpoint(tmp_path)
    assert (path.name, found["selmodel"]["step"]) == (BEST, 4)  # newer than the one before, of step 3
    assert passed == [(tmp_path / LAST, "is empty")]


def test_one_that_cannot_be_read_at_all_is_not_passed_over(tmp_path, monkeypatch):
    """A file system that is away for a moment must not cost the steps since the checkpoint before."""
    for step in (1, 2):
        write_checkpoint(content(step), tmp_path / LAST)

    def away(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoint_file, "damage", away)
    with pytest.raises(UserError, match=r"last\.ckpt: cannot be read \(Stale file handle\)"):
        newest_checkpoint(tmp_path)


def test_damaged_ones_are_renamed_and_never_over_another(tmp_path):
    for number in range(3):
        (tmp_path / LAST).write_bytes(bytes([number]))
        set_aside(tmp_path / LAST)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert kept == {f"{LAST}.damaged": b"\0", f"{LAST}.damaged-2": b"\1", f"{LAST}.damaged-3": b"\2"}
