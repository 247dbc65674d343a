"""Training and validation losses as sums and counts, so that nothing is ever a mean of means."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each target, in nats.

    Args:
        logits: [batch, position, vocabulary], any float dtype; the softmax is taken in float32 or wider.
        targets: [batch, position] int64.

    Returns:
        [batch, position], float32 (float64 for float64 logits).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def loss_sum(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of the cross entropy over the targets that count, in nats: a scalar.

    Args:
        logits: [batch, position, vocabulary].
        targets: [batch, position] int64.
        mask: [batch, position] bool, True where the target counts; None when all do.
    """
    losses = token_losses(logits, targets)
    return losses.sum() if mask is None else losses.masked_fill(~mask, 0.0).sum()
