"""suite=analysis: positions, calibration and kinds of tokens by hand; the command on both kinds of attention."""

from __future__ import annotations

import csv
import json

import hydra
import pytest
import torch

from selmodel.cli import CONFIGS
from selmodel.config import register_resolvers
from selmodel.errors import UserError
from selmodel.evaluation.analysis import KINDS, Calibration, MaskedByKind, PositionLoss, token_kinds
from selmodel.evaluation.run import evaluate
from selmodel.training.run import train
from tests.conftest import TINY


def test_positions_are_summed_in_ranges_that_double():
    losses = PositionLoss(7)
    losses.update(torch.arange(7.0).expand(2, 7))
    losses.update(torch.full((1, 7), 10.0))
    found = {row.name: (row.value, row.n) for row in losses.rows()}
    # positions 1, 2, 3-4, 5-7 of two rows 0..6 and one of 10s
    assert found == {
        "1": (10 / 3, 3), "2": (12 / 3, 3), "3-4": (30 / 6, 6), "5-7": (60 / 9, 9), "all": (112 / 21, 21),
    }  # fmt: skip


def test_calibration_by_hand():
    """Three places: sure and right, sure and wrong, unsure and right."""
    probabilities = torch.tensor([[0.96, 0.02, 0.02], [0.02, 0.96, 0.02], [0.55, 0.25, 0.20]])
    hits = Calibration()
    hits.update(probabilities.log()[None], torch.tensor([[0, 2, 0]]))
    found = {(row.name, row.figure): (row.value, row.n) for row in hits.rows()}
    assert found[("0.9-1.0", "confidence")] == (pytest.approx(0.96), 2)
    assert found[("0.9-1.0", "accuracy")] == (0.5, 2)
    assert found[("0.5-0.6", "confidence")] == (pytest.approx(0.55), 1)
    assert found[("0.5-0.6", "accuracy")] == (1.0, 1)
    assert found[("all", "accuracy")] == (pytest.approx(2 / 3), 3)
    assert found[("all", "ece")] == (pytest.approx((2 * 0.46 + 0.45) / 3, rel=1e-5), 3)
    certain = Calibration()
    certain.update(torch.tensor([[[100.0, 0.0]]]), torch.tensor([[0]]))  # a probability of exactly 1 has a bin
    assert [row.name for row in certain.rows()][:1] == ["0.9-1.0"]


def test_kinds_of_tokens():
    labels = [
        "⟨BOS⟩",
        "The",
        " fox",
        " saw",
        " 12",
        "th",
        ",",
        " the",
        " fox",
        ".\n",
        "\n",
        "fo",
        "x",
        " ",
        "⟨E2⟩",
        "⟨EOS⟩",
        "x",
        "…",
    ]
    ids = [1, 5, 6, 7, 8, 9, 10, 11, 6, 12, 13, 14, 15, 16, 17, 2, 15, 18]
    expected = [
        "beginning of a word", "beginning of a word", "beginning of a word", "number", "inside of a word",
        "punctuation", "beginning of a word", "repeated piece of a word", "punctuation", "white space",
        "beginning of a word", "inside of a word", "white space", "other", "end of a document",
        "repeated piece of a word", "punctuation",
    ]  # fmt: skip
    found = token_kinds(labels, ids)
    assert found[0] == -1
    assert [KINDS[kind] for kind in found[1:]] == expected


