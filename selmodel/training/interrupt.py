"""Stopping a run between two steps, with its state saved, and putting its SLURM job back into the queue."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import lightning as L
import torch

from selmodel.errors import UserError
from selmodel.training.checkpoint import CheckpointWriter
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
        if step == 0 and unit == "step":
            when = "before the first step"
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
    """Turns a signal (Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2) into a stop, ``last.ckpt`` written.

    Where a wait for data fails, the state is saved too.

    In one process the stop comes at once where nothing of the state of training changes meanwhile: until the first step
    is done (a compilation may take minutes), while training waits for data, and during a validation, which is done
    anew when the run goes on. Elsewhere, and in several processes, which must agree, it comes after the current step,
    or after the current batch of a validation.

    A second signal of the same kind stops at once, as if this callback were not there. Not so the cluster's in a SLURM
    job, where it is no impatient person: SLURM sends SIGTERM at the beginning and at the end of a grace time, and kills
    in the end.

    Args:
        writer: writes the checkpoint.
    """

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._trainer: L.Trainer | None = None
        self._received: int | None = None
        self._stop: Interrupted | None = None  # raised where the state rests
        self._failed_wait: Exception | None = None  # of a wait for data
        self._first_step = 0
        # "first": the first step of this start is not done, so that there is nothing to save; "rest": the state of
        # training does not change; "busy": it does, or files are written.
        self._phase = "busy"
        self._phase_before = "busy"  # a validation
        self._previous: dict[int, Any] = {}

    # -- signals --------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._trainer = trainer
        self._first_step = trainer.global_step
        self._phase = "first"
        loader = trainer.train_dataloader
        if hasattr(loader, "around_wait"):
            loader.around_wait = self._waiting
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
        if self._rests:
            log.warning("%s: stopping", signal.Signals(number).name)
            self._raise()
        if self._stop is None:
            log.warning("%s: stopping after this step", signal.Signals(number).name)

    @property
    def _rests(self) -> bool:
        """Whether the run may stop here and now."""
        return self._phase != "busy" and self._trainer.world_size == 1 and self._stop is None

    def _raise(self) -> NoReturn:
        # Before the first step is done the step counter may be ahead of the rest of the state.
        step = self._first_step if self._phase == "first" else self._trainer.global_step
        self._phase = "busy"  # a further signal must not break into writing the checkpoint
        self._stop = Interrupted(self._received, step, steps_made=step - self._first_step)
        raise self._stop

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around the wait for a batch: a signal stops at once, also one that came during the step before."""
        before = self._phase
        self._phase = "first" if before == "first" else "rest"
        if self._received is not None and self._rests:
            self._raise()
        try:
            yield
        except Exception as error:  # a shard that is gone, a worker that was killed
            self._failed_wait = error
            raise
        finally:
            self._phase = before

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """The stop, or the failure of a wait for data, has left the loops; now the state can be written."""
        if trainer.world_size > 1 or trainer.global_step == self._first_step:
            return
        if exception is self._stop:
            self._writer.save_last(trainer, module, final=True)
        elif exception is self._failed_wait:
            self._phase = "busy"
            try:
                self._writer.save_last(trainer, module, final=True)
            except UserError as error:  # the data's fault is the one to tell of
                log.error("%s", error)
            else:
                log.warning("the state after step %d is saved", trainer.global_step)

    # -- places where all processes agree -------------------------------------------------------------------

    # At the start of the next batch everything that belongs to the step before, validation included, is done.
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._stop_if_asked(trainer, module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._phase = "busy"

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._in_training(trainer):
            self._writer.validation_pending = True
            self._phase_before, self._phase = self._phase, "rest"

    def on_validation_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self._in_training(trainer):
            self._stop_if_asked(trainer, module)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._phase = "busy"  # its figures are written next

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._in_training(trainer):
            self._phase = self._phase_before

    def _in_training(self, trainer: L.Trainer) -> bool:
        return trainer.state.fn == "fit" and self._trainer is not None

    def _stop_if_asked(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        received = self._agree(trainer, module)
        if not received:
            return
        self._phase = "busy"
        step = trainer.global_step
        if step > self._first_step:
            self._writer.save_last(trainer, module, final=True)
        raise Interrupted(received, step, steps_made=step - self._first_step)

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


class PendingValidation(L.Callback):
    """Does the validation first that a stop before did not wait for.

    Args:
        writer: knows whether there is one.
    """

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if not self._writer.validation_pending:
            return
        log.info("step %d: its validation, which a stop had cut short", trainer.global_step)
        # As Lightning's training loop does it after a step.
        connector = trainer._logger_connector
        first_iteration = connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first_iteration
