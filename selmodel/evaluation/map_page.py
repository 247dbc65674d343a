"""The mask maps of a text as one HTML page that needs nothing but itself: no network, mouse, or colour vision."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selmodel.evaluation.maps import TextMap

TEMPLATE = Path(__file__).with_name("map_page.html")
MOST_VOTES = 8000  # of a layer that the page holds, the largest


def page(found: TextMap) -> str:
    """The page. Texts of strangers stand in it as data alone, never as markup."""
    data = {
        "labels": found.labels,
        "layers": [_layer(layer) for layer in found.layers],
        "facts": found.facts,
    }
    # In a script element only "</" could end it; escaped, no text can.
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(f"Mask map, {found.facts['checkpoint']}")
    return TEMPLATE.read_text(encoding="utf-8").replace("__TITLE__", title).replace("__DATA__", text)


def _layer(layer: Any) -> dict[str, Any]:
    query, key = layer.S.nonzero(as_tuple=True)
    votes = layer.S[query, key]
    total, n_votes = votes.sum().item(), len(votes)
    if n_votes > MOST_VOTES:
        largest = votes.topk(MOST_VOTES).indices.sort().values
        query, key, votes = query[largest], key[largest], votes[largest]
    return {
        "query": query.tolist(),
        "key": key.tolist(),
        "votes": [float(f"{vote:.3g}") for vote in votes.tolist()],
        "n": n_votes,
        "share": votes.sum().item() / total if total else 1.0,
        "F": [float(f"{F:.3g}") for F in layer.F.tolist()],
        "leaves": None if layer.leaves is None else layer.leaves.tolist(),
    }
