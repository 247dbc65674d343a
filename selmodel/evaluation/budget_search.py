"""The greedy search for budgets: which layers can do with fewer keys at a given loss (arXiv 2410.02703).

Every round lowers by a step of C tokens the layer whose lowering costs least loss, until no lowering stays within
the target. What enters each layer under the present budgets is kept, so trying layer l computes layers l and above
only: a round costs n_layers (n_layers + 1) / 2 layer passes instead of n_layers squared, and an accepted trial none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from selmodel.attention.cache import LayerCache
from selmodel.attention.pruning import DEFAULT_SINKS, LEAST_BUDGET, layer_rules
from selmodel.evaluation.perplexity import ValidationResult, ValidationSums
from selmodel.model import Transformer
from selmodel.training.losses import token_losses


@dataclass(frozen=True)
class Round:
    """One accepted lowering.

    Attributes:
        layer: the layer that was lowered.
        budget: its budget since then.
        loss: mean cross entropy per token of the model under all budgets since then, in nats.
        step: the step C it was lowered by, or would have been if the budget had allowed it.
    """

    layer: int
    budget: int
    loss: float
    step: int


@dataclass(frozen=True)
class _Trial:
    layer: int
    budget: int
    result: ValidationResult
    inputs: list[list[Tensor]]  # [batch][layer - first]: what enters the layers above the one tried


@torch.no_grad()
def loss_under(
    model: Transformer,
    batches: Iterable[dict],
    budgets: Sequence[int] | None = None,
    *,
    rule: str | None = None,
    n_sinks: int = DEFAULT_SINKS,
    precision: Callable[[], AbstractContextManager] = nullcontext,
) -> ValidationResult:
    """The figures of ``model`` under budgets, or without them (None); arguments as those of ``LayeredLoss``."""
    sums = ValidationSums(model.context_length)
    for batch in batches:
        tokens = batch["tokens"].to(model.embedding.weight.device)
        with precision():
            logits = model.pruned(tokens[:, :-1], budgets, rule=rule, n_sinks=n_sinks).logits
            _count(sums, batch, token_losses(logits, tokens[:, 1:]))
    return sums.result()


def _count(sums: ValidationSums, batch: dict, losses: Tensor) -> None:
    rows = batch["weight"].bool() if "weight" in batch else torch.ones(len(losses), dtype=torch.bool)
    sums.update(losses, rows[:, None].expand(losses.shape), batch.get("bytes"))


class LayeredLoss:
    """The loss of fixed sequences under budgets, where a change in one layer costs that layer and those above it.

    Args:
        model: in evaluation mode.
        batches: dictionaries with ``tokens`` [b, n + 1] int64, and optionally ``bytes`` and ``weight`` as
            ``selmodel.data.validation.ValidationLoader`` makes them.
        budgets: of every layer, to begin with.
        rule, n_sinks: as for ``selmodel.attention.cache.KVCache``.
        precision: makes the context that every pass computes in, such as autocast.

    What enters each layer is kept on the model's device: n_layers times the embedded sequences, and up to three times
    that while a round is tried. The figures are bit for bit those of ``Transformer.pruned`` on the same batches.
    """

    def __init__(
        self,
        model: Transformer,
        batches: Iterable[dict],
        budgets: Sequence[int],
        *,
        rule: str | None = None,
        n_sinks: int = DEFAULT_SINKS,
        precision: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.model = model
        self.batches = list(batches)
        self.budgets = list(budgets)
        self.rule, self.n_sinks = rule, n_sinks
        self.precision = precision
        self.layer_passes = 0  # layers computed so far, each over all sequences
        self.inputs: list[list[Tensor]] = [[] for _ in self.batches]  # [batch][layer]
        self.result = self._start()

    @torch.no_grad()
    def _start(self) -> ValidationResult:
        with self.precision():
            for batch, inputs in zip(self.batches, self.inputs, strict=True):
                tokens = batch["tokens"][:, :-1].to(self._device)
                inputs.append(self.model.embed(tokens)[0])
        trial = self._run(0, self.budgets)
        for inputs, above in zip(self.inputs, trial.inputs, strict=True):
            inputs += above
        return trial.result

    def lowered(self, layer: int, budget: int) -> _Trial:
        """The loss with another budget for one layer; the present budgets stay."""
        return self._run(layer, [budget if other == layer else own for other, own in enumerate(self.budgets)])

    def accept(self, trial: _Trial) -> None:
        """Make the trial's budgets the present ones."""
        self.budgets[trial.layer] = trial.budget
        for inputs, above in zip(self.inputs, trial.inputs, strict=True):
            inputs[trial.layer + 1 :] = above
        self.result = trial.result

    @torch.no_grad()
    def _run(self, first: int, budgets: list[int]) -> _Trial:
        model = self.model
        votes = model.blocks[0].attention.selection_head is not None
        rules = layer_rules(budgets, self.rule, model.n_layers, votes=votes, n_sinks=self.n_sinks)
        sums = ValidationSums(model.context_length)
        kept = []
        for batch, inputs in zip(self.batches, self.inputs, strict=True):
            tokens = batch["tokens"].to(self._device)
            b, n = tokens[:, :-1].shape
            above = []
            with self.precision():
                rotary = model.embed(tokens[:, :-1])[1]
                x = inputs[first]
                for layer in range(first, model.n_layers):
                    block, rule = model.blocks[layer], rules[layer]
                    weight = block.attention.wk.weight
                    cache = LayerCache(
                        block.attention, b, min(rule.budget, n), rule, dtype=weight.dtype, device=weight.device
                    )
                    x, _ = block(x, rotary, None, cache)
                    above.append(x)
                _count(sums, batch, token_losses(model.unembed(x), tokens[:, 1:]))
            kept.append(above[:-1])  # what leaves the last layer enters none
        self.layer_passes += model.n_layers - first
        return _Trial(first, budgets[first], sums.result(), kept)

    @property
    def _device(self) -> torch.device:
        return self.model.embedding.weight.device


def search_steps(step: int, context_length: int, schedule: str) -> list[int]:
    """The steps C that a search goes through, one after the other.

    ``greedy``: C alone, as in the paper. ``halving``: C times the largest power of two that is at most a quarter of
    the context, then half of it, and so on down to C: fewer rounds.
    """
    steps = [step]
    if schedule == "halving":
        while 2 * steps[-1] <= context_length // 4:
            steps.append(2 * steps[-1])
    return steps[::-1]


def search_budgets(
    loss: LayeredLoss,
    target: float,
    steps: Sequence[int],
    on_round: Callable[[Round], None] = lambda one: None,
) -> str:
    """Lower the budgets of ``loss`` as long as its loss stays at ``target`` (nats per token) or below.

    Of equal losses the lower layer's is taken. A budget is lowered to 2 at the least. ``on_round`` is called after each
    accepted lowering, and may raise to stop; a search begun again from the budgets it left goes on as it would have,
    if the steps are those that were left.

    Returns:
        why it ended: "target", no further lowering stays within it, or "floor", every layer holds 2 keys.
    """
    for step in steps:
        while True:
            best: _Trial | None = None
            for layer, budget in enumerate(loss.budgets):
                if budget <= LEAST_BUDGET:
                    continue
                trial = loss.lowered(layer, max(LEAST_BUDGET, budget - step))
                if best is None or trial.result.loss < best.result.loss:
                    best = trial
            if best is None:
                return "floor"
            if best.result.loss > target:
                break
            loss.accept(best)
            on_round(Round(best.layer, best.budget, best.result.loss, step))
    return "target"
