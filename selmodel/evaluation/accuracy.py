"""Accuracy on a synthetic task by length, in and beyond the lengths trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning as L
import torch
from omegaconf import DictConfig

from selmodel.data.caching import write_atomically
from selmodel.data.task_data import BY_LENGTH, TaskDataModule
from selmodel.errors import UserError
from selmodel.evaluation.setup import evaluation_trainer, output_path
from selmodel.model import Transformer
from selmodel.training.loading import load_run
from selmodel.training.summary import to_json

log = logging.getLogger(__name__)

EXAMPLES = 256  # of each length
TOKENS_PER_PASS = 16384
FILE = "accuracy.json"


@dataclass(frozen=True)
class LengthAccuracy:
    """How much of a length's examples is answered right.

    Attributes:
        length: of the examples.
        answers: how many were asked for.
        accuracy: share of the answers that were the likeliest token.
        whole: share of the examples all of whose answers were.
    """

    length: int
    answers: int
    accuracy: float
    whole: float


@torch.no_grad()
def accuracy_by_length(
    model: Transformer, data: TaskDataModule, lengths: Sequence[int], n_examples: int = EXAMPLES
) -> list[LengthAccuracy]:
    """Accuracy at each of ``lengths`` over the same ``n_examples`` for every model with the data's seed.

    Raises:
        UserError: an example of one of the lengths does not fit into the model's context.
    """
    device = next(model.parameters()).device
    results = []
    for length in lengths:
        width = data.source.n_symbols(length)
        if width > model.context_length:
            raise UserError(
                f"lengths={list(lengths)}: an example of length {length} has {width} tokens, more than the model's "
                f"context of {model.context_length}; leave it out, or train with model.context_length={width}"
            )
        right = whole = answers = 0
        rows = max(1, TOKENS_PER_PASS // width)
        for first in range(0, n_examples, rows):
            chosen = range(first, min(first + rows, n_examples))
            tokens, is_answer = data.examples(BY_LENGTH, length, chosen, [length] * len(chosen), width)
            tokens, is_answer = torch.from_numpy(tokens).to(device), torch.from_numpy(is_answer).to(device)
            hit = model(tokens[:, :-1]).logits.argmax(-1) == tokens[:, 1:]
            right += int((hit & is_answer).sum())
            whole += int((hit | ~is_answer).all(1).sum())
            answers += int(is_answer.sum())
        results.append(LengthAccuracy(length, answers, right / answers, whole / n_examples))
    return results


def table(results: Sequence[LengthAccuracy], data: TaskDataModule) -> list[str]:
    """The results for a person, a line per length."""
    order = data.order
    lines = [
        f"accuracy by length (trained on {order.min_length} to {order.max_length})",
        "  length   answers   right   whole examples right",
    ]
    lines += [
        f"  {one.length:6d}   {one.answers:7,d}   {one.accuracy:5.3f}   {one.whole:20.3f}"
        + ("   beyond training" if one.length > order.max_length else "")
        for one in results
    ]
    return lines


def write(path: Path, results: Sequence[LengthAccuracy], data: TaskDataModule, step: int) -> None:
    """Write the results with what they were measured on."""
    content = {"step": step, "accuracy": [asdict(one) for one in results], "protocol": data.protocol()}
    write_atomically(path, to_json(content))


class AccuracyByLength(L.Callback):
    """At the end of training: the accuracy at ``data.lengths``, printed, and written to ``RUN/accuracy.json``."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        data = trainer.datamodule
        if trainer.global_step < trainer.max_steps:
            return
        training = module.training
        module.eval()
        # On every process, since all are needed where weights are shared out.
        results = accuracy_by_length(module.model, data, data.lengths)
        module.train(training)
        if not trainer.is_global_zero:
            return
        write(Path(trainer.log_dir) / FILE, results, data, trainer.global_step)
        for line in ["", *table(results, data)]:
            log.info(line)


def task_accuracy(cfg: DictConfig) -> list[LengthAccuracy]:
    """``suite=task_accuracy``: accuracy of a checkpoint at ``cfg.lengths``, or at those of its run.

    Raises:
        UserError: a run that was not trained on a task, and lengths that are not whole numbers of at least 1.
    """
    lengths = cfg.lengths
    faults = [one for one in lengths or () if not isinstance(one, int) or isinstance(one, bool) or one < 1]
    if faults or (lengths is not None and not lengths):
        raise UserError(f"lengths={lengths}: expected whole numbers of at least 1, such as [8,32,128]")
    run = load_run(cfg.checkpoint)
    data = run.data(cfg.data, cache_dir=cfg.cache_dir)
    if not isinstance(data, TaskDataModule):
        raise UserError(
            f"checkpoint={cfg.checkpoint}: was not trained on a synthetic task; expected a run with "
            "data=variable_assignment, parity or copy, or another suite"
        )
    trainer = evaluation_trainer(cfg, run)
    model = run.module.to(trainer.strategy.root_device).model
    with trainer.precision_plugin.forward_context():
        results = accuracy_by_length(model, data, list(lengths or data.lengths))
    asked = None if lengths is None else list(lengths)
    output = output_path(cfg, run.path, "accuracy", lengths=asked)
    write(output, results, data, run.step)
    for line in (f"{run.path}, step {run.step}", *table(results, data), f"  written to {output}"):
        log.info(line)
    return results
