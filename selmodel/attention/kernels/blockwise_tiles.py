"""The tiles of the blockwise kernel: some sequences, a block of their queries, and the keys these look at.

A tile of logits is [sequence, key/value head, key, query of every head of the group]: [c, h_kv, m, group * rows].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from selmodel.attention.kernels.common import LOG2_E
from selmodel.attention.selection import accumulation_dtype, document_starts

# On a CPU so many sequences are taken together that a tile has about this many numbers: few steps where tiles are
# small, and two tiles (weights, and gradients of the logits) stay in cache.
TILE_NUMBERS = 2**19

# Live keys are gathered when at most this share of the earlier keys is left, and when that spares a tile at least
# this many numbers. Gathering keys and scattering their gradients costs as much as computing with a quarter of them.
GATHER_BELOW = 0.75
GATHER_SPARES = 2**15


@dataclass(frozen=True)
class Tile:
    """Some sequences, the queries first .. last - 1 of each, and m keys for each, the block's own last.

    index [c, m], or None: the keys are all those before `last`. Sequences with fewer live keys than others of their
    tile are filled up with key 0, marked dead.
    dead [c, m], or None: keys that are in the tile but left out: no attention, no gradient, no votes.
    flat [c * m]: index into a tensor whose sequences stand one after the other.
    """

    sequences: slice
    first: int
    last: int
    index: Tensor | None = None
    dead: Tensor | None = None
    flat: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.last - self.first

    def take(self, x: Tensor) -> Tensor:
        """The tile's keys of x [b, h_kv, n, d], which lies in memory as [b, n, h_kv, d]: [c, h_kv, m, d]."""
        if self.index is None:
            return x[self.sequences, :, : self.last]
        rows = x.transpose(1, 2).flatten(0, 1).index_select(0, self.flat)  # [c * m, h_kv, d]
        return rows.view(*self.index.shape, *rows.shape[1:]).transpose(1, 2)

    def take_rows(self, x: Tensor) -> Tensor:
        """The tile's keys of x [b, n]: [c, m]."""
        if self.index is None:
            return x[self.sequences, : self.last]
        return x.flatten().index_select(0, self.flat).view(self.index.shape)

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add x [c, m] to the tile's keys of total [b, n]."""
        if self.index is None:
            total[self.sequences, : self.last] += x
        else:
            total.view(-1).index_add_(0, self.flat, x.flatten())

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left [c, h_kv, m, r] @ right [c, h_kv, r, d] to the tile's keys of total [b, h_kv, n, d].

        total lies in memory as [b, n, h_kv, d].
        """
        if self.index is not None:
            product = (left @ right).transpose(1, 2).flatten(2).flatten(0, 1)  # [c * m, h_kv * d]
            total.transpose(1, 2).flatten(2).flatten(0, 1).index_add_(0, self.flat, product)
        elif self.sequences.stop - self.sequences.start == 1:
            total[self.sequences.start, :, : self.last].baddbmm_(left[0], right[0])
        else:
            total[self.sequences, :, : self.last] += left @ right


@dataclass(frozen=True)
class Problem:
    """The inputs, and what the forward and the backward pass do alike.

    q as given; k and v in the type computed in, in memory [b, n, h_kv, d]. Logits, S, F and thresholds are in units
    of ln 2. sound: q and k are finite, and so small that no logit or F can overflow.
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
    def of(q, k, v, document_ids, thresholds, selection_head, rows) -> Problem:
        dtype = accumulation_dtype(q.dtype)
        n = q.shape[2]
        k, v = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        q_norm, k_norm = (torch.linalg.vector_norm(x, dim=-1, dtype=dtype).max() for x in (q, k))
        sound = bool((n * q_norm * k_norm).isfinite())  # F is smaller, by Cauchy-Schwarz
        earlier = torch.ones(rows, rows, dtype=dtype, device=q.device).triu_(1)
        future = torch.zeros_like(earlier).masked_fill_(earlier.mT == 1, torch.inf)
        thresholds = None if thresholds is None else thresholds * LOG2_E
        return Problem(q, k, v, document_ids, thresholds, selection_head, rows, sound, earlier, future)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def workspace(self) -> Tensor:
        """Room for the largest tile, so that the loop does not allocate."""
        b, h, n, _ = self.q.shape
        one = h * min(self.max_rows, n) * n
        limit = max(one, TILE_NUMBERS) if self.q.device.type == "cpu" else math.inf
        return self.k.new_empty(min(b * one, limit))

    def _sequences_at_once(self, m: int, limit: int) -> int:
        """How many sequences to take together with m keys each, at most `limit`."""
        if self.q.device.type != "cpu":
            return limit
        return max(1, min(limit, TILE_NUMBERS // (self.q.shape[1] * self.max_rows * m)))

    def tiles(self, carry: Tensor, first: int) -> Iterator[Tile]:
        """The tiles of one block of queries; carry [b, n] is F at the block's first row."""
        b, n = carry.shape
        last = min(first + self.max_rows, n)
        if first == 0 or (self.thresholds is None and self.document_ids is None):
            yield from self._whole(slice(0, b), first, last, None)
            return
        live = torch.ones(b, first, dtype=torch.bool, device=carry.device)
        if self.thresholds is not None:
            live &= ~(carry[:, :first] >= self.thresholds[:, :first])  # not <: a NaN keeps the key
        if self.document_ids is not None:
            live &= self.document_ids[:, :first] == self.document_ids[:, first, None]
        counts = live.sum(1).tolist()
        start = 0
        while start < b:
            # As many sequences as fit, each with as many keys as the one with most.
            at, most = slice(start, start + 1), counts[start]
            while at.stop < b and self.sound:
                more = max(most, counts[at.stop])
                if self._sequences_at_once(more + last - first, b) < at.stop + 1 - start:
                    break
                at, most = slice(start, at.stop + 1), more
            start = at.stop
            spares = (first - most) * (at.stop - at.start) * self.q.shape[1] * (last - first)
            if most > GATHER_BELOW * first or spares < GATHER_SPARES:
                yield from self._whole(at, first, last, None if self.thresholds is None else live)
            else:
                yield self._gathered(at, first, last, live[at], counts[at], most)

    def _whole(self, at: slice, first: int, last: int, live: Tensor | None) -> Iterator[Tile]:
        """Tiles of all keys before `last`; live [b, first] or None."""
        step = self._sequences_at_once(last, at.stop - at.start)
        for start in range(at.start, at.stop, step):
            part = slice(start, min(start + step, at.stop))
            dead = None if live is None else pad(~live[part], (0, last - first))
            yield Tile(part, first, last, dead=dead)

    def _gathered(self, at: slice, first: int, last: int, live: Tensor, counts: list[int], most: int) -> Tile:
        """The tile of the live keys, live [c, first], and the block's own."""
        device, n = live.device, self.q.shape[2]
        n_sequences = at.stop - at.start
        index = pad_sequence(live.nonzero()[:, 1].split(counts), batch_first=True)  # [c, most]
        own = torch.arange(first, last, device=device).expand(n_sequences, -1)
        dead = None
        if min(counts) < most:
            dead = torch.arange(most, device=device) >= torch.tensor(counts, device=device)[:, None]
            dead = pad(dead, (0, last - first))
        index = torch.cat((index, own), 1)
        flat = (index + torch.arange(at.start, at.stop, device=device)[:, None] * n).flatten()
        return Tile(at, first, last, index, dead, flat)

    def fold(self, x: Tensor, tile: Tile) -> Tensor:
        """The tile's queries of x [b, h, n, ...], heads of a group side by side: [c, h_kv, group * rows, ...]."""
        x = x[tile.sequences, :, tile.first : tile.last]
        return x if self.group == 1 else x.unflatten(1, (-1, self.group)).flatten(2, 3)

    def logits(self, tile: Tile, work: Tensor) -> Tensor:
        """[c, h_kv, m, group * rows], in `work`; nothing is masked yet."""
        keys = tile.take(self.k)
        queries = self.fold(self.q, tile).to(self.k.dtype) * (LOG2_E * self.q.shape[3] ** -0.5)
        logits = view_of(work, (*keys.shape[:3], queries.shape[2]))
        torch.bmm(keys.flatten(0, 1), queries.flatten(0, 1).mT, out=logits.flatten(0, 1))
        return logits

    def selection(self, tile: Tile, logits: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """S and F [c, m, rows] of a tile; F is infinite where a query does not attend to a key."""
        rows = tile.rows
        head = self.selection_head % self.group
        S = logits[:, self.selection_head // self.group, :, head * rows : (head + 1) * rows].relu()
        c = tile.take_rows(carry)[:, :, None]
        if tile.dead is not None:
            c = c.masked_fill(tile.dead[:, :, None], torch.inf)
            S.masked_fill_(tile.dead[:, :, None], 0.0)
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

    def _unequal(self, tile: Tile) -> Tensor:
        """True where query and key are of different documents: [c, m, rows]."""
        queries = self.document_ids[tile.sequences, None, tile.first : tile.last]
        return tile.take_rows(self.document_ids)[:, :, None] != queries

    def subtract(self, tile: Tile, logits: Tensor, F: Tensor) -> None:
        """logits -= F, broadcast over heads."""
        by_head = logits.unflatten(3, (-1, tile.rows))
        by_head -= F[:, None, :, None]
        if not self.sound:  # NaN and infinite logits minus infinity are NaN
            by_head.masked_fill_(self.masked(tile), -torch.inf)

    def sum_below(self, tile: Tile, H: Tensor) -> Tensor:
        """For every query of the block the sum of H [c, m, rows] over the queries after it."""
        if self.sound:
            return H @ self.earlier[: tile.rows, : tile.rows].mT
        return pad(H[..., 1:].flip(2).cumsum(2).flip(2), (0, 1))

    def masked(self, tile: Tile) -> Tensor:
        """True where a query does not attend to a key: [1 or c, 1, m, 1, rows]."""
        query = torch.arange(tile.first, tile.last, device=self.q.device)
        key = torch.arange(tile.last, device=self.q.device)[None] if tile.index is None else tile.index
        masked = key[:, :, None] > query
        if tile.dead is not None:
            masked = masked | tile.dead[:, :, None]
        if self.document_ids is not None:
            masked = masked | self._unequal(tile)
        return masked[:, None, :, None]


def view_of(work: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor of that shape at the start of the workspace."""
    return work[: math.prod(shape)].view(shape)
