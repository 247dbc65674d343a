"""The mask maps of a text as one figure: S of every layer, and below it F at the end and what a budget keeps."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from selmodel.evaluation.maps import LayerMap, TextMap

LABELLED = 32  # tokens up to which each is named on the axes
COLUMNS = 3
COLORS = "cividis"  # ordered by lightness alone, so it reads without colour
SETTINGS = {"font.family": "DejaVu Sans", "font.size": 9}


def draw(found: TextMap) -> bytes:
    """The figure as PNG."""
    n_layers = len(found.layers)
    columns = min(n_layers, 2 if n_layers <= 4 else COLUMNS)
    rows = math.ceil(n_layers / columns)
    side = 5.0 if len(found.tokens) <= LABELLED else 4.2
    pruned = found.layers[0].leaves is not None
    largest = max(1e-3, max(layer.S.max().item() for layer in found.layers))
    smallest = largest / 1000
    most = max(1.0, max(layer.F.max().item() for layer in found.layers))
    heights = [1.0, 0.05, 0.05] if pruned else [1.0, 0.05]
    with matplotlib.rc_context(SETTINGS):
        width, height = columns * side * 1.15 + 1.0, rows * side * 1.2 + 1.6
        figure = Figure(figsize=(width, height), dpi=110)
        below, above = 1.4 / height, 0.9 / height
        grid = figure.add_gridspec(
            rows,
            columns,
            left=0.9 / width,
            right=1 - 1.2 / width,
            bottom=below,
            top=1 - above,
            wspace=0.22,
            hspace=0.28,
        )
        images, strips = [], []
        for number, layer in enumerate(found.layers):
            cells = grid[number // columns, number % columns].subgridspec(
                len(heights), 1, height_ratios=heights, hspace=0.06
            )
            axes = [figure.add_subplot(cells[0])]
            axes += [figure.add_subplot(cells[row], sharex=axes[0]) for row in range(1, len(heights))]
            images.append(_votes(axes[0], layer, smallest, largest))
            axes[0].set_title(f"layer {number}", loc="left", fontweight="bold")
            strips.append(axes[1].imshow(layer.F.numpy()[None], aspect="auto", cmap=COLORS, vmin=0, vmax=most))
            axes[1].set_yticks([0], ["F"])
            if pruned:
                kept = (layer.leaves.numpy() < 0)[None]
                axes[2].imshow(kept, aspect="auto", cmap="gray", vmin=0, vmax=1)
                axes[2].set_yticks([0], ["kept"])
            for upper in axes[:-1]:
                upper.tick_params(labelbottom=False)
            _name_tokens(axes, found.labels)
        beside = figure.add_axes((1 - 1.0 / width, 0.3, 0.18 / width, 0.4))
        figure.colorbar(images[0], cax=beside, label="S, votes (logarithmic)")
        under = figure.add_axes((0.3, 0.55 / height, 0.4, 0.16 / height))
        figure.colorbar(
            strips[0], cax=under, orientation="horizontal", label="F, sum of the votes after the last token"
        )
        figure.suptitle(_title(found), fontsize=10, x=0.1 / width, y=1 - 0.1 / height, ha="left", va="top")
        content = io.BytesIO()
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _votes(axes: Axes, layer: LayerMap, smallest: float, largest: float):
    S = layer.S.numpy().copy()
    S[smallest > S] = np.nan
    axes.set_facecolor("0.93")
    return axes.imshow(S, cmap=COLORS, norm=LogNorm(smallest, largest), aspect="auto", interpolation="nearest")


def _name_tokens(axes: list[Axes], labels: list[str]) -> None:
    n = len(labels)
    if n <= LABELLED:
        names = [_short(label) for label in labels]
        axes[-1].set_xticks(range(n), names, rotation=90, fontsize=8)
        axes[0].set_yticks(range(n), names, fontsize=8)
    else:
        axes[-1].set_xlabel("key: the token voted against")
        axes[0].set_ylabel("query: the token that votes")


def _short(label: str) -> str:
    # Mathtext would read dollars; a glyph that the font lacks is drawn as a box.
    shown = label.replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$").replace(" ", "␣")
    return shown if len(shown) <= 12 else f"{shown[:11]}…"


def _title(found: TextMap) -> str:
    facts = found.facts
    title = f"{facts['checkpoint']}, step {facts['step']:,}: who masks whom (S: row votes against column)"
    if facts["budgets"] is not None:
        title += f"\nwhite in the row 'kept': held in the end under budgets {facts['budgets']} by rule {facts['rule']}"
    return title
