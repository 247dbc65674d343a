"""Selective attention by blocks of queries: exact on any device, memory linear in the context.

Queries are taken block by block from the top. c[j] carries F at the first row of a block; inside it

    F[i,j] = c[j] + sum of S[i',j] over the block's rows i' < i

and the block attends to the keys up to its last row. Kept for the backward pass: the log-sum-exp of every row,
and c at every block boundary, n / rows lines of n numbers.

The backward pass goes from the bottom and recomputes each block's logits. With P the weights, dO the gradient of
the output, and g[j] the sum of H[i,j] over the rows of later blocks:

    dL[h] = P[h] * (dO[h] V^T - rowsum(dO[h] * O[h]))            the softmax's backward
    H     = sum over h of dL[h] + dM / tau where F <= tau        minus the gradient of F
    dS[i',j] = -(g[j] + sum of H[i,j] over the block's rows i > i')
    dL[selection head] += dS where S > 0
    dQ = dL K,  dK += dL^T Q,  dV += P^T dO

How it is made fast on a CPU (figures in docs/LOG.md): logits are kept in units of ln 2, since exp2 is several
times faster than exp there; a tile is laid out [key, query], so that four of the seven matrix products need no
transposed operand; sums over the rows of a tile are products with a triangle of ones; the causal mask is part of
F, which is broadcast over heads; and a tile holds few enough rows to stay in cache.

Live keys: before each block, keys whose c has reached their threshold are left out (see `selmodel.attention.live`),
and so are the keys of documents that ended before it. Where few are left, these are gathered. What a tile is and
how it is gathered: `blockwise_tiles.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from selmodel.attention.kernels.blockwise_tiles import Problem, view_of
from selmodel.attention.kernels.common import LOG2_E, check_inputs, empty_like
from selmodel.attention.live import death_thresholds
from selmodel.attention.selection import accumulation_dtype

# Queries in a block. On a CPU fewer make the products slow, and more compute in vain the half of a block's own keys
# that lies above the diagonal; an accelerator wants fewer and larger steps.
CPU_ROWS, ACCELERATOR_ROWS = 64, 128


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
    """out and M, as `selmodel.attention.kernels` describes it.

    Computes in float32 (float64 for float64) also under autocast. Beside inputs and outputs it holds copies of q,
    k, v in that type, c at the block boundaries, and one tile: no b * h * n * n. A NaN or infinity in q or k
    reaches the rows it reaches in the eager kernel.
    """
    check_inputs(q, k, v, selection_head, document_ids, memory_tau)
    thresholds = death_thresholds(q, k, v, live_keys, memory_tau)
    rows = CPU_ROWS if q.device.type == "cpu" else ACCELERATOR_ROWS
    out, _, _, memory = blockwise(q, k, v, document_ids, thresholds, selection_head, memory_tau, rows)
    return out, (None if memory_tau is None else memory)


@torch.library.custom_op("selmodel::blockwise", mutates_args=())
def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    thresholds: Tensor | None,
    selection_head: int,
    memory_tau: float | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [b,h,n,d], lse2 [b,h,n], carries [blocks,b,n] and M [b,n] ([0] without memory_tau).

    One opaque operator, so that `torch.compile` does not unroll the loop over blocks. thresholds [b,n]: the F from
    which each key is dead. lse2 and carries are kept for the backward pass, and in units of ln 2.
    """
    b, h, n, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        problem = Problem.of(q, k, v, document_ids, thresholds, selection_head, rows)
        out = empty_like(q)
        lse = torch.empty(b, h, n, dtype=dtype, device=q.device)
        carries = torch.empty(math.ceil(n / rows), b, n, dtype=dtype, device=q.device)
        memory = torch.empty((b, n) if memory_tau is not None else 0, dtype=dtype, device=q.device)
        carry = torch.zeros(b, n, dtype=dtype, device=q.device)
        work = problem.workspace()
        for block, first in enumerate(range(0, n, rows)):
            carries[block] = carry
            for tile in problem.tiles(carry, first):
                at, own = tile.sequences, slice(first, tile.last)
                logits = problem.logits(tile, work)  # [c, h_kv, m, group * rows]
                S, F = problem.selection(tile, logits, carry)  # [c, m, rows]
                if memory_tau is not None:
                    memory[at, own] = F.shape[1] - F.div(memory_tau * LOG2_E).clamp_(max=1).sum(1)
                problem.subtract(tile, logits, F)
                largest = logits.amax(2, keepdim=True)
                P = logits.sub_(largest).exp2_()
                total = P.sum(2, keepdim=True)
                values = tile.take(problem.v)
                out_tile = torch.bmm(P.flatten(0, 1).mT, values.flatten(0, 1))  # [c * h_kv, group * rows, d]
                out_tile /= total.view(len(out_tile), -1, 1)
                out[at, :, own] = out_tile.view(-1, h, tile.rows, d)
                lse[at, :, own] = (largest + total.log2_()).view(-1, h, tile.rows)
                tile.add(carry, S.sum(2))
    return out, lse, carries, memory


