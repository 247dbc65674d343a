"""What reaches wandb, read back from its own files, and that training does not depend on it."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import wandb

from selmodel.config import plain
from selmodel.errors import UserError
from selmodel.training import wandb_metrics, wandb_run
from selmodel.training.interrupt import Interrupted
from selmodel.training.loggers import CSVMetrics
from selmodel.training.run import _finish_wandb, train
from selmodel.training.wandb_metrics import WandbMetrics
from tests.wandb_records import starts


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def table(path):
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def logged(start):
    """Rows as the CSV files would hold them: without wandb's own columns."""
    rows = []
    for row in start.rows:
        figures = {key: value for key, value in row.items() if not key.startswith("_")}
        rows.append({"step": float(figures.pop("trainer/step"))} | {key: float(v) for key, v in figures.items()})
    return rows


def in_any_order(rows):
    return sorted(sorted(row.items()) for row in rows)


def in_files(run, *names):
    return in_any_order(row for name in names for row in table(run / f"{name}.csv"))


class StopAt:
    """Ends training after a step as a kill would, without a checkpoint."""

    def __init__(self, monkeypatch, step):
        plain_step = wandb_metrics.WandbMetrics.log_metrics

        def log_metrics(logger, metrics, step_now=None):
            plain_step(logger, metrics, step_now)
            if step_now == step and "train/loss" in metrics:
                raise RuntimeError("killed")

        monkeypatch.setattr(wandb_metrics.WandbMetrics, "log_metrics", log_metrics)


def test_every_row_of_the_files_reaches_wandb_with_its_step(tmp_path, tiny):
    run = tmp_path / "sweep" / "job"
    run.parent.mkdir()
    (run.parent / "sweep.json").write_text("{}")
    cfg = tiny(run, "logger=wandb", "logger.wandb.tags=[mine]", "trainer.max_steps=6")
    train(cfg)
    (start,) = starts(run)
    assert in_any_order(logged(start)) == in_files(run, "train", "validation")
    assert [row["_step"] for row in start.rows] == list(range(len(start.rows)))
    assert start.x_axes == {"*": "trainer/step"}
    assert start.run.run_id == (run / "wandb_id").read_text()
    assert (start.run.display_name, start.run.run_group, list(start.run.tags)) == ("job", "sweep", ["mine"])
    assert start.exit_code == 0

    config = plain(cfg)
    for group in ("attention", "model", "data", "tokenizer", "optim", "trainer", "logger", "callbacks"):
        assert start.config[group] == config[group]
    assert start.config["architecture"]["n_layers"] == 2
    assert len(start.config["corpus"]["fingerprint"]) > 10
    assert start.config["environment"]["torch"]

    last, best = table(run / "validation.csv")[-1], min(table(run / "validation.csv"), key=lambda row: row["val/loss"])
    for kind, row in (("final", last), ("best", best)):
        for name in ("loss", "perplexity", "bits_per_byte"):
            assert start.summary[f"{kind}/{name}"] == row[f"val/{name}"]
        assert start.summary[f"{kind}/step"] == row["step"]
        assert start.summary[f"{kind}/tokens"] == row["train/tokens"] == row["step"] * 8 * 32


