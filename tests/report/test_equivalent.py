"""Equivalent heads, worked by hand."""

from __future__ import annotations

import math

import pytest

from selmodel.report.equivalent import equivalent_heads, equivalent_range

CURVE = {1: 4.0, 2: 3.0, 4: 2.0, 8: 1.8}


@pytest.mark.parametrize(
    ("loss", "heads", "text"),
    [
        (3.0, 2.0, "2"),
        (4.0, 1.0, "1"),
        (1.8, 8.0, "8"),
        (2.5, 2**1.5, "2.8"),  # half way between 2 and 4 in the logarithm
        (3.75, 2**0.25, "1.2"),
        (1.9, 2**2.5, "5.7"),
        (1.79, math.inf, ">8"),
        (4.01, 0.0, "<1"),
    ],
)
def test_interpolation_in_the_logarithm(loss, heads, text):
    found = equivalent_heads(CURVE, loss)
    assert found.heads == pytest.approx(heads, rel=1e-12)
    assert str(found) == text


def test_of_several_crossings_the_fewest_heads_count():
    assert equivalent_heads({1: 4.0, 2: 2.0, 4: 3.0, 8: 1.0}, 2.5).heads == pytest.approx(2**0.75)


def test_one_point_gives_sides_alone():
    assert str(equivalent_heads({4: 2.0}, 2.1)) == "<4"
    assert str(equivalent_heads({4: 2.0}, 1.9)) == ">4"
    assert equivalent_heads({4: 2.0}, 2.0).heads == 4


def test_a_flat_stretch_gives_its_beginning():
    assert equivalent_heads({1: 3.0, 2: 2.0, 4: 2.0}, 2.0).heads == 2


def test_the_range_takes_the_seeds_at_their_most_unlike():
    losses = {1: [4.0, 4.2], 2: [3.0, 3.2], 4: [2.0, 2.2]}
    mean, least, most = equivalent_range(losses, [2.5, 2.7])
    assert mean.heads == pytest.approx(2**1.5)  # 2.6 against 4.1, 3.1, 2.1
    assert least.heads == pytest.approx(2**1.3)  # 2.7 against 4, 3, 2
    assert most.heads == pytest.approx(2**1.7)  # 2.5 against 4.2, 3.2, 2.2
