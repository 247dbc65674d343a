"""Stopping a run between two steps, with its state saved, and putting its SLURM job back into the queue."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

from selmodel.training.cluster import (
    REQUEUE_SIGNALS,
    cluster_environment,
    is_first_process,
    requeue,
    should_requeue,
    slurm_job,
)

log = logging.getLogger(__name__)

# Ctrl-C; what a system that shuts down sends; what clusters send before the time limit or a preemption.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(BaseException):
    """The run was asked to stop and has stopped after a whole step, its checkpoint written.

    Not an ``Exception``: a sweep, which goes on with the next job after a failed one, stops too.

    Attributes:
        signal: the signal's number.
        step: the last optimizer step trained (or round searched, by ``unit``); None before and after training.
        steps_made: of them, how many since this start.
    """

    def __init__(self, number: int, step: int | None, unit: str = "step", *, steps_made: int = 0) -> None:
        when = "outside of training" if step is None else f"after {unit} {step}"
        super().__init__(f"stopped by {signal.Signals(number).name} {when}")
        self.signal = number
        self.step = step
        self.steps_made = steps_made


@contextlib.contextmanager
def stopping_outside_training() -> Iterator[None]:
    """Before and after training, which ``StopOnSignal`` watches over: a signal raises ``Interrupted`` at once.

    There is no state then that could be lost, and files are written whole or not at all. While a stop is under way,
    such as a logger's last upload, the cluster's further signals (a preemption sends several) change nothing.
    """

    def stop(number: int, frame: Any) -> None:
        if number in REQUEUE_SIGNALS and isinstance(sys.exception(), Interrupted):
            return
        raise Interrupted(number, None)

    previous = {}
    with contextlib.suppress(ValueError):  # only the main thread may; elsewhere signals keep their usual effect
        for number in _SIGNALS:
            previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def requeueing() -> Iterator[None]:
    """A SLURM job whose run is stopped inside by a signal goes back into the queue; the ``Interrupted`` passes on.

    Around ``stopping_outside_training``: what has been put into the queue should find nothing of the run at work.
    """
    try:
        yield
    except Interrupted as stopped:
        job = slurm_job()
        first = is_first_process(cluster_environment())
        if first and should_requeue(job, stopped.signal, steps_made=stopped.steps_made):
            with _without_signals():
                requeue(job)
        raise


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """The cluster's signals change nothing meanwhile: the question to its controller takes a moment."""
    previous = {}
    with contextlib.suppress(ValueError):
        for number in REQUEUE_SIGNALS:
            previous[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopOnSignal(L.Callback):
    """Turns a signal (Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2) into a stop after the current step, ``last.ckpt`` written.

    A second signal of the same kind stops at once, as if this callback were not there. Not so the cluster's in a SLURM
    job, where it is no impatient person: SLURM sends SIGTERM at the beginning and at the end of a grace time, and kills
    in the end.
    """

    def __init__(self, save) -> None:
        self._save = save  # called with (trainer, module)
        self._received: int | None = None
        self._first_step = 0
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._first_step = trainer.global_step
        for number in _SIGNALS:
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # only the main thread may; elsewhere signals keep their usual effect
                return

    def _on_signal(self, number: int, frame: Any) -> None:
        repeated, self._received = self._received == number, number
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif slurm_job() is None:
            signal.signal(number, signal.SIG_DFL)
        elif repeated:
            return
        log.warning("%s: stopping after this step", signal.Signals(number).name)

    # At the start of the next batch everything that belongs to the step before, validation included, is done.
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        received = self._agree(trainer, module)
        if received and trainer.global_step:
            self._save(trainer, module)
            raise Interrupted(received, trainer.global_step, steps_made=trainer.global_step - self._first_step)

    def _agree(self, trainer: L.Trainer, module: L.LightningModule) -> int:
        """The signal that any process received, so that all stop after the same step."""
        if trainer.world_size == 1:
            return self._received or 0
        received = torch.tensor(self._received or 0, device=module.device)
        torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
        return int(received)

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
