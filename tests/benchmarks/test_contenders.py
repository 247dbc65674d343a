"""The contenders of the attention benchmark compute one function, forward and backward."""

from __future__ import annotations

import shutil

import contenders
import pytest
import torch
from measuring import Skipped

from selmodel.attention import selection

CPU = torch.device("cpu")
# Float32 against float64: rounding of 32 products and of F, a sum of up to 100 votes.
TOLERANCE = 1e-6


@pytest.mark.parametrize("name", ["eager", "x-transformers", "blockwise", "blockwise-live"])
def test_they_are_the_definition(name):
    errors = contenders.disagreement(name, torch.float32, CPU, n=100)
    if name == "x-transformers" and isinstance(errors["forward"], Skipped):
        pytest.skip(str(errors["forward"]))
    assert list(errors) == ["forward", "forward_backward"]
    assert max(errors.values()) < TOLERANCE


def test_standard_attention_is_another_function():
    """So small an error is not for want of selection in the inputs."""
    assert contenders.disagreement("standard", torch.float32, CPU)["forward"] > 0.1


def test_eager_is_the_definition_written_out():
    q, k, v, _ = (x.double() for x in contenders.random_tensors(1, 2, 2, 9, 4, torch.float32, CPU))
    expected = torch.zeros_like(q)
    logits = q @ k.mT / 2
    for i in range(9):
        F = torch.tensor([sum(max(0.0, logits[0, 0, p, j].item()) for p in range(j + 1, i)) for j in range(i + 1)])
        F[0] = 0
        weights = (logits[0, :, i, : i + 1] - F).softmax(-1)
        expected[0, :, i] = torch.einsum("hj,hjd->hd", weights, v[0, :, : i + 1])
    torch.testing.assert_close(contenders.CONTENDERS["eager"](q, k, v), expected)


@pytest.mark.parametrize("name", ["x-transformers", "blockwise"])
def test_heads_of_a_group_share_the_same_keys_in_all(name):
    q, k, v, grad = contenders.random_tensors(1, 4, 2, 40, 8, torch.float32, CPU)
    try:
        out = contenders.forward(contenders.CONTENDERS[name], q, k, v)
    except Skipped as reason:
        pytest.skip(str(reason))
    exact = contenders.CONTENDERS["eager"](*(x.double() for x in (q, k, v)))
    assert (out - exact).norm() / exact.norm() < TOLERANCE


def test_standard_takes_grouped_heads():
    q, k, v, _ = contenders.random_tensors(1, 4, 2, 12, 8, torch.float32, CPU)
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    weights = logits.masked_fill(~selection.attended_pairs(12, 12), -torch.inf).softmax(-1)
    torch.testing.assert_close(contenders.standard(q, k, v), weights @ v.repeat_interleave(2, 1))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention compiles C++ on the CPU")
def test_flex_is_the_definition_forward_and_says_why_not_backward():
    errors = contenders.disagreement("flex", torch.float32, CPU, n=100)
    assert errors["forward"] < TOLERANCE
    assert "no backward pass on the CPU" in str(errors["forward_backward"])


def test_inputs_lie_in_memory_as_projections_leave_them():
    q, k, v, grad = contenders.random_tensors(2, 4, 2, 7, 8, torch.float32, CPU)
    assert q.shape == grad.shape == (2, 4, 7, 8)
    assert k.shape == v.shape == (2, 2, 7, 8)
    assert q.transpose(1, 2).is_contiguous()
    assert not torch.equal(k, v)


def test_memory_by_the_square_of_the_context():
    """4 numbers of 4 bytes for 2 sequences of 10 x 10 pairs, for 3 heads or one."""
    found = {name: contenders.quadratic_bytes(name, 2, 3, 10, torch.bfloat16) for name in contenders.CONTENDERS}
    assert found["eager"] == found["x-transformers"] == 9600
    assert found["flex"] == 3200
    assert found["standard"] == found["blockwise"] == found["triton-live"] == 0
    assert contenders.quadratic_bytes("eager", 2, 3, 10, torch.float64) == 19200
