"""The Triton kernels compile, ahead of time and without a GPU, to machine code that fits and does not spill.

A part of all that can be chosen; `python tests/attention/triton_aot.py` compiles the rest too.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton_aot import CAPABILITIES, HEAD_DIMS, PRECISIONS, compile_for, launched

from selmodel.attention.kernels import triton_config

pytestmark = pytest.mark.skipif(triton_config.interpreted(), reason="kernels are interpreted, not compiled")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "precision", "heads"),
    [
        (64, torch.bfloat16, "tf32", 4),
        (128, torch.float16, "tf32", 4),
        (64, torch.float32, "ieee", 3),
    ],
)
def test_fits_and_does_not_spill(capability, head_dim, dtype, precision, heads):
    variants = launched(head_dim, dtype, precision, capability, heads)
    kernels = {variant.kernel for variant in variants}
    assert len(kernels) == 10  # every kernel of triton_launch
    faults = [fault for v in variants for fault in compile_for(v, capability).faults(v, capability)]
    assert faults == []


def test_every_variant_is_seen():
    """Live keys on and off, deterministic or not; one or two heads in a program of the forward pass."""
    variants = launched(64, torch.bfloat16, "tf32", (8, 0), heads=4)
    variants += launched(64, torch.bfloat16, "tf32", (8, 0), heads=3)
    seen = {(v.kernel, *(dict(v.constants).get(x) for x in ("LIVE", "STORE", "HEADS"))) for v in variants}
    for live in (False, True):
        assert {("forward_kernel", live, None, heads) for heads in (1, 2)} <= seen
        assert {("selection_gradient_kernel", live, store, None) for store in (False, True)} <= seen
        assert ("key_gradient_kernel", live, None, None) in seen


def test_the_table_has_every_kind_of_input():
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dtype, _ in PRECISIONS:
            for head_dim in (1, 8, 24, *HEAD_DIMS):
                tiles = triton_config.choose_tiles(head_dim, dtype, capability)
                assert tiles.queries % tiles.line == 0
                assert tiles.forward.blocks
                assert tiles.query_gradient.blocks
    # What the lines and blocks are must not depend on flags that may change between forward and backward pass.
    assert triton_config.choose_tiles(64, torch.float32, (8, 0)).line == 16