def test_nothing_of_the_machine_is_recorded(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh12345678")
    cfg = tiny(tmp_path / "run", "logger=wandb", "trainer.max_steps=1", "sample.prompt=abcdefgh12345678")
    train(cfg)
    (start,) = starts(tmp_path / "run")
    assert "environment" not in start.kinds  # host, program, arguments, hardware
    assert "files" not in start.kinds  # installed packages, code, diffs
    assert "stats" not in start.kinds
    assert start.run.host == ""
    assert "abcdefgh12345678" not in start.text
    assert start.config["sample"]["prompt"] == "***"
    for directory in (tmp_path / "run" / "wandb").glob("offline-run-*"):
        assert not [path for path in directory.rglob("files/*") if path.is_file()]


def test_a_resumed_run_goes_on_with_its_wandb_run(tmp_path, tiny):
    run = tmp_path / "run"
    train(tiny(run, "logger=wandb", "trainer.max_steps=5"))
    train(tiny(run, "logger=wandb", "trainer.max_steps=7"))
    first, second = starts(run)
    assert first.run.run_id == second.run.run_id
    assert second.run.resume
    assert in_any_order(logged(first) + logged(second)) == in_files(run, "train", "validation")
    numbers = [row["_step"] for start in (first, second) for row in start.rows]
    assert numbers == list(range(len(numbers)))  # wandb drops a row whose number is not above the last one's
    assert second.summary["final/step"] == 7


def test_steps_trained_again_after_a_kill_are_logged_again(tmp_path, tiny, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        StopAt(patch, 8)
        with pytest.raises(RuntimeError, match="killed"):
            train(tiny(run, "logger=wandb", "trainer.max_steps=10"))
    train(tiny(run, "logger=wandb", "trainer.max_steps=10"))  # from the checkpoint of step 5
    first, second = starts(run)
    assert first.exit_code == 1
    steps = [[row["trainer/step"] for row in start.rows if "train/loss" in row] for start in (first, second)]
    assert steps == [[1, 2, 3, 4, 5, 6, 7, 8], [6, 7, 8, 9, 10]]
    numbers = [row["_step"] for start in (first, second) for row in start.rows]
    assert numbers == sorted(set(numbers))
    everything = in_files(run, "train", "validation", "train.overtaken")
    assert in_any_order(logged(first) + logged(second)) == everything


@pytest.mark.slow
def test_a_killed_process_leaves_what_it_logged(tmp_path):
    """SIGKILL between two rows: the rows before it are in wandb's file, and the next start numbers its own above."""
    program = """
import os, signal, sys, time
from selmodel.training.loggers import CSVMetrics
from selmodel.training.wandb_metrics import WandbMetrics
loggers = [CSVMetrics(sys.argv[1]), WandbMetrics(sys.argv[1], mode="offline")]
for step in range(1, 9):
    for logger in loggers:
        logger.log_metrics({"train/loss": 1 / step}, step)
time.sleep(2.5)  # wandb's service begins, and writes every second
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", program, str(run)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    loggers = [CSVMetrics(run), WandbMetrics(run, mode="offline")]
    loggers[1].log_graph(None)
    for step in range(6, 10):
        for logger in loggers:
            logger.log_metrics({"train/loss": 1 / step}, step)
    loggers[1].finish()
    first, second = starts(run, killed=1)
    assert [row["trainer/step"] for row in first.rows] == list(range(1, 9))
    assert [row["trainer/step"] for row in second.rows] == [6, 7, 8, 9]
    assert [row["_step"] for row in second.rows] == [8, 9, 10, 11]


def test_a_stopped_run_is_preempted_and_a_failed_one_failed(tmp_path):
    for name, error in (("stopped", Interrupted(15, 3)), ("failed", ValueError())):
        logger = WandbMetrics(tmp_path / name, mode="offline")
        logger.log_metrics({"train/loss": 1.0}, 1)
        _finish_wandb([logger], error)
    (stopped,), (failed,) = starts(tmp_path / "stopped"), starts(tmp_path / "failed")
    assert (stopped.exit_code, stopped.preempting) == (143, True)
    assert (failed.exit_code, failed.preempting) == (1, False)


def test_jobs_of_one_process_do_not_share_a_run_even_after_one_that_never_finished(tmp_path):
    left_open = WandbMetrics(tmp_path / "a", mode="offline")
    left_open.log_metrics({"train/loss": 1.0}, 1)
    following = WandbMetrics(tmp_path / "b", mode="offline")
    following.log_metrics({"train/loss": 2.0}, 1)
    following.finish()
    left_open.finish()
    for name, loss in (("a", 1.0), ("b", 2.0)):
        (start,) = starts(tmp_path / name)
        assert [row["train/loss"] for row in start.rows] == [loss]
    assert wandb.run is None


# -- wandb out of order ---------------------------------------------------------------------------------------


def test_training_goes_on_with_one_warning_when_wandb_refuses_rows(tmp_path, tiny, monkeypatch, caplog):
    monkeypatch.setattr(wandb.Run, "log", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("broken pipe")))
    caplog.set_level("INFO", "selmodel")
    train(tiny(tmp_path / "run", "logger=wandb", "trainer.max_steps=4"))
    warnings = [
        record.message for record in caplog.records if "wandb" in record.message and record.levelname == "WARNING"
    ]
    assert len(warnings) == 1
    assert "broken pipe" in warnings[0]
    assert [row["step"] for row in table(tmp_path / "run" / "train.csv")] == [1, 2, 3, 4]
    assert "wandb did not take 5 rows" in caplog.text  # four of training, one of validation


def test_training_goes_on_when_no_run_can_be_begun(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(OSError("no space left")))
    logger = WandbMetrics(tmp_path / "run", mode="offline")
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.finish()
    assert caplog.text.count("no space left") == 1


def test_a_server_that_refuses_costs_the_live_view_only(tmp_path, monkeypatch, caplog):
    """Nothing listens at the address: after the time limit the run is written offline, rows of the wait included."""
    wandb.teardown()  # which makes it read the environment anew
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_run, "INIT_SECONDS", 1.0)
    logger = WandbMetrics(tmp_path / "run", mode="auto")
    began = time.monotonic()
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": 1 / step}, step)
    assert time.monotonic() - began < 0.5  # training did not wait
    logger.finish()
    assert "wandb: no run at the server" in caplog.text
    (start,) = starts(tmp_path / "run")
    assert [row["trainer/step"] for row in start.rows] == [1, 2, 3]
    assert "k" * 40 not in start.text
    wandb.teardown()


def test_training_does_not_wait_for_a_wandb_that_hangs(tmp_path, monkeypatch, caplog):
    release = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: release.wait(30) and None)
    monkeypatch.setattr(wandb_metrics._Feed, "PATIENCE", 0.2)
    logger = WandbMetrics(tmp_path / "run", mode="offline")
    began = time.monotonic()
    for step in range(1000):
        logger.log_metrics({"train/loss": 1.0}, step)
    logger.finish()
    assert time.monotonic() - began < 2
    assert "left behind" in caplog.text
    release.set()


# -- options --------------------------------------------------------------------------------------------------


def test_a_tag_that_wandb_would_refuse_is_named(tmp_path):
    with pytest.raises(UserError, match=r"logger\.wandb\.tags: 'x+' has 65 characters; wandb takes 1 to 64"):
        WandbMetrics(tmp_path / "run", tags=["fine", "x" * 65])
    assert not (tmp_path / "run").exists()


def test_building_the_logger_writes_nothing(tmp_path):
    logger = WandbMetrics(tmp_path / "run", mode="offline")
    assert (logger.name, logger.version) == ("wandb", None)
    logger.finish()
    assert not (tmp_path / "run").exists()
