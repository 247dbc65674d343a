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
and so are the keys of documents that ended before it. Where few are left, these are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from selmodel.attention.kernels.inputs import check_inputs
from selmodel.attention.live import death_thresholds
from selmodel.attention.selection import accumulation_dtype, document_starts

LOG2_E = math.log2(math.e)

# Queries in a block. On a CPU fewer make the products slow, and more compute in vain the half of a block's own keys
# that lies above the diagonal; an accelerator wants fewer and larger steps.
CPU_ROWS, ACCELERATOR_ROWS = 64, 128

# On a CPU so many sequences are taken together that a tile [sequence, head, key, query] has about this many numbers:
# few steps for small models, and two tiles (weights, and gradients of the logits) stay in cache.
TILE_NUMBERS = 2**19

# Live keys of a sequence are gathered when this share of them is left at most, and that spares this many numbers of
# its tile. Gathering keys and scattering their gradients costs as much as computing with a quarter of them.
GATHER_BELOW = 0.75
GATHER_SPARES = 2**15


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
        problem = _Problem.of(q, k, v, document_ids, thresholds, selection_head, rows)
        out = _empty_like(q)
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
        _empty_like(q),
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
        problem = _Problem.of(q, k, v, document_ids, thresholds, selection_head, rows)
        d_q, d_k, d_v = _empty_like(q, dtype), _empty_like(k, dtype).zero_(), _empty_like(v, dtype).zero_()
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
                d_logits = _tile(work_too, P.shape)
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
    return _empty_like(q), _empty_like(k), _empty_like(v)


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


@dataclass(frozen=True)
class _Tile:
    """Some sequences, the queries first .. last - 1 of each, and the keys these look at.

    index: positions of the keys, ascending, the block's own last, of the one sequence it is for; None: all keys
    before last, of the sequences in the slice. dead [c, m] or None: keys that are in the tile but left out.
    """

    sequences: slice
    first: int
    last: int
    index: Tensor | None = None
    dead: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.last - self.first

    def take(self, x: Tensor) -> Tensor:
        """The tile's keys of x [b, h_kv, n, d]: [c, h_kv, m, d]."""
        return self._take(x, 2)

    def take_rows(self, x: Tensor) -> Tensor:
        """The tile's keys of x [b, n]: [c, m]."""
        return self._take(x, 1)

    def _take(self, x: Tensor, dim: int) -> Tensor:
        x = x[self.sequences]
        return x.narrow(dim, 0, self.last) if self.index is None else x.index_select(dim, self.index)

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add x [c, m] to the tile's keys of total [b, n]."""
        if self.index is None:
            total[self.sequences, : self.last] += x
        else:
            total[self.sequences].index_add_(1, self.index, x)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left [c, h_kv, m, r] @ right [c, h_kv, r, d] to the tile's keys of total [b, h_kv, n, d]."""
        total = total[self.sequences]
        if self.index is not None:
            total.index_add_(2, self.index, left @ right)
        elif len(total) == 1:
            total[0, :, : self.last].baddbmm_(left[0], right[0])
        else:
            total[:, :, : self.last] += left @ right


