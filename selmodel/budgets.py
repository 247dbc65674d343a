"""Budgets as the user gives them: a number, one number per layer, or a file that a search has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from selmodel.attention.pruning import DEFAULT_SINKS, layer_rules
from selmodel.comparing import differences
from selmodel.errors import UserError
from selmodel.model import Transformer

FORMAT = "selmodel.budgets/1"


@dataclass(frozen=True)
class Pruning:
    """Which keys the layers of a model may hold. Made by ``read_budgets``, which checks it.

    Attributes:
        budgets: keys of each layer; None: all.
        rule: name in ``selmodel.attention.pruning.RULES``; None without budgets.
        n_sinks: of rule "oldest".
        n_layers: of the model.
    """

    budgets: tuple[int, ...] | None
    rule: str | None
    n_sinks: int
    n_layers: int

    def memory_factor(self, context_length: int) -> float:
        """``n * n_layers / sum of K``: how many times fewer keys are held at the end of the context."""
        return memory_factor(self.budgets, context_length, self.n_layers)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``Transformer.pruned`` and ``KVCache``."""
        budgets = None if self.budgets is None else list(self.budgets)
        return {"budgets": budgets, "rule": self.rule, "n_sinks": self.n_sinks}


def memory_factor(budgets: Sequence[int] | None, context_length: int, n_layers: int) -> float:
    """``n * n_layers / sum of K``; a budget above the context holds no more than the context."""
    if budgets is None:
        return 1.0
    return context_length * n_layers / sum(min(budget, context_length) for budget in budgets)


def read_budgets(
    budgets: int | Sequence[int] | str | Path | None,
    model: Transformer,
    *,
    rule: str | None = None,
    n_sinks: int | None = None,
) -> Pruning:
    """What the options ``budgets``, ``rule`` and ``n_sinks`` mean for ``model``.

    Args:
        budgets: keys that each layer may hold between queries, at least 2: one number for all, a list with one per
            layer, or the file that a search has written; None: no key leaves.
        rule: None: that of the file, or "selective" where the attention has votes. A file may be used with another
            rule than it was searched for, to compare rules at equal memory.
        n_sinks: of rule "oldest"; None: that of the file, or 4.

    Raises:
        UserError: naming each option that does not fit the model, and every field in which the file's model differs.
    """
    if isinstance(budgets, str | Path):
        content = _read_file(Path(budgets).expanduser(), model)
        budgets = content["budgets"]
        rule = rule or content["rule"]
        n_sinks = content["n_sinks"] if n_sinks is None else n_sinks
    n_sinks = DEFAULT_SINKS if n_sinks is None else n_sinks
    votes = model.blocks[0].attention.selection_head is not None
    rules = layer_rules(budgets, rule, model.n_layers, votes=votes, n_sinks=n_sinks)
    if rules is None:
        return Pruning(None, None, n_sinks, model.n_layers)
    return Pruning(tuple(one.budget for one in rules), rule or "selective", n_sinks, model.n_layers)


def _read_file(path: Path, model: Transformer) -> dict[str, Any]:
    expected = "expected a number, a list such as [8,16], or a file written by evaluate.py suite=budget_search"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"budgets={path}: cannot be read ({error.strerror}); {expected}") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"budgets={path}: is not JSON ({error}); {expected}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"budgets={path}: is no file of budgets (format {FORMAT!r}); {expected}")
    differing = differences(content.get("architecture", {}), model.options(), there="in the file", here="here")
    if differing:
        raise UserError(
            f"budgets={path}: were searched for another model: {'; '.join(differing)}; "
            "search them for this one, or give the numbers themselves, budgets="
            + str(content.get("budgets")).replace(" ", "")
        )
    rule, n_sinks = content.get("rule"), content.get("n_sinks")
    if not isinstance(rule, str) or not isinstance(n_sinks, Integral) or not isinstance(content.get("budgets"), list):
        raise UserError(f"budgets={path}: lacks budgets, rule or n_sinks; {expected}")
    return content
