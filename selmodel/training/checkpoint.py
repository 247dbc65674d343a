"""When checkpoints are taken, what is in one, and what happens when one cannot be written.

A checkpoint is always taken after everything that belongs to its optimizer step, validation included, so a resumed run
does the next step and nothing twice. Where a stop could not wait for the validation, the checkpoint says that it is
still to be done. The files: ``selmodel.training.checkpoint_file``.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from selmodel.errors import UserError
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.training.checkpoint_file import BEST, FORMAT, LAST, read_checkpoint, set_aside, write_checkpoint

log = logging.getLogger(__name__)

MONITORS = ("val/loss", "val/perplexity", "val/bits_per_byte")


class CheckpointWriter(L.Callback):
    """Writes ``last.ckpt`` every so many optimizer steps and at the end, ``best.ckpt`` after a better validation.

    Args:
        directory: the run's directory.
        identity: called when saving; returns the plain dictionary that says what the run is (resolved
            configuration, architecture, tokenizer), stored under ``selmodel``.
        every_n_steps: steps between two ``last.ckpt``; 0 for the end only.
        monitor: validation figure that ``best.ckpt`` holds the lowest of; null for no ``best.ckpt``.
        max_failed_saves: so many times in a row a file may fail to be written (a full disk) before the run stops.
    """

    def __init__(
        self,
        directory: str | Path,
        identity: Callable[[], dict],
        *,
        every_n_steps: int = 500,
        monitor: str | None = "val/loss",
        max_failed_saves: int = 3,
    ) -> None:
        if every_n_steps < 0:
            raise UserError(f"callbacks.checkpoint.every_n_steps={every_n_steps}: must be 0 (at the end only) or more")
        if max_failed_saves < 1:
            raise UserError(
                f"callbacks.checkpoint.max_failed_saves={max_failed_saves}: must be at least 1, the failures in a row "
                "that stop a run"
            )
        if monitor not in (None, *MONITORS):
            raise UserError(
                f"callbacks.checkpoint.monitor={monitor}: no such figure; expected null or one of {', '.join(MONITORS)}"
            )
        self.directory = Path(directory)
        self.identity = identity
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.max_failed_saves = max_failed_saves
        self.failed_saves = 0  # in all, also by earlier starts
        self.validation_pending = False  # of the step that training stands at
        self.damaged: Sequence[Path] = ()  # checkpoints that the run did not go on from
        self._failed_in_a_row = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self._last_step: int | None = None

    # -- when -----------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step >= trainer.max_steps > 0:
            # Lightning validates once more when it is asked to stop, so every run ends with a validation.
            trainer.should_stop = True
        if self._due(trainer.global_step) and not self._validation_follows(trainer):
            self.save_last(trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.validation_pending = False
        if self.monitor is not None:
            value = float(trainer.callback_metrics[self.monitor])
            # A diverged run's NaN is never the lowest, and nothing would be lower than it later.
            if math.isfinite(value) and (self.best is None or value < self.best):
                before = self.best, self.best_step
                self.best, self.best_step = value, trainer.global_step
                if not self._save(trainer, module, BEST):
                    self.best, self.best_step = before
        if self._due(trainer.global_step):
            self.save_last(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step and self._last_step != trainer.global_step:
            self.save_last(trainer, module, final=True)

    def _due(self, step: int) -> bool:
        return self.every_n_steps > 0 and step > 0 and step % self.every_n_steps == 0

    def _validation_follows(self, trainer: L.Trainer) -> bool:
        """Whether Lightning validates right after this training batch; the checkpoint is then taken after that."""
        if not trainer.enable_validation:
            return False
        return trainer.should_stop or trainer.global_step % trainer.val_check_batch == 0

    # -- what -----------------------------------------------------------------------------------------------

    def save_last(self, trainer: L.Trainer, module: L.LightningModule, *, final: bool = False) -> None:
        """Write ``last.ckpt`` now; every process must call it, between two optimizer steps.

        Args:
            final: nothing is trained after this, so there is no further try.

        Raises:
            UserError: it could not be written, and it was the final one, or too many before it were not either.
        """
        self._last_step = trainer.global_step
        self._save(trainer, module, LAST, final=final)

    def _save(self, trainer: L.Trainer, module: L.LightningModule, name: str, *, final: bool = False) -> bool:
        module.timer.pause()
        files = trainer.strategy.checkpoint_io
        files.failure = None
        trainer.save_checkpoint(self.directory / name, weights_only=False)
        reason = self._agree_on_failure(trainer, module, files.failure)
        if reason is None:
            self._failed_in_a_row = 0
        else:
            self._failed(trainer.global_step, name, reason, final=final)
        module.timer.start()
        return reason is None

    def _agree_on_failure(self, trainer: L.Trainer, module: L.LightningModule, failure: OSError | None) -> str | None:
        """Why the first process, which writes, could not; None where it could. Known to all processes after this."""
        reason = None if failure is None else (failure.strerror or str(failure))
        if trainer.world_size == 1:
            return reason
        shared = [reason]
        torch.distributed.broadcast_object_list(shared, src=0, device=module.device)
        return shared[0]

    def _failed(self, step: int, name: str, reason: str, *, final: bool) -> None:
        self.failed_saves += 1
        self._failed_in_a_row += 1
        path = self.directory / name
        there = "the one before it is untouched" if path.exists() else "there is none of that name yet"
        fault = f"step {step}: {path} could not be written ({reason}); {there}"
        if final or self._failed_in_a_row >= self.max_failed_saves:
            often = "" if final else (
                f", {self._failed_in_a_row} times in a row (callbacks.checkpoint.max_failed_saves="
                f"{self.max_failed_saves})"
            )  # fmt: skip
            raise UserError(
                f"stopped at {fault}{often}. Free space or mend the folder's rights; the same command then goes on "
                "from the last checkpoint that was written"
            )
        log.error(
            "%s. Training goes on; it stops after %d failures in a row, this is number %d",
            fault, self.max_failed_saves, self._failed_in_a_row,
        )  # fmt: skip

    def finish_pending(self, path: Path, validation: ValidationResult) -> None:
        """After the validation of a finished run, which a stop had cut short: write what it would have written.

        path: the checkpoint that says that it is pending.
        """
        self.validation_pending = False
        checkpoint = read_checkpoint(path)
        names = [path.name]
        value = math.nan if self.monitor is None else validation.metrics()[self.monitor]
        if math.isfinite(value) and (self.best is None or value < self.best):
            # As Lightning keeps figures for callbacks: in float32.
            self.best, self.best_step = float(torch.tensor(value)), checkpoint["selmodel"]["step"]
            names.insert(0, BEST)
        checkpoint["callbacks"][self.state_key] = self.state_dict()
        for name in names:
            write_checkpoint(checkpoint, path.with_name(name))

    def state_dict(self) -> dict:
        return {
            "monitor": self.monitor, "best": self.best, "best_step": self.best_step,
            "failed_saves": self.failed_saves, "validation_pending": self.validation_pending,
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        self.failed_saves = state.get("failed_saves", 0)
        self.validation_pending = state.get("validation_pending", False)
        if state["monitor"] == self.monitor:
            self.best, self.best_step = state["best"], state["best_step"]
        else:
            log.info("%s: looking for the lowest %s anew; it was %s before", BEST, self.monitor, state["monitor"])

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        checkpoint["selmodel"] = self.identity() | {"format": FORMAT, "step": trainer.global_step}
        checkpoint["random"] = _gather(random_state())
        checkpoint["loops"]["fit_loop"] = _settled_progress(checkpoint["loops"]["fit_loop"], trainer.global_step)

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        states = checkpoint["random"]
        # On another number of processes there is no state to go on with for the new ones; rank 0's serves.
        self._random = states[trainer.global_rank] if trainer.global_rank < len(states) else states[0]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._last_step = trainer.global_step
        if trainer.is_global_zero:  # not before: all processes have read by now what they go on from
            for path in self.damaged:
                log.warning("%s: is damaged, kept as %s", path, set_aside(path).name)
        # Last of all, since restoring and building loaders may draw numbers.
        if (state := self.__dict__.pop("_random", None)) is not None:
            set_random_state(state)


def is_validation_pending(checkpoint: dict) -> bool:
    """Whether a checkpoint was taken before the validation of its step, which a stop did not wait for."""
    return checkpoint["callbacks"].get(CheckpointWriter.__qualname__, {}).get("validation_pending", False)


def _settled_progress(state: dict, step: int) -> dict:
    """Lightning's loop state as it is between two optimizer steps.

    A checkpoint may be taken in several hooks, in each of which Lightning's counters stand elsewhere, and its
    restart rules then skip a validation, run one batch of it, or count a step twice. Written in this one form, a
    checkpoint always means: step ``step`` is done with all that belongs to it, go on with the next.
    """
    state = dict(state)
    progress = {"ready": step, "started": step, "processed": step, "completed": step}
    batches = state["epoch_loop.batch_progress"]
    state["epoch_loop.batch_progress"] = batches | {
        "total": batches["total"] | progress,
        "current": batches["current"] | progress,
        "is_last_batch": False,
    }
    state["epoch_loop.state_dict"] = state["epoch_loop.state_dict"] | {"_batches_that_stepped": step}
    epochs = state["epoch_progress"]
    in_first_epoch = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    state["epoch_progress"] = epochs | {
        "total": epochs["total"] | in_first_epoch,
        "current": epochs["current"] | in_first_epoch,
    }
    validation = state["epoch_loop.val_loop.batch_progress"]
    fresh = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    state["epoch_loop.val_loop.batch_progress"] = validation | {
        "total": validation["total"] | fresh,
        "current": validation["current"] | fresh,
        "is_last_batch": False,
    }
    return state


# -- random states --------------------------------------------------------------------------------------------


def random_state() -> dict:
    """States of this process's generators (Python, NumPy, torch, CUDA) as plain containers and tensors."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [
            kind,
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    """Set the generators of this process to what ``random_state`` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _gather(value: dict) -> list[dict]:
    """``value`` of every process, in rank order; every process calls it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
