"""Context pruning: which key leaves a layer that holds more than its budget.

A layer with budget K holds at most K keys between queries. Query i appends its own key and attends to all keys
then held; when it is done, and while more than K are held, one leaves for good. What is left out is left out
alone: the others keep their original positions. The result is that of full attention with -inf at every
(query, key) whose key had left. The rules, with F of `selmodel.attention.selection` and the weights of the softmax:

    selective  the key with the largest F[i+1,j] leaves (arXiv 2410.02703); never <BOS>, never key i
    oldest     the oldest key leaves, but for the first n_sinks ones (StreamingLLM, Xiao et al., arXiv 2309.17453;
               there the kept keys are also given new, adjacent positions, which a learned table does not need)
    h2o        the key with the lowest sum of weights, over all queries so far and all heads, leaves, but for the
               newest K // 2 (Zhang et al., arXiv 2306.14048). As published, half of the budget is for recent keys
               (a new key has had no queries yet, and would always be the one to leave), and <BOS> is a key like
               any other. Published for each head by itself; here the heads of a layer hold the same keys.
    tova       the key with the lowest weight of query i, averaged over heads, leaves (Oren et al., arXiv
               2401.06104). As published, any key can be the one: <BOS>, and key i too.

Among equals the older key leaves. Every rule serves every kind of attention, except that "selective" needs votes;
a selective layer subtracts F from its logits whatever the rule. F counts the votes of all queries, so it does not
depend on what has left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from selmodel.attention.selection import accumulation_dtype, selection_scores
from selmodel.errors import UserError

# The age of a key that may never leave. Other keys have their position as age; the smallest age is the oldest key.
NEVER = torch.iinfo(torch.int32).max
# StreamingLLM finds four initial tokens enough to collect the attention that goes nowhere else.
DEFAULT_SINKS = 4
LEAST_BUDGET = 2  # <BOS> and the newest key
# Queries in a block. Fewer make the products slow, more attend to keys that left early in the block.
MIN_ROWS, MAX_ROWS = 64, 128


class Rule(ABC):
    """Chooses the key that leaves a layer with `budget` keys, in two forms.

    `leaving` decides after one query; `departures`, where the rule does not read attention weights, for a block of
    queries in advance. n_sinks: used by "oldest" alone.
    """

    reads_weights = False  # needs the attention weights of the query that is done
    sums_weights = False  # and their sum over all queries, which a cache then keeps

    def __init__(self, budget: int, n_sinks: int = DEFAULT_SINKS) -> None:
        self.budget = budget
        self.n_protected = 0  # the first tokens that never leave

    @abstractmethod
    def leaving(self, F: Tensor | None, weights: Tensor | None, age: Tensor, query: int, out: Tensor) -> None:
        """Write into out [b, 1], int64, which of the held keys leaves after `query`.

        All are [b, held], keys in any order. F: after the votes of `query`, 0 for its own key; None without votes.
        weights: of the query, summed over heads, or the sum over all queries so far; None unless the rule reads
        them. age, int32: the position of each key, or NEVER.
        """

    def departures(self, n_earlier: int, rows: int, F: Tensor | None) -> Tensor:
        """With which query of a block each key leaves, from 0; `rows` for a key that stays.

        The keys: n_earlier ones, oldest first, from before the block, then the `rows` keys of the block itself.
        F [b, rows, n_earlier + rows]: F[:, t] after the votes of query t, 0 for its own key and those after it.
        Returns int64 [b or 1, n_earlier + rows].
        """
        raise NotImplementedError(f"{type(self).__name__} decides query by query")

    def protect(self, positions: Tensor) -> Tensor:
        """The ages, int32, of keys at `positions`."""
        return positions.masked_fill(positions < self.n_protected, NEVER).to(torch.int32)


class SelectiveRule(Rule):
    """The largest F leaves."""

    def __init__(self, budget: int, n_sinks: int = DEFAULT_SINKS) -> None:
        super().__init__(budget)
        self.n_protected = 1  # <BOS>

    def leaving(self, F: Tensor | None, weights: Tensor | None, age: Tensor, query: int, out: Tensor) -> None:
        """See `Rule.leaving`.

        <BOS> has F = 0, so it is among the largest only when all keys are, and then it is NEVER the oldest. The
        query's own key is then the youngest of at least three.
        """
        torch.argmin(torch.where(F < F.amax(1, keepdim=True), NEVER, age), 1, keepdim=True, out=out)

    def departures(self, n_earlier: int, rows: int, F: Tensor | None) -> Tensor:
        """See `Rule.departures`. A few numpy calls for each query, for all sequences of the batch at once.

        Keys come oldest first and argmax takes the first of equals, so the older one leaves. The query's own key and
        those yet to come have F = 0 and stand after one that may leave, so they are never taken.
        """
        b = F.shape[0]
        largest = torch.finfo(F.dtype).max
        # inf - inf below would be NaN, and argmax would take it for the largest ever after.
        F = F.nan_to_num(nan=largest, posinf=largest).cpu().numpy()
        row = np.arange(b)
        first = max(0, self.budget - n_earlier)  # the first query after which a key leaves
        gone = np.empty((rows, b), dtype=np.int64)
        barred = np.zeros((b, n_earlier + rows), dtype=F.dtype)  # -inf: protected, or gone
        barred[:, : self.n_protected] = -np.inf
        candidates = np.empty_like(barred)
        for t in range(first, rows):
            np.add(F[:, t], barred, out=candidates)
            candidates.argmax(1, out=gone[t])
            barred[row, gone[t]] = -np.inf
        departures = np.full((b, n_earlier + rows), rows)
        departures[row, gone[first:]] = np.arange(first, rows)[:, None]
        return torch.from_numpy(departures)


class OldestRule(Rule):
    """The oldest key leaves, but for the first n_sinks, which are capped so that the newest fits too."""

    def __init__(self, budget: int, n_sinks: int = DEFAULT_SINKS) -> None:
        super().__init__(budget)
        self.n_protected = min(n_sinks, budget - 1)

    def leaving(self, F: Tensor | None, weights: Tensor | None, age: Tensor, query: int, out: Tensor) -> None:
        """See `Rule.leaving`."""
        torch.argmin(age, 1, keepdim=True, out=out)

    def departures(self, n_earlier: int, rows: int, F: Tensor | None) -> Tensor:
        """See `Rule.departures`."""
        departures = torch.full((1, n_earlier + rows), rows)
        first = max(0, self.budget - n_earlier)  # the first query after which a key leaves
        order = torch.arange(first, rows)
        departures[0, self.n_protected : self.n_protected + len(order)] = order
        return departures


class HeavyHitterRule(Rule):
    """H2O: the lowest sum of weights leaves, but for the newest K // 2 keys."""

    reads_weights = sums_weights = True

    def leaving(self, F: Tensor | None, weights: Tensor | None, age: Tensor, query: int, out: Tensor) -> None:
        """See `Rule.leaving`."""
        recent = age > query - self.budget // 2
        _lowest(weights.masked_fill(recent, torch.inf), age, out)