def test_masked_shares_are_those_counted_one_by_one():
    generator = torch.Generator().manual_seed(0)
    n, layers = 9, 2
    scores = [torch.rand(3, n, n, generator=generator).mul(0.8).tril(-1) for _ in range(layers)]
    for S in scores:
        S[:, :, 0] = 0
    kinds = torch.randint(0, 3, (3, n), generator=generator)
    kinds[:, 0] = -1
    counted = MaskedByKind(layers)
    counted.update([S[:2] for S in scores], kinds[:2])
    counted.update([S[2:] for S in scores], kinds[2:])
    found = {(row.name, row.layer): (row.value, row.n) for row in counted.rows()}
    every = []
    for layer in range(layers):
        for kind in range(3):
            pairs = [
                scores[layer][b, :i, j].sum().item() > 1.0
                for b in range(3)
                for j in range(1, n)
                if kinds[b, j] == kind
                for i in range(j + 2, n)
            ]
            assert found[(KINDS[kind], layer)] == (pytest.approx(sum(pairs) / len(pairs)), len(pairs))
            every += pairs
    assert found[("all", None)] == (pytest.approx(sum(every) / len(every)), len(every) // layers)
    assert (KINDS[5], None) not in found  # there was none of that kind


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, cache_dir):
    register_resolvers()
    root = tmp_path_factory.mktemp("analysis-runs")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for kind in ("selective", "standard"):
            options = [*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"runs_root={root}", "sample=null"]
            options += [f"run_dir={root / kind}", f"attention={kind}", "data.document_mask=true"]
            train(hydra.compose("train", options))
    return {kind: root / kind for kind in ("selective", "standard")}


@pytest.fixture
def command(runs, cache_dir):
    def command(run, *overrides):
        options = [f"checkpoint={runs[run]}", f"cache_dir={cache_dir}", "trainer=cpu", "suite=analysis"]
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return evaluate(hydra.compose("evaluate", [*options, *overrides]))

    return command


@pytest.mark.parametrize("run", ["selective", "standard"])
def test_the_losses_are_those_of_the_validation(command, runs, run, caplog):
    """Over the same sequences, as the run has them; documents are kept apart in both."""
    with caplog.at_level("INFO"):
        rows = command(run, "data.validation_sequences=10")
    results = json.loads((runs[run] / "results.json").read_text())["validation"]
    found = {(row.part, row.name): row for row in rows if row.figure == "loss"}
    assert found[("loss by position", "all")].value == pytest.approx(results["loss"], rel=1e-5)
    by_position = results["loss_by_position"]
    assert found[("loss by position", "5-8")].value == pytest.approx(sum(by_position[4:8]) / 4, rel=1e-5)
    assert any(row.part == "masked" for row in rows) == (run == "selective")
    assert "expected calibration error" in caplog.text
    (path,) = runs[run].glob("analysis-*.json")
    assert [row["value"] for row in json.loads(path.read_text())["rows"]] == [row.value for row in rows]
    with path.with_suffix(".csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["value"]) for row in table] == [row.value for row in rows]


def test_the_batch_changes_nothing(command):
    whole = command("selective", "data.validation_sequences=6", "data.validation_batch_size=6")
    parts = command("selective", "data.validation_sequences=6", "data.validation_batch_size=4")
    assert [row.n for row in whole] == [row.n for row in parts]
    assert [row.value for row in whole] == pytest.approx([row.value for row in parts], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "options",
    [["suite=analysis", "checkpoint=RUN"], ["suite=hellaswag", "checkpoint=RUN"], ["checkpoint=hf:x", "like=RUN"]],
)
def test_a_run_on_a_task_is_refused_where_text_is_meant(options, tmp_path, cache_dir, monkeypatch):
    from selmodel.evaluation import foreign

    monkeypatch.setattr(foreign, "load_subject", lambda cfg: None)
    if "suite=hellaswag" in options:
        pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        task = [
            "data=parity", "model.depth=1", "model.d_model=16", "model.head_dim=8", "model.context_length=64",
            "data.max_length=8", "data.lengths=[8]", "data.batch_size=4", "trainer=cpu", "trainer.max_steps=1",
            f"run_dir={tmp_path / 'run'}", f"runs_root={tmp_path}", f"cache_dir={cache_dir}", "sample=null",
        ]  # fmt: skip
        train(hydra.compose("train", task))
        options = [option.replace("RUN", str(tmp_path / "run")) for option in options]
        cfg = hydra.compose("evaluate", [*options, f"cache_dir={cache_dir}", "trainer=cpu"])
    with pytest.raises(UserError, match=r"is for runs on text; for .*last\.ckpt, on a synthetic task, suite=task_acc"):
        evaluate(cfg)
