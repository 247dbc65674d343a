"""Stable names for runs: the same settings give the same directory, on any day and any machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

# Options that do not change what a run computes; a run keeps its directory when they change.
_WITHOUT_EFFECT = (
    "resume",
    "run_dir",
    "runs_root",
    "cache_dir",
    "logger",
    "callbacks",
    "sample",
    "plan",
    "replay",
    "guards",
    "sweep",
    "trainer",
    "data.workers",
    "hydra",
)
# Exceptions to the above: these do change what a run computes.
_WITH_EFFECT = ("trainer.max_steps", "trainer.precision", "guards.skip_spikes")
_LONGEST = 120  # characters; file systems allow 255 bytes, and checkpoint names and sweeps want room


def run_name(overrides: Iterable[str]) -> str:
    """Directory name of a run from the overrides typed, in sorted order.

    ``["model.depth=4", "attention=selective"]`` gives ``attention-selective+model.depth-4``: characters that need no
    quotes in a shell or on this program's command line. Others become ``-``, of a path only the last part is kept, and
    a name that would grow too long is cut. A name that lost something this way ends with a hash of the whole, so that
    different settings never share a directory.
    """
    # Of an option typed twice the last value counts.
    kept = sorted({item.split("=", 1)[0]: item for item in overrides if _has_effect(item)}.values())
    if not kept:
        return "default"
    # The folder of an experiment belongs to its name; of other paths only the last part is kept.
    kept = [item.replace("/", "-") if item.startswith("experiment=") else item for item in kept]
    parts = [re.sub(r"=.*/(?=[^/])", "=", item).split("=", 1) for item in kept]
    name = "+".join("-".join(re.sub(r"[^A-Za-z0-9_.-]+", "-", part).strip("-") for part in item) for item in parts)
    unchanged = all(re.fullmatch(r"[\w./@]+=[A-Za-z0-9_.][A-Za-z0-9_.-]*", item) and "/" not in item for item in kept)
    if unchanged and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(",".join(kept).encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - 9].rstrip('-+.')}-{digest}"


def _has_effect(override: str) -> bool:
    key = override.lstrip("+~").split("=", 1)[0].split("@", 1)[0].replace("/", ".")
    if any(key == name or key.startswith(f"{name}.") for name in _WITH_EFFECT):
        return True
    return not any(key == name or key.startswith(f"{name}.") for name in _WITHOUT_EFFECT)
