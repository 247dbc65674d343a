"""Noticing that training goes wrong: gradients that are not finite, and losses that jump.

A step whose gradient is not finite changes nothing: it is counted, told of with the place of its batch in the data, and
its batch is kept in a file. After too many in a row the run stops with its state saved, since its weights would be what
is wrong. Gradients are those of all processes together, so all decide alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from selmodel.errors import UserError

log = logging.getLogger(__name__)

FOLDER = "skipped"  # of a run's, for the batches of steps that were skipped
KEPT = 20  # batches kept there at most
WINDOW = 100  # steps whose median a loss is compared with
LEAST_WINDOW = 20  # before so many, nothing is called a spike


class Guards:
    """What is watched for in training (config ``guards``).

    Args:
        max_skipped: steps in a row that may be skipped before the run stops.
        spike_factor: a loss above this many times the median of the last steps is logged as a spike; None: none is.

    Raises:
        UserError: naming each option that is out of range.
    """

    def __init__(self, max_skipped: int = 10, spike_factor: float | None = 2.0) -> None:
        faults = []
        if max_skipped < 1:
            faults.append(
                f"guards.max_skipped={max_skipped}: must be at least 1, the skipped steps in a row that stop a run"
            )
        if spike_factor is not None and not 1 < spike_factor < math.inf:
            faults.append(f"guards.spike_factor={spike_factor}: must be above 1, or null for no watch over spikes")
        if faults:
            raise UserError("\n".join(faults))
        self.max_skipped = max_skipped
        self.spike_factor = spike_factor
        self.skipped = 0  # in all, also by earlier starts
        self.in_a_row = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row were skipped."""
        return self.in_a_row >= self.max_skipped

    def step_made(self) -> None:
        """A step with a finite gradient."""
        self.in_a_row = 0

    def step_skipped(self, step: int, batch: dict[str, Any], loss: float, directory: Path | None) -> None:
        """A step with a gradient that is not finite: count it, say so, and keep its batch.

        Args:
            step: number of the optimizer step, from 1.
            batch: of this process.
            loss: mean of this process's targets, in nats.
            directory: of the run; None: the batch is not kept.
        """
        self.skipped += 1
        self.in_a_row += 1
        where = f"global batch {int(batch['step'])} of the data"
        kept = None if directory is None else _keep(batch, step, directory)
        log.warning(
            "step %d skipped: its gradient is not finite (loss %s); %s%s",
            step, f"{loss:.4g}", where, "" if kept is None else f", kept in {kept}",
        )  # fmt: skip

    def see_loss(self, step: int, loss: float) -> None:
        """Compare a logged loss with the ones before it, and say where it is a spike."""
        if self.spike_factor is None or not math.isfinite(loss):
            return
        if len(self._losses) >= LEAST_WINDOW and loss > self.spike_factor * (median := statistics.median(self._losses)):
            log.warning("step %d: loss %.4f is a spike, %.1f times the median %.4f of the last %d logged",
                        step, loss, loss / median, median, len(self._losses))  # fmt: skip
        self._losses.append(loss)


def _keep(batch: dict[str, Any], step: int, directory: Path) -> Path | None:
    """Write the batch of a skipped step, tensors and plain values; None where the disk refuses or there are many."""
    folder = directory / FOLDER
    path = folder / f"step-{step:08d}.pt"
    content = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor | int)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob("step-*.pt"))) >= KEPT:
            return None
        torch.save(content, path)
    except OSError as error:
        log.warning("%s: the batch could not be kept (%s)", path, error.strerror)
        return None
    return path


@contextlib.contextmanager
def without_update(optimizer: Optimizer) -> Iterator[None]:
    """Inside, a step of ``optimizer`` counts for everything around it (Lightning's counters) and changes nothing."""
    optimizer.step = lambda closure=None: None if closure is None else closure()  # hides the class's for this instance
    try:
        yield
    finally:
        del optimizer.step


class StopWhenExhausted(L.Callback):
    """Stops a run after too many skipped steps in a row, with ``last.ckpt`` written."""

    def __init__(self, save) -> None:
        self._save = save  # called with (trainer, module)

    # At the start of the next batch everything that belongs to the step before is done.
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        guards = module.guards
        if guards.exhausted:
            self._save(trainer, module)
            raise UserError(
                f"stopped at step {trainer.global_step}: {guards.in_a_row} steps in a row had a gradient that is not "
                f"finite (guards.max_skipped={guards.max_skipped}), so the weights or the learning rate are what is "
                "wrong. The state is saved, as it was before them; lower optim.lr, raise optim.warmup_steps, or go on "
                "from an earlier checkpoint (resume=RUN/best.ckpt)"
            )
