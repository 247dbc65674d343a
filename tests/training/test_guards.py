"""Steps whose gradient is not finite change nothing, are told of, and stop a run when they do not end."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from selmodel.errors import UserError
from selmodel.training import module as module_file
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.guards import Guards, without_update
from selmodel.training.run import train


def spoil(monkeypatch, *steps: int):
    """Makes the loss NaN in these optimizer steps of every run."""
    real = module_file.loss_sum
    seen = {"step": 0}

    def loss_sum(*arguments):
        seen["step"] += 1
        loss = real(*arguments)
        return loss * torch.nan if seen["step"] in steps else loss

    monkeypatch.setattr(module_file, "loss_sum", loss_sum)
    return seen


def rows(run):
    with (run / "train.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_skipped_step_changes_nothing_and_the_run_goes_on(tmp_path, tiny, monkeypatch, caplog):
    run = tmp_path / "run"
    spoil(monkeypatch, 4)
    common = ("callbacks.checkpoint.every_n_steps=1", "trainer.val_check_interval=50")
    with caplog.at_level("WARNING"):
        train(tiny(run, *common, "trainer.max_steps=4", "optim.schedule_steps=8"))
    assert "step 4 skipped: its gradient is not finite (loss nan); global batch 3 of the data" in caplog.text
    skipped = read_checkpoint(run / "last.ckpt")
    assert skipped["selmodel"]["step"] == 4
    assert skipped["skipped_steps"] == 1
    before = tmp_path / "before"
    train(tiny(before, *common, "trainer.max_steps=3", "optim.schedule_steps=8"))
    for key, weight in read_checkpoint(before / "last.ckpt")["state_dict"].items():
        assert torch.equal(skipped["state_dict"][key], weight), key
    # the batch is kept, and is the one of that step
    kept = torch.load(run / "skipped" / "step-00000004.pt", weights_only=True)
    assert kept["step"] == 3
    assert kept["tokens"].shape == (8, 33)
    # the run goes on, counting
    train(tiny(run, *common, "trainer.max_steps=8", "optim.schedule_steps=8"))
    assert [row["step"] for row in rows(run)] == [str(i) for i in range(1, 9)]
    assert all(float(row["train/loss"]) < 7 for row in rows(run) if row["step"] != "4")
    assert rows(run)[-1]["train/skipped_steps"] == "1"
    assert json.loads((run / "results.json").read_text())["validation"]["loss"] is not None


def test_sound_runs_are_as_without_guards(tmp_path, tiny):
    train(tiny(tmp_path / "one", "guards.spike_factor=null"))
    train(tiny(tmp_path / "two", "guards.max_skipped=1"))
    assert [row["train/loss"] for row in rows(tmp_path / "one")] == [
        row["train/loss"] for row in rows(tmp_path / "two")
    ]
    assert "train/skipped_steps" not in rows(tmp_path / "one")[0]
    assert not (tmp_path / "one" / "skipped").exists()


def test_too_many_in_a_row_stop_the_run_with_its_state(tmp_path, tiny, monkeypatch):
    run = tmp_path / "run"
    spoil(monkeypatch, *range(5, 100))
    with pytest.raises(UserError, match=r"stopped at step 7: 3 steps in a row .*guards\.max_skipped=3.*resume="):
        train(tiny(run, "guards.max_skipped=3", "trainer.max_steps=12"))
    checkpoint = read_checkpoint(run / "last.ckpt")
    assert checkpoint["selmodel"]["step"] == 7
    assert all(torch.isfinite(weight).all() for weight in checkpoint["state_dict"].values())
    assert not (run / "results.json").exists()
    monkeypatch.undo()
    train(tiny(run, "guards.max_skipped=3", "trainer.max_steps=12"))  # what was wrong is gone: it goes on
    assert json.loads((run / "results.json").read_text())["step"] == 12


def test_skips_that_are_not_in_a_row_do_not_stop(tmp_path, tiny, monkeypatch):
    spoil(monkeypatch, 2, 4, 6, 8)
    train(tiny(tmp_path / "run", "guards.max_skipped=2", "trainer.max_steps=10"))
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["skipped_steps"] == 4


def test_a_step_without_update_counts_and_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2)
    with without_update(optimizer):
        assert optimizer.step(lambda: 5) == 5
        optimizer.step()
    assert weight.tolist() == [1, 1]
    optimizer.step()
    assert weight.tolist() == [0, 0]


def test_spikes_are_told_by_the_median(caplog):
    guards = Guards(spike_factor=2.0)
    with caplog.at_level("WARNING"):
        guards.see_loss(1, 50.0)  # too early to tell
        for step in range(2, 30):
            guards.see_loss(step, 3.0)
        guards.see_loss(30, 5.9)
        assert not caplog.text
        guards.see_loss(31, 6.5)
    assert "step 31: loss 6.5000 is a spike, 2.2 times the median 3.0000" in caplog.text
    Guards(spike_factor=None).see_loss(1, 1e9)


@pytest.mark.parametrize(("options", "message"), [
    ({"max_skipped": 0}, "guards.max_skipped=0"),
    ({"spike_factor": 1.0}, "guards.spike_factor=1.0"),
    ({"spike_factor": float("inf")}, "guards.spike_factor=inf"),
])  # fmt: skip
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        Guards(**options)
