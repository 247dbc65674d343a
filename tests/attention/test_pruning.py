"""The pruning rules and attention under a budget: worked by hand, and against loops and full attention with -inf."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from selmodel.attention import pruning
from selmodel.attention.kernels.eager import selective_attention
from selmodel.attention.pruning import (
    NEVER,
    RULES,
    HeavyHitterRule,
    LastQueryRule,
    OldestRule,
    SelectiveRule,
    attend_under_budget,
    layer_rules,
    take_keys,
    total_votes,
)
from selmodel.attention.selection import accumulate, selection_scores
from selmodel.errors import UserError

# ---- worked by hand ----

# One head of one feature: L[i,j] = q[i] * k[j]. Keys 0 .. 7; key 0 is <BOS>.
HAND_Q = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, -1.0, 0.0]
HAND_K = [5.0, 1.0, 3.0, -1.0, 2.0, 1.0, 0.0, 0.0]
HAND_V = [1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7]
# Budget 3. After query
#   3: votes 2 + 1 for key 1 (queries 2 and 3), 3 for key 2. A tie: the older leaves, key 1. Held 0 2 3.
#   4: 3 + 3 for key 2, max(0, -1) for key 3. Key 2 leaves. Held 0 3 4.
#   5: 2 for key 4, 0 for key 3. Key 4 leaves. Held 0 3 5.
#   6: (-1)(-1) = 1 for key 3, 0 for key 5. Key 3 leaves. Held 0 5 6.
#   7: nothing. All F are 0, <BOS> and key 7 among them: the oldest other leaves, key 5. Held 0 6 7.
HAND_LEAVES = {1: 3, 2: 4, 4: 5, 3: 6, 5: 7}


def column(*values):
    """[1, 1, n, 1] in float64."""
    return torch.tensor(values, dtype=torch.float64)[None, None, :, None]


def hand(rule, rows=64, monkeypatch=None):
    if monkeypatch:
        monkeypatch.setattr(pruning, "MIN_ROWS", rows)
        monkeypatch.setattr(pruning, "MAX_ROWS", rows)
    return attend_under_budget(column(*HAND_Q), column(*HAND_K), column(*HAND_V), rule, selection_head=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_selective_evictions_by_hand(rows, monkeypatch):
    out, held, F = hand(SelectiveRule(3), rows, monkeypatch)
    assert held.tolist() == [[0, 6, 7]]
    assert F.tolist() == [[0.0, 0.0, 0.0]]
    # Query 4 sees keys 0 2 3 4 with F = 0 3 0 0: logits 5, 3 - 3, -1, 2.
    weights = [math.exp(x) for x in (5, 0, -1, 2)]
    expected = sum(w * v for w, v in zip(weights, (1, 100, 1e3, 1e4), strict=True)) / sum(weights)
    assert out[0, 0, 4, 0].item() == pytest.approx(expected, rel=1e-12)
    # Query 7 sees keys 0 5 6 7; q = 0, and F = 0 for all of them: their mean.
    assert out[0, 0, 7, 0].item() == pytest.approx((1 + 1e5 + 1e6 + 1e7) / 4, rel=1e-12)
    # Query 6 sees keys 0 3 5 6 with F = 0 0 0 0: logits -5, 1, -1, 0.
    weights = [math.exp(x) for x in (-5, 1, -1, 0)]
    expected = sum(w * v for w, v in zip(weights, (1, 1e3, 1e5, 1e6), strict=True)) / sum(weights)
    assert out[0, 0, 6, 0].item() == pytest.approx(expected, rel=1e-12)


def test_departures_by_hand():
    L = torch.tensor(HAND_Q)[:, None] * torch.tensor(HAND_K)
    F = selection_scores(L[None]).cumsum(1)  # after each query
    departures = SelectiveRule(3).departures(0, 8, F)
    assert departures.tolist() == [[HAND_LEAVES.get(j, 8) for j in range(8)]]
    # With room for two, one more leaves, and the same order begins a query earlier.
    # After 2: key 1, the only one that may. 3: key 2 (3 votes). 4: key 3 (0 votes, but alone). 5, 6, 7: 4, 5, 6.
    assert SelectiveRule(2).departures(0, 8, F).tolist() == [[8, 2, 3, 4, 5, 6, 7, 8]]


def test_oldest_by_hand():
    # Budget 4 with 2 sinks. After query 4 keys 0 1 2 3 4 are held and 2 leaves; then 3 after query 5, and so on.
    assert OldestRule(4, 2).departures(0, 7, None).tolist() == [[7, 7, 4, 5, 6, 7, 7]]
    # A later block: keys 0 1 5 6 held before it, and its own 7 8 9.
    assert OldestRule(4, 2).departures(4, 3, None).tolist() == [[3, 3, 0, 1, 2, 3, 3]]
    # Sinks are capped at budget - 1, so that every query can bring its key.
    assert OldestRule(2, 4).departures(0, 4, None).tolist() == [[4, 2, 3, 4]]
    assert OldestRule(3, 0).departures(0, 5, None).tolist() == [[3, 4, 5, 5, 5]]


def choose(rule, *, age, query, F=None, weights=None):
    age = torch.tensor([age], dtype=torch.int32)
    F, weights = (None if x is None else torch.tensor([x]) for x in (F, weights))
    out = torch.zeros(1, 1, dtype=torch.int64)
    rule.leaving(F, weights, age, query, out=out)
    return out.item()


def test_one_step_by_hand():
    """Keys lie in any order; the result is a slot."""
    ages = [NEVER, 5, 3, 7]
    assert choose(SelectiveRule(3), F=[0.0, 1.0, 2.0, 0.0], age=ages, query=7) == 2
    assert choose(SelectiveRule(3), F=[0.0, 2.0, 2.0, 0.0], age=ages, query=7) == 2  # of equals the older
    assert choose(SelectiveRule(3), F=[0.0, 0.0, 0.0, 0.0], age=ages, query=7) == 2  # not <BOS>, not key 7
    assert choose(SelectiveRule(3), F=[0.0, math.inf, math.inf, 0.0], age=ages, query=7) == 2
    assert choose(OldestRule(3, 1), age=ages, query=7) == 2
    # h2o, budget 4: the newest two, of ages 7 and 6, stay; of equals the older; <BOS> may leave.
    ages = [0, 7, 3, 6, 5]
    assert choose(HeavyHitterRule(4), weights=[3.0, 0.1, 1.5, 0.2, 1.0], age=ages, query=7) == 4
    assert choose(HeavyHitterRule(4), weights=[3.0, 0.1, 1.0, 0.2, 1.0], age=ages, query=7) == 2
    assert choose(HeavyHitterRule(4), weights=[0.5, 0.1, 1.0, 0.2, 1.0], age=ages, query=7) == 0
    # tova: whichever has least, the newest too.
    assert choose(LastQueryRule(4), weights=[0.5, 0.1, 1.0, 0.2, 1.0], age=ages, query=7) == 1
    assert choose(LastQueryRule(4), weights=[0.2, 0.6, 1.0, 0.2, 1.0], age=ages, query=7) == 0


# ---- the two forms of a rule are one ----


def loop_departures(F, budget):
    """The definition in loops; F [rows, keys] after each query, all keys new. A huge number stands for infinity."""
    rows = len(F)
    held, departures = [], [rows] * rows
    for i in range(rows):
        held.append(i)
        if len(held) > budget:
            leaves = max((j for j in held if j not in (0, i)), key=lambda j: (F[i][j], -j))
            departures[leaves] = i
            held.remove(leaves)
    return departures


@pytest.mark.parametrize("budget", [2, 3, 8, 29, 30, 40])
@pytest.mark.parametrize("votes", ["many ties", "real", "none", "overflow"])
def test_departures_against_loops(budget, votes):
    generator = torch.Generator().manual_seed(budget)
    S = torch.randint(0, 2, (3, 30, 30), generator=generator).float() * 2
    if votes == "real":
        S = torch.rand(3, 30, 30, generator=generator)
    elif votes == "none":
        S = S * 0
    elif votes == "overflow":
        S = torch.where(S > 0, torch.tensor(3e38), 0.0)  # a sum of two is infinite
    F = (S.tril(-1) * (torch.arange(30) > 0)).cumsum(1)
    assert F.isinf().any() == (votes == "overflow")
    assert SelectiveRule(budget).departures(0, 30, F).tolist() == [loop_departures(x, budget) for x in F.tolist()]


def test_a_nan_vote_costs_a_key_and_no_more():
    """A model that has gone wrong keeps to its budget: one key leaves per query, and <BOS> stays."""
    F = torch.zeros(1, 6, 6)
    F[0, 2:, 1] = math.nan
    departures = SelectiveRule(3).departures(0, 6, F)[0]
    assert departures[0] == departures[5] == 6
    assert sorted(departures.tolist()) == [3, 4, 5, 6, 6, 6]
    slot = choose(SelectiveRule(3), F=[0.0, math.nan, 1.0, 0.0], age=[NEVER, 1, 2, 3], query=3)
    assert slot in (1, 2)


def test_a_rule_that_reads_weights_has_no_departures():
    with pytest.raises(NotImplementedError, match="HeavyHitterRule decides query by query"):
        HeavyHitterRule(4).departures(0, 5, None)


# ---- attention, against full attention with -inf ----


def mask_of(departures):
    """[b, n, n], True where the query does not see the key: later keys, and those that left with an earlier query."""
    n = departures.shape[1]
    query = torch.arange(n)[:, None]
    return (torch.arange(n) > query) | (departures[:, None] < query)


@pytest.mark.parametrize("rows", [5, 16, 64])
@pytest.mark.parametrize(
    ("name", "h_kv", "selection_head"),
    [(name, *heads) for name in ("selective", "oldest") for heads in ((4, 0), (2, 3), (1, 1))] + [("oldest", 2, None)],
)
def test_attention_is_that_with_minus_infinity(random_qkv, monkeypatch, name, h_kv, selection_head, rows):
    """Many blocks: they carry F, and gather the keys that are left."""
    monkeypatch.setattr(pruning, "MIN_ROWS", rows)
    monkeypatch.setattr(pruning, "MAX_ROWS", rows)
    n = 71
    q, k, v = random_qkv(b=3, h=4, h_kv=h_kv, n=n, d=5, scale=1.0)
    logits = q @ k.repeat_interleave(4 // h_kv, 1).mT / 5**0.5
    F = F_after = torch.zeros(3, n, n, dtype=q.dtype)
    if selection_head is not None:
        S = selection_scores(logits[:, selection_head])
        F, F_after = accumulate(S), S.cumsum(1)
    for budget in (2, 3, 17, 40, 70, 71, 200):
        rule = RULES[name](budget, n_sinks=3)
        if name == "selective":
            departures = torch.tensor([loop_departures(x, budget) for x in F_after.tolist()])
        else:
            sinks = min(3, budget - 1)
            # Of the keys after the sinks, the newest budget - sinks are held.
            leaves_after = torch.arange(n) + budget - sinks
            departures = torch.where(torch.arange(n) < sinks, n, leaves_after.clamp(max=n)).expand(3, -1)
        masked = mask_of(departures)
        weights = (logits - F[:, None]).masked_fill(masked[:, None], -math.inf).softmax(-1)
        expected = weights @ v.repeat_interleave(4 // h_kv, 1)
        out, held, last_F = attend_under_budget(q, k, v, rule, selection_head=selection_head)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        kept = (departures == n).nonzero()[:, 1].view(3, -1)
        if budget >= n:
            assert held is None
        else:
            assert torch.equal(held, kept)
        if selection_head is None:
            assert last_F is None
        else:
            torch.testing.assert_close(last_F, F_after[:, -1].gather(1, kept))


def test_without_a_rule_it_is_the_layers_attention(random_qkv):
    """And the weights' sums are the columns of the softmax."""
    q, k, v = random_qkv(h=4, h_kv=2, n=150)
    expected, _ = selective_attention(q, k, v, selection_head=1)
    sums = torch.full((2, 150), 0.5, dtype=q.dtype)
    out, held, F = attend_under_budget(q, k, v, None, selection_head=1, weight_sums=sums)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attend_under_budget(q, k, v, None, selection_head=1).out, expected, rtol=1e-10, atol=0)
    assert held is None
    logits = q @ k.repeat_interleave(2, 1).mT / 2
    S = selection_scores(logits[:, 1])
    torch.testing.assert_close(F, S.sum(1))
    causal = torch.ones(150, 150).tril() == 0
    weights = (logits - accumulate(S)[:, None]).masked_fill(causal, -math.inf).softmax(-1)
    torch.testing.assert_close(sums, weights.sum((1, 2)) + 0.5)


