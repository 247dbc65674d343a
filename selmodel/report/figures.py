"""Figures: readable in black and white, axes with units, the protocol below; the same bytes for the same runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

# Markers and line styles tell kinds apart without colour; the colours are Okabe and Ito's, safe for the colour-blind.
STYLES = {
    "standard": {"color": "#d55e00", "marker": "o", "linestyle": "--", "markerfacecolor": "white"},
    "selective": {"color": "#0072b2", "marker": "s", "linestyle": "-"},
}
OTHER_STYLES = (
    {"color": "#000000", "marker": "^", "linestyle": "-."},
    {"color": "#009e73", "marker": "D", "linestyle": ":"},
    {"color": "#cc79a7", "marker": "v", "linestyle": (0, (5, 1))},
)
VARIANT_MARKERS = ("^", "D", "v", "P", "X", "*", "<", ">")
WIDTH = 6.4  # inches; two columns of a page, and still readable in one
CAPTION_WIDTH = 105  # characters of a line below the figure
SETTINGS = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.grid": True,
    "grid.color": "0.88",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "selmodel",  # names inside the file, which are random otherwise
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Series:
    """One line of a figure.

    Attributes:
        label: in the legend.
        points: values of all seeds by position on the x axis, ascending.
        style: of the line; a name in ``STYLES``, or any other text for one of the further styles.
        variant: lines of one style with different variants differ in shade and width.
    """

    label: str
    points: Mapping[float, Sequence[float]]
    style: str
    variant: int = 0


@dataclass(frozen=True)
class Plot:
    """A figure's frame: labels with units, scales, and the text below it.

    Attributes:
        log_x: base-2 logarithm, a tick at each point; False: linear.
        ticks: labels of the x axis by position, in place of the numbers.
    """

    title: str
    x_label: str
    y_label: str
    caption: str
    log_x: bool = True
    ticks: Mapping[float, str] = field(default_factory=dict)


def line_figure(plot: Plot, series: Sequence[Series]) -> Figure:
    """Means as lines, a band from the lowest to the highest seed, every seed as a small point."""
    with _drawing(plot) as (figure, axes):
        for number, one in enumerate(series):
            style = _style(one, number)
            x = np.array(sorted(one.points), dtype=float)
            values = [np.asarray(one.points[position], dtype=float) for position in sorted(one.points)]
            mean = np.array([v.mean() for v in values])
            axes.plot(x, mean, label=one.label, **style)
            if max(map(len, values)) > 1:
                low, high = (np.array([f(v) for v in values]) for f in (np.min, np.max))
                axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
                for position, v in zip(x, values, strict=True):
                    axes.plot([position] * len(v), v, ".", color=style["color"], markersize=3)
        positions = sorted({x for one in series for x in one.points})
        if plot.log_x:
            axes.set_xscale("log", base=2)
        axes.set_xticks(positions, [plot.ticks.get(x, f"{x:g}") for x in positions])
        axes.xaxis.set_minor_locator(NullLocator())
    return figure


def curve_figure(plot: Plot, series: Sequence[Series], *, unit: float = 1.0) -> Figure:
    """Lines with many points: the mean over seeds of a curve, x divided by ``unit``."""
    with _drawing(plot) as (figure, axes):
        for number, one in enumerate(series):
            style = _style(one, number) | {"linewidth": 1.6, "markersize": 4.5}
            style["markevery"] = (2 * number, max(1, len(one.points) // 6))  # apart, where lines meet
            x = np.array(sorted(one.points), dtype=float) / unit
            values = [np.asarray(one.points[position], dtype=float) for position in sorted(one.points)]
            axes.plot(x, [v.mean() for v in values], label=one.label, **style)
            if max(map(len, values)) > 1:
                low, high = ([f(v) for v in values] for f in (np.min, np.max))
                axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
        if plot.log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path`` with .png and .svg; without dates, so the same figure gives the same bytes."""
    with matplotlib.rc_context(SETTINGS):
        paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        for one in paths:
            metadata = {"Date": None} if one.suffix == ".svg" else {"Software": None}
            figure.savefig(one, dpi=200, metadata=metadata)
    return paths


@contextmanager
def _drawing(plot: Plot) -> Iterator[tuple[Figure, Axes]]:
    """A figure to draw in; its labels, legend and caption are added after."""
    caption = "\n".join(textwrap.fill(line, CAPTION_WIDTH) for line in plot.caption.splitlines())
    below = 0.155 * (caption.count("\n") + 1) + 0.12  # inches
    height = 3.9 + below
    with matplotlib.rc_context(SETTINGS):
        # A figure of its own, not one of pyplot's, which lives until it is closed and asks for a display.
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.get_layout_engine().set(rect=(0, below / height, 1, 1 - below / height))
        axes = figure.subplots()
        yield figure, axes
        axes.set_title(plot.title, fontsize=11)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
        figure.text(0.015, below / height - 0.01, caption, fontsize=7.2, va="top", color="0.25")


def _style(one: Series, number: int) -> dict:
    style = dict(STYLES.get(one.style) or OTHER_STYLES[number % len(OTHER_STYLES)])
    style |= {"linewidth": 1.8 - 0.35 * min(one.variant, 3), "markersize": 6 - min(one.variant, 3)}
    if one.variant:
        style["alpha"] = max(0.45, 1 - 0.2 * one.variant)
        style["marker"] = VARIANT_MARKERS[(one.variant - 1) % len(VARIANT_MARKERS)]
    return style
