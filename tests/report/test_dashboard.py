"""The workspace's panels show what training logs, under its names; the command answers without a network."""

from __future__ import annotations

import csv
import json
import re
import socket
import sys

import pytest

from selmodel.report import dashboard
from selmodel.report.dashboard import Images, Lines, Points, main, sections
from selmodel.report.run import REPORTS
from selmodel.training import module
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.loggers import summary_metrics
from selmodel.training.run import train
from selmodel.training.wandb_run import AXES, STEP, recorded_config


def panels(kind):
    return [panel for content in sections().values() for panel in content if isinstance(panel, kind)]


@pytest.fixture
def run(tmp_path, tiny, monkeypatch):
    """A run that logs all there is: selection, the memory term, and MFU, for which its device is given a peak."""
    monkeypatch.setattr(module, "peak_flops", lambda device: 1e12)
    train(tiny(tmp_path / "run", "trainer.max_steps=2", "attention.memory_loss.eps=0.1", "sample=null"))
    return tmp_path / "run"


def test_panels_and_logged_metrics_are_the_same_names(run):
    logged = set()
    for name in ("train", "validation"):
        with (run / f"{name}.csv").open(newline="") as file:
            logged |= set(next(csv.reader(file)))
    logged -= {"step"}
    assert "throughput/mfu" in logged
    assert "train/memory_loss" in logged
    by_name = {metric for panel in panels(Lines) if not panel.per_layer for metric in panel.metrics}
    patterns = [panel.metrics[0] for panel in panels(Lines) if panel.per_layer]
    layers = [{metric for metric in logged if re.search(pattern, metric)} for pattern in patterns]
    assert [len(found) for found in layers] == [2, 2, 2, 2]  # each of two layers
    others = {"val/accuracy", "train/skipped_steps"}  # of tasks; of runs whose guards skipped a step
    assert by_name | set().union(*layers) == logged | others
    assert {panel.x for panel in panels(Lines)} <= logged | {STEP}


def test_accuracy_has_the_name_that_tasks_log():
    from selmodel.evaluation.perplexity import ValidationResult

    names = ValidationResult.__dataclass_fields__
    values = dict.fromkeys(names, 1) | {"loss": 1.0, "accuracy": 0.5}
    assert "val/accuracy" in ValidationResult(**values).metrics()


def test_points_are_of_summary_and_config_that_runs_have(run):
    identity = read_checkpoint(run / "last.ckpt")["selmodel"]
    config = recorded_config(identity, json.loads((run / "results.json").read_text())["parameters"])
    assert set(AXES) <= set(config)
    assert (config["kind"], config["n_heads"], config["context_length"], config["memory_loss_eps"]) == (
        "SelectiveAttention", 2, 32, 0.1,
    )  # fmt: skip
    assert config["parameters"] > config["attention_parameters"] == 2 * 4 * 32 * 32  # two layers of four projections
    summary = set(summary_metrics(run)) | {"equivalent_heads"}  # which reports add
    assert {panel.x for panel in panels(Points)} <= set(AXES)
    assert {panel.y for panel in panels(Points)} <= summary
    for column in dashboard.COLUMNS:
        kind, _, name = column.partition(":")
        assert name in (AXES if kind == "config" else summary)


def test_every_report_has_its_place_among_the_figures():
    (images,) = panels(Images)
    assert images.keys == tuple(f"figures/{name}" for name in REPORTS)


def test_dry_run_prints_the_workspace_without_a_network(monkeypatch, capsys):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a network connection"))
    assert main(["project=p", "entity=me", "group=heads", "--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["entity"], printed["project"], printed["name"]) == ("me", "p", "selmodel")
    built = printed["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in built] == list(sections())
    for section, wanted in zip(built, sections().values(), strict=True):
        assert [panel["config"]["chartTitle"] for panel in section["panels"]] == [panel.title for panel in wanted]
        for panel, description in zip(section["panels"], wanted, strict=True):
            config = panel["config"]
            if isinstance(description, Lines):
                assert config["xAxis"] == description.x
                drawn = (config["metricRegex"],) if description.per_layer else tuple(config["metrics"])
                assert drawn == description.metrics
            elif isinstance(description, Points):
                assert config["xAxis"] == f"config:{description.x}.value"
                assert config["yAxis"] == f"summary:{description.y}"
            elif isinstance(description, Images):
                assert tuple(config["mediaKeys"]) == description.keys
    assert "heads" in json.dumps(printed["spec"]["section"]["runSets"])


def test_without_the_package_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert main(["project=p", "--dry-run"]) == 2
    assert "pip install -e '.[dashboard]'" in capsys.readouterr().err


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def test_saving_without_a_key_is_answered(no_key, capsys):
    pytest.importorskip("wandb_workspaces")
    assert main(["project=p"]) == 2
    assert "error: no key found" in capsys.readouterr().err


def test_a_server_that_refuses_is_answered(monkeypatch, capsys):
    ws = pytest.importorskip("wandb_workspaces.workspaces")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(ws.Workspace, "save", lambda self: (_ for _ in ()).throw(ConnectionError("unreachable")))
    assert main(["project=p", "entity=me"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: project=p: the workspace was not saved (ConnectionError: unreachable)")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["projct=p"], ["projct=p: no such option; did you mean project?", "project=NAME is missing"]),
        (["project=a/b"], ["project=a/b: a name in wandb has no spaces"]),
        (["project=p", "entity="], ["entity=: expected a value"]),
        (["project=p", "--dryrun"], ["--dryrun: no such option"]),
    ],
)
def test_typed_mistakes_are_answered(arguments, expected, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    for text in expected:
        assert text in error


def test_help_lists_the_options(capsys):
    assert main(["--help"]) == 0
    assert "project=NAME" in capsys.readouterr().out
