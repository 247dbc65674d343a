"""Two real processes (gloo) against one: the same numbers, and a run may move between them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from selmodel.training.checkpoint_file import read_checkpoint
from tests.conftest import TINY

ROOT = Path(__file__).resolve().parent.parent.parent

# Between one process and two only the order of float32 sums differs.
TOLERANCE = 1e-5
# At the tiny runs' usual rate of 0.01 the roundings of 50 steps grow to 4e-5.
LONG = ("trainer.max_steps=50", "optim.lr=1e-3")


@pytest.fixture
def command(tmp_path, corpus, cache_dir):
    """Runs train.py in processes of its own."""

    def command(run_dir: Path, *arguments: str) -> str:
        typed = (*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"run_dir={run_dir}", *LONG)
        # Hydra refuses a group that is chosen twice.
        options = {option.split("=")[0]: option for option in (*typed, *arguments)}
        result = subprocess.run(
            [
                sys.executable, str(ROOT / "train.py"), *options.values(),
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    return command


def column(path: Path, name: str) -> dict[int, float]:
    with path.open(newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file)}


def assert_same_run(one: Path, other: Path) -> None:
    for name, key in (("train.csv", "train/loss"), ("train.csv", "train/grad_norm"), ("validation.csv", "val/loss")):
        left, right = column(one / name, key), column(other / name, key)
        assert left == pytest.approx(right, rel=TOLERANCE), key
    for key in ("val/tokens", "train/tokens"):
        assert column(one / "validation.csv", key) == column(other / "validation.csv", key)
    states = [read_checkpoint(run / "last.ckpt")["DataModule"] for run in (one, other)]
    assert states[0]["step"] == states[1]["step"]
    assert states[0]["streams"].tolist() == states[1]["streams"].tolist()


@pytest.mark.slow
def test_two_processes_are_one_run_and_it_may_move_between_them(tmp_path, command):
    command(tmp_path / "one")
    printed = command(tmp_path / "two", "trainer.devices=2")
    assert printed.count("run directory") == 1  # one process speaks
    assert_same_run(tmp_path / "one", tmp_path / "two")

    # on two processes to step 20, on one to step 35, on two to the end
    schedule = "optim.schedule_steps=50"
    command(tmp_path / "moved", schedule, "trainer.max_steps=20", "trainer.devices=2")
    command(tmp_path / "moved", schedule, "trainer.max_steps=35")
    command(tmp_path / "moved", schedule, "trainer.devices=2", "data.workers=1")
    assert_same_run(tmp_path / "one", tmp_path / "moved")
    assert len(read_checkpoint(tmp_path / "moved" / "last.ckpt")["random"]) == 2


@pytest.mark.slow
def test_a_number_of_devices_that_does_not_divide_the_streams(tmp_path, corpus, cache_dir):
    result = subprocess.run(
        [
            sys.executable, str(ROOT / "train.py"), *TINY, f"data.root={corpus}", f"cache_dir={cache_dir}",
            f"run_dir={tmp_path / 'run'}", "trainer.devices=3",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert result.returncode != 0
    assert "data.streams" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_shared_out_weights_are_the_same_run_and_it_may_move(tmp_path, command):
    """FSDP on two processes against one: the same losses, and whole checkpoints that either goes on from."""
    sharded = ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2")
    command(tmp_path / "one", "attention=selective")
    command(tmp_path / "two", "attention=selective", *sharded)
    assert_same_run(tmp_path / "one", tmp_path / "two")

    schedule = ("attention=selective", "optim.schedule_steps=50")
    command(tmp_path / "moved", *schedule, "trainer.max_steps=20", *sharded)
    command(tmp_path / "moved", *schedule, "trainer.max_steps=35")
    command(tmp_path / "moved", *schedule, *sharded)
    assert_same_run(tmp_path / "one", tmp_path / "moved")
    checkpoints = [read_checkpoint(tmp_path / name / "last.ckpt") for name in ("one", "two")]
    # Adam divides by the gradient's size, so where that is nearly 0 roundings show.
    for key, weight in checkpoints[0]["state_dict"].items():
        torch.testing.assert_close(checkpoints[1]["state_dict"][key], weight, rtol=1e-3, atol=1e-4)
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in checkpoints]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        torch.testing.assert_close(states[1][key]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_two_jobs_of_two_processes_have_two_folders(tmp_path, corpus, cache_dir):
    """The second process of a job begins with the same command; it must not run the sweep again."""
    options = [option for option in TINY if not option.startswith(("trainer=", "trainer.max_steps"))]
    result = subprocess.run(
        [
            sys.executable, str(ROOT / "train.py"), "-m", *options, f"data.root={corpus}", f"cache_dir={cache_dir}",
            "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=4", "sample=null",
            "attention=selective,standard", "sweep.name=both",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    sweep = tmp_path / "multirun" / "both"
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"attention-selective", "attention-standard"}
    for name in ("attention-selective", "attention-standard"):
        with (sweep / name / "train.csv").open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]
    assert not list(tmp_path.glob("runs*"))