def test_earlier_keys_bring_their_F(random_qkv):
    """The last 40 queries alone, with the F that the first 20 have left, are the last 40 of all."""
    q, k, v = random_qkv(n=60)
    whole = attend_under_budget(q, k, v, SelectiveRule(50), selection_head=0)
    start = attend_under_budget(q[:, :, :20], k[:, :, :20], v[:, :, :20], SelectiveRule(50), selection_head=0)
    rest = attend_under_budget(q[:, :, 20:], k, v, SelectiveRule(50), selection_head=0, F=start.F)
    torch.testing.assert_close(rest.out, whole.out[:, :, 20:])
    assert torch.equal(rest.held, whole.held)
    torch.testing.assert_close(rest.F, whole.F)


def test_half_precision_computes_in_float32(random_qkv):
    """256 votes of 1 and more add up: a sum in bfloat16 would stop at 256."""
    q = torch.ones(1, 1, 700, 1, dtype=torch.bfloat16)
    out, _, F = attend_under_budget(q, q, q, SelectiveRule(700), selection_head=0)
    assert F.dtype == torch.float32
    assert F[0, 1].item() == 698  # queries 2 .. 699
    assert out.dtype == torch.float32


@pytest.mark.parametrize("projected", [True, False])
def test_take_keys(projected):
    """In the layout of a projection, [b, n, h, d], and in that of a cache."""
    x = torch.arange(2 * 3 * 5 * 2).float().view(2, 3, 5, 2)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if projected else x
    index = torch.tensor([[4, 0, 4], [1, 2, 3]])
    taken = take_keys(x, index)
    for b in range(2):
        assert torch.equal(taken[b], x[b][:, index[b]])


