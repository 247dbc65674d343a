"""Reports on what was measured after training: budgets, and accuracy on synthetic tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selmodel.report.figures import Plot, Series, line_figure
from selmodel.report.runs import Run, check_comparable
from selmodel.report.shared import Report, by_kind, notes_on, protocol, setting
from selmodel.report.tables import spread


def memory(runs: list[Run]) -> Report:
    """The memory table: what budgets, where they were searched, save at which perplexity."""
    found = [
        (run, one)
        for run in runs
        for path in sorted(run.directory.glob("budgets*.json"))
        if (one := _searched(run, path)) is not None
    ]
    found.sort(key=lambda pair: (pair[1]["context_length"], pair[1]["target"], pair[1]["run"]))
    rows = [
        {
            "run": one["run"],
            "context": one["context_length"],
            "target": one["target"],
            "keys by layer": one["budgets"],
            "factor": f"{one['memory_factor']:.1f}",
            "unseen perplexity": f"{one['perplexity']:.2f}",
            "unpruned": _or_dash(one["unpruned_perplexity"]),
            "target perplexity": _or_dash(one["target_perplexity"]),
        }
        for _, one in found
    ]
    notes = ["perplexities are those of the part of the validation set that the search did not see"]
    if not rows:
        notes = [
            "no budgets have been searched yet: python evaluate.py checkpoint=RUN suite=budget_search search.target=..."
        ]
    used = list(dict.fromkeys(run for run, _ in found))
    return Report("memory", used, rows, None, notes, [one for _, one in found])


def _searched(run: Run, path: Path) -> dict[str, Any] | None:
    """What a search has written, as a row; None for a file that is none or is half written."""
    try:
        content = json.loads(path.read_text())
        unseen = content.get("unseen") or {}
        increase, target = content["search"]["increase"], content["search"]["target"]
        if increase is not None:
            name = f"own +{increase:.1%}"
        else:
            # A checkpoint is named by its run's folder.
            name = Path(target).parent.name if isinstance(target, str) else f"perplexity {target:g}"
        return {
            "run": run.name,
            "attention": run.attention,
            "positions": setting(run, "positions"),
            "context_length": int(content["context_length"]),
            "memory_loss_eps": run.settings["attention.memory_loss.eps"],
            "seed": run.seed,
            "target": name,
            "rule": content["rule"],
            "budgets": " ".join(map(str, content["budgets"])),
            "memory_factor": float(content["memory_factor"]),
            "perplexity": float(content["perplexity"]),
            "unpruned_perplexity": unseen.get("unpruned_perplexity"),
            "target_perplexity": unseen.get("target_perplexity"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _or_dash(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"


def task_accuracy(runs: list[Run]) -> Report:
    """Right answers on a synthetic task by length, in and beyond the lengths trained on."""
    accuracies = {run: found for run in runs if (found := _accuracies(run))}
    chosen = list(accuracies)
    if not chosen:
        return Report(
            "task_accuracy", [], [], None, ["no finished run was trained on a synthetic task (accuracy.json)"]
        )
    check_comparable(chosen, ())
    trained = chosen[0].settings["protocol.max_length"]
    series, table = [], []
    by_length: dict[int, dict[str, Any]] = {}
    for kind, group in by_kind(chosen):
        points: dict[float, list[float]] = {}
        for run in sorted(group, key=lambda run: run.seed):
            for one in accuracies[run]:
                points.setdefault(one["length"], []).append(one["accuracy"])
                table.append({"run": run.name, "attention": kind, "seed": run.seed, "trained_length": trained, **one})
        series.append(Series(kind, points, kind))
        for length, values in points.items():
            row_ = by_length.setdefault(length, {"length": length, "": "" if length <= trained else "beyond training"})
            row_[kind] = spread(values, 3)
    plot = Plot(
        "Accuracy by length", f"length (trained up to {trained})", "share of answers that are right", protocol(chosen)
    )
    rows = [by_length[length] for length in sorted(by_length)]
    return Report("task_accuracy", chosen, rows, line_figure(plot, series), notes_on(chosen), table)


def _accuracies(run: Run) -> list[dict[str, Any]]:
    try:
        content = json.loads((run.directory / "accuracy.json").read_text())
        return [{name: one[name] for name in ("length", "answers", "accuracy", "whole")} for one in content["accuracy"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