@dataclass(frozen=True)
class _Problem:
    """The inputs, and what the forward and the backward pass do alike.

    q as given, k and v in the type computed in. Logits, S, F and thresholds are in units of ln 2.
    sound: q and k are finite, and so small that no logit or F can overflow.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    document_ids: Tensor | None
    thresholds: Tensor | None
    selection_head: int
    max_rows: int
    sound: bool
    earlier: Tensor  # [key, query] of a block, 1 where the key is earlier than the query, else 0
    future: Tensor  # [key, query] of a block, infinite where the key is later than the query, else 0

    @staticmethod
    def of(q, k, v, document_ids, thresholds, selection_head, rows) -> _Problem:
        dtype = accumulation_dtype(q.dtype)
        n, d = q.shape[2:]
        k, v = k.to(dtype), v.to(dtype)
        largest_F = n * q.norm(dim=-1, dtype=dtype).max() * k.norm(dim=-1).max()  # and more, by Cauchy-Schwarz
        earlier = torch.ones(rows, rows, dtype=dtype, device=q.device).triu_(1)
        future = torch.zeros_like(earlier).masked_fill_(earlier.mT == 1, torch.inf)
        thresholds = None if thresholds is None else thresholds * LOG2_E
        sound = bool(largest_F.isfinite())
        return _Problem(q, k, v, document_ids, thresholds, selection_head, rows, sound, earlier, future)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def workspace(self) -> Tensor:
        """Room for the largest tile, so that the loop does not allocate."""
        b, h, n, _ = self.q.shape
        return self.k.new_empty(self._sequences_at_once() * h * min(self.max_rows, n) * n)

    def _sequences_at_once(self) -> int:
        b, h, n, _ = self.q.shape
        if self.q.device.type != "cpu":
            return b
        return max(1, min(b, TILE_NUMBERS // (h * min(self.max_rows, n) * n)))

    def tiles(self, carry: Tensor, first: int) -> Iterator[_Tile]:
        """The tiles of one block of queries; carry [b, n] is F at the block's first row."""
        b, n = carry.shape
        last = min(first + self.max_rows, n)
        at_once = self._sequences_at_once()
        for start in range(0, b, at_once):
            at = slice(start, min(start + at_once, b))
            if first == 0 or (self.thresholds is None and self.document_ids is None):
                yield _Tile(at, first, last)
                continue
            live = torch.ones(at.stop - at.start, first, dtype=torch.bool, device=carry.device)
            if self.thresholds is not None:
                live &= ~(carry[at, :first] >= self.thresholds[at, :first])  # not <: a NaN keeps the key
            if self.document_ids is not None:
                live &= self.document_ids[at, :first] == self.document_ids[at, first, None]
            n_dead = live.numel() - int(live.sum())
            spares = n_dead * self.q.shape[1] * (last - first) / len(live)
            if n_dead < (1 - GATHER_BELOW) * live.numel() or spares < GATHER_SPARES:
                dead = None if self.thresholds is None else pad(~live, (0, last - first))
                yield _Tile(at, first, last, dead=dead)
                continue
            own = torch.arange(first, last, device=carry.device)
            for sequence in range(at.start, at.stop):
                index = torch.cat((live[sequence - at.start].nonzero()[:, 0], own))
                yield _Tile(slice(sequence, sequence + 1), first, last, index)

    def fold(self, x: Tensor, tile: _Tile) -> Tensor:
        """The tile's queries of x [b, h, n, ...], heads of a group side by side: [c, h_kv, group * rows, ...]."""
        x = x[tile.sequences, :, tile.first : tile.last]
        return x if self.group == 1 else x.unflatten(1, (-1, self.group)).flatten(2, 3)

    def logits(self, tile: _Tile, work: Tensor) -> Tensor:
        """[c, h_kv, m, group * rows], in `work`; nothing is masked yet."""
        keys = tile.take(self.k)
        queries = self.fold(self.q, tile).to(self.k.dtype) * (LOG2_E * self.q.shape[3] ** -0.5)
        logits = _tile(work, (*keys.shape[:3], queries.shape[2]))
        torch.bmm(keys.flatten(0, 1), queries.flatten(0, 1).mT, out=logits.flatten(0, 1))
        return logits

    def selection(self, tile: _Tile, logits: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """S and F [c, m, rows] of a tile; F is infinite where a query does not attend to a key."""
        rows = tile.rows
        head = self.selection_head % self.group
        S = logits[:, self.selection_head // self.group, :, head * rows : (head + 1) * rows].relu()
        c = tile.take_rows(carry)[:, :, None]
        if tile.dead is not None:
            c = c.masked_fill(tile.dead[:, :, None], torch.inf)
        own = slice(S.shape[1] - rows, None)  # the block's own keys are the tile's last
        if self.document_ids is not None:
            unequal = self._unequal(tile)
            S.masked_fill_(unequal | tile.take_rows(document_starts(self.document_ids))[:, :, None], 0.0)
            c = c.masked_fill(unequal, torch.inf)
        else:
            S[:, 0] = 0.0  # <BOS>, which is never dead: F[.,0] = 0
        if self.sound:
            S[:, own] *= self.earlier[:rows, :rows]
            F = c + S @ self.earlier[:rows, :rows]
        else:
            S[:, own].masked_fill_(self.earlier[:rows, :rows] == 0, 0.0)
            F = c + pad(S[..., :-1].cumsum(2), (1, 0))
        F[:, own] += self.future[:rows, :rows]
        return S, F

    def _unequal(self, tile: _Tile) -> Tensor:
        """True where query and key are of different documents: [c, m, rows]."""
        queries = self.document_ids[tile.sequences, None, tile.first : tile.last]
        return tile.take_rows(self.document_ids)[:, :, None] != queries

    def subtract(self, tile: _Tile, logits: Tensor, F: Tensor) -> None:
        """logits -= F, broadcast over heads."""
        by_head = logits.unflatten(3, (-1, tile.rows))
        by_head -= F[:, None, :, None]
        if not self.sound:  # NaN and infinite logits minus infinity are NaN
            by_head.masked_fill_(self.masked(tile), -torch.inf)

    def sum_below(self, tile: _Tile, H: Tensor) -> Tensor:
        """For every query of the block the sum of H [c, m, rows] over the queries after it."""
        if self.sound:
            return H @ self.earlier[: tile.rows, : tile.rows].mT
        return pad(H[..., 1:].flip(2).cumsum(2).flip(2), (0, 1))

    def masked(self, tile: _Tile) -> Tensor:
        """True where a query does not attend to a key: [1 or c, 1, m, 1, rows]."""
        query = torch.arange(tile.first, tile.last, device=self.q.device)
        key = torch.arange(tile.last, device=self.q.device) if tile.index is None else tile.index
        masked = (key[:, None] > query)[None]
        if self.document_ids is not None:
            masked = masked | self._unequal(tile)
        return masked[:, None, :, None]


def _tile(work: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor of that shape at the start of the workspace."""
    return work[: math.prod(shape)].view(shape)


def _empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[b, h, n, d] in memory [b, n, h, d], as the projections before and after attention have it."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d, dtype=dtype).transpose(1, 2)
