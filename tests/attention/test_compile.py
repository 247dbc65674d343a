"""The selective layer under torch.compile, activation checkpointing and autocast, against float64."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch

from selmodel.attention import SelectiveAttention
from selmodel.model import Transformer

N = 150  # three blocks of queries

BACKENDS = [
    "aot_eager",  # traces and differentiates, but generates no code: needs no compiler
    pytest.param(
        "inductor",
        marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
    ),
]


def make(dtype=torch.float32, **options) -> Transformer:
    attention = functools.partial(SelectiveAttention, memory_loss={"eps": 0.1}, **options.pop("attention", {}))
    model = Transformer(
        50, attention, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_model=16, context_length=N, **options
    )
    model.init_weights(0)
    for parameter in model.parameters():  # logits of a size at which selection shows
        parameter.data.mul_(3)
    return model.to(dtype)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, N), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(model, parameters):
    output = model(tokens())
    loss = output.logits.square().mean() + output.memory.sum() / N
    return loss.detach(), torch.autograd.grad(loss, list(parameters))


def assert_close(actual, expected, tolerance):
    assert abs(actual[0].double() - expected[0]) < tolerance * abs(expected[0])
    for x, y in zip(actual[1], expected[1], strict=True):
        assert (x.double() - y).norm() < tolerance * y.norm()


@pytest.mark.parametrize("checkpoint_activations", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_and_plain_agree_with_float64(checkpoint_activations, backend):
    """fullgraph: without a single graph break, though the loop over blocks depends on the data."""
    torch.compiler.reset()
    options = {"checkpoint_activations": checkpoint_activations}
    exact_model = make(torch.float64, attention={"kernel": "eager"})
    exact = loss_and_gradients(exact_model, exact_model.parameters())
    model = make(**options)
    plain = loss_and_gradients(model, model.parameters())
    compiled = loss_and_gradients(torch.compile(model, backend=backend, fullgraph=True), model.parameters())
    # Rounding of float32 through two layers and their gradients; a wrong term would show in the first digits.
    assert_close(plain, exact, 2e-5)
    assert_close(compiled, exact, 2e-5)


def test_checkpointing_changes_no_bit():
    plain, again = (make(checkpoint_activations=x) for x in (False, True))
    first, second = (loss_and_gradients(model, model.parameters()) for model in (plain, again))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(x, y) for x, y in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast(compiled):
    """bfloat16 products outside attention, float32 for F inside: close to float64 as far as bfloat16 goes."""
    torch.compiler.reset()
    model, exact_model = make(), make(torch.float64, attention={"kernel": "eager"})
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(tokens())
        loss = output.logits.float().square().mean()
    loss.backward()
    exact = exact_model(tokens()).logits
    assert (output.logits.double() - exact).norm() < 0.05 * exact.norm()
    assert output.memory.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