class LastQueryRule(Rule):
    """TOVA: the lowest weight of the last query leaves."""

    reads_weights = True

    def leaving(self, F: Tensor | None, weights: Tensor | None, age: Tensor, query: int, out: Tensor) -> None:
        """See `Rule.leaving`."""
        _lowest(weights, age, out)


def _lowest(x: Tensor, age: Tensor, out: Tensor) -> None:
    """Where x [b, held] is lowest, the oldest of equals."""
    torch.argmin(torch.where(x > x.amin(1, keepdim=True), NEVER, age), 1, keepdim=True, out=out)


RULES: dict[str, type[Rule]] = {
    "selective": SelectiveRule,
    "oldest": OldestRule,
    "h2o": HeavyHitterRule,
    "tova": LastQueryRule,
}


def layer_rules(
    budgets: int | Sequence[int] | None,
    rule: str | None,
    n_layers: int,
    *,
    votes: bool,
    n_sinks: int = DEFAULT_SINKS,
) -> list[Rule] | None:
    """The rule of every layer; None when nothing is to be pruned (budgets None).

    budgets: one for all layers, or a list with one for each. rule: a name in `RULES`; None is "selective" for
    attention with `votes`. Raises UserError, with all faults in one message.
    """
    faults = []
    choices = [name for name in RULES if votes or name != "selective"]
    kind = "selective" if votes else "standard"
    if rule is not None and rule not in RULES:
        faults.append(f"rule={rule}: no such pruning rule; choose one of {', '.join(choices)}")
    elif rule is not None and rule not in choices:
        faults.append(
            f"rule={rule} with {kind} attention, which has no votes to prune by; choose one of {', '.join(choices)}"
        )
    elif rule is not None and budgets is None:
        faults.append(f"rule={rule} without budgets would prune nothing: give budgets, or leave rule out")
    elif rule is None and budgets is not None and not votes:
        faults.append(
            f"budgets={_short(budgets)} with {kind} attention and no rule: it has no votes to prune by; "
            f"choose one of rule={', '.join(choices)}"
        )
    if not _is_whole(n_sinks) or n_sinks < 0:
        faults.append(f"n_sinks={n_sinks!r}: expected the number of first tokens to keep, such as {DEFAULT_SINKS}")
    if budgets is not None:
        faults += _budget_faults(budgets, n_layers)
    if faults:
        raise UserError("; ".join(faults))
    if budgets is None:
        return None
    budgets = [budgets] * n_layers if _is_whole(budgets) else budgets
    return [RULES[rule or "selective"](int(budget), int(n_sinks)) for budget in budgets]


