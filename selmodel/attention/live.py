"""Live keys: from which F on a key can be left out for every later query of every head.

F[i,j] only grows with i and is shared by the heads of a layer. So once F[i,j] has passed a threshold T[j] above
which key j cannot matter, a kernel need not look at the key again: not in the forward pass, not in the backward
pass, and not in the votes. This is how selective attention becomes cheaper than standard attention.

The threshold of `live_keys="auto"`. Let m = L[h,i,i], the logit of query i with its own key, and let i > j be any
query. The weight of key j in row i of head h is, since F[i,i] = 0 and the normaliser is at least exp(m),

    w = exp(L[h,i,j] - F[i,j] - lse[h,i])
      <= exp(|q[h,i]| |k[h,j]| / sqrt(d) - L[h,i,i] - F[i,j])                    (Cauchy-Schwarz)

With r[h,j] = max over i > j of |q[h,i]|, s[h,j] = max over i > j of -L[h,i,i], and

    T[j] = max over h of (r[h,j] |k[h,j]| / sqrt(d) + s[h,j]) + ln(n h / eps)

F[i,j] >= T[j] gives w < eps / (n h). A row leaves out fewer than n keys: it loses a weight below eps / h. A column
leaves out fewer than n rows of h heads: the weights that reach the gradient of F[.,j] through it add up to less
than eps. eps is half the spacing of float32 at 1, so what is lost is below what rounding 1 loses (for float64
inputs, of float64). This is sharper than 2 max|q| max|k| / sqrt(d) + ln(n / eps): it follows the key, and takes
the row's own logit for the normaliser instead of the least that a logit could be.

A NaN or infinity in q, k or v makes every threshold of that sequence NaN or infinite, nothing reaches it, and
the kernel computes what it computes without live keys. Thresholds are above 0, so a key with F = 0, <BOS> and the
query's own among them, is never left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from selmodel.attention.selection import accumulation_dtype

# Norms and logits are rounded, so each part of the bound is raised by this share of itself.
ROUNDING_SLACK = 1e-4


def check_live_keys(live_keys: str | float) -> str | float:
    """ "off", "auto" or the threshold as a float; ValueError for anything else."""
    if live_keys in ("off", "auto"):
        return live_keys
    if isinstance(live_keys, int | float) and not isinstance(live_keys, bool) and 0 < live_keys < math.inf:
        return float(live_keys)
    raise ValueError(
        f"live_keys={live_keys!r}: expected off, auto, or the F (a number above 0) from which keys are dead"
    )


@torch.no_grad()
def death_thresholds(
    q: Tensor, k: Tensor, v: Tensor, live_keys: str | float, memory_tau: float | None = None
) -> Tensor | None:
    """The F from which each key may be left out; None when live_keys is "off".

    q [b, h, n, d]; k, v [b, h_kv, n, d]. live_keys: "off", "auto" (what is lost is below rounding, see the top of
    this module) or a number above 0, taken as it is. With memory_tau, no threshold is below it, so that a dead key
    counts as wholly gone in the memory term and has no gradient there. Returns [b, n] in float32 (float64 for
    float64 inputs).
    """
    live_keys = check_live_keys(live_keys)
    if live_keys == "off":
        return None
    b, h, n, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    # 0, or NaN for a sequence with a NaN or infinity anywhere: it is then computed without leaving keys out.
    extremes = torch.stack([extreme(x, dim=(1, 2, 3)) for x in (q, k, v) for extreme in (torch.amax, torch.amin)])
    unsound = (extremes.to(dtype) * 0).sum(dim=0)[:, None]  # [b, 1]
    if live_keys == "auto":
        thresholds = _bound(q, k, dtype) + math.log(n * h * 2 / torch.finfo(dtype).eps)
        # Where a row's own logit is huge, the bound lets go of keys that nothing has masked. Keep those, <BOS> above
        # all: F = 0 is below every threshold.
        thresholds = thresholds.clamp(min=torch.finfo(dtype).tiny)
    else:
        thresholds = q.new_full((b, n), live_keys, dtype=dtype)
    if memory_tau is not None:
        thresholds = thresholds.clamp(min=memory_tau)
    return thresholds + unsound


def _bound(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """max over h of (r |k| / sqrt(d) + s), the logarithm of the largest weight of each key before F; [b, n]."""
    b, h, n, d = q.shape
    q, k = q.unflatten(1, (k.shape[1], -1)), k[:, :, None]  # [b, h_kv, group, n, d] and [b, h_kv, 1, n, d]
    own_logit = torch.linalg.vecdot(q.to(dtype), k.to(dtype)) * d**-0.5  # L[h,i,i]
    q_norm, k_norm = (torch.linalg.vector_norm(x, dim=-1, dtype=dtype) for x in (q, k))
    largest = _max_over_later(q_norm) * k_norm * d**-0.5  # r |k| / sqrt(d)
    s = _max_over_later(-own_logit)
    return (largest * (1 + ROUNDING_SLACK) + s + s.abs() * ROUNDING_SLACK).amax(dim=(1, 2))


def _max_over_later(x: Tensor) -> Tensor:
    """max over i > j of x[..., i]; 0 for the last j, which no query follows."""
    latest = x.flip(-1).cummax(dim=-1).values.flip(-1)
    return torch.nn.functional.pad(latest[..., 1:], (0, 1))
