"""``suite=pruning`` and ``suite=pruning_rules``: what a model loses when its layers hold fewer keys.

The figures are those of step-by-step decoding under budgets (``selmodel.attention.pruning``), computed for whole
sequences in parallel; never those of a full-attention pass whose keys are dropped afterwards.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from selmodel.attention.pruning import LEAST_BUDGET, RULES
from selmodel.budgets import Pruning, memory_factor, read_budgets
from selmodel.data.caching import write_atomically
from selmodel.data.datamodule import DataModule
from selmodel.errors import UserError
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.evaluation.setup import evaluation_trainer, output_path
from selmodel.model import ModelOutput, Transformer
from selmodel.training.loading import TrainedRun, load_run
from selmodel.training.module import LanguageModel
from selmodel.training.summary import to_json

log = logging.getLogger(__name__)


class PrunedModel(nn.Module):
    """A ``Transformer`` that evaluates whole sequences under budgets, in a ``LanguageModel``'s place for it."""

    def __init__(self, model: Transformer, pruning: Pruning) -> None:
        super().__init__()
        self.model = model
        self.pruning = pruning
        self.context_length = model.context_length

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> ModelOutput:
        """tokens [b, n] int64 -> the logits of the pruned model; without gradient, without documents."""
        return self.model.pruned(tokens, **self.pruning.arguments())


def pruning(cfg: DictConfig) -> ValidationResult:
    """Loss, perplexity and bits per byte of the run's validation set under ``cfg.budgets``, and without them."""
    if cfg.budgets is None:
        raise UserError(
            "budgets: not given; expected budgets=K (keys that every layer may hold), budgets=[K0,K1,...], or "
            "budgets=FILE.json from suite=budget_search"
        )
    run = load_run(cfg.checkpoint)
    chosen = read_budgets(plain_budgets(cfg.budgets), run.model, rule=cfg.rule, n_sinks=cfg.n_sinks)
    data = pruning_data(cfg, run)
    unpruned, pruned = evaluate_under(cfg, run, data, [Pruning(None, None, chosen.n_sinks, chosen.n_layers), chosen])
    n = run.model.context_length
    factor = chosen.memory_factor(n)
    output = output_path(cfg, run.path, "pruning", budgets=cfg.budgets, rule=cfg.rule, n_sinks=cfg.n_sinks)
    results = {
        **chosen.arguments(),
        "context_length": n,
        "memory_factor": factor,
        "validation": asdict(pruned),
        "unpruned": asdict(unpruned),
    }
    _write(output, cfg, run, data, results)
    for line in (
        f"{run.path}, step {run.step}",
        f"  keys held by layer   {' '.join(map(str, chosen.budgets))} of {n}, rule {chosen.rule}",
        f"  memory factor        {factor:.1f}",
        *pruned.lines(),
        f"  without budgets      {unpruned.loss:.4f} nats per token, perplexity {unpruned.perplexity:.2f}",
        f"  over                 {pruned.sequences:,} sequences, {pruned.tokens:,} tokens, {pruned.bytes:,} bytes",
        f"  written to           {output}",
    ):
        log.info(line)
    return pruned


