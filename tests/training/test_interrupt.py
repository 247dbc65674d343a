"""Ctrl-C and SIGTERM stop a run after a whole step, with its state saved."""

from __future__ import annotations

import csv
import os
import signal
import threading
import time

import pytest

from selmodel.training.checkpoint import read_checkpoint
from selmodel.training.interrupt import Interrupted
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
