"""Choosing a kernel, and the checks that all kernels make."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from selmodel.attention import kernels
from selmodel.attention.kernels import KERNELS, resolve_kernel, selective_attention, triton_op
from selmodel.errors import UserError


@pytest.fixture(autouse=True)
def choose_anew():
    """What is available is changed by tests, and a choice is kept."""
    kernels._choose.cache_clear()
    kernels.announce.cache_clear()
    yield
    kernels._choose.cache_clear()
    kernels.announce.cache_clear()


def test_auto_resolves_once_and_says_what_and_why(caplog):
    kernel = resolve_kernel("auto", "cpu")
    assert resolve_kernel("auto", torch.device("cpu")) is kernel
    assert (kernel.name, kernel.function) == ("blockwise", KERNELS["blockwise"])
    with caplog.at_level(logging.INFO, logger="selmodel"):
        kernels.announce(kernel, 30.0)
        kernels.announce(kernel, 30.0)
    assert caplog.messages == ["selective attention: blockwise (the fastest on cpu), live keys 30.0"]


@pytest.mark.parametrize(
    ("missing", "inputs", "name", "reason"),
    [
        (None, {}, "triton", "fused, for CUDA devices"),
        (None, {"dtype": torch.bfloat16, "head_dim": 128}, "triton", "fused"),
        (None, {"dtype": torch.float64, "head_dim": 64}, "blockwise", "without the fused triton kernel: .*float64"),
        (None, {"dtype": torch.bfloat16, "head_dim": 256}, "blockwise", "without the fused triton kernel: .*256"),
        ("triton is not installed", {}, "blockwise", "without the fused triton kernel: triton is not installed"),
    ],
)
def test_auto_on_cuda(monkeypatch, missing, inputs, name, reason):
    monkeypatch.setattr(triton_op, "availability", lambda device_type: missing)
    monkeypatch.setattr(kernels, "_disagreement", lambda: None)
    kernel = resolve_kernel("auto", "cuda:1", **inputs)
    assert kernel.name == name
    assert re.search(reason, kernel.reason)


def test_fused_kernels_that_fail_on_this_gpu_are_not_chosen_unasked(monkeypatch):
    monkeypatch.setattr(triton_op, "availability", lambda device_type: None)
    monkeypatch.setattr(kernels, "_disagreement", lambda: "here its dq differs from that of another kernel by 40%")
    kernel = resolve_kernel("auto", "cuda")
    assert kernel.name == "blockwise"
    assert kernel.reason.endswith(
        "without the fused triton kernel: here its dq differs from that of another kernel by 40%"
    )
    assert resolve_kernel("triton", "cuda").name == "triton"


@pytest.mark.parametrize("fault", ["none", "wrong gradient", "NaN", "raises"])
def test_what_the_fused_kernels_are_checked_for(monkeypatch, fault):
    """With the blockwise kernel in the place of the fused ones."""

    def fused(q, k, v, live_keys):
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        out, memory = KERNELS["blockwise"](q, k, v, live_keys=live_keys)
        if fault == "wrong gradient" and live_keys == "auto":
            out = out.detach() + 0.9 * (out - out.detach())
        return (out * float("nan") if fault == "NaN" else out), memory

    monkeypatch.setattr(triton_op, "selective_attention", fused)
    found = triton_op.disagreement(KERNELS["blockwise"], "cpu")
    expected = {
        "none": None,
        "wrong gradient": "here its dq differs from that of another kernel by 10%",
        "NaN": "here its out differs from that of another kernel by nan%",
        "raises": "it fails here: RuntimeError: out of resource: shared memory",
    }[fault]
    assert found == expected


def test_an_impossible_choice_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(triton_op, "availability", lambda device_type: "no CUDA device is available")
    with pytest.raises(
        UserError, match=r"attention\.kernel=triton: no CUDA device is available; choose attention\.kernel=auto"
    ):
        resolve_kernel("triton", "cpu")
    monkeypatch.setattr(triton_op, "availability", lambda device_type: None)
    assert resolve_kernel("triton", "cpu").name == "triton"  # it will be moved
    with pytest.raises(UserError, match=r"attention\.kernel=triton: .*192"):
        resolve_kernel("triton", "cpu", head_dim=192)


@pytest.mark.parametrize("name", ["blockwise", "eager"])
def test_each_kernel_can_be_asked_for(name):
    kernel = resolve_kernel(name, "cpu")
    assert (kernel.name, kernel.function) == (name, KERNELS[name])
    assert "attention.kernel" in kernel.reason


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(UserError, match=r"attention\.kernel=eagre: .*auto, eager"):
        resolve_kernel("eagre", "cpu")


def test_selective_attention_dispatches(random_qkv):
    q, k, v = random_qkv()
    out, memory = selective_attention(q, k, v, selection_head=1, memory_tau=2.0, kernel="eager")
    expected, expected_memory = KERNELS["eager"](q, k, v, selection_head=1, memory_tau=2.0)
    assert torch.equal(out, expected)
    assert torch.equal(memory, expected_memory)


def inputs(q=(2, 4, 5, 8), k=(2, 2, 5, 8), v=None, dtypes=(torch.float32,) * 3, **options):
    shapes = (q, k, k if v is None else v)
    return [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)], options


ids = torch.zeros(2, 5, dtype=torch.int32)


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (inputs(q=(4, 5, 8)), r"q has shape \[4, 5, 8\]: expected four dimensions"),
        (inputs(v=(2, 2, 5, 4)), r"k .* and v .*equal shapes"),
        (inputs(k=(3, 2, 5, 8)), "equal batch, length and head size"),
        (inputs(k=(2, 2, 6, 8)), "equal batch, length and head size"),
        (inputs(k=(2, 2, 5, 4)), "equal batch, length and head size"),
        (inputs(k=(2, 3, 5, 8)), "4 query heads and 3 key/value heads"),
        (inputs(k=(2, 0, 5, 8)), "4 query heads and 0 key/value heads"),
        (inputs(q=(2, 4, 0, 8), k=(2, 2, 0, 8)), "at least one position"),
        (inputs(selection_head=4), r"selection_head=4 with 4 heads: expected one of 0\.\.3"),
        (inputs(selection_head=-1), r"selection_head=-1 with 4 heads: expected one of 0\.\.3"),
        (inputs(dtypes=(torch.float32, torch.float32, torch.bfloat16)), "types .*bfloat16"),
        (inputs(dtypes=(torch.int32,) * 3), "types torch.int32"),
        (inputs(document_ids=ids[:, :4]), r"document_ids has shape \[2, 4\]: expected \[2, 5\]"),
        (inputs(document_ids=ids[0]), r"document_ids has shape \[5\]"),
        (inputs(document_ids=ids.float()), "document_ids has type torch.float32"),
        (inputs(document_ids=ids.to("meta")), "document_ids is on meta"),
        (inputs(memory_tau=0.0), r"memory_tau=0\.0: expected a number above 0"),
        (inputs(memory_tau=float("nan")), "memory_tau=nan"),
    ],
)
def test_bad_inputs_name_the_argument(name, call, message):
    tensors, options = call
    with pytest.raises(ValueError, match=message):
        KERNELS[name](*tensors, **options)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_inputs_of_two_devices_are_refused(name):
    (q, k, v), _ = inputs()
    with pytest.raises(ValueError, match="q, k, v are on cpu, meta, cpu: expected one device"):
        KERNELS[name](q, k.to("meta"), v)