@pytest.mark.parametrize("n", [1, 2, 130])
def test_total_votes(random_qkv, n):
    q, k, _ = random_qkv(h=1, n=n)
    expected = selection_scores(q[:, 0] @ k[:, 0].mT / 2).sum(1)
    torch.testing.assert_close(total_votes(q[:, 0], k[:, 0]), expected)


# ---- options ----


def test_rules_of_layers():
    assert layer_rules(None, None, 3, votes=True) is None
    rules = layer_rules([4, np.int64(5), 6], None, 3, votes=True)
    assert [(type(rule), rule.budget) for rule in rules] == [(SelectiveRule, 4), (SelectiveRule, 5), (SelectiveRule, 6)]
    rules = layer_rules((2, 9), "oldest", 2, votes=False, n_sinks=3)
    assert [(type(rule), rule.budget, rule.n_protected) for rule in rules] == [(OldestRule, 2, 1), (OldestRule, 9, 3)]
    assert [type(rule) for rule in layer_rules(4, "h2o", 2, votes=True)] == [HeavyHitterRule] * 2
    assert [type(rule) for rule in layer_rules(4, "tova", 1, votes=False)] == [LastQueryRule]


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (1, r"budgets=1: expected an integer of at least 2 .*, or a list with one for each of 2 layers"),
        (0, "budgets=0: "),
        (-4, "budgets=-4: "),
        (4.0, r"budgets=4\.0: "),
        (True, "budgets=True: "),
        ("8", "budgets='8': "),
        ({"a": 1}, "budgets="),
        ([4, 5.0], r"budgets\[1\]=5\.0: "),
        ([False, 4], r"budgets\[0\]=False: "),
        ([4, None], r"budgets\[1\]=None: "),
        ([], r"budgets=\[\] has 0 entries with model\.n_layers=2: expected 2, or one integer for all layers"),
        ([4] * 100, r"budgets=\[4, .*\.\.\. has 100 entries"),
    ],
)
def test_bad_budgets_are_named(budgets, message):
    with pytest.raises(UserError, match=message):
        layer_rules(budgets, None, 2, votes=True)


@pytest.mark.parametrize("n_sinks", [-1, 2.0, True, None])
def test_bad_sinks_are_named(n_sinks):
    with pytest.raises(UserError, match=r"n_sinks=.*: expected the number of first tokens to keep"):
        layer_rules(4, "oldest", 2, votes=False, n_sinks=n_sinks)


def test_all_faults_in_one_message():
    with pytest.raises(UserError) as error:
        layer_rules([1, 4, 2.5], "selective", 2, votes=False, n_sinks=-3)
    for part in ("rule=selective with standard attention", "n_sinks=-3", "budgets[0]=1", "budgets[2]=2.5", "3 entries"):
        assert part in str(error.value)
    assert "choose one of oldest, h2o, tova" in str(error.value)
