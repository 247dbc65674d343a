"""The jobs of a sweep: named by what was typed, listed in a file, the same ones on every start."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selmodel.data.caching import write_atomically
from selmodel.errors import UserError
from selmodel.naming import run_name

MANIFEST = "sweep.json"
FORMAT = "selmodel.sweep/1"
# Options of the command that runs a sweep, not of its jobs.
_NOT_OF_A_JOB = ("hydra", "sweep")


@dataclass(frozen=True)
class Job:
    """One combination of a sweep's values.

    Attributes:
        name: of its folder in the sweep's.
        overrides: what one would type after ``python train.py`` to train it alone.
    """

    name: str
    overrides: tuple[str, ...]


def key_of(override: str) -> str:
    """The option that an override sets: ``model.n_heads`` of ``+model.n_heads=4``."""
    return override.lstrip("+~").split("=", 1)[0]


def is_of_a_job(override: str) -> bool:
    """False for Hydra's options and those of the sweep itself."""
    return key_of(override).replace("/", ".").split(".", 1)[0] not in _NOT_OF_A_JOB


def sweep_name(fixed: Iterable[str]) -> str:
    """Name of a sweep's folder from the overrides that all its jobs share."""
    name = run_name(override for override in fixed if is_of_a_job(override))
    return "sweep" if name == "default" else name


def make_jobs(combinations: Iterable[Sequence[str]], axes: Iterable[str]) -> list[Job]:
    """A job for each list of overrides, named by the options in ``axes``.

    Raises:
        UserError: two jobs would share a folder, because the axis that tells them apart has no effect on a run.
    """
    axes = set(axes)
    jobs: dict[str, Job] = {}
    for combination in combinations:
        overrides = tuple(override for override in combination if is_of_a_job(override))
        name = run_name(override for override in overrides if key_of(override) in axes)
        if name in jobs:
            differing = sorted(
                key_of(mine) for mine, other in zip(overrides, jobs[name].overrides, strict=True) if mine != other
            )
            raise UserError(
                f"a sweep over {', '.join(differing)}: does not change what a run computes, so its jobs would be one "
                "and the same; leave it out of the sweep"
            )
        jobs[name] = Job(name, overrides)
    return list(jobs.values())


def write_manifest(directory: Path, jobs: Sequence[Job]) -> None:
    """Put ``jobs`` on the sweep's list, after those that an earlier start has put there."""
    known = {job.name: job for job in read_manifest(directory)} if (directory / MANIFEST).exists() else {}
    known |= {job.name: job for job in jobs}
    content = {
        "format": FORMAT,
        "jobs": [{"name": job.name, "overrides": list(job.overrides)} for job in known.values()],
    }
    write_atomically(directory / MANIFEST, json.dumps(content, indent=2).encode() + b"\n")


def read_manifest(directory: Path) -> list[Job]:
    """The jobs of the sweep in ``directory``; where no list is, its folders that look like runs.

    Raises:
        UserError: there is no such folder, it holds no run, or its list cannot be read.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise UserError(f"sweep={directory}: no such folder; expected that of a sweep, such as multirun/NAME")
    if not path.exists():
        found = sorted({file.parent.relative_to(directory) for file in directory.rglob("config.yaml")})
        if not found:
            raise UserError(
                f"sweep={directory}: holds neither {MANIFEST} nor a run (config.yaml); expected the folder of a sweep, "
                "such as multirun/NAME"
            )
        return [Job(str(name), ()) for name in found]
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT!r}")
        return [Job(str(job["name"]), tuple(job["overrides"])) for job in content["jobs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: is not the list of a sweep's jobs ({error}); remove it, and the same command writes it anew"
        ) from error
