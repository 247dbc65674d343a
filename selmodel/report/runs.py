"""The finished runs of a sweep as rows, and whether they may stand beside each other."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from selmodel.errors import UserError
from selmodel.sweep.status import FINISHED, JobStatus, sweep_status

KINDS = {"StandardAttention": "standard", "SelectiveAttention": "selective"}
# Parts of a run's configuration that decide what it computes; the rest (devices, logging, folders) does not.
_COMPARED = ("optim", "compile")
# These are known by what they give, which is compared itself, or say where something lies.
_NOT_COMPARED = ("optim._target_",)


@dataclass(frozen=True, eq=False)  # two runs are the same only if they are one
class Run:
    """One finished run.

    Attributes:
        name: of its folder in the sweep's.
        directory: of the run.
        attention: "standard", "selective", or the class of another kind.
        settings: what it was trained and measured with, by dotted name: all that must be equal between two runs, axes
            of a comparison apart.
        seed: of weights and data order.
        tokens: trained on.
        loss, bits_per_byte: of the last validation, nats per token and bits per byte; NaN for a run that has diverged.
        loss_by_position: [context], nats.
        parameters: numbers by part, and "total".
        git_commit: of the program, None where it was not known.
    """

    name: str
    directory: Path
    attention: str
    settings: dict[str, Any]
    seed: int
    tokens: int
    loss: float
    bits_per_byte: float
    loss_by_position: tuple[float, ...]
    parameters: dict[str, int]
    git_commit: str | None

    @property
    def own_settings(self) -> set[str]:
        """Names of the settings that mean something for its kind of attention."""
        selective = self.attention == "selective"
        return {name for name in self.settings if selective or not name.startswith("attention.memory_loss")}

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def read_sweep(directory: Path) -> tuple[list[Run], list[str]]:
    """The finished runs below ``directory``, and a line for each job that is not one, with the reason.

    Raises:
        UserError: the folder is not that of a sweep.
    """
    runs, missing = [], []
    for one in sweep_status(directory):
        folder = directory / one.job.name
        run = read_run(folder, one.job.name) if one.state == FINISHED else None
        if run is not None and math.isfinite(run.loss):
            runs.append(run)
        else:
            missing.append(f"{one.job.name}: {_why_missing(one, run)}")
    return runs, missing


def _why_missing(one: JobStatus, run: Run | None) -> str:
    if run is not None:
        return "has diverged"
    if one.state == FINISHED:
        return "its results.json lacks what a report needs"
    where = "" if one.step is None else f" at step {one.step:,}" + (f" of {one.max_steps:,}" if one.max_steps else "")
    reason = "" if one.error is None else f" ({one.error.splitlines()[0]})"
    return f"{one.state}{where}{reason}"


def read_run(directory: Path, name: str | None = None) -> Run | None:
    """The run in ``directory``; None where its files are missing, damaged or of another kind."""
    try:
        results = json.loads((directory / "results.json").read_text())
        config = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        architecture = dict(results["architecture"])
        attention = dict(architecture.pop("attention"))
        kind = attention.pop("kind")
        validation = results["validation"]
        settings = {f"model.{key}": value for key, value in architecture.items()}
        settings |= {f"attention.{key}": value for key, value in attention.items()}
        memory_loss = (config["attention"].get("memory_loss") or {}) if kind == "SelectiveAttention" else {}
        eps = memory_loss.get("eps") or 0.0
        settings["attention.memory_loss.eps"] = float(eps)
        settings["attention.memory_loss.tau"] = float(memory_loss.get("tau") or 1.0) if eps else None
        settings |= {f"protocol.{key}": value for key, value in results["protocol"].items()}
        settings["trained tokens"] = results["tokens"]
        settings["trained steps"] = results["step"]
        settings["data.batch_size"] = config["data"]["batch_size"]
        for part in _COMPARED:
            settings |= _flat(part, config[part])
        if "selection_head" not in attention and kind == "StandardAttention":
            settings["attention.selection_head"] = None
        return Run(
            name=name or directory.name,
            directory=directory,
            attention=KINDS.get(kind, kind),
            settings={key: value for key, value in settings.items() if key not in _NOT_COMPARED},
            seed=int(config["seed"]),
            tokens=int(results["tokens"]),
            loss=_number(validation["loss"]),
            bits_per_byte=_number(validation.get("bits_per_byte")),
            loss_by_position=tuple(_number(value) for value in validation["loss_by_position"]),
            parameters={key: int(value) for key, value in results["parameters"].items()},
            git_commit=(results.get("environment") or {}).get("git_commit"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    except Exception as error:  # YAML's own
        if type(error).__module__.split(".")[0] in ("yaml", "omegaconf"):
            return None
        raise


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(f"{name}.{key}", inner)
    return flat


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def check_comparable(runs: Sequence[Run], axes: Iterable[str]) -> None:
    """Refuse to put runs on one axis that were trained or measured differently.

    Args:
        runs: at least one.
        axes: settings that may differ: what the comparison varies, and what follows from it. Attention's own options
            are compared among runs of the same kind only, seeds and git commits not at all.

    Raises:
        UserError: naming each setting that differs, its values, and the runs that have them.
    """
    axes = set(axes)
    faults = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        if key in axes:
            continue
        if key.startswith("attention."):
            groups = [[run for run in runs if run.attention == kind] for kind in {run.attention: None for run in runs}]
        else:
            groups = [list(runs)]
        for group in groups:
            values: dict[str, list[str]] = {}
            for run in group:
                values.setdefault(json.dumps(run.settings.get(key), default=str), []).append(run.name)
            if len(values) > 1:
                faults.append(f"{key}: " + "; ".join(_who(value, names) for value, names in values.items()))
    if faults:
        raise UserError(
            "these runs cannot stand in one figure, because they were trained or measured differently:\n"
            + "\n".join(faults)
            + "\nReport on a folder that holds comparable runs alone, or train the missing ones alike."
        )


def _who(value: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{value} in {shown}"


def git_commits(runs: Iterable[Run]) -> list[str]:
    """The program's commits, the most frequent first, shortened."""
    counts = Counter(run.git_commit or "unknown" for run in runs)
    return [commit[:10] + ("-dirty" if commit.endswith("-dirty") else "") for commit, _ in counts.most_common()]
