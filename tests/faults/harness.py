"""Real training processes on a small corpus: started, watched while they run, and compared when they have ended."""

from __future__ import annotations

import contextlib
import csv
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from selmodel.training.checkpoint_file import read_checkpoint
from tests.conftest import write_corpus

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
EVERY = 5  # optimizer steps between two checkpoints
VALIDATE = 8  # between two validations
LIMIT = 90.0  # seconds within which a process must have ended after a fault, or be training again
OPTIONS = (
    "data=local", "attention=selective", "model.depth=2", "model.d_model=64", "model.head_dim=32",
    "model.context_length=64", "tokenizer.vocab_size=400", "data.batch_size=32", "data.streams=8", "trainer=cpu",
    f"trainer.max_steps={STEPS}", f"trainer.val_check_interval={VALIDATE}", "trainer.log_every_n_steps=1",
    f"callbacks.checkpoint.every_n_steps={EVERY}", "data.validation_sequences=60", "data.validation_batch_size=4",
    "data.workers=2", "sample=null", "guards.stall_minutes=0.05", "callbacks.progress.line_seconds=1000",
)  # fmt: skip


def make_corpus(root: Path) -> Path:
    """A corpus whose training split is read more than once in a run."""
    return write_corpus(root, shards=4, rows=400)


@dataclass
class Training:
    """One ``python train.py`` process.

    Attributes:
        run: the run's directory.
        process: the first process; with two ranks it starts the other.
        started: when, by ``time.monotonic``.
        output: file with what it printed.
    """

    run: Path
    process: subprocess.Popen
    started: float
    output: Path

    @classmethod
    def start(cls, run: Path, corpus: Path, cache: Path, *options: str, outputs: Path) -> Training:
        """Start or go on with the run in the folder ``run``; what it prints goes to a new file in ``outputs``."""
        run.parent.mkdir(parents=True, exist_ok=True)
        outputs.mkdir(parents=True, exist_ok=True)
        output = outputs / f"{len(list(outputs.iterdir())):03d}.txt"
        command = [
            sys.executable, str(ROOT / "train.py"), *OPTIONS, f"data.root={corpus}", f"cache_dir={cache}",
            f"run_dir={run}", *options,
        ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "WANDB"))}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=run.parent, env=environment,
                start_new_session=True,
            )  # fmt: skip
        return cls(run, process, time.monotonic(), output)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def text(self) -> str:
        """What it printed so far."""
        return self.output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Whether ``condition`` came true before the process ended and the time was over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.ended:
                return condition()
            time.sleep(0.001)
        return False

    def wait_ended(self, seconds: float = LIMIT) -> float | None:
        """Seconds until it had ended; None where it did not in time, and was killed with all it had started."""
        begin = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return None
        return time.monotonic() - begin

    def kill_all(self) -> None:
        """End the process and all of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def children(self) -> list[int]:
        """Process ids of what the first process has started itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                        found.append(int(entry.name))
        return sorted(found)

    def session(self) -> list[int]:
        """Process ids of all that belongs to it and lives."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.process.pid and fields[0] != "Z":
                        found.append(int(entry.name))
        return found


def rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a metrics file; none where there is none."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def last_step(run: Path) -> int:
    """The last step that a run has logged, 0 where it has none."""
    steps = [int(row["step"]) for row in rows(run / "train.csv")]
    return steps[-1] if steps else 0


def resumed_at(text: str) -> int:
    """The step that a process went on from, or found the run finished at, by what it said; 0 where it began anew."""
    found = re.findall(r"(?:resuming from .* at|is finished:) step (\d+)", text)
    return int(found[-1]) if found else 0


def is_writing_checkpoint(run: Path) -> bool:
    """Whether a checkpoint is being written at this moment."""
    try:
        return any(name.startswith((".last.ckpt.", ".best.ckpt.")) for name in os.listdir(run))
    except FileNotFoundError:
        return False


def is_validating(run: Path) -> bool:
    """Whether the run has made a step after which it validates, and the figures are not there yet."""
    step = last_step(run)
    return step > 0 and step % VALIDATE == 0 and str(step) not in {row["step"] for row in rows(run / "validation.csv")}


def differences(run: Path, reference: Path) -> list[str]:
    """In what a finished run is not, to the last bit, the reference: figures of all steps, weights, optimizer, data."""
    found = []
    for file, names in (
        ("train.csv", ("step", "train/loss", "train/grad_norm", "train/grad_norm_max", "train/lr", "train/tokens")),
        ("validation.csv", ("step", "val/loss", "val/bits_per_byte", "val/tokens")),
    ):
        ours, theirs = ([[row[name] for name in names] for row in rows(one / file)] for one in (run, reference))
        if ours != theirs:
            at = next((a[0] for a, b in zip(ours, theirs, strict=False) if a != b), "the end")
            found.append(f"{file}: {len(ours)} rows against {len(theirs)}, different from step {at} on")
    for name in ("last.ckpt", "best.ckpt"):
        try:
            ours, theirs = read_checkpoint(run / name), read_checkpoint(reference / name)
        except Exception as error:
            found.append(f"{name}: {error}")
            continue
        for part in ("state_dict", "optimizer_states", "DataModule", "guards"):
            if not equal(ours[part], theirs[part]):
                found.append(f"{name}: {part} differs")
        if ours["selmodel"]["step"] != theirs["selmodel"]["step"]:
            found.append(f"{name}: of step {ours['selmodel']['step']}, not {theirs['selmodel']['step']}")
    return found


def equal(one: object, other: object) -> bool:
    """Whether two parts of checkpoints are the same, tensors to the last bit."""
    import torch

    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@dataclass
class Moment:
    """When a fault comes: at a place of the run, and a little later.

    Attributes:
        place: "start" (before the first step of this start), "step", "checkpoint" (one is being written) or
            "validation".
        steps: for "step", how many after the start.
        delay: seconds after that.
    """

    place: str
    steps: int
    delay: float

    @classmethod
    def choose(cls, generator: random.Random) -> Moment:
        place = generator.choices(("start", "step", "checkpoint", "validation"), (1, 4, 2, 2))[0]
        delay = generator.uniform(0.0, {"start": 5.0, "checkpoint": 0.01}.get(place, 0.15))
        return cls(place, generator.randint(1, 14), delay)

    def wait(self, training: Training) -> bool:
        """Wait for the moment; False where the process ended before it came."""
        run = training.run
        if self.place == "step":
            wanted = min(last_step(run) + self.steps, STEPS - 1)
            come = training.wait_until(lambda: last_step(run) >= wanted and made_a_step(training))
        elif self.place == "checkpoint":
            come = training.wait_until(lambda: is_writing_checkpoint(run))
        elif self.place == "validation":
            come = training.wait_until(lambda: made_a_step(training) and is_validating(run))
        else:
            come = True
        if not come or training.ended:
            return False
        time.sleep(self.delay)
        return not training.ended


def made_a_step(training: Training) -> bool:
    """Whether the process itself has logged a step. An earlier start's rows are cut back when it begins."""
    text = training.text()  # it says where it lies after it has cut them back
    return "run directory:" in text and last_step(training.run) > resumed_at(text)
