"""What reports have in common: their shape, groups of runs, notes, and the protocol in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from selmodel.report.runs import Run, git_commits
from selmodel.report.tables import spread

DEPTH = ("model.n_layers", "model.d_model", "model.d_ff")


CONTEXT = ("model.context_length", "protocol.context_length", "protocol.validation_sequences", "data.batch_size")


EPS = ("attention.memory_loss.eps", "attention.memory_loss.tau")


KIND_ORDER = ("standard", "selective")


@dataclass
class Report:
    """What a report has found, before it is written.

    Attributes:
        name: of its files.
        runs: compared.
        rows: of the summary, as texts.
        figure: or None where there is nothing to draw.
        notes: what a reader has to know, a line each.
        table: rows of the CSV; None: a row for each run.
        summary: figures of single runs that follow from the comparison, by their directory.
    """

    name: str
    runs: list[Run]
    rows: list[dict[str, Any]]
    figure: Figure | None
    notes: list[str] = field(default_factory=list)
    table: list[dict[str, Any]] | None = None
    summary: dict[Path, dict[str, float | str]] = field(default_factory=dict)


def by_kind(runs: Iterable[Run]) -> list[tuple[str, list[Run]]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.attention, []).append(run)
    return sorted(groups.items(), key=lambda item: kind_rank(item[0]))


def kind_rank(kind: str) -> tuple[int, str]:
    return (KIND_ORDER.index(kind) if kind in KIND_ORDER else len(KIND_ORDER), kind)


def by_label(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ in their seed alone, together, under what tells them from the others."""
    axes = varying(runs)
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault((run.attention, *(run.settings[name] for name in axes)), []).append(run)
    labelled = []
    for key in sorted(groups, key=lambda key: (kind_rank(key[0]), key[1:])):
        shown = [
            f"{short(name)} {value:g}"
            for name, value in zip(axes, key[1:], strict=True)
            if name in groups[key][0].own_settings
        ]
        labelled.append((", ".join([key[0], *shown]), groups[key]))
    return labelled


def varying(runs: Sequence[Run]) -> list[str]:
    """Settings that tell runs apart, the ones that people set."""
    names = ("model.n_layers", "model.n_heads", "model.context_length", "attention.memory_loss.eps")
    return [name for name in names if len({json.dumps(run.settings[name]) for run in runs}) > 1]


def short(name: str) -> str:
    return {"n_layers": "layers", "n_heads": "heads", "context_length": "context"}.get(name.rsplit(".", 1)[-1], "eps")


def points_of(runs: Iterable[Run], axis: str, value: Callable[[Run], float]) -> dict[int, list[float]]:
    points: dict[int, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        points.setdefault(setting(run, axis), []).append(value(run))
    return dict(sorted(points.items()))


def setting(run: Run, name: str) -> Any:
    return run.settings[f"model.{name}"]


def figures_of(runs: Sequence[Run]) -> dict[str, str]:
    return {
        "loss": spread([run.loss for run in runs], 4),
        "perplexity": spread([run.perplexity for run in runs], 2),
        "bits per byte": spread([run.bits_per_byte for run in runs], 4),
    }


def notes_on(runs: Sequence[Run], kinds: Sequence[str] = KIND_ORDER) -> list[str]:
    notes = []
    for kind in kinds:
        if not any(run.attention == kind for run in runs):
            notes.append(f"no finished run has {kind} attention")
    seeds = {run.seed for run in runs}
    notes.append(
        "one seed: differences are not told from chance"
        if len(seeds) == 1
        else "bands and ± span the seeds, lowest to highest"
    )
    commits = git_commits(runs)
    if len(commits) > 1:
        notes.append(f"trained by several versions of the program: {', '.join(commits)}")
    return notes


def protocol(runs: Sequence[Run]) -> str:
    """What the figures were measured under, in a sentence or two."""
    if not runs:
        return "no runs"
    tokens = sorted({run.tokens for run in runs})
    seeds = sorted({run.seed for run in runs})
    first = runs[0].settings
    contexts = sorted({setting(run, "context_length") for run in runs})
    validation = sorted({run.settings.get("protocol.validation_tokens") or 0 for run in runs})
    return (
        f"Trained on {_join(tokens)} tokens, context {_join(contexts)}, {first['model.positions']} positions, "
        f"{first['model.vocab_size']:,} pieces (tokenizer {first['protocol.tokenizer_hash'][:8]}), corpus "
        f"{first['protocol.source'][:8]}; "
        + (f"validated on {_join(validation)} tokens, " if validation[0] else "")
        + f"{first['protocol.precision']}; "
        f"seed{'s' if len(seeds) > 1 else ''} {_join(seeds)}; program {', '.join(git_commits(runs))}."
    )


def _join(values: Sequence[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)
