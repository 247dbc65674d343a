"""Steps whose gradient is not finite change nothing, are told of, and stop a run when they do not end."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from selmodel.errors import UserError
from selmodel.training import guards as guards_file
from selmodel.training import module as module_file
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.guards import LEAST_WINDOW, Guards, without_update
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
    assert (
        "step 4 skipped: its gradient is not finite (loss nan); global batch 3 of the data, epoch 1, stream"
        in caplog.text
    )
    skipped = read_checkpoint(run / "last.ckpt")
    assert skipped["selmodel"]["step"] == 4
    assert skipped["guards"]["skipped"] == 1
    before = tmp_path / "before"
    train(tiny(before, *common, "trainer.max_steps=3", "optim.schedule_steps=8"))
    for key, weight in read_checkpoint(before / "last.ckpt")["state_dict"].items():
        assert torch.equal(skipped["state_dict"][key], weight), key
    # the batch is kept, and is the one of that step
    kept = torch.load(run / "skipped" / "step-00000004.pt", weights_only=True)
    assert (kept["step"], kept["optimizer_step"]) == (3, 4)
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
    message = r"stopped at step 7: 3 steps in a row .*guards\.max_skipped=3.*replay=.*step-00000007\.pt.*resume="
    with pytest.raises(UserError, match=message):
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
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["guards"]["skipped"] == 4


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
        assert guards.fault_of(1, 50.0, 1.0) is None  # too early to tell
        for step in range(2, 30):
            guards.fault_of(step, 3.0, 1.0)
        guards.fault_of(30, 5.9, 1.0)
        assert not caplog.text
        assert guards.fault_of(31, 6.5, 1.0) is None  # told of, and made
    assert "step 31: loss 6.5000 is a spike, 2.2 times the median 3.0000" in caplog.text
    assert Guards(spike_factor=None).fault_of(1, 1e9, 1.0) is None


@pytest.mark.parametrize(
    ("loss", "norm", "fault"),
    [
        (3.0, 1.0, None),
        (3.0, float("nan"), "its gradient is not finite"),
        (3.0, float("inf"), "its gradient is not finite"),
        (float("nan"), 1.0, "its loss is not finite"),
        (6.1, 1.0, "its loss is a spike"),
    ],
)
def test_what_is_skipped_and_that_a_spike_does_not_move_the_median(loss, norm, fault):
    guards = Guards(skip_spikes=True)
    for step in range(LEAST_WINDOW):
        guards.fault_of(step, 3.0, 2.0)
    assert guards.fault_of(30, loss, norm) == fault
    state = guards.state_dict()
    assert state["losses"] == [3.0] * (LEAST_WINDOW + (fault is None))
    assert guards.take_largest_norm() == 2.0
    assert guards.take_largest_norm() == 0.0


def test_a_resumed_run_judges_spikes_as_an_uninterrupted_one(tmp_path, tiny, monkeypatch):
    """The losses before the stop count; the step after it is a spike, and is skipped in both."""
    real = module_file.loss_sum
    step_of_spike = 26
    monkeypatch.setattr(guards_file, "WINDOW", 30)

    def run(name, *parts):
        made = {"step": 0}

        def loss_sum(*arguments):
            made["step"] += 1
            return real(*arguments) * (5 if made["step"] == step_of_spike else 1)

        monkeypatch.setattr(module_file, "loss_sum", loss_sum)
        for steps in (*parts, 30):
            options = (f"trainer.max_steps={steps}", "optim.schedule_steps=30", "guards.skip_spikes=true")
            train(tiny(tmp_path / name, *options, "guards.spike_factor=3", "trainer.val_check_interval=50"))
        return rows(tmp_path / name)

    whole, parts = run("whole"), run("parts", 25)
    figures = ("step", "train/loss", "train/grad_norm", "train/grad_norm_max", "train/skipped_steps")
    assert [[row[name] for name in figures] for row in parts] == [[row[name] for name in figures] for row in whole]
    assert [row["train/skipped_steps"] for row in whole] == [""] * 25 + ["1"] * 5


def test_the_largest_norm_between_two_lines_is_kept(tmp_path, tiny):
    """Of every step, also those that have no line of their own."""
    train(tiny(tmp_path / "all"))
    train(tiny(tmp_path / "some", "trainer.log_every_n_steps=4"))
    norms = {int(row["step"]): float(row["train/grad_norm"]) for row in rows(tmp_path / "all")}
    found = {int(row["step"]): float(row["train/grad_norm_max"]) for row in rows(tmp_path / "some")}
    assert found == {
        last: max(norms[step] for step in range(first, last + 1)) for first, last in ((1, 1), (2, 4), (5, 8), (9, 12))
    }


def test_a_stopped_run_gets_as_many_skips_again():
    guards = Guards(max_skipped=3)
    for step in range(3):
        guards.step_skipped(step, "its loss is not finite", {"step": step}, float("nan"))
    assert guards.exhausted
    again = Guards(max_skipped=3)
    again.load_state_dict(guards.state_dict())
    assert (again.skipped, again.in_a_row, again.exhausted) == (3, 0, False)


@pytest.mark.parametrize(("options", "message"), [
    ({"max_skipped": 0}, "guards.max_skipped=0"),
    ({"spike_factor": 1.0}, "guards.spike_factor=1.0"),
    ({"spike_factor": float("inf")}, "guards.spike_factor=inf"),
    ({"spike_factor": None, "skip_spikes": True}, "guards.skip_spikes=true with guards.spike_factor=null"),
    ({"stall_minutes": 0}, "guards.stall_minutes=0"),
])  # fmt: skip
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        Guards(**options)
