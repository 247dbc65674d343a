"""Stopping a run between two steps, with its state saved."""

from __future__ import annotations

import logging
import signal
from typing import Any

import lightning as L
import torch

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was asked to stop and has stopped after a whole step, its checkpoint written.

    Not an ``Exception``: a sweep, which goes on with the next job after a failed one, stops too.

    Attributes:
        signal: the signal's number.
        step: the last optimizer step trained (or round searched, by ``unit``).
    """

    def __init__(self, number: int, step: int, unit: str = "step") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after {unit} {step}")
        self.signal = number
        self.step = step


class StopOnSignal(L.Callback):
    """Turns SIGINT (Ctrl-C) and SIGTERM into a stop after the current step, with ``last.ckpt`` written.

    A second signal of the same kind stops at once, as if this callback were not there.
    """

    def __init__(self, save) -> None:
        self._save = save  # called with (trainer, module)
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for number in _SIGNALS:
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # only the main thread may; elsewhere signals keep their usual effect
                return

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received = number
        signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
        log.warning("%s: stopping after this step", signal.Signals(number).name)

    # At the start of the next batch everything that belongs to the step before, validation included, is done.
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        received = self._agree(trainer, module)
        if received and trainer.global_step:
            self._save(trainer, module)
            raise Interrupted(received, trainer.global_step)

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
