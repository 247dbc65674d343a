"""The faults of the campaign. Each is done to a process that trains, or to its files between two starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import LIMIT, Training, last_step

_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10  # of ext file systems, as chattr +i sets it


@dataclass
class Outcome:
    """What became of a process after a fault.

    Attributes:
        seconds: until it had ended; None: it did not within the limit.
        code: exit status, negative for a signal.
        note: what is worth telling.
        at_step: the last step logged when the fault came.
        problems: what it should have done and did not.
        went_on: it bore the fault and finished or went on training.
        damaged: checkpoints that the next start cannot use; must_tell: and one of them is what it tries first.
    """

    seconds: float | None = 0.0
    code: int | None = None
    note: str = ""
    at_step: int = 0
    problems: tuple[str, ...] = ()
    went_on: bool = False
    damaged: int = 0
    must_tell: bool = False


def _ended(training: Training, expected: Callable[[Outcome], str | None], **others) -> Outcome:
    """Wait for the end of the process. ``expected`` says what is wrong with it; a run that is done may end with 0, for
    nothing was left that the fault could have struck, and what it left is compared later."""
    at_step = last_step(training.run)
    seconds = training.wait_ended()
    code = training.process.returncode
    outcome = Outcome(seconds, code, at_step=max(at_step, last_step(training.run)), went_on=code == 0, **others)
    if not outcome.went_on and seconds is not None and (problem := expected(outcome)):
        outcome.problems = (problem,)
    return outcome


def _says(training: Training, *words: str) -> Callable[[Outcome], str | None]:
    """Expects the answer to a fault of the machine: exit status 2, and one of ``words`` in what it printed."""

    def expected(outcome: Outcome) -> str | None:
        if outcome.code == 2 and any(word in training.text() for word in words):
            return None
        return f"exit status {outcome.code}, without saying {' or '.join(map(repr, words))}"

    return expected


def sends(number: int) -> Callable[[Training, random.Random], Outcome]:
    """A fault that is a signal to the first process."""

    def send(training: Training, generator: random.Random) -> Outcome:
        os.kill(training.process.pid, number)
        return _ended(training, _answers(number))

    return send


def _answers(number: int) -> Callable[[Outcome], str | None]:
    """Expects the end by a signal: as a shell gives it, or, before the program has begun to listen, by the system."""
    name = signal.Signals(number).name
    return lambda outcome: None if outcome.code in (128 + number, -number) else f"status {outcome.code} after {name}"


def limit_files(training: Training, generator: random.Random) -> Outcome:
    """No file may grow beyond a few bytes, as with a quota; for a while, or until the run gives up."""
    pid = training.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, before[1]))
    if generator.random() < 0.5:
        time.sleep(generator.uniform(0.1, 0.5))
        if not training.ended:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        if not training.wait_until(lambda: training.ended, 2.0) or training.process.returncode == 0:
            return Outcome(0.0, at_step=last_step(training.run), went_on=True, note="for a while")
    return _ended(training, _says(training, "could not be written", "cannot be written"), note="until it stopped")


def fill_disk(training: Training, generator: random.Random) -> Outcome:
    """The file system of the run has no room left; for the next start it has."""
    filler = training.run.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"\0" * 65536)
    try:
        return _ended(training, _says(training, "No space left on device"))
    finally:
        filler.unlink()


def forbid_writing(training: Training, generator: random.Random) -> Outcome:
    """The folder of the run takes no new files, as a file system that was made read-only."""
    training.run.mkdir(exist_ok=True)
    set_immutable(training.run, True)
    try:
        return _ended(training, _says(training, "could not be written", "cannot be written"))
    finally:
        set_immutable(training.run, False)


def set_immutable(folder: Path, immutable: bool) -> None:
    """Set or clear the flag of a folder that even the superuser cannot write into. OSError where there is none."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        flags = struct.unpack("i", fcntl.ioctl(handle, _GET_FLAGS, struct.pack("i", 0)))[0]
        flags = flags | _IMMUTABLE if immutable else flags & ~_IMMUTABLE
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("i", flags))
    finally:
        os.close(handle)


def damages(how: str, *names: str) -> Callable[[Training, random.Random], Outcome]:
    """A fault that kills the process and damages checkpoints before the next start."""

    def damage(training: Training, generator: random.Random) -> Outcome:
        os.kill(training.process.pid, signal.SIGKILL)
        outcome = _ended(training, _answers(signal.SIGKILL))
        others = {"last.ckpt", "previous.ckpt", "best.ckpt"} - set(names)
        if not any((training.run / name).exists() for name in others):
            outcome.note = "killed alone, for there was no other checkpoint"
            return outcome
        for name in names:
            path = training.run / name
            if not path.exists():
                continue
            content = bytearray(path.read_bytes())
            if how == "flip":
                content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            else:
                del content[generator.randrange(len(content)) :]
            path.write_bytes(content)
            outcome.damaged += 1
            outcome.must_tell |= name == "last.ckpt"
        return outcome

    return damage


