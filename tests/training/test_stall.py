"""A run that makes no steps says where it stands."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

from selmodel.data.loader import STACK_SIGNAL
from selmodel.training.module import LanguageModel
from selmodel.training.run import train
from selmodel.training.stall import StallWatch


def stuck_here(seconds):
    time.sleep(seconds)


def test_a_stall_is_told_of_with_the_place_and_ends_nothing(tmp_path, tiny, monkeypatch, caplog):
    original = LanguageModel.training_step

    def step(self, batch, index):
        if self.global_step == 3:
            stuck_here(2.0)
        return original(self, batch, index)

    monkeypatch.setattr(LanguageModel, "training_step", step)
    with caplog.at_level("WARNING"):
        train(tiny(tmp_path / "run", "guards.stall_minutes=0.01"))  # 0.6 s
    reports = [message for message in caplog.messages if re.match(r"no step for .*, after step 3:", message)]
    assert 1 <= len(reports) <= 4  # again after as long
    assert f"process {os.getpid()} on " in reports[0]
    assert "rank 0 of 1" in reports[0]
    assert "in stuck_here" in reports[0]
    assert not any(thread.name == "stall watch" for thread in threading.enumerate())


def test_a_run_that_moves_says_nothing(tmp_path, tiny, caplog):
    with caplog.at_level("WARNING"):
        train(tiny(tmp_path / "run"))
        train(tiny(tmp_path / "off", "guards.stall_minutes=null"))
    assert "no step for" not in caplog.text


def worker(register):
    if register:
        import faulthandler

        faulthandler.register(STACK_SIGNAL, all_threads=True)
    stuck_here(60)


def report():
    return StallWatch(1.0).report(90.0, threading.get_ident())


@contextlib.contextmanager
def child(*, register=True):
    process = multiprocessing.get_context("fork").Process(target=worker, args=(register,))
    process.start()
    time.sleep(0.3)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_workers_are_told_of_and_asked_for_their_stack(capfd):
    with child() as process:
        text = report()
        time.sleep(0.3)
        assert process.is_alive()
    assert f"its process {process.pid} ({process.name}) is waiting; its stack follows" in text
    assert "stuck_here" in capfd.readouterr().err


def test_a_child_that_does_not_know_the_signal_is_not_ended_by_it():
    with child(register=False) as process:
        assert f"its process {process.pid} ({process.name}) is waiting" in report()
        time.sleep(0.2)
        assert process.is_alive()


def test_a_stopped_worker_is_told_from_a_waiting_one():
    with child() as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        assert f"is stopped; kill -CONT {process.pid} wakes it" in report()


def test_the_workers_of_a_run_know_the_signal(tmp_path, tiny, monkeypatch, capfd):
    """While training waits, the worker that reads its data prints where it stands, and goes on."""
    original = LanguageModel.training_step

    def step(self, batch, index):
        if self.global_step == 3:
            stuck_here(1.5)
        return original(self, batch, index)

    monkeypatch.setattr(LanguageModel, "training_step", step)
    train(tiny(tmp_path / "run", "guards.stall_minutes=0.01", "data.workers=1"))
    assert "_worker_loop" in capfd.readouterr().err


def test_nothing_is_watched_outside_of_training():
    watch = StallWatch(None)
    watch.on_fit_start(SimpleNamespace(), None)
    assert watch._thread is None
