"""Reports, budgets and figures reach the wandb runs they belong to, read back from wandb's own files."""

from __future__ import annotations

import base64
import os

import filelock
import pytest

from selmodel.errors import UserError
from selmodel.report.upload import log_artifacts, log_report, update_summary, wandb_options
from selmodel.training.run import train
from tests.wandb_records import starts

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEANl9ngAAAAABJRU5ErkJggg=="
)  # one pixel


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.fixture
def job(tmp_path, tiny):
    """A trained job of the sweep ``heads``, with wandb, offline."""
    run = tmp_path / "heads" / "job"
    run.parent.mkdir()
    (run.parent / "sweep.json").write_text("{}")
    train(tiny(run, "logger=wandb", "logger.wandb.project=p", "trainer.max_steps=1", "sample=null"))
    return run


def write(path, content=b"x"):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def artifacts(start):
    return {
        artifact.name: (artifact.type, sorted(entry.path for entry in artifact.manifest.contents))
        for artifact in start.artifacts
    }


def test_budgets_and_figures_become_artifacts_of_the_run(job):
    trained = starts(job)[0].run.run_id
    files = [write(job / name) for name in ("budgets-last.json", "loss.png", "loss.svg", "table.csv", "notes.json")]
    log_artifacts(job, files)
    _, added = starts(job)
    assert (added.run.run_id, added.run.project, added.exit_code) == (trained, "p", 0)
    assert artifacts(added) == {
        f"budgets-{trained}": ("budgets", ["budgets-last.json"]),
        f"figures-{trained}": ("figures", ["loss.png", "loss.svg"]),
        f"reports-{trained}": ("reports", ["notes.json", "table.csv"]),
    }
    assert added.rows == []  # nothing is added to the curves
    staged = [path for path in (job / "wandb" / "staged").rglob("*") if path.is_file()]
    assert len(staged) == 5  # copies to send later, in the run's own folder
    assert "WANDB_DATA_DIR" not in os.environ


def test_a_figure_known_later_joins_the_summary(job):
    update_summary(job, {"equivalent_heads": 3.5, "memory_factor": None})
    assert starts(job)[-1].summary["equivalent_heads"] == 3.5


def test_a_report_has_a_run_of_its_own_in_the_group_of_its_sweep(job):
    pytest.importorskip("PIL")
    folder = job.parent / "report"
    files = [write(folder / "perplexity_vs_heads.png", PNG), write(folder / "perplexity_vs_heads.csv")]
    assert log_report(job.parent, files, runs=[job], figures={job: {"equivalent_heads": 2.0}})
    (report,) = starts(folder)
    assert (report.run.run_group, report.run.job_type, report.run.display_name) == (
        "heads",
        "report",
        "report",
    )
    (row,) = report.rows
    assert any(key.startswith("figures/perplexity_vs_heads") for key in row)
    assert artifacts(report) == {
        f"perplexity_vs_heads-{kind}-{report.run.run_id}": (kind, [f"perplexity_vs_heads.{suffix}"])
        for kind, suffix in (("figures", "png"), ("reports", "csv"))
    }
    assert starts(job)[-1].summary["equivalent_heads"] == 2.0
    assert log_report(job.parent, files, runs=[job])  # again: the same run goes on
    assert len({start.run.run_id for start in starts(folder)}) == 1
    assert report.run.run_id != starts(job)[0].run.run_id


def test_without_wandb_a_report_is_not_sent_and_a_run_says_so(tmp_path, tiny):
    run = tmp_path / "run"
    train(tiny(run, "trainer.max_steps=1", "sample=null"))
    assert wandb_options(run) is None
    assert not log_report(tmp_path, [], runs=[run, tmp_path / "nowhere"])
    with pytest.raises(UserError, match="trained without Weights & Biases; train with logger=wandb"):
        update_summary(run, {"equivalent_heads": 1.0})
    assert not (run / "wandb").exists()


def test_files_are_checked_before_anything_is_opened(job):
    twice = [write(job / "a.csv"), write(job / "folder" / "a.csv"), job / "none.csv"]
    with pytest.raises(UserError) as error:
        log_artifacts(job, twice)
    assert "none.csv: no such file" in str(error.value)
    assert "a.csv: given more than once" in str(error.value)
    assert len(starts(job)) == 1


def test_a_run_that_is_training_is_left_alone(job):
    with filelock.FileLock(job / ".lock"), pytest.raises(UserError, match="is being trained"):
        update_summary(job, {"equivalent_heads": 1.0})
    assert len(starts(job)) == 1


def test_a_configuration_that_is_none_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("- a\n- b")
    with pytest.raises(UserError, match=r"config\.yaml: not the configuration of a run"):
        wandb_options(tmp_path)
