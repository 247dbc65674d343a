"""Selective attention as the paper defines it, in plain PyTorch: S, F, and the memory term.

Source: "Selective Attention Improves Transformer" (arXiv 2410.02703). With b sequences of n tokens, query
position i and key position j, both counted from 0, and the logits L of the selection head s:

    L[i,j] = q[i]·k[j] / sqrt(d)        for j <= i, else -inf
    S[i,j] = max(0, L[i,j])             0 for j >= i, and for the first token of the sequence (<BOS>)
    F[i,j] = sum over i' < i of S[i',j]             strictly earlier queries
    out[h,i] = softmax_j(L[h,i,j] - F[i,j]) · v[h,j]            one F for all heads of the layer
    M[i]   = (i + 1) - sum over j <= i of min(F[i,j], tau) / tau            keys still held at query i

Every kernel, cache and evaluation is tested against this file.

Document masking. With `document_ids` [b, n], equal for tokens of one document, whose tokens are adjacent,
each document is a sequence of its own: no query attends to another document, S between documents is 0, the
first token of each document takes the place of <BOS>, and M counts the keys of the query's document alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which logits, F and softmax are computed: float64 for float64, else float32.

    A sum of S in bfloat16 sticks (256 + 1 = 256), and models trained with one diverged or ended worse.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def selection_scores(logits: Tensor, document_ids: Tensor | None = None, first_query: int = 0) -> Tensor:
    """S: how strongly each query asks that each key be masked from later queries.

    logits [b, m, n]: L of the selection head, already scaled, for the queries first_query ..
    first_query + m - 1 and the keys 0 .. n - 1; what stands above the diagonal is ignored.
    document_ids [b, >= n], integer. Returns S [b, m, n] in the type of `logits`, >= 0, exactly 0 where key j
    is not strictly earlier than query i, is the first of its document, or is of another document.
    """
    m, n = logits.shape[-2:]
    maskable = selectable_pairs(m, n, document_ids, first_query, logits.device)
    return logits.relu().masked_fill(~maskable, 0.0)


def accumulate(S: Tensor) -> Tensor:
    """F: the exclusive cumulative sum of S over queries, so that F[i] holds the votes of queries < i.

    S [..., n, n] with queries in dimension -2. Returns F of the same shape in float32 (float64 for float64),
    whatever the type of S. Shifted, because cumsum - S would round, and turn infinity into NaN.
    """
    total = S.cumsum(dim=-2, dtype=accumulation_dtype(S.dtype))
    return functional.pad(total[..., :-1, :], (0, 0, 1, 0))


def memory_term(F: Tensor, tau: float = 1.0, document_ids: Tensor | None = None) -> Tensor:
    """M[i] = (i + 1) - sum over j <= i of min(F[i,j], tau) / tau: the keys that query i still holds.

    F [b, n, n]; tau > 0 is the F from which a key counts as gone. Returns M [b, n] in the type of F, in
    [1, i + 1]. With document_ids [b, n], keys of other documents are not held: M restarts at 1 with each
    document.
    """
    n = F.shape[-1]
    attended = attended_pairs(n, n, document_ids, device=F.device)
    gone = F.clamp(max=tau).masked_fill(~attended, 0.0).sum(dim=-1) / tau
    return attended.sum(dim=-1) - gone


def memory_loss(memory: Tensor, nonpad: Tensor | None = None) -> Tensor:
    """The memory loss before its weight eps: sum over l of max over i of M[l,i] / (n_layers * n_nonpad).

    memory [n_layers, b, n]: M of every layer. nonpad [b, n], bool: the tokens that are no padding; None means
    all. The maximum runs over them, n_nonpad is their number in the sequence, and the result, a scalar in
    (0, 1], is averaged over the sequences that have any. The training loss is cross entropy + eps * this.
    """
    n_layers, b, n = memory.shape
    if nonpad is None:
        return (memory.amax(dim=-1).sum(dim=0) / (n_layers * n)).mean()
    n_nonpad = nonpad.sum(dim=-1)  # [b]
    has_tokens = n_nonpad > 0
    largest = memory.masked_fill(~nonpad, -torch.inf).amax(dim=-1)  # [n_layers, b]
    largest = largest.masked_fill(~has_tokens, 0.0)
    per_sequence = largest.sum(dim=0) / (n_layers * n_nonpad.clamp(min=1))
    return per_sequence.sum() / has_tokens.sum().clamp(min=1)


class SelectionStatistics(NamedTuple):
    """What a selection head does to a batch. Each is a scalar tensor, or [n_layers] when layers are stacked.

    A causal pair is a query i and a key j <= i of the same document; i = j counts.
    """

    mean_F: Tensor  # mean of F over all causal pairs of the batch
    share_F_above_1: Tensor  # share of those pairs with F > 1, in [0, 1]
    memory_share: Tensor  # mean over all queries of M[i] / (keys of i's document up to i), in (0, 1]
    live_share: Tensor  # share of those pairs with F below the key's threshold, in (0, 1]; see `live.py`


@torch.no_grad()
def selection_statistics(
    q_s: Tensor,
    k_s: Tensor,
    document_ids: Tensor | None = None,
    *,
    tau: float = 1.0,
    thresholds: Tensor | None = None,
    block: int = 128,
) -> SelectionStatistics:
    """Statistics of F from the selection head alone, whatever kernel computes the attention.

    q_s, k_s [b, n, d]: queries of the selection head and the keys of its group. thresholds [b, n], of
    `selmodel.attention.live.death_thresholds`: the F from which each key is dead; None: none ever is. Runs
    over `block` queries at a time, so that memory is O(b * block * n) and not O(b * n * n). No gradient.
    """
    b, n, d = q_s.shape
    dtype = accumulation_dtype(q_s.dtype)
    with torch.autocast(q_s.device.type, enabled=False):
        q_s, k_s = q_s.to(dtype) * d**-0.5, k_s.to(dtype)
        votes = q_s.new_zeros(b, n)  # F at the first query of the block, for every key
        pairs = sum_F = above_1 = memory_share = dead = q_s.new_zeros(())
        for first in range(0, n, block):
            last = min(first + block, n)
            logits = q_s[:, first:last] @ k_s[:, :last].mT  # [b, block, keys so far]
            S = selection_scores(logits, document_ids, first)
            attended = attended_pairs(last - first, last, document_ids, first, q_s.device)
            F = (votes[:, None, :last] + accumulate(S)).masked_fill(~attended, 0.0)
            held = attended.sum(dim=-1)  # [queries] or [b, queries]
            pairs = pairs + held.sum() * (b if document_ids is None else 1)
            sum_F = sum_F + F.sum()
            above_1 = above_1 + (F > 1).sum()
            if thresholds is not None:  # above 0; F is 0 here where a query does not attend
                dead = dead + (F >= thresholds[:, None, :last]).sum()
            memory_share = memory_share + (1 - F.clamp(max=tau).sum(dim=-1) / (tau * held)).sum()
            votes[:, :last] += S.sum(dim=-2)
    return SelectionStatistics(sum_F / pairs, above_1 / pairs, memory_share / (b * n), 1 - dead / pairs)


def attended_pairs(
    n_queries: int,
    n_keys: int,
    document_ids: Tensor | None = None,
    first_query: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """True where query i may attend to key j: j <= i, and the same document.

    The queries are first_query .. first_query + n_queries - 1, the keys 0 .. n_keys - 1. Returns bool
    [n_queries, n_keys], or [b, n_queries, n_keys] when document_ids [b, >= n_keys] is given.
    """
    query = torch.arange(first_query, first_query + n_queries, device=device)
    key = torch.arange(n_keys, device=device)
    causal = key <= query[:, None]
    if document_ids is None:
        return causal
    query_document = document_ids[:, first_query : first_query + n_queries, None]
    return causal & (query_document == document_ids[:, None, :n_keys])


def selectable_pairs(
    n_queries: int,
    n_keys: int,
    document_ids: Tensor | None = None,
    first_query: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """True where query i may vote to mask key j: j < i, the same document, and j not its first token.

    Arguments and shape as for `attended_pairs`.
    """
    query = torch.arange(first_query, first_query + n_queries, device=device)
    key = torch.arange(n_keys, device=device)
    earlier = (key < query[:, None]) & (key > 0)
    if document_ids is None:
        return earlier
    starts = document_starts(document_ids)[:, None, :n_keys]
    return earlier & attended_pairs(n_queries, n_keys, document_ids, first_query, device) & ~starts


def document_starts(document_ids: Tensor) -> Tensor:
    """True at the first token of every document. document_ids [b, n], integer; returns bool [b, n]."""
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    return functional.pad(changes, (1, 0), value=True)