def _budget_faults(budgets: object, n_layers: int) -> list[str]:
    wanted = f"an integer of at least {LEAST_BUDGET} (room for <BOS> and the newest key)"
    if isinstance(budgets, Sequence) and not isinstance(budgets, str):
        faults = [
            f"budgets[{layer}]={budget!r}: expected {wanted}"
            for layer, budget in enumerate(budgets)
            if not _is_whole(budget) or budget < LEAST_BUDGET
        ]
        if len(budgets) != n_layers:
            faults.append(
                f"budgets={_short(budgets)} has {len(budgets)} entries with model.n_layers={n_layers}: "
                f"expected {n_layers}, or one integer for all layers"
            )
        return faults
    if not _is_whole(budgets) or budgets < LEAST_BUDGET:
        return [f"budgets={budgets!r}: expected {wanted}, or a list with one for each of {n_layers} layers"]
    return []


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _short(budgets: object) -> str:
    text = str(budgets)
    return text if len(text) <= 60 else f"{text[:57]}..."


class PrunedAttention(NamedTuple):
    """What `attend_under_budget` returns."""

    out: Tensor  # [b, h, m, d]
    held: Tensor | None  # [b, held], int64: the keys that are left, oldest first; None: all are
    F: Tensor | None  # [b, held], after the votes of all queries


