"""Thresholds above which a key may be left out: the bound itself, and that it is tight enough to be of use."""

from __future__ import annotations

import math

import pytest
import torch

from selmodel.attention.kernels.eager import selective_attention as eager
from selmodel.attention.live import check_live_keys, death_thresholds
from selmodel.attention.selection import accumulate, selection_scores


def weights_and_F(q, k, selection_head=0):
    """The weights [b, h, query, key] and F [b, query, key] by the definition, in float64."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    n = q.shape[2]
    logits = q @ k.mT / q.shape[3] ** 0.5
    F = accumulate(selection_scores(logits[:, selection_head]))
    future = torch.ones(n, n).triu(1).bool()
    return (logits - F[:, None]).masked_fill(future, -math.inf).softmax(-1), F


def inputs(kind, n=60, seed=0):
    """Adversarial q, k, v [2, h, n, 8] in float64."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, n, 8, generator=g, dtype=torch.float64) for _ in range(3))
    if kind == "huge norms":
        q, k = q * 30, k * 30
    elif kind == "one huge query":
        q[:, :, n // 2] *= 300
    elif kind == "one huge key":
        k[:, :, 7] *= 300
    elif kind == "one key carries all":  # every head's queries look at key 5
        q = q * 0.1 + 4 * k[:, :, 5:6]
    elif kind == "own logit very negative":  # the normaliser's bound, L[i,i], is as low as can be
        k = -q.clone()
    elif kind == "own logit huge":
        k = 6 * q.clone()
    elif kind == "grouped":
        k, v = k[:, :2], v[:, :2]
    return q, k, v


KINDS = (
    "plain", "huge norms", "one huge query", "one huge key", "one key carries all", "own logit very negative",
    "own logit huge", "grouped",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_what_auto_leaves_out_is_below_rounding(kind, seed):
    """The claim itself: F >= T gives each weight < eps / (n h), in every row of every head."""
    q, k, v = inputs(kind, n=160, seed=seed)
    weights, F = weights_and_F(q, k)
    thresholds = death_thresholds(q.float(), k.float(), v.float(), "auto")
    dead = thresholds[:, None] <= F  # [b, query, key]
    eps = torch.finfo(torch.float32).eps / 2
    assert weights.masked_fill(~dead[:, None], 0.0).max() < eps / (160 * 4)
    if kind == "plain":
        assert dead.sum() > 500  # otherwise the test has seen nothing


def test_the_threshold_by_hand():
    """d = 4, n = 3: T[j] = max over i > j of |q[i]| * |k[j]| / 2 + max over i > j of -L[i,i] + ln(3 / eps)."""
    q = torch.tensor([[9.0, 0, 0, 0], [0, 3.0, 4.0, 0], [1.0, 0, 0, 0]]).view(1, 1, 3, 4)
    k = torch.tensor([[2.0, 0, 0, 0], [0, 0, 1.0, 0], [-4.0, 0, 3.0, 0]]).view(1, 1, 3, 4)
    # L[1,1] = 4 * 1 / 2 = 2, L[2,2] = -4 / 2 = -2; |q| = 9, 5, 1; |k| = 2, 1, 5.
    constant = math.log(3 * 2**24)
    expected = torch.tensor([[5 * 2 / 2 + 2 + constant, 1 * 1 / 2 + 2 + constant, 0 + 0 + constant]])
    torch.testing.assert_close(death_thresholds(q, k, q, "auto"), expected, rtol=2e-4, atol=0)
    assert (death_thresholds(q, k, q, "auto") >= expected).all()
    # Another head can only raise it.
    two = death_thresholds(q.repeat(1, 2, 1, 1), torch.cat((k, 0 * k), 1), q.repeat(1, 2, 1, 1), "auto")
    torch.testing.assert_close(two, expected + math.log(2), rtol=2e-4, atol=0)


def test_qk_norm_makes_the_bound_small_and_static():
    """|q| = |k| = sqrt(d), so T <= 2 sqrt(d) + ln(n h / eps), whatever the projections have grown to."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.rms_norm(torch.randn(2, 4, 50, 64, generator=g) * 100, (64,)) for _ in range(2))
    thresholds = death_thresholds(q, k, q, "auto")
    assert (thresholds <= (2 * 8 + math.log(50 * 4 * 2**24)) * 1.001).all()


def test_thresholds_are_above_zero():
    """A huge own logit proves that keys nobody has masked do not matter; F = 0 keeps them all the same."""
    q = torch.full((1, 1, 5, 2), 100.0)
    k = q.clone()
    k[:, :, 0] = 0.001
    assert (death_thresholds(q, k, q, "auto") > 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("live_keys", ["auto", 3.0])
def test_a_sequence_with_nan_or_infinity_keeps_every_key(value, which, live_keys):
    tensors = inputs("plain")
    tensors[which][1, 2, 30, 1] = value
    thresholds = death_thresholds(*tensors, live_keys)
    F = torch.tensor(math.inf)
    assert (thresholds[0] <= F).all()
    assert not (thresholds[1] <= F).any() or thresholds[1].isinf().all()


def test_overflowing_norms_keep_every_key():
    q, k, v = (x.float() for x in inputs("plain"))
    thresholds = death_thresholds(q * 1e30, k * 1e30, v, "auto")
    assert not (thresholds < math.inf).any()


def test_a_threshold_by_hand_and_the_memory_term():
    q, k, v = inputs("plain")
    assert death_thresholds(q, k, v, "off") is None
    assert (death_thresholds(q, k, v, 3) == 3).all()
    assert (death_thresholds(q, k, v, 3, memory_tau=5.0) == 5).all()  # a dead key has left the memory term wholly
    assert (death_thresholds(q, k, v, 3, memory_tau=1.0) == 3).all()
    assert death_thresholds(q.bfloat16(), k.bfloat16(), v.bfloat16(), 3).dtype == torch.float32
    assert death_thresholds(q, k, v, "auto").dtype == torch.float64


def test_float64_uses_its_own_rounding():
    q, k, v = inputs("plain")
    difference = death_thresholds(q, k, v, "auto") - death_thresholds(q.float(), k.float(), v.float(), "auto").double()
    torch.testing.assert_close(difference, torch.full_like(difference, math.log(2**29)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", ["on", 0, -1.0, True, None, math.nan, math.inf])
def test_bad_values_are_named(bad):
    with pytest.raises(ValueError, match=r"live_keys=.*: expected off, auto, or the F"):
        check_live_keys(bad)


def test_the_eager_kernel_refuses_a_threshold():
    q, k, v = inputs("plain")
    with pytest.raises(ValueError, match=r"live_keys=2\.0 with the eager kernel"):
        eager(q, k, v, live_keys=2.0)
    assert torch.equal(eager(q, k, v, live_keys="auto")[0], eager(q, k, v)[0])