def pruning_rules(cfg: DictConfig) -> dict[str, dict[int, float]]:
    """Every pruning rule that the attention admits, at each of ``cfg.n_keys`` keys in all layers: one table of losses.

    Returns:
        the validation loss by rule and number of keys.
    """
    keys = OmegaConf.to_container(cfg.n_keys) if OmegaConf.is_list(cfg.n_keys) else [cfg.n_keys]
    bad = [key for key in keys if not isinstance(key, int) or isinstance(key, bool) or key < LEAST_BUDGET]
    if bad or not keys:
        raise UserError(
            f"n_keys={keys}: expected numbers of keys, each at least {LEAST_BUDGET}, such as n_keys=[8,32,128]"
        )
    run = load_run(cfg.checkpoint)
    n = run.model.context_length
    votes = run.model.blocks[0].attention.selection_head is not None
    rules = [rule for rule in RULES if votes or rule != "selective"]
    keys = sorted({min(key, n) for key in keys})
    data = pruning_data(cfg, run)
    choices = [read_budgets(key, run.model, rule=rule, n_sinks=cfg.n_sinks) for key in keys for rule in rules]
    unpruned, *results = evaluate_under(
        cfg, run, data, [Pruning(None, None, choices[0].n_sinks, run.model.n_layers), *choices]
    )
    losses: dict[str, dict[int, float]] = {rule: {} for rule in rules}
    for choice, result in zip(choices, results, strict=True):
        losses[choice.rule][choice.budgets[0]] = result.loss
    output = output_path(cfg, run.path, "pruning_rules", n_keys=cfg.n_keys, n_sinks=cfg.n_sinks)
    table = [
        {
            "rule": choice.rule,
            "keys": choice.budgets[0],
            "memory_factor": choice.memory_factor(n),
            "loss": result.loss,
            "perplexity": result.perplexity,
        }
        for choice, result in zip(choices, results, strict=True)
    ]
    content = {"context_length": n, "n_sinks": choices[0].n_sinks, "unpruned": asdict(unpruned), "table": table}
    _write(output, cfg, run, data, content)
    width = max(len(rule) for rule in rules) + 2
    lines = [
        f"{run.path}, step {run.step}: perplexity, by the keys that every layer holds",
        f"  {'keys':>6}  {'memory':>7}" + "".join(f"{rule:>{max(width, 10)}}" for rule in rules),
        f"  {'all':>6}  {'1x':>7}" + "".join(f"{unpruned.perplexity:>{max(width, 10)}.2f}" for _ in rules),
    ]
    perplexities = {(row["rule"], row["keys"]): row["perplexity"] for row in table}
    for key in reversed(keys):
        factor = f"{memory_factor([key], n, 1):.3g}x"
        row = "".join(f"{perplexities[rule, key]:>{max(width, 10)}.2f}" for rule in rules)
        lines.append(f"  {key:>6}  {factor:>7}{row}")
    lines += [
        f"  over {unpruned.sequences:,} sequences of {n} tokens; oldest keeps the first {choices[0].n_sinks} tokens",
        f"  written to {output}",
    ]
    for line in lines:
        log.info(line)
    return losses


def pruning_data(cfg: DictConfig, run: TrainedRun) -> DataModule:
    """The run's validation data for a model under budgets.

    Raises:
        UserError: for a run with a document mask, which a cache does not know.
    """
    if run.config.data.get("document_mask"):
        raise UserError(
            f"checkpoint={run.path}: trained with data.document_mask=true; budgets are defined for sequences without "
            "a document mask (a cache holds one document); evaluate it with suite=perplexity"
        )
    return run.data(cfg.data, cache_dir=cfg.cache_dir)


def evaluate_under(
    cfg: DictConfig, run: TrainedRun, data: DataModule, choices: list[Pruning]
) -> list[ValidationResult]:
    """The validation of the run under each of ``choices``, in turn, on the trainer's devices."""
    trainer = evaluation_trainer(cfg, run)
    results = []
    for number, choice in enumerate(choices, 1):
        if len(choices) > 2:
            what = "all keys" if choice.budgets is None else f"{choice.rule}, {choice.budgets[0]} keys"
            log.info("%d of %d: %s", number, len(choices), what)
        module = LanguageModel(PrunedModel(run.model, choice), run.module.optim)
        trainer.validate(module, datamodule=data, verbose=False)
        results.append(module.validation)
    return results


def plain_budgets(budgets: Any) -> Any:
    """``budgets`` of a composed configuration as a plain number, list or text."""
    return OmegaConf.to_container(budgets) if OmegaConf.is_config(budgets) else budgets


def _write(output, cfg: DictConfig, run: TrainedRun, data: DataModule, content: dict) -> None:
    record = {
        "checkpoint": run.path.name,
        "step": run.step,
        **content,
        "architecture": run.model.options(),
        "protocol": data.protocol() | {"precision": cfg.trainer.precision},
        "environment": run.environment,
    }
    write_atomically(output, to_json(record))
