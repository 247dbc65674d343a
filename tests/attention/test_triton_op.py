"""Where the Triton kernel can be used, what it says where it cannot, and what needs no GPU to be right."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from selmodel.attention.kernels import triton_config, triton_op


def inputs(d=16, dtype=torch.float32, device="cpu"):
    return [torch.zeros(1, 2, 5, d, dtype=dtype, device=device) for _ in range(3)]


@pytest.fixture
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_a_cpu_is_refused_with_a_way_out(not_interpreted):
    assert "CUDA device, not cpu" in triton_op.availability("cpu")
    with pytest.raises(ValueError, match=r"attention\.kernel=triton: .*CUDA device, not cpu.*blockwise"):
        triton_op.selective_attention(*inputs())


def test_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(triton_config.importlib.util, "find_spec", lambda name: None)
    assert triton_op.availability("cuda") == "triton is not installed: pip install triton"


def test_a_missing_or_old_gpu_is_named(monkeypatch, not_interpreted):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_op.availability("cuda") == "no CUDA device is available"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0) if device else (7, 5))
    assert "8.0 or newer (Ampere), and a GPU here has 7.5" in triton_op.availability("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert triton_op.availability("cuda") is None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in triton_op.availability("cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"dtype": torch.float64}, "inputs are float64"), ({"d": 136}, "at most 128 features, and the inputs 136")],
)
def test_unsupported_inputs_are_refused_with_a_way_out(arguments, message):
    with pytest.raises(ValueError, match=rf"attention\.kernel=triton: .*{message}.*attention\.kernel=blockwise"):
        triton_op.selective_attention(*inputs(**arguments))


def test_importing_does_not_import_triton():
    code = "import sys; sys.modules['triton'] = None; import selmodel.attention.kernels.triton_op"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_first_positions():
    ids = torch.tensor([[7, 7, 3, 3, 3, 9], [1, 1, 1, 1, 1, 1]])
    expected = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    assert torch.equal(triton_op.first_positions(ids), expected)


def test_document_ends():
    pytest.importorskip("triton")
    from selmodel.attention.kernels.triton_launch import document_ends

    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    expected = torch.tensor([[2, 2, 5, 5, 5, 6], [6, 6, 6, 6, 6, 6]], dtype=torch.int32)
    assert torch.equal(document_ends(starts), expected)


@pytest.mark.parametrize(("head_dim", "block"), [(1, 16), (16, 16), (17, 32), (64, 64), (80, 128), (128, 128)])
def test_head_block(head_dim, block):
    assert triton_config.head_block(head_dim) == block


def test_precision_follows_the_users_choice():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert triton_config.precision(torch.float32) == "ieee"
        torch.set_float32_matmul_precision("high")
        assert triton_config.precision(torch.float32) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_rows_are_copied_only_if_they_must_be():
    pytest.importorskip("triton")
    from selmodel.attention.kernels.triton_launch import _readable

    x = torch.zeros(2, 5, 3, 32).transpose(1, 2)
    assert _readable(x) is x
    assert _readable(x[..., :16]).data_ptr() == x.data_ptr()
    padded = _readable(x[..., :20] + 1)
    assert padded.shape == (2, 3, 5, 32)
    assert padded[..., 20:].abs().max() == 0
    assert _readable(x.transpose(2, 3)[..., :5].transpose(2, 3)).stride(3) == 1
    far = torch.empty_strided((1, 1, 2**21, 16), (2**31, 2**31, 2**10, 1), device="meta")
    assert _readable(far).stride(2) == 16  # offsets beyond 32 bits
    near = torch.empty_strided((1, 1, 2**21, 16), (2**31, 2**31, 2**9, 1), device="meta")
    assert _readable(near) is near
