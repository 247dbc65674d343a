"""Ctrl-C and SIGTERM stop a run after a whole step, with its state saved."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
import time

import pytest
import torch

from selmodel.data import loader
from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training import checkpoint, checkpoint_file
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.interrupt import Interrupted
from selmodel.training.module import LanguageModel
from selmodel.training.optim import AdamW
from selmodel.training.run import train


def losses(path, name):
    with path.open(newline="") as file:
        return {row["step"]: row[name] for row in csv.DictReader(file)}


def send_after(path, n_rows, number):
    """Sends this process a signal once the metrics file has ``n_rows`` rows."""

    def wait():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists() and path.read_text().count("\n") > n_rows:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.002)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_after_a_step_and_nothing_is_lost(tmp_path, tiny, number):
    common = ("trainer.max_steps=40", "trainer.val_check_interval=7", "callbacks.checkpoint.every_n_steps=0")
    before = signal.getsignal(number)
    send_after(tmp_path / "parts" / "train.csv", 9, number)
    with pytest.raises(Interrupted) as interrupted:
        train(tiny(tmp_path / "parts", *common))
    step = interrupted.value.step
    assert 9 <= step < 40
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["selmodel"]["step"] == step
    assert signal.getsignal(number) == before  # the handlers are put back
    train(tiny(tmp_path / "parts", *common))
    train(tiny(tmp_path / "whole", *common))
    for file, name in (("train.csv", "train/loss"), ("validation.csv", "val/loss")):
        assert losses(tmp_path / "parts" / file, name) == losses(tmp_path / "whole" / file, name)


# --- where a step or a validation may take long ----------------------------------------------------------------------


def send_at(monkeypatch, owner, name, when, *, number=signal.SIGTERM, seconds=30.0):
    """The first call of ``owner.name`` for which ``when(...)`` is true sends this process a signal and takes long."""
    original, sent = getattr(owner, name), []

    def slow(*arguments, **options):
        if not sent and when(*arguments, **options):
            sent.append(time.monotonic())
            # from another thread, as a cluster does, while this one is at work
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.05)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    return sent


def equal_files(one, other):
    for file, name in (("train.csv", "train/loss"), ("validation.csv", "val/loss")):
        ours, theirs = ((folder / file).read_text().splitlines() for folder in (one, other))
        assert len(ours) == len(theirs), file  # no step twice, none left out
        assert losses(one / file, name) == losses(other / file, name)
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (read_checkpoint(folder / name) for folder in (one, other))
        assert ours["selmodel"]["step"] == theirs["selmodel"]["step"]
        assert ours["callbacks"]["CheckpointWriter"] == theirs["callbacks"]["CheckpointWriter"]
        for key, weight in theirs["state_dict"].items():
            assert torch.equal(ours["state_dict"][key], weight)


COMMON = ("trainer.max_steps=12", "trainer.val_check_interval=4", "callbacks.checkpoint.every_n_steps=3")


@pytest.mark.parametrize("step", [4, 8, 12])
@pytest.mark.parametrize("batch", [0, 3])
def test_a_stop_does_not_wait_for_a_validation_which_is_done_anew(tmp_path, tiny, monkeypatch, step, batch):
    """Also the last one, after which nothing is trained any more."""
    options = (*COMMON, "data.validation_batch_size=2")
    train(tiny(tmp_path / "whole", *options))
    with monkeypatch.context() as patched:
        sent = send_at(
            patched, LanguageModel, "validation_step", lambda self, _, index: (self.global_step, index) == (step, batch)
        )
        with pytest.raises(Interrupted, match=f"SIGTERM after step {step}"):
            train(tiny(tmp_path / "parts", *options))
    assert time.monotonic() - sent[0] < 10
    saved = read_checkpoint(tmp_path / "parts" / "last.ckpt")
    assert saved["selmodel"]["step"] == step
    assert saved["callbacks"]["CheckpointWriter"]["validation_pending"]
    train(tiny(tmp_path / "parts", *options))
    equal_files(tmp_path / "parts", tmp_path / "whole")
    assert (
        json.loads((tmp_path / "parts" / "results.json").read_text())["best"]
        == (json.loads((tmp_path / "whole" / "results.json").read_text())["best"])
    )


@pytest.mark.parametrize("step", [8, 12])
def test_a_validation_done_anew_and_lost_again_is_told_once(tmp_path, tiny, monkeypatch, step):
    """Killed after its figures were written, and before a checkpoint was."""
    train(tiny(tmp_path / "whole", *COMMON))
    with monkeypatch.context() as patched:
        send_at(patched, LanguageModel, "validation_step", lambda self, *_: self.global_step == step)
        with pytest.raises(Interrupted):
            train(tiny(tmp_path / "parts", *COMMON))

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    for owner, name in ((checkpoint_file, "write_checkpoint"), (checkpoint, "write_checkpoint")):
        monkeypatch.setattr(owner, name, killed)
    with pytest.raises(Killed):
        train(tiny(tmp_path / "parts", *COMMON))
    assert str(step) in losses(tmp_path / "parts" / "validation.csv", "val/loss")
    monkeypatch.undo()
    train(tiny(tmp_path / "parts", *COMMON))
    equal_files(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_does_not_wait_for_data(tmp_path, tiny, monkeypatch, workers):
    options = (*COMMON, f"data.workers={workers}")
    train(tiny(tmp_path / "whole", *options))
    with monkeypatch.context() as patched:
        # In the process that trains: with a worker its wait, without one the reading itself.
        original = loader.TrainLoader._batches

        def batches(self, source, step, *others):
            def slow():
                for count, piece in enumerate(source):
                    if count == 6:
                        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                        time.sleep(30)
                    yield piece

            return original(self, slow(), step, *others)

        patched.setattr(loader.TrainLoader, "_batches", batches)
        started = time.monotonic()
        with pytest.raises(Interrupted, match=r"SIGTERM after step [56]") as stopped:
            train(tiny(tmp_path / "parts", *options))
        assert time.monotonic() - started < 28
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["selmodel"]["step"] == stopped.value.step
    train(tiny(tmp_path / "parts", *options))
    equal_files(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_does_not_wait_for_the_first_step_which_may_compile(tmp_path, tiny, monkeypatch, resumed):
    """Nothing is trained yet, so nothing is saved; what was there stays."""
    train(tiny(tmp_path / "whole", *COMMON))
    if resumed:
        train(tiny(tmp_path / "parts", *COMMON, "trainer.max_steps=5", "optim.schedule_steps=12"))
        before = (tmp_path / "parts" / "last.ckpt").read_bytes()
    with monkeypatch.context() as patched:
        sent = send_at(patched, Transformer, "forward", lambda self, *_, **__: self.training)
        with pytest.raises(
            Interrupted, match="SIGTERM after step 5" if resumed else "before the first step"
        ) as stopped:
            train(tiny(tmp_path / "parts", *COMMON))
    assert time.monotonic() - sent[0] < 10
    assert stopped.value.steps_made == 0
    if resumed:
        assert (tmp_path / "parts" / "last.ckpt").read_bytes() == before
    else:
        assert not list((tmp_path / "parts").glob("*.ckpt"))
        train(tiny(tmp_path / "parts", *COMMON))
        equal_files(tmp_path / "parts", tmp_path / "whole")


def test_in_the_middle_of_a_step_the_stop_waits_for_its_end(tmp_path, tiny, monkeypatch):
    train(tiny(tmp_path / "whole", *COMMON))
    with monkeypatch.context() as patched:
        sent = send_at(patched, AdamW, "lr_at", lambda self, step: step == 6, seconds=1.0)
        with pytest.raises(Interrupted, match="SIGTERM after step 6"):
            train(tiny(tmp_path / "parts", *COMMON))
    assert sent
    train(tiny(tmp_path / "parts", *COMMON))
    equal_files(tmp_path / "parts", tmp_path / "whole")


def test_a_second_signal_does_not_break_into_the_checkpoint_of_the_first(tmp_path, tiny, monkeypatch):
    """Of another kind, as a cluster sends SIGUSR1 before SIGTERM."""
    train(tiny(tmp_path / "whole", *COMMON))
    with monkeypatch.context() as patched:
        send_at(
            patched, LanguageModel, "validation_step", lambda self, *_: self.global_step == 4, number=signal.SIGUSR1
        )
        original = torch.save

        def slow_save(*arguments, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            return original(*arguments, **options)

        patched.setattr(torch, "save", slow_save)
        with pytest.raises(Interrupted, match="SIGUSR1 after step 4"):
            train(tiny(tmp_path / "parts", *COMMON, "callbacks.checkpoint.every_n_steps=0"))
    train(tiny(tmp_path / "parts", *COMMON))
    equal_files(tmp_path / "parts", tmp_path / "whole")


# --- a disk that refuses ---------------------------------------------------------------------------------------------


def refuse(monkeypatch, when):
    """Writing a checkpoint fails while ``when(step)`` is true."""
    original = checkpoint_file.write_checkpoint

    def write(checkpoint, path):
        if when(checkpoint["selmodel"]["step"]):
            raise OSError(28, "No space left on device")
        original(checkpoint, path)

    monkeypatch.setattr(checkpoint_file, "write_checkpoint", write)


def test_failed_saves_are_told_of_and_counted_and_do_not_stop_training_at_once(tmp_path, tiny, monkeypatch, caplog):
    train(tiny(tmp_path / "whole", *COMMON))
    with monkeypatch.context() as patched:
        refuse(patched, lambda step: step in (3, 4))
        train(tiny(tmp_path / "parts", *COMMON))
    failures = [record for record in caplog.records if "could not be written" in record.getMessage()]
    assert [record.levelname for record in failures] == ["ERROR", "ERROR"]  # last.ckpt after 3, best.ckpt after 4
    assert "step 3:" in failures[0].getMessage()
    assert "No space left on device" in failures[0].getMessage()
    assert "number 2" in failures[1].getMessage()
    state = read_checkpoint(tmp_path / "parts" / "last.ckpt")["callbacks"]["CheckpointWriter"]
    assert state["failed_saves"] == 2
    assert losses(tmp_path / "parts" / "train.csv", "train/loss") == losses(
        tmp_path / "whole" / "train.csv", "train/loss"
    )


def test_too_many_in_a_row_stop_the_run_and_it_goes_on_from_the_last_one_written(tmp_path, tiny, monkeypatch):
    train(tiny(tmp_path / "whole", *COMMON))
    options = (*COMMON, "callbacks.checkpoint.monitor=null", "callbacks.checkpoint.max_failed_saves=2")
    with monkeypatch.context() as patched:
        refuse(patched, lambda step: step > 3)
        message = r"stopped at step 9: .*last\.ckpt could not be written \(No space left on device\).*2 times in a row"
        with pytest.raises(UserError, match=message):
            train(tiny(tmp_path / "parts", *options))
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["selmodel"]["step"] == 3
    train(tiny(tmp_path / "parts", *options))
    for file, name in (("train.csv", "train/loss"), ("validation.csv", "val/loss")):
        assert losses(tmp_path / "parts" / file, name) == losses(tmp_path / "whole" / file, name)


def test_a_stop_whose_checkpoint_cannot_be_written_says_so(tmp_path, tiny, monkeypatch):
    """It must not look like a stop with the state saved, which a cluster puts back into its queue."""
    refuse(monkeypatch, lambda step: step > 3)
    send_at(monkeypatch, LanguageModel, "validation_step", lambda self, *_: self.global_step == 4)
    with pytest.raises(UserError, match=r"stopped at step 4: .*No space left"):
        train(tiny(tmp_path / "run", *COMMON))
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["selmodel"]["step"] == 3


def test_the_last_checkpoint_of_a_run_must_be_written(tmp_path, tiny, monkeypatch):
    refuse(monkeypatch, lambda step: step == 11)
    with pytest.raises(UserError, match=r"stopped at step 11: .*could not be written"):
        train(tiny(tmp_path / "run", *COMMON, "trainer.max_steps=11", "callbacks.checkpoint.monitor=null"))
