"""Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split layout.

Feature p of the first half turns with feature p of the second half by the angle position * base^(-2p/d). The
logit q·k then depends on the positions through their difference alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """cos and sin of the angles, float32, [n, d / 2] (or any shape that broadcasts to [b, h, n, d / 2])."""

    cos: Tensor
    sin: Tensor


def rotary_tables(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rotary:
    """The tables for integer `positions` [n] and an even head_dim.

    Computed where they are used and held by no module: a model cast to bfloat16 would round stored tables,
    and neighbouring positions would become one (bfloat16 has no integer between 256 and 258).
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = positions.to(torch.float32)[:, None] * frequency  # [n, head_dim / 2]
    return Rotary(angle.cos(), angle.sin())


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [b, h, n, d] by the tables; returns the type of x.

    Rounded once: float32 tables make the products float32 (float64 for float64 x).
    """
    first, second = x.chunk(2, dim=-1)
    rotated = (first * rotary.cos - second * rotary.sin, second * rotary.cos + first * rotary.sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)
