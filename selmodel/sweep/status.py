"""How far each job of a sweep is, told from the files it has written, while it runs and after."""

from __future__ import annotations

import fcntl
import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from selmodel.sweep.grid import Job, read_manifest
from selmodel.training.checkpoint_file import LAST
from selmodel.training.loggers import read_rows

log = logging.getLogger(__name__)

FINISHED, RUNNING, STOPPED, FAILED, WAITING = "finished", "running", "stopped", "failed", "waiting"
ERROR_FILE = "error.txt"


@dataclass(frozen=True)
class JobStatus:
    """Where a job stands.

    Attributes:
        job: which.
        state: "finished"; "running" (a process holds its directory); "stopped" (begun, can be gone on with);
            "failed" (its last start ended with an error); "waiting" (not begun).
        step, max_steps: optimizer steps trained and asked for, None where not known.
        loss: of the last logged training step, in nats.
        validation_loss: of the last validation, in nats; NaN where the run has diverged.
        seconds_left: by the speed it last logged.
        error: of a failed job, as it was written.
    """

    job: Job
    state: str
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    seconds_left: float | None = None
    error: str | None = None


def job_status(directory: Path, job: Job) -> JobStatus:
    """The status of ``job``, whose run lies in ``directory``."""
    max_steps = _max_steps(directory / "config.yaml")
    row = _last_row(directory / "train.csv")
    step = _number(row.get("step"))
    step = None if step is None else int(step)
    loss = _number(row.get("train/loss"))
    validation = _number(_last_row(directory / "validation.csv").get("val/loss"))
    results = _read_json(directory / "results.json")
    error = _read_text(directory / ERROR_FILE)
    state = WAITING
    if isinstance(results.get("step"), int) and max_steps is not None and results["step"] >= max_steps:
        state, step = FINISHED, results["step"]
        validation = _number((results.get("validation") or {}).get("loss"))
        validation = math.nan if validation is None else validation
    elif is_held(directory / ".lock"):
        state = RUNNING
    elif error is not None:
        state = FAILED
    elif (directory / LAST).exists() or row:
        state = STOPPED
    left = None
    seconds = _number(row.get("throughput/step_seconds"))
    if state in (RUNNING, STOPPED) and None not in (step, max_steps, seconds):
        left = max(0, max_steps - step) * seconds
    return JobStatus(job, state, step, max_steps, loss, validation, left, error if state == FAILED else None)


def sweep_status(directory: Path) -> list[JobStatus]:
    """The status of all jobs of the sweep in ``directory``.

    Raises:
        UserError: the folder is not that of a sweep.
    """
    return [job_status(directory / job.name, job) for job in read_manifest(directory)]


def status(directory: Path) -> None:
    """``report=status``: write the table of the sweep in ``directory`` to the log."""
    for line in table(directory, sweep_status(directory)):
        log.info(line)


def table(directory: Path, jobs: Sequence[JobStatus]) -> list[str]:
    """The jobs for a person, those that failed with their errors at the end."""
    counts = Counter(one.state for one in jobs)
    states = ", ".join(
        f"{counts[state]} {state}" for state in (FINISHED, RUNNING, STOPPED, FAILED, WAITING) if counts[state]
    )
    lines = [
        f"{directory}: {len(jobs)} jobs, {states}",
        f"{'state':<10}{'step':>16}{'loss':>9}{'val loss':>10}{'perplexity':>12}{'left':>9}  job",
    ]
    for one in jobs:
        step = "-" if one.step is None else f"{one.step:,}"
        if one.max_steps is not None:
            step += f" of {one.max_steps:,}"
        validation = one.validation_loss
        diverged = validation is not None and math.isnan(validation)
        lines.append(
            f"{one.state:<10}{step:>16}"
            f"{'-' if one.loss is None else f'{one.loss:.4f}':>9}"
            f"{'-' if validation is None else 'diverged' if diverged else f'{validation:.4f}':>10}"
            f"{'-' if validation is None or diverged else perplexity(validation):>12}"
            f"{'' if one.seconds_left is None else duration(one.seconds_left):>9}  {one.job.name}"
        )
    for one in jobs:
        if one.error is not None:
            lines += ["", f"{one.job.name} failed:", *(f"  {line}" for line in one.error.splitlines())]
    return lines


def perplexity(loss: float) -> str:
    """exp of a loss in nats, short."""
    value = math.exp(loss) if loss < 700 else math.inf
    return f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """A time for a person: 45s, 12m30s, 3h05m, 2d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def is_held(lock: Path) -> bool:
    """Whether a process of this machine holds the lock file of a run."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _max_steps(path: Path) -> int | None:
    try:
        # Without following references, which a stranger's file might make to the environment.
        value = OmegaConf.to_container(OmegaConf.load(path), resolve=False)["trainer"]["max_steps"]
    except Exception:  # half written, or of another kind: many errors, one answer
        return None
    return value if isinstance(value, int) else None


def _last_row(path: Path) -> dict[str, str]:
    """The last whole row of a table, empty where there is none."""
    try:
        rows = read_rows(path)
    except OSError:
        return {}
    return rows[-1] if rows else {}


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or "no reason was written"
    except OSError:
        return None
