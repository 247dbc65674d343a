"""Noticing that training goes wrong: losses and gradients that are not finite, and losses that jump.

A step whose loss or gradient is not finite changes nothing: it is counted, told of with the place of its batch in the
data, and its batch is kept in a file (``selmodel.training.replay`` looks at it). After too many in a row the run stops
with its state saved, since its weights would be what is wrong. Losses and gradients are those of all processes
together, so all decide alike.
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
import numpy as np
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
        spike_factor: a loss above this many times the median of the last steps is told of as a spike; None: none is.
        skip_spikes: skip the steps of spikes, as those whose gradient is not finite.
        stall_minutes: without a step for so long, each process says where it stands; None: it does not. See
            ``selmodel.training.stall``.

    Raises:
        UserError: naming each option that is out of range.
    """

    def __init__(
        self,
        max_skipped: int = 10,
        spike_factor: float | None = 2.0,
        skip_spikes: bool = False,
        stall_minutes: float | None = 10.0,
    ) -> None:
        faults = []
        if max_skipped < 1:
            faults.append(
                f"guards.max_skipped={max_skipped}: must be at least 1, the skipped steps in a row that stop a run"
            )
        if spike_factor is not None and not 1 < spike_factor < math.inf:
            faults.append(f"guards.spike_factor={spike_factor}: must be above 1, or null for no watch over spikes")
        if spike_factor is None and skip_spikes:
            faults.append("guards.skip_spikes=true with guards.spike_factor=null: what is a spike? give a factor")
        if stall_minutes is not None and not 0 < stall_minutes < math.inf:
            faults.append(f"guards.stall_minutes={stall_minutes}: must be above 0, or null for no watch over stalls")
        if faults:
            raise UserError("\n".join(faults))
        self.max_skipped = max_skipped
        self.spike_factor = spike_factor
        self.skip_spikes = skip_spikes
        self.stall_minutes = stall_minutes
        self.skipped = 0  # in all, also by earlier starts
        self.in_a_row = 0
        self.last_kept: Path | None = None  # batch of a skipped step of this start
        self._largest_norm = 0.0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row were skipped."""
        return self.in_a_row >= self.max_skipped

    def fault_of(self, step: int, loss: float, norm: float) -> str | None:
        """Why a step must not be made; None where it may.

        Args:
            step: number of the optimizer step, from 1.
            loss: mean over the targets of all processes, in nats.
            norm: of the gradient of all processes.
        """
        if math.isfinite(norm):
            self._largest_norm = max(self._largest_norm, norm)
        fault = None
        if not math.isfinite(norm):
            fault = "its gradient is not finite"
        elif not math.isfinite(loss):
            fault = "its loss is not finite"
        elif self._is_spike(step, loss) and self.skip_spikes:
            fault = "its loss is a spike"
        if fault is None:
            self.in_a_row = 0
            self._losses.append(loss)
        return fault

    def step_skipped(
        self,
        step: int,
        fault: str,
        batch: dict[str, Any],
        loss: float,
        *,
        place: str = "",
        directory: Path | None = None,
        rank: int = 0,
    ) -> None:
        """A step that was not made: count it, say so, and keep its batch.

        Args:
            step: number of the optimizer step, from 1.
            fault: as ``fault_of`` gives it.
            batch: of this process.
            loss: mean over the targets of all processes, in nats.
            place: where in the corpus the batch was read.
            directory: of the run; None: the batch is not kept.
            rank: of this process.
        """
        self.skipped += 1
        self.in_a_row += 1
        kept = None if directory is None else _keep(batch, step, directory, rank)
        self.last_kept = kept or self.last_kept
        log.warning(
            "step %d skipped: %s (loss %s); global batch %d of the data%s%s",
            step, fault, f"{loss:.4g}", int(batch["step"]), place and f", {place}",
            "" if kept is None else f", kept in {kept}",
        )  # fmt: skip

    def take_largest_norm(self) -> float:
        """The largest finite norm of a gradient since the last call."""
        largest, self._largest_norm = self._largest_norm, 0.0
        return largest

    def _is_spike(self, step: int, loss: float) -> bool:
        if self.spike_factor is None or len(self._losses) < LEAST_WINDOW:
            return False
        median = statistics.median(self._losses)
        if loss <= self.spike_factor * median:
            return False
        log.warning("step %d: loss %.4f is a spike, %.1f times the median %.4f of the last %d steps",
                    step, loss, loss / median, median, len(self._losses))  # fmt: skip
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge as an uninterrupted one would."""
        return {
            "skipped": self.skipped, "in_a_row": self.in_a_row, "largest_norm": self._largest_norm,
            "losses": list(self._losses),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; a run that had stopped for too many skipped steps gets as many again."""
        self.skipped = state["skipped"]
        self.in_a_row = 0 if state["in_a_row"] >= self.max_skipped else state["in_a_row"]
        self._largest_norm = state["largest_norm"]
        self._losses = deque(state["losses"], maxlen=WINDOW)


def _keep(batch: dict[str, Any], step: int, directory: Path, rank: int) -> Path | None:
    """Write the batch of a skipped step, tensors and plain values; None where the disk refuses or there are many."""
    folder = directory / FOLDER
    path = folder / (f"step-{step:08d}.pt" if rank == 0 else f"step-{step:08d}-rank-{rank}.pt")
    content = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor | int)}
    if isinstance(batch.get("state"), np.ndarray):
        content["state"] = torch.from_numpy(batch["state"])
    content["optimizer_step"] = step
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob("step-*.pt"))) >= KEPT:
            return None
        torch.save(content, path)
    except (OSError, RuntimeError) as error:  # torch tells of a full disk by the latter
        log.warning("%s: the batch could not be kept (%s)", path, str(error).splitlines()[0])
        path.unlink(missing_ok=True)
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
            look = "" if guards.last_kept is None else (
                f" A batch of them is kept: python train.py 'replay={guards.last_kept}' shows its texts, and what in "
                "it is not finite."
            )  # fmt: skip
            raise UserError(
                f"stopped at step {trainer.global_step}: {guards.in_a_row} steps in a row were skipped "
                f"(guards.max_skipped={guards.max_skipped}), so the weights or the learning rate are what is wrong. "
                f"The state is saved, as it was before them.{look} Lower optim.lr, raise optim.warmup_steps, or go on "
                "from an earlier checkpoint (resume=RUN/best.ckpt in another run_dir)"
            )
