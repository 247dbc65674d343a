"""Budgets as numbers, lists and files; what does not fit the model is answered by name."""

from __future__ import annotations

import functools
import json

import pytest

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.budgets import FORMAT, memory_factor, read_budgets
from selmodel.errors import UserError
from selmodel.model import Transformer

SIZES = {"n_layers": 3, "n_heads": 2, "head_dim": 4, "d_model": 8, "context_length": 32}


def make(attention=SelectiveAttention, **options):
    return Transformer(20, attention, **{**SIZES, **options})


@pytest.fixture
def file(tmp_path):
    content = {
        "format": FORMAT,
        "budgets": [2, 5, 32],
        "rule": "selective",
        "n_sinks": 3,
        "architecture": make().options(),
    }

    def write(**changes):
        path = tmp_path / "budgets.json"
        path.write_text(json.dumps({**content, **changes}))
        return path

    return write


@pytest.mark.parametrize(
    ("budgets", "expected"), [(None, 1.0), ([32, 32, 32], 1.0), ([2, 4, 6], 8.0), ([2, 14, 99], 96 / 48)]
)
def test_memory_factor(budgets, expected):
    """n * n_layers / sum of K; a layer never holds more than the context."""
    assert memory_factor(budgets, 32, 3) == expected


@pytest.mark.parametrize(("given", "expected"), [(7, (7, 7, 7)), ([2, 3, 4], (2, 3, 4)), (None, None)])
def test_numbers(given, expected):
    pruning = read_budgets(given, make())
    assert pruning.budgets == expected
    assert pruning.rule == (None if given is None else "selective")
    assert pruning.n_sinks == 4


@pytest.mark.parametrize("as_text", [True, False])
def test_a_file_brings_its_rule(file, as_text):
    path = file()
    pruning = read_budgets(str(path) if as_text else path, make())
    assert pruning.arguments() == {"budgets": [2, 5, 32], "rule": "selective", "n_sinks": 3}


def test_a_file_may_be_used_with_another_rule(file):
    assert read_budgets(file(), make(), rule="oldest", n_sinks=1).arguments() == {
        "budgets": [2, 5, 32],
        "rule": "oldest",
        "n_sinks": 1,
    }


@pytest.mark.parametrize(
    ("given", "model", "words"),
    [
        ([2, 3], {}, ["has 2 entries", "n_layers=3", "expected 3"]),
        (1, {}, ["budgets=1", "at least 2"]),
        ([4, 4, 2.5], {}, ["budgets[2]=2.5", "integer of at least 2"]),
        (4, {"attention": StandardAttention}, ["standard attention", "rule=oldest"]),
        ("nowhere.json", {}, ["nowhere.json", "No such file", "suite=budget_search"]),
    ],
)
def test_what_does_not_fit_is_named(given, model, words):
    with pytest.raises(UserError) as error:
        read_budgets(given, make(**model))
    for word in words:
        assert word in str(error.value)


def test_a_file_of_another_architecture_names_every_difference(file):
    other = make(functools.partial(SelectiveAttention, selection_head=1), n_layers=4)
    with pytest.raises(UserError) as error:
        read_budgets(file(), other)
    for words in (
        "n_layers: 3 in the file, 4 here",
        "attention.selection_head: 0 in the file, 1 here",
        "budgets=[2,5,32]",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "no file of budgets"),
        ('{"budgets": [1]}', "no file of budgets"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_damaged_files(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words):
        read_budgets(path, make())


@pytest.mark.parametrize("changes", [{"budgets": None}, {"rule": 3}, {"n_sinks": "x"}])
def test_a_file_that_lacks_a_part(file, changes):
    with pytest.raises(UserError, match="lacks budgets, rule or n_sinks"):
        read_budgets(file(**changes), make())


def test_budgets_in_a_file_are_checked_as_typed_ones(file):
    with pytest.raises(UserError, match=r"budgets\[1\]=1"):
        read_budgets(file(budgets=[2, 1, 2]), make())
