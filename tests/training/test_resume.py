"""A stopped and resumed run must be the uninterrupted run, to the last bit on the CPU."""

from __future__ import annotations

import csv
import json
import shutil

import filelock
import pytest
import torch

from selmodel.comparing import differences
from selmodel.errors import UserError
from selmodel.training import module
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.module import LanguageModel
from selmodel.training.resume import find_checkpoint
from selmodel.training.run import train


def column(path, name):
    """{step: value as written} of one column of a metrics file; the text keeps every bit of a float64."""
    with path.open(newline="") as file:
        return {int(row["step"]): row[name] for row in csv.DictReader(file)}


STOPS = {
    "between validations": (30, "trainer.val_check_interval=7"),
    "at a validation": (30, "trainer.val_check_interval=10"),
    "one step after a validation": (31, "trainer.val_check_interval=10"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("attention", ["standard", "selective"])
def test_stop_and_resume_equals_uninterrupted(tmp_path, tiny, stop, attention):
    step, interval = STOPS[stop]
    common = (
        f"attention={attention}",
        interval,
        "trainer.max_steps=60",
        "optim.schedule_steps=60",
        "callbacks.checkpoint.every_n_steps=100",
        "micro_batch_tokens=96",  # three passes per step, the last one short
    )
    train(tiny(tmp_path / "whole", *common))
    train(tiny(tmp_path / "parts", *common, f"trainer.max_steps={step}"))
    train(tiny(tmp_path / "parts", *common))

    for name, key in (("train.csv", "train/loss"), ("train.csv", "train/grad_norm"), ("train.csv", "train/tokens")):
        assert column(tmp_path / "parts" / name, key) == column(tmp_path / "whole" / name, key)
        assert list(column(tmp_path / "parts" / name, key)) == list(range(1, 61))
    whole, parts = (column(tmp_path / run / "validation.csv", "val/loss") for run in ("whole", "parts"))
    # The stopped run has validated once more, where it stopped.
    assert {s: loss for s, loss in parts.items() if s in whole} == whole
    assert set(parts) - set(whole) <= {step}
    end_whole, end_parts = (read_checkpoint(tmp_path / run / "last.ckpt") for run in ("whole", "parts"))
    for name, value in end_whole["state_dict"].items():
        assert torch.equal(value, end_parts["state_dict"][name]), name
    assert end_parts["selmodel"]["step"] == 60


@pytest.mark.slow
def test_a_run_killed_after_its_checkpoint_goes_on_from_there(tmp_path, tiny):
    """Steps trained and logged after the last checkpoint are done again, and their rows are not there twice."""
    common = ("trainer.max_steps=20", "callbacks.checkpoint.every_n_steps=6", "trainer.val_check_interval=4")
    train(tiny(tmp_path / "whole", *common))
    train(tiny(tmp_path / "parts", *common, "trainer.max_steps=6", "optim.schedule_steps=20"))
    at_six = tmp_path / "six.ckpt"
    shutil.copy(tmp_path / "parts" / "last.ckpt", at_six)
    train(tiny(tmp_path / "parts", *common, "trainer.max_steps=11", "optim.schedule_steps=20"))
    shutil.copy(at_six, tmp_path / "parts" / "last.ckpt")  # as if killed at step 11
    train(tiny(tmp_path / "parts", *common))
    assert column(tmp_path / "parts" / "train.csv", "train/loss") == column(
        tmp_path / "whole" / "train.csv", "train/loss"
    )
    assert list(column(tmp_path / "parts" / "train.overtaken.csv", "train/loss")) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("interval", [5, 10, 3])
def test_a_crash_after_a_checkpoint_taken_inside_training(tmp_path, tiny, monkeypatch, interval):
    """The checkpoint of step 10 is written in the middle of training, after a validation or between two of them."""
    common = ("callbacks.checkpoint.every_n_steps=10", f"trainer.val_check_interval={interval}", "trainer.max_steps=21")
    common = (*common, "data.validation_batch_size=3")
    train(tiny(tmp_path / "whole", *common))

    step = LanguageModel.training_step

    def crashing(self, batch, batch_idx):
        if self.global_step == 13:
            raise RuntimeError("crash")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", crashing)
    with pytest.raises(RuntimeError, match="crash"):
        train(tiny(tmp_path / "parts", *common))
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["selmodel"]["step"] == 10
    train(tiny(tmp_path / "parts", *common))
    for name, key in (("train.csv", "train/loss"), ("validation.csv", "val/loss"), ("validation.csv", "val/tokens")):
        assert column(tmp_path / "parts" / name, key) == column(tmp_path / "whole" / name, key)


def test_every_validation_after_a_resume_runs_all_its_batches(tmp_path, tiny):
    common = ("trainer.val_check_interval=2", "trainer.max_steps=6", "data.validation_batch_size=3")
    train(tiny(tmp_path / "run", *common, "trainer.max_steps=4"))
    train(tiny(tmp_path / "run", *common))
    # ten sequences of 32 targets, every time
    assert set(column(tmp_path / "run" / "validation.csv", "val/tokens").values()) == {"320"}


def test_a_finished_run_is_left_alone(tmp_path, tiny, caplog):
    train(tiny(tmp_path / "run", "trainer.max_steps=2"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    caplog.set_level("INFO")
    assert train(tiny(tmp_path / "run", "trainer.max_steps=2")) is None
    assert "finished" in caplog.text
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_another_architecture_is_refused_by_name(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=1"))
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    with pytest.raises(UserError) as error:
        train(tiny(tmp_path / "run", "trainer.max_steps=2", "model.n_heads=4", "attention=standard"))
    assert "n_heads: 2 in the checkpoint, 4 now" in str(error.value)
    assert "attention.kind: SelectiveAttention in the checkpoint, StandardAttention now" in str(error.value)
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before


def test_another_tokenizer_is_refused(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=1"))
    with pytest.raises(UserError, match="tokenizer: sentencepiece"):
        train(tiny(tmp_path / "run", "trainer.max_steps=2", "tokenizer.seed=1", "tokenizer.sample_bytes=40000"))


def test_another_order_of_the_data_is_refused(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=1"))
    with pytest.raises(UserError, match=r"data\.batch_size"):
        train(tiny(tmp_path / "run", "trainer.max_steps=2", "data.batch_size=16"))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_refused_resume_changes_nothing(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=7"))
    shutil.copy(tmp_path / "run" / "best.ckpt", tmp_path / "run" / "last.ckpt")
    before = content(tmp_path / "run")
    for override in ("data.batch_size=16", "seed=1", "model.n_heads=1"):
        with pytest.raises(UserError):
            train(tiny(tmp_path / "run", override))
    assert content(tmp_path / "run") == before


def test_optimizer_options_changed_on_resume_take_effect_and_are_said(tmp_path, tiny, caplog):
    schedule = "optim.schedule_steps=12"
    for name in ("same", "changed"):
        train(tiny(tmp_path / name, schedule, "trainer.max_steps=6"))
    train(tiny(tmp_path / "same", schedule))
    caplog.set_level("INFO")
    train(tiny(tmp_path / "changed", schedule, "optim.weight_decay=0.9", "optim.betas=[0.5,0.5]"))
    assert "optim.weight_decay: 0.1 in the checkpoint, 0.9 now" in caplog.text
    same, changed = (column(tmp_path / name / "train.csv", "train/loss") for name in ("same", "changed"))
    assert same[7] == changed[7]  # the loss before the first step with the new options
    assert same[9] != changed[9]
    (state,) = read_checkpoint(tmp_path / "changed" / "last.ckpt")["optimizer_states"]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.9, 0.0]


def test_resume_from_another_run_begins_a_new_directory_and_then_goes_on_in_it(tmp_path, tiny):
    train(tiny(tmp_path / "first", "trainer.max_steps=4", "optim.schedule_steps=12"))
    other = (f"resume={tmp_path / 'first' / 'last.ckpt'}", "optim.schedule_steps=12")
    train(tiny(tmp_path / "second", *other, "trainer.max_steps=8"))
    train(tiny(tmp_path / "second", *other, "trainer.max_steps=10"))
    assert list(column(tmp_path / "second" / "train.csv", "train/loss")) == [5, 6, 7, 8, 9, 10]
    train(tiny(tmp_path / "third", "trainer.max_steps=2"))
    before = content(tmp_path / "third")
    with pytest.raises(UserError, match="already holds another run"):
        train(tiny(tmp_path / "third", *other))
    assert content(tmp_path / "third") == before


def test_going_back_to_the_best_checkpoint_of_a_run_rewinds_its_metrics(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=5", "optim.schedule_steps=12"))
    shutil.copy(tmp_path / "run" / "last.ckpt", tmp_path / "run" / "kept.ckpt")
    train(tiny(tmp_path / "run", "trainer.max_steps=8", "optim.schedule_steps=12"))
    train(tiny(tmp_path / "run", f"resume={tmp_path / 'run' / 'kept.ckpt'}", "trainer.max_steps=9"))
    assert list(column(tmp_path / "run" / "train.csv", "train/loss")) == list(range(1, 10))


def test_another_monitor_begins_anew(tmp_path, tiny):
    train(tiny(tmp_path / "run", "callbacks.checkpoint.monitor=val/bits_per_byte", "trainer.max_steps=5"))
    train(tiny(tmp_path / "run", "trainer.max_steps=40"))
    state = read_checkpoint(tmp_path / "run" / "best.ckpt")["callbacks"]["CheckpointWriter"]
    assert state["monitor"] == "val/loss"
    assert state["best_step"] > 5


def flip(path, place=0.5):
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, lambda path: path.write_bytes(b"")], ids=["flipped", "cut", "empty"])
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_it_taken(tmp_path, tiny, damage, caplog):
    """The run comes out as if nothing had happened; the damaged file is kept, and replaces nothing."""
    caplog.set_level("INFO")
    common = ("callbacks.checkpoint.every_n_steps=3", "optim.schedule_steps=12", "trainer.val_check_interval=4")
    common += ("callbacks.checkpoint.monitor=null",)
    train(tiny(tmp_path / "whole", *common))
    run = tmp_path / "run"
    train(tiny(run, *common, "trainer.max_steps=7"))  # checkpoints after 3, 6 and 7
    damage(run / "last.ckpt")
    damaged = (run / "last.ckpt").read_bytes()
    train(tiny(run, *common))
    assert f"{run / 'last.ckpt'}: " in caplog.text
    assert f"resuming from {run / 'previous.ckpt'} at step 6" in caplog.text
    assert (run / "last.ckpt.damaged").read_bytes() == damaged
    for name, figure in (("train.csv", "train/loss"), ("validation.csv", "val/loss")):
        ours, theirs = (column(tmp_path / which / name, figure) for which in ("run", "whole"))
        assert {step: ours[step] for step in theirs} == theirs
    for name in ("last.ckpt", "previous.ckpt"):
        ours, theirs = (read_checkpoint(tmp_path / which / name) for which in ("run", "whole"))
        for key, weight in theirs["state_dict"].items():
            assert torch.equal(ours["state_dict"][key], weight)


def test_of_a_finished_run_a_damaged_checkpoint_is_put_back_where_another_has_its_step(tmp_path, tiny, caplog):
    caplog.set_level("INFO")
    run = tmp_path / "run"
    train(tiny(run, "trainer.max_steps=5"))
    assert read_checkpoint(run / "best.ckpt")["selmodel"]["step"] == 5
    whole = read_checkpoint(run / "last.ckpt")
    flip(run / "last.ckpt")
    assert train(tiny(run, "trainer.max_steps=5")) is None
    assert "is finished: step 5" in caplog.text
    assert (run / "last.ckpt.damaged").exists()
    for key, weight in read_checkpoint(run / "last.ckpt")["state_dict"].items():
        assert torch.equal(weight, whole["state_dict"][key])


def test_of_a_finished_run_the_last_checkpoint_is_of_the_last_step(tmp_path, tiny):
    """A kill came between best.ckpt and last.ckpt of the last step."""
    run = tmp_path / "run"
    train(tiny(run, "trainer.max_steps=5", "callbacks.checkpoint.every_n_steps=3"))
    assert read_checkpoint(run / "best.ckpt")["selmodel"]["step"] == 5
    shutil.copy2(run / "previous.ckpt", run / "last.ckpt")
    (run / "best.ckpt").touch()
    assert read_checkpoint(run / "last.ckpt")["selmodel"]["step"] == 3
    assert train(tiny(run, "trainer.max_steps=5", "callbacks.checkpoint.every_n_steps=3")) is None
    assert read_checkpoint(run / "last.ckpt")["selmodel"]["step"] == 5


def test_of_two_damaged_ones_both_are_passed_over(tmp_path, tiny, caplog):
    caplog.set_level("INFO")
    common = ("callbacks.checkpoint.every_n_steps=3", "optim.schedule_steps=12", "trainer.val_check_interval=5")
    run = tmp_path / "run"
    train(tiny(run, *common, "trainer.max_steps=6"))
    for name in ("last.ckpt", "best.ckpt"):
        flip(run / name)
    train(tiny(run, *common, "trainer.max_steps=7"))
    assert f"resuming from {run / 'previous.ckpt'} at step 3" in caplog.text
    assert {path.name for path in run.glob("*.damaged")} == {"last.ckpt.damaged", "best.ckpt.damaged"}


def test_where_none_is_whole_nothing_is_begun_anew(tmp_path, tiny):
    run = tmp_path / "run"
    train(tiny(run, "trainer.max_steps=3"))
    for path in run.glob("*.ckpt"):
        cut(path)
    before = {path.name: path.read_bytes() for path in run.glob("*.c*")}
    with pytest.raises(UserError, match=r"none of its checkpoints is whole: last\.ckpt is cut off.*best\.ckpt is cut"):
        train(tiny(run))
    assert {path.name: path.read_bytes() for path in run.glob("*.c*")} == before


def test_a_checkpoint_named_by_the_user_is_not_replaced_by_another(tmp_path, tiny):
    run = tmp_path / "run"
    train(tiny(run, "trainer.max_steps=3"))
    flip(run / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt: its checksum does not fit .* beside it: best\.ckpt"):
        train(tiny(tmp_path / "other", f"resume={run / 'last.ckpt'}"))


def test_a_run_killed_before_its_first_checkpoint_begins_anew_and_tells_each_step_once(tmp_path, tiny):
    run = tmp_path / "run"
    train(tiny(run))
    whole = column(run / "train.csv", "train/loss")
    for path in run.glob("*.ckpt"):
        path.unlink()
    train(tiny(run))
    assert column(run / "train.csv", "train/loss") == whole
    assert len((run / "train.csv").read_text().splitlines()) == 1 + len(whole)
    assert (run / "train.overtaken.csv").exists()


@pytest.mark.parametrize("damage", ["", "step,trai", "7,1.0\n"], ids=["empty", "cut header", "no header"])
def test_damaged_metrics_do_not_stop_a_resume(tmp_path, tiny, damage):
    train(tiny(tmp_path / "run", "trainer.max_steps=3", "optim.schedule_steps=12"))
    (tmp_path / "run" / "train.csv").write_text(damage)
    train(tiny(tmp_path / "run", "trainer.max_steps=5", "optim.schedule_steps=12"))
    assert list(column(tmp_path / "run" / "train.csv", "train/loss")) == [4, 5]
    if damage:
        assert (tmp_path / "run" / "train.damaged.csv").read_text() == damage


def test_one_directory_has_one_writer(tmp_path, tiny):
    (tmp_path / "run").mkdir()
    with filelock.FileLock(tmp_path / "run" / ".lock"), pytest.raises(UserError, match="another process is training"):
        train(tiny(tmp_path / "run"))


def test_files_of_a_save_cut_short_are_removed(tmp_path, tiny):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".last.ckpt.abc.tmp").write_bytes(b"half")
    train(tiny(tmp_path / "run", "trainer.max_steps=1"))
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert not list((tmp_path / "run").glob(".*.tmp"))


def test_a_diverged_run_ends_with_its_figures(tmp_path, tiny, caplog, monkeypatch):
    caplog.set_level("INFO")
    real = module.token_losses
    monkeypatch.setattr(module, "token_losses", lambda *arguments: real(*arguments) * float("nan"))
    train(tiny(tmp_path / "run", "trainer.max_steps=6"))
    assert "diverged" in caplog.text
    assert not (tmp_path / "run" / "best.ckpt").exists()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["validation"]["loss"] is None


def test_never_does_not_overwrite(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=1"))
    with pytest.raises(UserError, match="already holds a run"):
        train(tiny(tmp_path / "run", "trainer.max_steps=1", "resume=never"))


def test_a_checkpoint_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"resume=.*none\.ckpt: no such file"):
        find_checkpoint(tmp_path, str(tmp_path / "none.ckpt"))
    assert find_checkpoint(tmp_path, "auto") is None


def test_differences_name_both_values():
    old = {"a": 1, "b": {"c": [1, 2]}, "d": None}
    new = {"a": 1, "b": {"c": (1, 3)}, "e": 5}
    assert differences(old, new) == [
        "b.c: [1, 2] in the checkpoint, (1, 3) now",
        "d: None in the checkpoint, absent now",
        "e: absent in the checkpoint, 5 now",
    ]


@pytest.mark.parametrize("damage", ["removed", "half written", "of an earlier end"])
def test_results_that_are_missing_at_the_end_are_written(tmp_path, tiny, damage):
    """A kill between the last checkpoint and the results leaves a run that is trained and has no figures."""
    run = tmp_path / "run"
    expected = train(tiny(run, "trainer.max_steps=6"))
    results = run / "results.json"
    content = json.loads(results.read_text())
    if damage == "removed":
        results.unlink()
    elif damage == "half written":
        results.write_text(results.read_text()[:100])
    else:
        results.write_text(json.dumps(content | {"step": 3}))
    again = train(tiny(run, "trainer.max_steps=6"))
    assert again.loss == expected.loss
    written = json.loads(results.read_text())
    for key in ("step", "tokens", "validation", "best", "protocol", "parameters", "architecture"):
        assert written[key] == content[key], key
    assert train(tiny(run, "trainer.max_steps=6")) is None  # there now
