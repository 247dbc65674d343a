"""The attention benchmark: that its contenders compute one function, its table, and its answers to bad options."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
attention = pytest.importorskip("attention")

CPU = torch.device("cpu")


def test_contenders_are_the_definition():
    """x-transformers is optional, and says so; FlexAttention needs a compiler, so it is not called here."""
    found = attention.agreement(
        ["standard", "eager", "x-transformers", "blockwise", "blockwise-live"], torch.float32, CPU
    )
    errors = dict(line.split(" ", 1) for line in found)
    assert list(errors) == ["eager", "x-transformers", "blockwise", "blockwise-live"]
    for name, error in errors.items():
        assert "not installed" in error if error.startswith("- ") else float(error) < 1e-6, name


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    attention.main(
        "--contexts 20 33 --only eager blockwise-live --batch 1 --heads 2 --head-dim 8 --rounds 1 --no-memory "
        f"--device cpu --json {file}".split()
    )
    printed = capsys.readouterr().out
    assert printed.count("context ") == 2
    rows = [line.split() for line in printed.splitlines() if line.startswith(("standard", "eager", "blockwise"))]
    assert [row[0] for row in rows] == ["standard", "eager", "blockwise-live"] * 2
    assert rows[0][1] == rows[0][3] == "1.00"  # the ratio to itself
    results = json.loads(file.read_text())["results"]
    assert [result["context"] for result in results] == [20, 33]
    taken = results[0]["contenders"]
    ratio = taken["eager"]["forward"] / taken["standard"]["forward"]
    assert float(rows[1][1]) == pytest.approx(ratio, abs=0.006)


def test_too_large_logits_are_skipped_and_said(capsys):
    attention.main(
        [
            "--contexts",
            "64",
            "--only",
            "eager",
            "blockwise",
            "--batch",
            "1",
            "--heads",
            "2",
            "--head-dim",
            "8",
            "--rounds",
            "1",
            "--no-memory",
            "--device",
            "cpu",
            "--memory-limit",
            "0.00001",
        ]
    )
    printed = capsys.readouterr().out
    assert "eager, forward: about 0 GiB of logits, more than --memory-limit" in printed
    assert "blockwise, forward" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contexts 0", "--contexts [0]: expected numbers of tokens, 1 or more"),
        ("--batch 0", "--batch 0: expected 1 or more"),
        ("--heads 8 --kv-heads 3", "--kv-heads 3: expected a divisor of --heads 8"),
        ("--json nowhere/a.json", "--json nowhere/a.json: its folder does not exist"),
        ("--only blokwise", "invalid choice: 'blokwise'"),
    ],
)
def test_bad_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        attention.main(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err
