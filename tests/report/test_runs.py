"""Reading finished runs, and refusing to compare what was measured differently."""

from __future__ import annotations

import json
import math

import pytest

from selmodel.errors import UserError
from selmodel.report.runs import check_comparable, git_commits, read_run, read_sweep
from selmodel.sweep.grid import Job, write_manifest
from tests.report.runs_on_disk import heads_sweep, make_run


def test_a_run_is_read(tmp_path):
    run = read_run(make_run(tmp_path, "a", attention="selective", loss=2.0, heads=4, eps=0.1, seed=3))
    assert (run.name, run.attention, run.loss, run.seed, run.tokens) == ("a", "selective", 2.0, 3, 5120)
    assert run.perplexity == pytest.approx(math.e**2)
    assert run.settings["model.n_heads"] == 4
    assert run.settings["attention.memory_loss.eps"] == 0.1
    assert run.settings["optim.lr"] == 0.1
    assert run.parameters["attention"] == 800


def test_a_standard_run_has_no_memory_loss(tmp_path):
    assert read_run(make_run(tmp_path, "a")).settings["attention.memory_loss.eps"] == 0.0


@pytest.mark.parametrize("name", ["results.json", "config.yaml"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "a: [", "null", '{"step": 10}', "\x00"])
def test_damaged_files_are_no_run_and_no_traceback(tmp_path, name, text):
    run = make_run(tmp_path, "a")
    (run / name).write_text(text)
    assert read_run(run) is None


def test_what_is_missing_is_said_with_its_reason(tmp_path):
    make_run(tmp_path, "good")
    make_run(tmp_path, "diverged", loss=None)
    broken = make_run(tmp_path, "broken")
    content = json.loads((broken / "results.json").read_text())
    del content["architecture"]
    (broken / "results.json").write_text(json.dumps(content))
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "error.txt").write_text("a=1: expected 2\n")
    write_manifest(tmp_path, [Job(name, ()) for name in ("good", "diverged", "broken", "failed", "waiting")])
    runs, missing = read_sweep(tmp_path)
    assert [run.name for run in runs] == ["good"]
    assert missing == [
        "diverged: has diverged",
        "broken: its results.json lacks what a report needs",
        "failed: failed (a=1: expected 2)",
        "waiting: waiting",
    ]


def test_runs_alike_may_stand_beside_each_other(tmp_path):
    runs, _ = read_sweep(heads_sweep(tmp_path))
    check_comparable(runs, ("model.n_heads", "model.n_kv_heads"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tokenizer_hash": "x"}, "protocol.tokenizer_hash: "),
        ({"source": "x"}, "protocol.source: "),
        ({"validation_tokens": 128}, "protocol.validation_tokens: "),
        ({"precision": "bf16-mixed"}, 'protocol.precision: "32-true" in a; "bf16-mixed" in b'),
        ({"context": 4}, "model.context_length: 8 in a; 4 in b"),
        ({"heads": 8}, "model.n_heads: 4 in a; 8 in b"),
    ],
)
def test_what_differs_is_named_with_the_runs(tmp_path, changed, named):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", **changed)
    runs, _ = read_sweep(tmp_path)
    with pytest.raises(UserError) as error:
        check_comparable(runs, ())
    assert named in str(error.value)


def test_all_differences_are_named_at_once(tmp_path):
    make_run(tmp_path, "a")
    for name in "bcdef":
        make_run(tmp_path, name, source="x", precision="y")
    runs, _ = read_sweep(tmp_path)
    with pytest.raises(UserError) as error:
        check_comparable(runs, ())
    assert "protocol.source" in str(error.value)
    assert "protocol.precision" in str(error.value)
    assert "in b, c, d and 2 more" in str(error.value)


def test_options_of_attention_are_compared_within_a_kind(tmp_path):
    make_run(tmp_path, "standard")
    make_run(tmp_path, "selective", attention="selective")
    runs, _ = read_sweep(tmp_path)
    check_comparable(runs, ())
    make_run(tmp_path, "other", attention="selective", eps=0.5)
    runs, _ = read_sweep(tmp_path)
    with pytest.raises(UserError, match=r"attention\.memory_loss\.eps: 0\.5 in other; 0\.0 in selective"):
        check_comparable(runs, ())


def test_commits_are_counted_not_compared(tmp_path):
    for i, commit in enumerate(("a" * 40, "b" * 40 + "-dirty", "b" * 40 + "-dirty")):
        make_run(tmp_path, str(i), commit=commit)
    runs, _ = read_sweep(tmp_path)
    check_comparable(runs, ())
    assert git_commits(runs) == ["bbbbbbbbbb-dirty", "aaaaaaaaaa"]
