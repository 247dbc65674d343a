"""The definition with full n x n logits: exact on any device, memory O(b * h * n * n).

In float64 this is the oracle of the other kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selmodel.attention.kernels.common import check_inputs
from selmodel.attention.live import check_live_keys
from selmodel.attention.selection import (
    accumulate,
    accumulation_dtype,
    attended_pairs,
    memory_term,
    selection_scores,
)


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    selection_head: int = 0,
    document_ids: Tensor | None = None,
    memory_tau: float | None = None,
    live_keys: str | float = "off",
) -> tuple[Tensor, Tensor | None]:
    """out[h,i] = softmax_j(L[h,i,j] - F[i,j]) · v[h,j], as `selmodel.attention.kernels` describes it.

    Logits, F and softmax are computed in float32 (float64 for float64) also under autocast, and out is
    rounded once to the type of q. A masked logit is -inf, so its weight is exactly 0, and no row is masked
    whole: F[i,0] = F[i,i] = 0. live_keys "auto" is "off" here: they differ by less than rounding. A NaN or
    infinity in q or k reaches exactly the rows that IEEE arithmetic on the definition gives; one in v also
    reaches rows where its weight is 0 (0 * inf = NaN).
    """
    check_inputs(q, k, v, selection_head, document_ids, memory_tau)
    if check_live_keys(live_keys) not in ("off", "auto"):
        raise ValueError(
            f"live_keys={live_keys} with the eager kernel, which leaves no key out: "
            "expected off or auto (which here is off); the blockwise kernel takes a threshold"
        )
    b, h, n, d = q.shape
    h_kv = k.shape[1]
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        # The heads of a group lie side by side and share one key head: fold them into the query dimension.
        queries = (q.to(dtype) * d**-0.5).reshape(b, h_kv, (h // h_kv) * n, d)
        logits = (queries @ k.to(dtype).mT).view(b, h, n, n)  # [batch, head, query, key]
        F = accumulate(selection_scores(logits[:, selection_head], document_ids))  # [batch, query, key]
        masked = ~attended_pairs(n, n, document_ids, device=q.device)
        masked = masked if document_ids is None else masked[:, None]
        weights = (logits - F[:, None]).masked_fill_(masked, -torch.inf).softmax(dim=-1)
        out = weights.view(b, h_kv, (h // h_kv) * n, n) @ v.to(dtype)
        memory = None if memory_tau is None else memory_term(F, memory_tau, document_ids)
    return out.view(b, h, n, d).to(q.dtype), memory
