"""Configurations that came in a file, such as a checkpoint: read as data, whoever made it.

A configuration names the classes that its components are built of, so that one made by a stranger could name anything:
``_target_: os.system``. What a command line names is the user's own doing; what a file names must be one of this
project's components, or come from a package that the user trusts by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from selmodel.errors import UserError

VARIABLE = "SELMODEL_TRUST"
GROUPS = ("attention", "model", "optim", "data")  # that are built of a stored configuration
COMPONENTS = frozenset(
    {
        "selmodel.attention.SelectiveAttention",
        "selmodel.attention.StandardAttention",
        "selmodel.data.datamodule.DataModule",
        "selmodel.data.docstrings.DocstringsSource",
        "selmodel.data.hub.C4Source",
        "selmodel.data.sources.LocalSource",
        "selmodel.data.task_data.TaskDataModule",
        "selmodel.data.tasks.Copy",
        "selmodel.data.tasks.Parity",
        "selmodel.data.tasks.VariableAssignment",
        "selmodel.data.token_cache.TokenCache",
        "selmodel.model.Transformer",
        "selmodel.training.optim.AdamW",
    }
)


def stored_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A configuration from a file, as it may be built: no reference in it is followed, and it names known components.

    Args:
        config: plain containers.
        path: of the file, for the message.

    Returns:
        a copy in which ``${...}`` is text, not a reference to the environment or to anything else.

    Raises:
        UserError: naming each component that is neither this project's nor of a package in ``SELMODEL_TRUST``.
    """
    trusted = tuple(name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip())
    faults = [
        f"{where}._target_={target}"
        for where, target in _targets({name: config.get(name) for name in GROUPS})
        if target not in COMPONENTS and not any(target == name or target.startswith(f"{name}.") for name in trusted)
    ]
    if faults:
        packages = sorted({fault.partition("=")[2].partition(".")[0] for fault in faults})
        raise UserError(
            f"{path}: its configuration names what is not part of selmodel: {', '.join(faults)}. Building it would run "
            f"that code. If it is yours, or you trust who made the file, set {VARIABLE}={','.join(packages)} and try "
            "again"
        )
    return _as_text(config)


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _targets(value, path)


def _as_text(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _as_text(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_as_text(value) for value in node]
    return without_interpolation(node) if isinstance(node, str) else node


def without_interpolation(text: str) -> str:
    """``text`` as OmegaConf must be given it to give it back: ``${`` escaped, and backslashes before it doubled."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
