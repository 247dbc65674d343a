"""Reports from files on disk: their figures by hand, the same bytes each time, and what is not there yet."""

from __future__ import annotations

import csv
import itertools
import json
import math

import pytest

from selmodel.errors import UserError
from selmodel.report.curves import bin_edges, loss_by_position, training_curves
from selmodel.report.run import REPORTS, write_all, write_report
from selmodel.report.runs import read_sweep
from selmodel.report.tables import spread, to_csv, to_lines, to_markdown
from tests.report.runs_on_disk import heads_sweep, make_run


def report(name, sweep):
    return REPORTS[name](read_sweep(sweep)[0])


def texts(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_perplexity_vs_heads_by_hand(tmp_path):
    rows = report("perplexity_vs_heads", heads_sweep(tmp_path)).rows
    assert [row["heads"] for row in rows] == [1, 2, 4]
    assert rows[0]["standard loss"] == "4.0500 ±0.0500"
    assert rows[0]["selective loss"] == "3.0500"
    # 3.05 is what two standard heads have in the mean; 3.05 against 4, 3, 2 and against 4.1, 3.1, 2.1
    assert rows[0]["equivalent standard heads"] == "2"
    assert rows[0]["range over seeds"] == f"{2**0.95:.2g} to {2**1.05:.2g}"
    assert rows[0]["attention parameter ratio"] == "2.00"
    assert rows[1]["equivalent standard heads"] == ">4"
    assert rows[1]["attention parameter ratio"] == ">2.00"
    assert rows[2]["selective loss"] == rows[2]["equivalent standard heads"] == "-"


def test_files_are_written_once_into_the_sweep_and_are_the_same_each_time(tmp_path, caplog):
    sweep = heads_sweep(tmp_path / "sweep")
    before = sorted(path for path in sweep.rglob("*"))
    with caplog.at_level("INFO", logger="selmodel"):
        files = write_report("perplexity_vs_heads", sweep)
    assert [path.name for path in files] == [f"perplexity_vs_heads.{suffix}" for suffix in ("csv", "md", "png", "svg")]
    assert {path.parent for path in files} == {sweep / "report"}
    assert sorted(path for path in sweep.rglob("*") if "report" not in path.parts) == before
    first = {path: path.read_bytes() for path in files}
    write_report("perplexity_vs_heads", sweep)
    assert {path: path.read_bytes() for path in files} == first
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["attention"] for row in rows} == {"standard", "selective"}
    assert float(rows[0]["loss"]) == read_sweep(sweep)[0][0].loss
    assert "seeds 0, 1" in first[files[1]].decode()
    svg = first[files[3]].decode()
    for words in ("validation perplexity", "heads of 16 features", "Trained on 5,120 tokens", "tokenizer 70ce70ce"):
        assert words in svg
    assert "equivalent standard heads" in texts(caplog)


def test_mixed_protocols_are_refused_and_nothing_is_written(tmp_path):
    sweep = heads_sweep(tmp_path)
    make_run(sweep, "other", heads=8, tokenizer_hash="x")
    with pytest.raises(UserError, match=r"protocol\.tokenizer_hash: .* in other"):
        write_report("perplexity_vs_heads", sweep)
    assert not (sweep / "report").exists()


def test_one_kind_alone_is_reported_with_what_is_missing(tmp_path, caplog):
    make_run(tmp_path, "a", heads=1)
    make_run(tmp_path, "b", heads=2, loss=None)
    with caplog.at_level("INFO", logger="selmodel"):
        assert write_report("perplexity_vs_heads", tmp_path)
    assert "no finished run has selective attention" in texts(caplog)
    assert "b: has diverged" in texts(caplog)
    assert "one seed: differences are not told from chance" in texts(caplog)


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_finished_is_no_traceback(tmp_path, name, caplog):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("trainer: {max_steps: 10}\n")
    with caplog.at_level("INFO", logger="selmodel"):
        assert write_report(name, tmp_path) == []
    assert "nothing to report yet: no run has finished" in texts(caplog)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("name", REPORTS)
def test_an_empty_folder_is_named(tmp_path, name):
    with pytest.raises(UserError, match="holds neither"):
        write_report(name, tmp_path)


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_takes_a_single_run(tmp_path, name):
    make_run(tmp_path, "a", attention="selective")
    write_report(name, tmp_path)


def test_context_size_compares_the_same_text(tmp_path):
    for context, loss in ((4, 3.0), (8, 2.5)):
        make_run(tmp_path, f"standard-{context}", context=context, loss=loss)
        make_run(tmp_path, f"selective-{context}", context=context, loss=loss - 0.25, attention="selective")
    rows = report("context_size", tmp_path).rows
    assert [row["context_length"] for row in rows] == ["4", "8"]
    assert rows[1]["selective perplexity"] == f"{math.exp(2.25):.2f}"
    make_run(tmp_path, "more", context=16, loss=2.0, validation_tokens=128)
    with pytest.raises(UserError, match=r"protocol\.validation_tokens"):
        report("context_size", tmp_path)


