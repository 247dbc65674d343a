"""Perplexity against heads, context, size, and the weight of the memory loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selmodel.report.equivalent import Equivalent, equivalent_range
from selmodel.report.figures import Plot, Series, line_figure
from selmodel.report.runs import Run, check_comparable
from selmodel.report.shared import (
    CONTEXT,
    DEPTH,
    EPS,
    Report,
    by_kind,
    figures_of,
    notes_on,
    points_of,
    protocol,
    setting,
)
from selmodel.report.tables import spread


def perplexity_vs_heads(runs: list[Run]) -> Report:
    """Perplexity by heads for both kinds, and the standard heads that each selective one is worth."""
    check_comparable(runs, ("model.n_heads", "model.n_kv_heads", *DEPTH))
    depths = sorted({setting(run, "n_layers") for run in runs})
    series, rows, summary = [], [], {}
    for variant, depth in enumerate(reversed(depths)):
        here = [run for run in runs if setting(run, "n_layers") == depth]
        for kind, group in by_kind(here):
            label = kind if len(depths) == 1 else f"{kind}, {depth} layers"
            series.append(Series(label, points_of(group, "n_heads", lambda run: run.perplexity), kind, variant))
        equivalents = _equivalents(here)
        rows += _heads_rows(here, depth, equivalents)
        for run in here:
            if run.attention == "selective" and (found := equivalents.get(setting(run, "n_heads"))):
                inside = 0 < found[0].heads < math.inf
                summary[run.directory] = {"equivalent_heads": found[0].heads if inside else str(found[0])}
    plot = Plot(
        "Perplexity by number of heads",
        f"heads of {setting(runs[0], 'head_dim')} features (d_model stays)",
        "validation perplexity",
        protocol(runs),
    )
    figure = line_figure(plot, series)
    return Report("perplexity_vs_heads", runs, rows, figure, notes_on(runs), summary=summary)


def _losses(runs: Sequence[Run]) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Losses by heads, of standard and of selective runs."""
    losses = {kind: points_of(group, "n_heads", lambda run: run.loss) for kind, group in by_kind(runs)}
    return losses.get("standard", {}), losses.get("selective", {})


def _equivalents(runs: Sequence[Run]) -> dict[int, tuple[Equivalent, Equivalent, Equivalent]]:
    """(of the means, least, most) equivalent standard heads, by selective heads."""
    standard, selective = _losses(runs)
    if not standard:
        return {}
    return {heads: equivalent_range(standard, values) for heads, values in selective.items()}


def _heads_rows(
    runs: Sequence[Run], depth: int, equivalents: Mapping[int, tuple[Equivalent, Equivalent, Equivalent]]
) -> list[dict[str, Any]]:
    standard, selective = _losses(runs)
    rows = []
    for heads in sorted({*standard, *selective}):
        one: dict[str, Any] = {"layers": depth, "heads": heads}
        for kind, values in (("standard", standard), ("selective", selective)):
            found = values.get(heads, [])
            one[f"{kind} loss"] = spread(found, 4) if found else "-"
            one[f"{kind} perplexity"] = spread([math.exp(loss) for loss in found], 2) if found else "-"
        one["equivalent standard heads"] = one["range over seeds"] = one["attention parameter ratio"] = "-"
        if heads in equivalents:
            mean, least, most = equivalents[heads]
            one["equivalent standard heads"] = str(mean)
            several = max(len(selective[heads]), *(len(v) for v in standard.values())) > 1
            one["range over seeds"] = f"{least} to {most}" if several else "one seed"
            if 0 < mean.heads < math.inf:
                # With the head size fixed, parameters of attention go with the number of heads.
                one["attention parameter ratio"] = f"{mean.heads / heads:.2f}"
            else:
                bound = mean.most if mean.heads else mean.fewest
                one["attention parameter ratio"] = f"{'>' if mean.heads else '<'}{bound / heads:.2f}"
        rows.append(one)
    return rows


def context_size(runs: list[Run]) -> Report:
    """Perplexity by context for both kinds, over the same number of validation tokens."""
    check_comparable(runs, CONTEXT)
    title = "Perplexity by context"
    note = "every context reads the same validation text, cut to its length, and trains on as many tokens a step"
    return _by_axis(
        runs, "context_size", "context_length", title, "context, tokens", notes=[*notes_on(runs), note],
        value=lambda run: setting(run, "context_length"),
    )  # fmt: skip


def model_size(runs: list[Run]) -> Report:
    """Perplexity by size for both kinds."""
    check_comparable(runs, ("model.n_heads", "model.n_kv_heads", *DEPTH))
    depths = {run.parameters["total"]: setting(run, "n_layers") for run in runs}
    ticks = {size: f"{size / 1e6:.3g}\n{depth} layers" for size, depth in depths.items()}
    return _by_axis(
        runs, "model_size", "parameters", "Perplexity by model size", "parameters, millions", notes=notes_on(runs),
        value=lambda run: run.parameters["total"], ticks=ticks,
    )  # fmt: skip


def memory_loss(runs: list[Run]) -> Report:
    """Perplexity of selective models by the weight of the memory loss."""
    chosen = [run for run in runs if run.attention == "selective"]
    if not chosen:
        return Report("memory_loss", [], [], None, ["no run has selective attention, which the memory loss is of"])
    check_comparable(chosen, EPS)
    weights = sorted({run.settings["attention.memory_loss.eps"] for run in chosen})
    place = {weight: float(i) for i, weight in enumerate(weights)}
    plot = Plot(
        "Perplexity by weight of the memory loss", "weight of the memory loss, eps", "validation perplexity",
        protocol(chosen), log_x=False, ticks={place[weight]: f"{weight:g}" for weight in weights},
    )  # fmt: skip
    points: dict[float, list[float]] = {}
    for run in sorted(chosen, key=lambda run: run.seed):
        points.setdefault(place[run.settings["attention.memory_loss.eps"]], []).append(run.perplexity)
    rows = []
    for weight in weights:
        group = [run for run in chosen if run.settings["attention.memory_loss.eps"] == weight]
        rows.append({"eps": f"{weight:g}", **figures_of(group)})
    figure = line_figure(plot, [Series("selective", points, "selective")]) if len(weights) > 1 else None
    return Report("memory_loss", chosen, rows, figure, notes_on(chosen, kinds=("selective",)))


def _by_axis(
    runs: list[Run], name: str, column: str, title: str, x_label: str, *, value: Callable[[Run], float],
    notes: list[str], ticks: dict | None = None,
) -> Report:  # fmt: skip
    series, rows = [], []
    for kind, group in by_kind(runs):
        points: dict[float, list[float]] = {}
        for run in sorted(group, key=lambda run: run.seed):
            points.setdefault(value(run), []).append(run.perplexity)
        series.append(Series(kind, points, kind))
    for x in sorted({value(run) for run in runs}):
        one: dict[str, Any] = {column: f"{x:,}"}
        for kind, group in by_kind(runs):
            here = [run for run in group if value(run) == x]
            one |= {f"{kind} {key}": text for key, text in figures_of(here).items()} if here else {}
        rows.append(one)
    plot = Plot(title, x_label, "validation perplexity", protocol(runs), ticks=ticks or {})
    return Report(name, runs, rows, line_figure(plot, series), notes)
