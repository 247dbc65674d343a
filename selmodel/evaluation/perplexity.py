"""Perplexity, bits per byte and loss by position over a fixed set of sequences.

Everything is kept as sums and counts in float64 and reduced as such, so the numbers do not depend on the batch
size, on padding rows, or on how many processes share the set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValidationResult:
    """Validation figures of one pass.

    Attributes:
        loss: mean cross entropy per target token, in nats.
        perplexity: ``exp(loss)``.
        bits_per_byte: total cross entropy in bits over the UTF-8 bytes of the source text that the targets
            stand for; the prediction of ``<EOS>`` is paid for and brings no bytes. NaN without byte counts.
        tokens: target tokens counted.
        bytes: UTF-8 bytes of source text that those tokens stand for.
        sequences: sequences counted.
        loss_by_position: [context_length] float64, mean loss of each target position, in nats.
        accuracy: share of the targets that were the likeliest token; None where it was not counted.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    sequences: int
    loss_by_position: list[float]
    accuracy: float | None = None

    def lines(self) -> list[str]:
        """The figures for a person, a line each, the names in a column of 21 characters."""
        lines = [
            f"  validation loss      {self.loss:.4f} nats per token",
            f"  perplexity           {self.perplexity:.2f}",
        ]
        if self.bytes:
            lines.append(f"  bits per byte        {self.bits_per_byte:.4f}")
        if self.accuracy is not None:
            lines.append(f"  accuracy             {self.accuracy:.4f}")
        return lines

    def line(self) -> str:
        """The figures for a person, in one line."""
        parts = [f"validation loss {self.loss:.4f}", f"perplexity {self.perplexity:.2f}"]
        if self.bytes:
            parts.append(f"bits per byte {self.bits_per_byte:.4f}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.4f}")
        return ", ".join(parts)

    def metrics(self) -> dict[str, float]:
        """The scalar figures under the names that logs use."""
        metrics = {
            "val/loss": self.loss,
            "val/perplexity": self.perplexity,
            "val/bits_per_byte": self.bits_per_byte,
            "val/tokens": self.tokens,
        }
        return metrics if self.accuracy is None else metrics | {"val/accuracy": self.accuracy}


class ValidationSums:
    """Accumulates token losses; one instance per pass over the set."""

    def __init__(self, context_length: int, device: torch.device | str = "cpu") -> None:
        # float64 is not available on every accelerator (MPS); losses are moved to the CPU, once per batch.
        self.device = torch.device(device)
        # rows: loss sum, token count, byte count, right answers, by position; the sequence count has its own cell
        self.sums = torch.zeros(4, context_length, dtype=torch.float64, device=self.device)
        self.counts_right = False
        self.sequences = torch.zeros((), dtype=torch.float64, device=self.device)

    def update(self, losses: Tensor, counted: Tensor, n_bytes: Tensor | None, right: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            losses: [batch, position] cross entropy in nats.
            counted: [batch, position] bool, False for padding and for targets that do not count.
            n_bytes: [batch, position] UTF-8 bytes of source text per target, or None.
            right: [batch, position] bool, True where the target was the likeliest token, or None.
        """
        losses = losses.to(self.device, torch.float64).masked_fill(~counted.to(self.device), 0.0)
        counted = counted.to(self.device, torch.float64)
        n = losses.shape[1]
        self.sums[0, :n] += losses.sum(0)
        self.sums[1, :n] += counted.sum(0)
        if n_bytes is not None:
            self.sums[2, :n] += (n_bytes.to(self.device, torch.float64) * counted).sum(0)
        if right is not None:
            self.sums[3, :n] += (right.to(self.device, torch.float64) * counted).sum(0)
            self.counts_right = True
        self.sequences += (counted.sum(1) > 0).sum()

    def reduce(self) -> None:
        """Sum over all processes, if there are several; every process must call it."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            packed = torch.cat([self.sums.flatten(), self.sequences[None]])
            if torch.distributed.get_backend() == "nccl":
                packed = packed.cuda()
            torch.distributed.all_reduce(packed)
            packed = packed.to(self.device)
            self.sums = packed[:-1].view_as(self.sums)
            self.sequences = packed[-1]

    def result(self) -> ValidationResult:
        """The figures of what was added so far.

        Raises:
            ValueError: when nothing was added.
        """
        loss_sum, tokens, n_bytes, right = self.sums.sum(1).tolist()
        if tokens == 0:
            raise ValueError("validation saw no target token")
        loss = loss_sum / tokens
        return ValidationResult(
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else math.inf,
            bits_per_byte=loss_sum / math.log(2) / n_bytes if n_bytes else math.nan,
            tokens=int(tokens),
            bytes=int(n_bytes),
            sequences=int(self.sequences.item()),
            loss_by_position=(self.sums[0] / self.sums[1]).tolist(),
            accuracy=right / tokens if self.counts_right else None,
        )