def test_memory_loss_is_of_selective_runs(tmp_path):
    make_run(tmp_path, "standard")
    for i, eps in enumerate((None, 0.1, 1.0)):
        make_run(tmp_path, f"eps-{i}", attention="selective", eps=eps, loss=2.0 + i)
    rows = report("memory_loss", tmp_path).rows
    assert [row["eps"] for row in rows] == ["0", "0.1", "1"]
    assert [row["loss"] for row in rows] == ["2.0000", "3.0000", "4.0000"]


def test_the_memory_table(tmp_path):
    run = make_run(tmp_path, "a", attention="selective")
    content = {
        "budgets": [2, 4], "memory_factor": 8 / 3, "perplexity": 21.0, "rule": "selective", "context_length": 8,
        "search": {"target": "runs/standard/last.ckpt", "increase": None},
        "unseen": {"unpruned_perplexity": 20.0, "target_perplexity": 21.5},
    }  # fmt: skip
    (run / "budgets-last.json").write_text(json.dumps(content))
    (run / "budgets-half.json").write_text(json.dumps(content)[:40])
    found = report("memory", tmp_path)
    assert found.rows == [
        {
            "run": "a", "context": 8, "target": "standard", "keys by layer": "2 4", "factor": "2.7",
            "unseen perplexity": "21.00", "unpruned": "20.00", "target perplexity": "21.50",
        }
    ]  # fmt: skip
    assert found.table[0]["memory_factor"] == 8 / 3


def test_no_budgets_yet(tmp_path, caplog):
    make_run(tmp_path, "a", attention="selective")
    with caplog.at_level("INFO", logger="selmodel"):
        assert write_report("memory", tmp_path) == []
    assert "no budgets have been searched yet" in texts(caplog)


def test_task_accuracy_by_hand(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        run = make_run(tmp_path, f"r{seed}", seed=seed, max_length=8)
        one = {"length": 16, "answers": 10, "accuracy": accuracy, "whole": 0.0}
        (run / "accuracy.json").write_text(json.dumps({"accuracy": [one]}))
    found = report("task_accuracy", tmp_path)
    assert found.rows == [{"length": 16, "": "beyond training", "standard": "0.600 ±0.100"}]
    assert [row["seed"] for row in found.table] == [0, 1]


def test_bins_grow_with_the_position():
    assert bin_edges(8) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    edges = bin_edges(256)
    assert (edges[0], edges[-1]) == (0, 256)
    assert all(high > low for low, high in itertools.pairwise(edges))
    late = [edge for edge in edges if edge >= 32]
    assert [round(math.log2(edge) * 4) for edge in late] == list(range(20, 33))


def test_loss_by_position_is_a_mean_over_bins(tmp_path):
    make_run(tmp_path, "a", by_position=[float(i) for i in range(8)])
    make_run(tmp_path, "b", seed=1, by_position=[float(i) + 1 for i in range(7)] + [None])
    rows = loss_by_position(read_sweep(tmp_path)[0]).rows
    assert rows[0] == {"runs": "standard", "positions": "1 to 1", "loss": "0.5000 ±0.5000"}
    assert rows[7]["loss"] == "7.0000"  # the other's is not a number


def test_curves_read_whole_lines_alone(tmp_path):
    run = make_run(tmp_path, "a", curve=((100, 5.0), (200, 4.0)))
    with (run / "validation.csv").open("a") as file:
        file.write("3,nan,300\n4,abc,400\n5,3.")
    found = training_curves(read_sweep(tmp_path)[0])
    assert found.rows == [{"runs": "standard", "tokens": "200", "loss": "4.0000"}]


def test_all_leaves_out_what_does_not_fit(tmp_path, caplog):
    with caplog.at_level("INFO", logger="selmodel"):
        sweep = heads_sweep(tmp_path)
        for run in sweep.iterdir():
            (run / "validation.csv").write_text("step,val/loss,train/tokens\n1,4.0,100\n")
        names = {path.stem for path in write_all(sweep)}
    assert names == {"perplexity_vs_heads", "loss_by_position", "training_curves"}


def test_tables():
    rows = [{"name": "a", "value": "1.5"}, {"name": "bc", "value": ">10"}]
    assert to_markdown(rows) == "| name | value |\n|---|---:|\n| a | 1.5 |\n| bc | >10 |\n"
    assert to_lines(rows) == ["name  value", "a       1.5", "bc      >10"]
    assert to_csv([{"a": 0.1, "b": None, "c": math.nan}]) == b"a,b,c\n0.1,,\n"
    assert spread([1.0, 2.0], 1) == "1.5 ±0.5"
    assert spread([1.0], 2) == "1.00"
    assert to_markdown([]) == ""
