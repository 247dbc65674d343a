"""What kernels have in common: the checks before they compute, the layout of what they return, and units."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The faster kernels keep logits, S, F and log-sum-exps in units of ln 2, since exp2 is cheaper than exp.
LOG2_E = math.log2(math.e)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection_head: int,
    document_ids: Tensor | None,
    memory_tau: float | None,
) -> None:
    """Raise ValueError, naming the argument, unless q [b,h,n,d] and k, v [b,h_kv,n,d] fit together.

    Reads shapes, types and devices only, never values, so it costs no wait for a device. NaN and infinity
    are not looked for: they propagate by IEEE arithmetic.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected four dimensions [batch, head, n, d]")
    b, h, n, d = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)}: expected equal shapes")
    if (k.shape[0], k.shape[2], k.shape[3]) != (b, n, d):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)}: expected equal batch, length and head size "
            "(only the number of heads may differ)"
        )
    if n < 1 or d < 1:
        raise ValueError(f"q {list(q.shape)}: expected at least one position and one feature")
    h_kv = k.shape[1]
    if h_kv < 1 or h < 1 or h % h_kv:
        raise ValueError(f"{h} query heads and {h_kv} key/value heads: the former must be a multiple of the latter")
    if not 0 <= selection_head < h:
        raise ValueError(f"selection_head={selection_head} with {h} heads: expected one of 0..{h - 1}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k, v have types {q.dtype}, {k.dtype}, {v.dtype}: expected one of "
            "float16, bfloat16, float32, float64 for all three"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}: expected one device")
    if document_ids is not None:
        if document_ids.shape != (b, n):
            raise ValueError(f"document_ids has shape {list(document_ids.shape)}: expected {[b, n]}")
        if document_ids.is_floating_point() or document_ids.dtype == torch.bool:
            raise ValueError(f"document_ids has type {document_ids.dtype}: expected an integer type")
        if document_ids.device != q.device:
            raise ValueError(f"document_ids is on {document_ids.device}, q on {q.device}: expected one device")
    if memory_tau is not None and not memory_tau > 0:
        raise ValueError(f"memory_tau={memory_tau}: expected a number above 0")


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[b, h, n, d] in memory [b, n, h, d], as the projections before and after attention have it."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d, dtype=dtype).transpose(1, 2)
