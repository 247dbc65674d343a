"""Where a job stands, from files that may be missing, half written or being written."""

from __future__ import annotations

import json
import math

import filelock
import pytest

from selmodel.sweep.grid import Job, write_manifest
from selmodel.sweep.status import duration, job_status, perplexity, status, sweep_status, table

JOB = Job("job", ())


def make_run(directory, *, step=30, max_steps=100, results=None, header=None):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(f"trainer:\n  max_steps: {max_steps}\n")
    columns = header or "step,train/loss,throughput/step_seconds"
    (directory / "train.csv").write_text(f"{columns}\n10,4.5,0.5\n{step},3.25,0.5\n")
    (directory / "validation.csv").write_text(f"step,val/loss\n{step},3.5\n")
    (directory / "last.ckpt").write_bytes(b"")
    if results is not None:
        (directory / "results.json").write_text(results)
    return directory


def test_nothing_there_is_waiting(tmp_path):
    one = job_status(tmp_path / "none", JOB)
    assert (one.state, one.step, one.loss, one.seconds_left) == ("waiting", None, None, None)


def test_a_run_that_has_stopped(tmp_path):
    one = job_status(make_run(tmp_path / "run"), JOB)
    assert (one.state, one.step, one.max_steps) == ("stopped", 30, 100)
    assert (one.loss, one.validation_loss, one.seconds_left) == (3.25, 3.5, 35.0)


def test_a_run_that_is_held_is_running(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "error.txt").write_text("of an earlier start\n")
    with filelock.FileLock(run / ".lock"):
        one = job_status(run, JOB)
        assert (one.state, one.error) == ("running", None)
        assert one.seconds_left == 35.0
    assert job_status(run, JOB).state == "failed"


def test_a_run_that_has_finished(tmp_path):
    results = json.dumps({"step": 100, "validation": {"loss": 3.0}})
    one = job_status(make_run(tmp_path / "run", step=100, results=results), JOB)
    assert (one.state, one.step, one.validation_loss, one.seconds_left) == ("finished", 100, 3.0, None)


def test_results_of_fewer_steps_than_asked_for_are_not_the_end(tmp_path):
    results = json.dumps({"step": 50, "validation": {"loss": 3.0}})
    assert job_status(make_run(tmp_path / "run", step=50, results=results), JOB).state == "stopped"


def test_a_diverged_run_says_so(tmp_path):
    results = json.dumps({"step": 100, "validation": {"loss": None}})
    one = job_status(make_run(tmp_path / "run", step=100, results=results), JOB)
    assert one.state == "finished"
    assert math.isnan(one.validation_loss)
    assert "diverged" in table(tmp_path, [one])[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", '{"step": 1'),
        ("results.json", "[1]"),
        ("config.yaml", "trainer: ["),
        ("config.yaml", ""),
        ("train.csv", "step,tra"),
        ("train.csv", ""),
        ("train.csv", "step,train/loss\n10,4"),
        ("train.csv", "step,train/loss\n10,\x00\n"),
        ("validation.csv", "step,val/loss\n10,abc\n"),
        ("validation.csv", "\xff\xfe"),
    ],
)
def test_half_written_files_are_no_traceback(tmp_path, name, text):
    run = make_run(tmp_path / "run")
    (run / name).write_text(text, encoding="latin-1")
    before = sorted(path.name for path in run.iterdir())
    one = job_status(run, JOB)
    assert one.state == "stopped"
    assert table(tmp_path, [one])
    assert sorted(path.name for path in run.iterdir()) == before  # reading changes nothing


def test_a_half_written_last_line_does_not_count(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "train.csv").open("a") as file:
        file.write("40,3.")
    assert job_status(run, JOB).step == 30


def test_the_table_of_a_sweep(tmp_path, caplog):
    write_manifest(tmp_path, [Job("a", ("x=1",)), Job("b", ("x=2",)), Job("c", ("x=3",))])
    make_run(tmp_path / "a", step=100, results=json.dumps({"step": 100, "validation": {"loss": 3.0}}))
    make_run(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "error.txt").write_text("model.n_heads=0: expected more\nsecond line\n")
    assert [one.state for one in sweep_status(tmp_path)] == ["finished", "stopped", "failed"]
    with caplog.at_level("INFO", logger="selmodel"):
        status(tmp_path)
    lines = [record.message for record in caplog.records]
    assert lines[0].endswith("3 jobs, 1 finished, 1 stopped, 1 failed")
    assert lines[2].split() == ["finished", "100", "of", "100", "3.2500", "3.0000", "20.09", "a"]
    assert lines[3].split() == ["stopped", "30", "of", "100", "3.2500", "3.5000", "33.12", "35s", "b"]
    assert lines[4].split() == ["failed", "-", "-", "-", "-", "c"]
    assert lines[5:] == ["", "c failed:", "  model.n_heads=0: expected more", "  second line"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90000, "1d01h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_perplexities():
    assert perplexity(0.0) == "1.00"
    assert perplexity(20.0) == "4.9e+08"
    assert perplexity(1e4) == "inf"