def attend_under_budget(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule | None,
    *,
    selection_head: int | None = None,
    F: Tensor | None = None,
    weight_sums: Tensor | None = None,
) -> PrunedAttention:
    """Attention of m queries to c earlier keys and their own, with the evictions after each query. No gradient.

    q [b, h, m, d]; k, v [b, h_kv, c + m, d], oldest first. rule: one that does not read weights, unless no key is to
    leave; None: none leaves. selection_head: the query head that votes; None: standard attention. F [b, c]: of the
    earlier keys before the first query, in float32 (float64 for float64); None is 0. weight_sums [b, c + m]: the
    attention weights, summed over heads and queries, are added to it.

    Queries are taken block by block, with the keys that are held when the block begins and the block's own: time is
    O(m * (K + rows)), memory linear in m. F of a key that has left is not computed: no later query needs it.
    """
    b, h, m, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    n_earlier = k.shape[2] - m
    group = h // k.shape[1]
    budget = k.shape[2] if rule is None else rule.budget
    block = min(MAX_ROWS, max(MIN_ROWS, budget // 4))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out = q.new_empty(b, m, h, d).transpose(1, 2)  # in memory as the projection after it wants it
    index = None  # [b, held]; None: all keys so far
    if selection_head is not None and F is None:
        F = q.new_zeros(b, n_earlier)
    for first in range(0, m, block):
        last = min(first + block, m)
        rows, end = last - first, n_earlier + last
        if index is None:
            keys, values = k[:, :, :end], v[:, :, :end]
        else:
            own = torch.arange(end - rows, end, device=q.device).expand(b, -1)
            index = torch.cat((index, own), 1)
            keys, values = take_keys(k, index), take_keys(v, index)
        queries = q[:, :, first:last]
        n_keys = keys.shape[2]
        query = torch.arange(n_keys - rows, n_keys, device=q.device)[:, None]
        key = torch.arange(n_keys, device=q.device)
        masked = key > query  # [rows, keys], and then [b or 1, rows, keys]
        F_after = None
        if selection_head is not None:
            logits = queries[:, selection_head] * d**-0.5 @ keys[:, selection_head // group].mT
            S = logits.relu_().masked_fill_(key >= query, 0.0)  # [b, rows, keys]
            # Nobody votes for <BOS>. Where it has left ("oldest" without sinks), the layer is full, and the key that is
            # first now leaves with the block's first query, before a vote for it would count.
            S[:, :, 0] = 0.0
            F_before = pad(F, (0, rows))[:, None]  # [b, 1, keys]
            F_after = S.cumsum(1).add_(F_before)
            bias = torch.cat((F_before, F_after[:, :-1]), 1).neg_()
        departures = None
        if n_keys > budget:
            departures = rule.departures(n_keys - rows, rows, F_after).to(q.device)
            masked = masked | (departures[:, None] < torch.arange(rows, device=q.device)[:, None])
        if F_after is None:
            bias = q.new_zeros(()).expand(masked.shape if masked.dim() == 3 else (1, *masked.shape))
        bias = bias.masked_fill(masked, -torch.inf)  # [b or 1, rows, keys]
        if weight_sums is None:
            out[:, :, first:last] = _attend(queries, keys, values, bias)
        else:
            out[:, :, first:last], weights = attention_weights(queries, keys, values, bias)
            weight_sums[:, :end] += weights.sum((1, 2))
        F = None if F_after is None else F_after[:, -1]
        if departures is not None:
            kept = (departures == rows).expand(b, -1).nonzero()[:, 1].view(b, budget)
            index = kept if index is None else index.gather(1, kept)
            F = None if F is None else F.gather(1, kept)
    return PrunedAttention(out, index, F)


def take_keys(x: Tensor, index: Tensor) -> Tensor:
    """x [b, h, n, d] at index [b, m] of dimension 2: [b, h, m, d]."""
    b, h, n, d = x.shape
    rows = x.transpose(1, 2)
    if not rows.is_contiguous():
        return x.gather(2, index[:, None, :, None].expand(b, h, index.shape[1], d))
    # All heads of a key lie side by side, as a projection leaves them: copied at once, several times faster.
    flat = (index + torch.arange(0, b * n, n, device=x.device)[:, None]).flatten()
    return rows.flatten(0, 1).index_select(0, flat).view(b, -1, h, d).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q·k / sqrt(d) + bias) · v; q [b, h, m, d], k and v [b, h_kv, n, d], bias [b or 1, m, n]."""
    b, h, m, d = q.shape
    group = h // k.shape[1]
    if group > 1:  # the queries of a group, one after the other: no copies of the keys
        q, bias = q.unflatten(1, (-1, group)).flatten(2, 3), bias.repeat(1, group, 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None]).reshape(b, h, m, d)


def attention_weights(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """out [b, h, m, d] as `_attend` and the weights [b, h, m, n] themselves."""
    b, h, m, d = q.shape
    group = h // k.shape[1]
    logits = q.unflatten(1, (-1, group)).flatten(2, 3) * d**-0.5 @ k.mT  # [b, h_kv, group * m, n]
    weights = (logits.reshape(b, h, m, -1) + bias[:, None]).softmax(-1)
    out = weights.view(logits.shape) @ v
    return out.reshape(b, h, m, d), weights


def total_votes(q: Tensor, k: Tensor, block: int = 128) -> Tensor:
    """The votes of all n queries for each key: F after the last of them.

    q, k [b, n, d]: of the selection head and of its key head; key 0 is <BOS>. Returns [b, n], in float32 (float64
    for float64). Memory O(b * block * n).
    """
    b, n, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    q, k = q.to(dtype) * d**-0.5, k.to(dtype)
    votes = q.new_zeros(b, n)
    for first in range(0, n, block):
        last = min(first + block, n)
        votes[:, :last] += selection_scores(q[:, first:last] @ k[:, :last].mT, first_query=first).sum(1)
    return votes