@blockwise.register_fake
def _(q, k, v, document_ids, thresholds, selection_head, memory_tau, rows):
    b, h, n, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    return (
        empty_like(q),
        q.new_empty(b, h, n, dtype=dtype),
        q.new_empty(-(-n // rows), b, n, dtype=dtype),
        q.new_empty((b, n) if memory_tau is not None else (0,), dtype=dtype),
    )


@torch.library.custom_op("selmodel::blockwise_backward", mutates_args=())
def blockwise_backward(
    d_out: Tensor,
    d_memory: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    carries: Tensor,
    document_ids: Tensor | None,
    thresholds: Tensor | None,
    selection_head: int,
    memory_tau: float | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    b, h, n, d = q.shape
    dtype = lse.dtype
    with torch.autocast(q.device.type, enabled=False):
        problem = Problem.of(q, k, v, document_ids, thresholds, selection_head, rows)
        d_q, d_k, d_v = empty_like(q, dtype), empty_like(k, dtype).zero_(), empty_like(v, dtype).zero_()
        later = torch.zeros(b, n, dtype=dtype, device=q.device)  # g: the sum of H over the rows of later blocks
        work, work_too = problem.workspace(), problem.workspace()
        for block, first in reversed(list(enumerate(range(0, n, rows)))):
            for tile in problem.tiles(carries[block], first):
                at, own = tile.sequences, slice(first, tile.last)
                P = problem.logits(tile, work)
                S, F = problem.selection(tile, P, carries[block])
                problem.subtract(tile, P, F)
                P -= problem.fold(lse, tile)[:, :, None]
                P.exp2_()
                grad = problem.fold(d_out, tile).to(dtype)  # [c, h_kv, group * rows, d]
                tile.add_product(d_v, P, grad)
                delta = (grad * problem.fold(out, tile)).sum(-1)  # [c, h_kv, group * rows]
                d_logits = view_of(work_too, P.shape)
                torch.bmm(tile.take(problem.v).flatten(0, 1), grad.flatten(0, 1).mT, out=d_logits.flatten(0, 1))
                d_logits -= delta[:, :, None]
                d_logits *= P
                by_head = d_logits.unflatten(3, (-1, tile.rows))  # [c, h_kv, m, group, rows]
                if not problem.sound:
                    by_head.masked_fill_(problem.masked(tile), 0.0)
                H = by_head.sum((1, 3))  # [c, m, rows]
                if d_memory is not None and memory_tau is not None:
                    H += (memory_tau * LOG2_E >= F) * (d_memory[at, None, own].to(dtype) / memory_tau)
                below = problem.sum_below(tile, H) + tile.take_rows(later)[:, :, None]
                selecting = by_head[:, selection_head // problem.group, :, selection_head % problem.group]
                selecting -= torch.ops.aten.threshold_backward(below, S, 0)  # d_S where S > 0
                tile.add(later, H.sum(2))
                keys = tile.take(problem.k).flatten(0, 1)
                d_q[at, :, own] = torch.bmm(d_logits.flatten(0, 1).mT, keys).mul_(d**-0.5).view(-1, h, tile.rows, d)
                tile.add_product(d_k, d_logits, problem.fold(q, tile).to(dtype) * d**-0.5)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


@blockwise_backward.register_fake
def _(d_out, d_memory, q, k, v, *saved):
    return empty_like(q), empty_like(k), empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, document_ids, thresholds, selection_head, memory_tau, rows = inputs
    out, lse, carries, _ = output
    ctx.save_for_backward(q, k, v, out, lse, carries, document_ids, thresholds)
    ctx.options = (selection_head, memory_tau, rows)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, _, __, d_memory):
    q, k, v, out, lse, carries, document_ids, thresholds = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    grads = blockwise_backward(d_out, d_memory, q, k, v, out, lse, carries, document_ids, thresholds, *ctx.options)
    return (*grads, None, None, None, None, None)


blockwise.register_autograd(_backward, setup_context=_save)