def remove_shard(training: Training, generator: random.Random) -> Outcome:
    """A file of the corpus is gone while it is read; it is back for the next start."""
    corpus = Path(next(o for o in training.process.args if o.startswith("data.root=")).partition("=")[2])
    shard = generator.choice(sorted((corpus / "en").glob("c4-train.*")))
    aside = corpus / f"aside-{shard.name}"
    shard.rename(aside)
    begin = time.monotonic()
    try:
        ended = training.wait_until(lambda: training.ended, 20.0)
        if not ended:
            return Outcome(0.0, at_step=last_step(training.run), went_on=True, note="not needed again")
        # Before it has begun to read, the corpus as a whole is another.
        outcome = _ended(training, _says(training, shard.name, "source fingerprint"))
        outcome.seconds = time.monotonic() - begin
        return outcome
    finally:
        aside.rename(shard)


def kill_worker(training: Training, generator: random.Random) -> Outcome:
    """One of the processes that read the data is killed, as by a machine short of memory."""
    workers = _workers(training)
    if not workers:
        return Outcome(0.0, at_step=last_step(training.run), went_on=True, note="none was there")
    os.kill(generator.choice(workers), signal.SIGKILL)
    return _ended(training, _says(training, "by SIGKILL"))


def stop_worker(training: Training, generator: random.Random) -> Outcome:
    """One of the processes that read the data hangs; the run says so, and is then asked to stop."""
    workers = _workers(training)
    if not workers:
        return Outcome(0.0, at_step=last_step(training.run), went_on=True, note="none was there")
    os.kill(generator.choice(workers), signal.SIGSTOP)
    told = training.wait_until(lambda: "is stopped; kill -CONT" in training.text(), 60.0)
    if training.ended:
        return Outcome(0.0, training.process.returncode, at_step=last_step(training.run), went_on=True, note="finished")
    os.kill(training.process.pid, signal.SIGTERM)
    outcome = _ended(training, _answers(signal.SIGTERM))
    if not told:
        outcome.problems += ("the stall was not told of",)
    return outcome


def kill_rank(training: Training, generator: random.Random) -> Outcome:
    """One of two processes of a run is killed; the other must not wait for it."""
    ranks = _ranks(training)
    if len(ranks) < 2:
        return Outcome(0.0, at_step=last_step(training.run), went_on=True, note="none was there")
    os.kill(generator.choice(ranks), signal.SIGKILL)
    outcome = _ended(training, lambda outcome: None)
    deadline = time.monotonic() + LIMIT
    while (left := training.session()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        outcome.problems += (f"{len(left)} of its processes were still there after {LIMIT:.0f} s",)
        training.kill_all()
    return outcome


def stop_rank(training: Training, generator: random.Random) -> Outcome:
    """One of two processes of a run hangs; the other says so. Nothing but a kill ends both, as at the end of a job."""
    ranks = _ranks(training)
    if len(ranks) < 2:
        return Outcome(0.0, at_step=last_step(training.run), went_on=True, note="none was there")
    os.kill(generator.choice(ranks), signal.SIGSTOP)
    told = training.wait_until(lambda: "no step for" in training.text(), 60.0)
    at_step = last_step(training.run)
    begin = time.monotonic()
    training.kill_all()
    return Outcome(
        time.monotonic() - begin, training.process.returncode, at_step=at_step,
        problems=() if told else ("the stall was not told of",),
    )  # fmt: skip


def _workers(training: Training) -> list[int]:
    return [pid for pid in training.children() if _is_fork(pid, training.process.pid)]


def _is_fork(pid: int, parent: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return False


def _ranks(training: Training) -> list[int]:
    others = [pid for pid in training.children() if b"train.py" in _command(pid)]
    return [training.process.pid, *others]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "24M"):
    """A file system of its own of ``size`` at ``folder``. Skips with OSError where none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        raise OSError(done.stderr.decode().strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


# name in the table: (what is done, two processes, a small disk)
KINDS: dict[str, tuple[Callable[[Training, random.Random], Outcome], bool, bool]] = {
    "SIGKILL": (sends(signal.SIGKILL), False, False),
    "SIGTERM": (sends(signal.SIGTERM), False, False),
    "SIGINT": (sends(signal.SIGINT), False, False),
    "SIGUSR1": (sends(signal.SIGUSR1), False, False),
    "quota (RLIMIT_FSIZE)": (limit_files, False, False),
    "full disk (tmpfs)": (fill_disk, False, True),
    "read-only folder": (forbid_writing, False, False),
    "newest checkpoint cut": (damages("cut", "last.ckpt"), False, False),
    "newest checkpoint, a bit flipped": (damages("flip", "last.ckpt"), False, False),
    "two newest checkpoints damaged": (damages("flip", "last.ckpt", "previous.ckpt"), False, False),
    "shard removed": (remove_shard, False, False),
    "data worker killed": (kill_worker, False, False),
    "data worker stopped": (stop_worker, False, False),
    "SIGTERM to one of two ranks": (sends(signal.SIGTERM), True, False),
    "one of two ranks killed": (kill_rank, True, False),
    "one of two ranks stopped": (stop_rank, True, False),
}
WEIGHTS = {
    "SIGKILL": 4, "SIGTERM": 4, "SIGINT": 2, "SIGUSR1": 2, "quota (RLIMIT_FSIZE)": 2, "full disk (tmpfs)": 2,
    "read-only folder": 2, "newest checkpoint cut": 2, "newest checkpoint, a bit flipped": 2,
    "two newest checkpoints damaged": 1, "shard removed": 2, "data worker killed": 2, "data worker stopped": 2,
    "SIGTERM to one of two ranks": 2, "one of two ranks killed": 2, "one of two ranks stopped": 1,
}  # fmt: skip
