"""Rotary positions: angles by hand, invariance, and exactness under bfloat16."""

from __future__ import annotations

import math

import torch

from selmodel.attention.rotary import apply_rotary, rotary_tables


def test_by_hand():
    """head_dim 4, base 100: frequencies 1 and 100^(-2/4) = 0.1. At position 3 the angles are 3 and 0.3.

    Feature 0 turns with feature 2 by 3, feature 1 with feature 3 by 0.3.
    """
    x = torch.tensor([1.0, 1.0, 0.0, 2.0]).view(1, 1, 1, 4)
    rotated = apply_rotary(x, rotary_tables(torch.tensor([3]), 4, base=100.0))
    expected = [
        math.cos(3),
        math.cos(0.3) - 2 * math.sin(0.3),
        math.sin(3),
        2 * math.cos(0.3) + math.sin(0.3),
    ]
    torch.testing.assert_close(rotated.flatten(), torch.tensor(expected))


def test_position_zero_is_the_identity():
    x = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(apply_rotary(x, rotary_tables(torch.tensor([0]), 8)), x)


def test_logits_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator, dtype=torch.float64) for _ in range(2))

    def logit(i, j):
        turned = [apply_rotary(x, rotary_tables(torch.tensor([p]), 16)) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert math.isclose(logit(7, 3), logit(104, 100), rel_tol=1e-4)  # float32 angles near 100
    assert not math.isclose(logit(7, 3), logit(7, 4), rel_tol=1e-2)


def test_positions_stay_distinct_under_bfloat16():
    """Tables are float32: 8,192 positions have 8,192 different rows. (bfloat16 integers end at 256.)"""
    tables = rotary_tables(torch.arange(8192), 64)
    assert tables.cos.dtype == tables.sin.dtype == torch.float32
    rows = torch.cat(tables, dim=-1)
    assert len(rows.unique(dim=0)) == 8192


def test_halves_are_rotated_in_float32_and_rounded_once():
    x = torch.randn(1, 1, 600, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rotary_tables(torch.arange(600), 32)
    assert torch.equal(apply_rotary(x, tables), apply_rotary(x.float(), tables).bfloat16())
