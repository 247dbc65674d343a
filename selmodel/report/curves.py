"""Curves: loss by place in the context, and by tokens trained on."""

from __future__ import annotations

import itertools
import math

from selmodel.report.figures import Plot, Series, curve_figure
from selmodel.report.runs import Run, check_comparable
from selmodel.report.shared import CONTEXT, DEPTH, EPS, Report, by_label, notes_on, protocol, setting
from selmodel.report.tables import spread
from selmodel.training.loggers import read_rows


def loss_by_position(runs: list[Run]) -> Report:
    """Mean loss by place in the context, in bins whose width grows with the place, for the largest context."""
    longest = max(setting(run, "context_length") for run in runs)
    chosen = [run for run in runs if setting(run, "context_length") == longest]
    heads = max(setting(run, "n_heads") for run in chosen)
    chosen = [run for run in chosen if setting(run, "n_heads") == heads]
    check_comparable(chosen, EPS)
    edges = bin_edges(longest)
    series, rows = [], []
    for label, group in by_label(chosen):
        points: dict[float, list[float]] = {}
        for run in group:
            for first, last in itertools.pairwise(edges):
                values = [v for v in run.loss_by_position[first:last] if math.isfinite(v)]
                if values:
                    points.setdefault(math.sqrt((first + 1) * last), []).append(sum(values) / len(values))
        kind = group[0].attention
        series.append(Series(label, points, kind, sum(one.style == kind for one in series)))
        for (first, last), place in zip(itertools.pairwise(edges), sorted(points), strict=False):
            rows.append({"runs": label, "positions": f"{first + 1} to {last}", "loss": spread(points[place], 4)})
    plot = Plot(
        f"Loss by position in the context, {heads} heads", "position in the context, tokens", "loss, nats per token",
        "Mean over bins, four to each doubling of the position. " + protocol(chosen),
    )  # fmt: skip
    return Report("loss_by_position", chosen, rows, curve_figure(plot, series), notes_on(chosen))


def bin_edges(context_length: int) -> list[int]:
    """Edges of bins of positions, 0 to ``context_length``: four to each doubling, at least a position each."""
    edges = [0]
    step = 0
    while edges[-1] < context_length:
        edge = min(context_length, max(edges[-1] + 1, round(2 ** (step / 4))))
        step += 1
        if edge > edges[-1]:
            edges.append(edge)
    return edges


def training_curves(runs: list[Run]) -> Report:
    """Validation loss by tokens trained on, a line for each combination but the seed."""
    check_comparable(runs, ("model.n_heads", "model.n_kv_heads", *DEPTH, *CONTEXT, *EPS))
    series, rows = [], []
    for label, group in by_label(runs):
        points: dict[float, list[float]] = {}
        for run in group:
            for line in read_rows(run.directory / "validation.csv"):
                try:
                    tokens, loss = float(line["train/tokens"]), float(line["val/loss"])
                except (KeyError, TypeError, ValueError):
                    continue
                if math.isfinite(loss):
                    points.setdefault(tokens, []).append(loss)
        if points:
            kind = group[0].attention
            series.append(Series(label, points, kind, sum(one.style == kind for one in series)))
            last = max(points)
            rows.append({"runs": label, "tokens": f"{last:,.0f}", "loss": spread(points[last], 4)})
    plot = Plot(
        "Validation loss during training", "tokens trained on, millions", "validation loss, nats per token",
        protocol(runs), log_x=False,
    )  # fmt: skip
    figure = curve_figure(plot, series, unit=1e6) if series else None
    return Report("training_curves", runs, rows, figure, notes_on(runs))
