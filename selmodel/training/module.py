"""The LightningModule: one loader batch is one optimizer step.

The loader hands each process its whole share of the global batch. ``training_step`` cuts it into micro-batches
that fit the device, adds their gradients and steps once (manual optimization). So steps, validation and
checkpoints all count optimizer steps, there is no accumulation window that a checkpoint could fall into, and every
target token of the global batch has the same weight whatever the cut.
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from selmodel.attention import selection
from selmodel.errors import UserError
from selmodel.evaluation.perplexity import ValidationResult, ValidationSums
from selmodel.model import Transformer
from selmodel.training.guards import Guards, without_update
from selmodel.training.losses import loss_sum, token_losses
from selmodel.training.optim import AdamW
from selmodel.training.throughput import StepTimer, peak_flops, peak_memory_gib

log = logging.getLogger(__name__)

STATISTICS_ROWS = 4  # sequences that a log line's selection statistics are taken over


def check_micro_batch_tokens(value: int | None) -> None:
    """Refuse a number of tokens that makes no pass. Raises UserError."""
    if value is not None and value < 1:
        raise UserError(f"micro_batch_tokens={value}: must be at least 1, or null for one pass per step")


class LanguageModel(L.LightningModule):
    """Next-token training of a ``Transformer``.

    Args:
        model: the network; its own options hold the architecture.
        optim: optimizer and schedule options.
        micro_batch_tokens: largest number of target tokens of one forward and backward pass on one device; the
            gradients of the passes add up to that of the whole batch. None: the whole batch in one pass.
        compile: run the network through ``torch.compile``. Parameter names stay as they are.
        guards: what is watched for; None: with its defaults.

    Batches are dictionaries as ``selmodel.data.datamodule.DataModule`` makes them: ``tokens`` [batch,
    context_length + 1] int64, and optionally ``document_ids`` of that shape and ``target_mask`` [batch,
    context_length] bool, True where a target counts.
    """

    def __init__(
        self,
        model: Transformer,
        optim: AdamW,
        *,
        micro_batch_tokens: int | None = None,
        compile: bool = False,
        guards: Guards | None = None,
    ) -> None:
        super().__init__()
        check_micro_batch_tokens(micro_batch_tokens)
        self.automatic_optimization = False
        self.model = model
        self.optim = optim
        self.micro_batch_tokens = micro_batch_tokens
        self.guards = guards or Guards()
        self.timer = StepTimer()
        self.tokens_seen = 0
        self.validation: ValidationResult | None = None  # of the last finished pass
        self._sums: ValidationSums | None = None
        if compile:
            # In place: unlike torch.compile(model), it leaves no "_orig_mod." in the names of a checkpoint.
            self.model.compile()

    def configure_model(self) -> None:
        """Share the weights out where the strategy asks for it (``trainer=fsdp``): block by block, then the rest."""
        if self.device_mesh is None or self.model.is_sharded:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    # -- optimizer ------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optim.build(self.model)

    # -- training -------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None):
        """The network's output for ``tokens`` [batch, position] int64."""
        return self.model(tokens, document_ids)

    def on_train_start(self) -> None:
        self.optim.apply(self.optimizers().optimizer)
        self.timer.start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.timer.mark("data")

    def training_step(self, batch: dict, batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        step = self.global_step + 1
        logging_step = self._is_logging_step(step)
        n_rows = batch["tokens"].shape[0]
        counts = self._sum_over_processes(torch.tensor([self._count(batch), n_rows], dtype=torch.float64))
        n_targets, n_rows_global = int(counts[0]), int(counts[1])

        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        memory_total = torch.zeros((), dtype=torch.float64, device=self.device)
        pieces = self._micro_batches(batch)
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            output = self.model(piece["tokens"][:, :-1], _inputs_only(piece.get("document_ids")))
            mask = piece.get("target_mask")
            piece_loss = loss_sum(output.logits, piece["tokens"][:, 1:], mask)
            # Processes average their gradients, hence the factor of their number.
            objective = piece_loss / n_targets * self.trainer.world_size
            total += piece_loss.detach()
            if output.memory is not None:
                piece_memory = selection.memory_loss(output.memory) * piece["tokens"].shape[0]
                objective = (
                    objective + self.model.memory_loss_eps * piece_memory / n_rows_global * self.trainer.world_size
                )
                memory_total += piece_memory.detach()
            with contextlib.nullcontext() if last else self._without_gradient_exchange():
                self.manual_backward(objective)
        self._settle(logging_step)
        self.timer.mark("forward_backward")

        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.gradient_clip or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        lr = self.optim.lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        totals = self._sum_over_processes(torch.stack([total, memory_total]))
        loss, norm = totals[0].item() / n_targets, norm.item()
        fault = self.guards.fault_of(step, loss, norm)
        if fault is None:
            optimizer.step()
        else:
            # Counted as a step all the same: steps, batches and the schedule stay together.
            with without_update(optimizer.optimizer):
                optimizer.step()
            self.guards.step_skipped(
                step, fault, batch, loss, place=self.trainer.datamodule.place_of(batch),
                directory=self.trainer.log_dir and Path(self.trainer.log_dir), rank=self.global_rank,
            )  # fmt: skip
        self.trainer.datamodule.mark_trained(batch)
        self._settle(logging_step)
        self.timer.mark("optimizer")

        self.tokens_seen += n_targets
        self.timer.step(n_targets)
        if logging_step:
            self._log_training(
                step,
                batch,
                loss=loss,
                memory_loss=totals[1].item() / n_rows_global if self.model.memory_loss_eps else None,
                norm=norm,
                lr=lr,
            )
            self.timer.start()
        return {"loss": total.detach() / max(self._count(batch), 1)}

    def _micro_batches(self, batch: dict) -> list[dict]:
        """``batch`` cut along its rows so that each piece has at most ``micro_batch_tokens`` target positions."""
        tokens = batch["tokens"]
        rows = len(tokens)
        if self.micro_batch_tokens is not None:
            rows = max(1, self.micro_batch_tokens // (tokens.shape[1] - 1))
        keys = [key for key in ("tokens", "document_ids", "target_mask") if key in batch]
        return [{key: batch[key][i : i + rows] for key in keys} for i in range(0, len(tokens), rows)]

    def _count(self, batch: dict) -> int:
        """Number of targets of this process that count."""
        mask = batch.get("target_mask")
        return batch["tokens"][:, 1:].numel() if mask is None else int(mask.sum())

    def _without_gradient_exchange(self):
        strategy = self.trainer.strategy
        if isinstance(strategy, ParallelStrategy):
            return strategy.block_backward_sync()
        return contextlib.nullcontext()

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        value = value.to(self.device)
        torch.distributed.all_reduce(value)
        return value

    def _settle(self, wanted: bool) -> None:
        """Wait for the device, so that the step's parts are timed truly; on logging steps only."""
        if wanted and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _is_logging_step(self, step: int) -> bool:
        return step % self.trainer.log_every_n_steps == 0 or step == 1 or step == self.trainer.max_steps

    def _log_training(
        self, step: int, batch: dict, *, loss: float, memory_loss: float | None, norm: float, lr: float
    ) -> None:
        metrics = {
            "train/loss": loss,
            "train/perplexity": math.exp(loss) if loss < 700 else math.inf,
            "train/lr": lr,
            "train/grad_norm": norm,
            "train/grad_norm_max": self.guards.take_largest_norm(),  # of all steps since the last line
            "train/tokens": self.tokens_seen,
        }
        if memory_loss is not None:
            metrics["train/memory_loss"] = memory_loss
        if self.guards.skipped:
            metrics["train/skipped_steps"] = self.guards.skipped
        metrics |= self._selection_metrics(batch)
        figures = self.timer.take()
        metrics |= figures
        peak = peak_flops(self.device)
        if peak is not None and figures:
            flops = self.model.flops_per_token() * figures["throughput/tokens_per_second"]
            metrics["throughput/mfu"] = flops / (peak * self.trainer.world_size)
        metrics["throughput/peak_memory_gib"] = peak_memory_gib(self.device)
        self.log_metrics(metrics, step)

    def _selection_metrics(self, batch: dict) -> dict[str, float]:
        """Statistics of F by layer over the first rows of this process's batch; empty without selection."""
        document_ids = batch.get("document_ids")
        statistics = self.model.selection_statistics(
            batch["tokens"][:STATISTICS_ROWS, :-1],
            None if document_ids is None else document_ids[:STATISTICS_ROWS, :-1],
        )
        if statistics is None:
            return {}
        return {
            f"selection/{name}/layer_{layer}": value
            for name, values in statistics._asdict().items()
            for layer, value in enumerate(values.tolist())
        }

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Hand ``metrics`` of optimizer step ``step`` to every logger and make them visible to callbacks."""
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step)
        self.trainer.callback_metrics.update({key: torch.tensor(value) for key, value in metrics.items()})

    # -- validation -----------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.timer.pause()
        self._sums = ValidationSums(self.model.context_length)

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        tokens = batch["tokens"]
        output = self.model(tokens[:, :-1], _inputs_only(batch.get("document_ids")))
        counted = batch["weight"].bool()[:, None].expand(-1, tokens.shape[1] - 1)
        right = None
        if "target_mask" in batch:  # some targets are answers: how many of them are right is what one asks
            counted = counted & batch["target_mask"]
            right = output.logits.argmax(-1) == tokens[:, 1:]
        self._sums.update(token_losses(output.logits, tokens[:, 1:]), counted, batch.get("bytes"), right)

    def on_validation_epoch_end(self) -> None:
        self._sums.reduce()
        self.validation = self._sums.result()
        metrics = self.validation.metrics()
        # For callbacks that monitor a metric; the loggers get theirs below, with the optimizer step as the step.
        self.log_dict(metrics, logger=False)
        if not self.trainer.sanity_checking and self.trainer.state.fn == "fit":
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics | {"train/tokens": self.tokens_seen}, self.global_step)
        self.timer.start()

    # -- state ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["tokens_seen"] = self.tokens_seen
        checkpoint["guards"] = self.guards.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.tokens_seen = checkpoint["tokens_seen"]
        if "guards" in checkpoint:
            self.guards.load_state_dict(checkpoint["guards"])

    @property
    def tokens_per_second(self) -> float | None:
        """Training speed since the start, all processes together, without validations; None before a step."""
        return self.timer.tokens_per_second


def _inputs_only(document_ids: Tensor | None) -> Tensor | None:
    """Document ids of the input positions, [batch, position], from those of the whole sequence."""
    return None if document_ids is None else document_ids[:, :-1]
