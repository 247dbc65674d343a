"""Checkpoints: what is in one, how it is written, and whether a run may go on from it.

A checkpoint is a dictionary of plain containers and tensors, so that ``torch.load(path, weights_only=True)`` reads
it and nothing in it can run code. It is always taken after everything that belongs to its optimizer step,
validation included, so a resumed run does the next step and nothing twice.
"""

from __future__ import annotations

import logging
import math
import os
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from selmodel.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1
LAST = "last.ckpt"
BEST = "best.ckpt"
MONITORS = ("val/loss", "val/perplexity", "val/bits_per_byte")


class AtomicCheckpointIO(CheckpointIO):
    """Writes to a temporary name, flushes to disk, renames: a file of the final name is always whole."""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        _check_plain(checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only their owner may read
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _flush_directory(path.parent)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> dict:
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def _check_plain(value: Any, path: str = "checkpoint") -> None:
    """Refuse what ``weights_only=True`` would refuse to load, while the run can still be saved otherwise.

    Exact types: a subclass (``TorchVersion`` of ``str``, ``OrderedDict`` excepted, which torch allows) would not load.
    """
    if type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            if type(key) not in (str, int):
                raise TypeError(f"{path}: key {key!r} of type {type(key).__name__} cannot go into a checkpoint")
            _check_plain(inner, f"{path}.{key}")
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{path}[{index}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in (str, int, float, bool, bytes, type(None)):
        raise TypeError(f"{path}: a {type(value).__module__}.{type(value).__name__} cannot go into a checkpoint")


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict:
    """Read a checkpoint without unpickling arbitrary objects.

    Raises:
        UserError: when the file is missing, not whole, or not a checkpoint of this project.
    """
    path = Path(path)
    if path.is_dir():
        path = path / LAST
    if not path.is_file():
        near = sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        hint = "found beside it: " + ", ".join(p.name for p in near) if near else "no checkpoint is beside it"
        raise UserError(f"checkpoint={path}: no such file; expected RUN/{LAST} or RUN/{BEST}; {hint}")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # zip, pickle, EOF and runtime errors, by the kind of damage
        raise UserError(
            f"checkpoint={path}: cannot be read ({type(error).__name__}, {path.stat().st_size} bytes); it is damaged "
            f"or not a checkpoint; try the other one of {LAST} and {BEST}"
        ) from error
    stored = checkpoint.get("selmodel") if isinstance(checkpoint, dict) else None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError(
            f"checkpoint={path}: not a checkpoint that this version reads; expected one of format {FORMAT}, written by "
            "train.py"
        )
    return checkpoint


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of checkpoints that a kill has cut short."""
    for path in directory.glob(".*.ckpt.*.tmp"):
        path.unlink(missing_ok=True)


class CheckpointWriter(L.Callback):
    """Writes ``last.ckpt`` every so many optimizer steps and at the end, ``best.ckpt`` after a better validation.

    Args:
        directory: the run's directory.
        identity: called when saving; returns the plain dictionary that says what the run is (resolved
            configuration, architecture, tokenizer), stored under ``selmodel``.
        every_n_steps: steps between two ``last.ckpt``; 0 for the end only.
        monitor: validation figure that ``best.ckpt`` holds the lowest of; null for no ``best.ckpt``.
    """

    def __init__(
        self,
        directory: str | Path,
        identity: Callable[[], dict],
        *,
        every_n_steps: int = 500,
        monitor: str | None = "val/loss",
    ) -> None:
        if every_n_steps < 0:
            raise UserError(f"callbacks.checkpoint.every_n_steps={every_n_steps}: must be 0 (at the end only) or more")
        if monitor not in (None, *MONITORS):
            raise UserError(
                f"callbacks.checkpoint.monitor={monitor}: no such figure; expected null or one of {', '.join(MONITORS)}"
            )
        self.directory = Path(directory)
        self.identity = identity
        self.every_n_steps = every_n_steps
        self.monitor = monitor
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
        if self.monitor is not None:
            value = float(trainer.callback_metrics[self.monitor])
            # A diverged run's NaN is never the lowest, and nothing would be lower than it later.
            if math.isfinite(value) and (self.best is None or value < self.best):
                self.best, self.best_step = value, trainer.global_step
                self._save(trainer, module, BEST)
        if self._due(trainer.global_step):
            self.save_last(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step and self._last_step != trainer.global_step:
            self.save_last(trainer, module)

    def _due(self, step: int) -> bool:
        return self.every_n_steps > 0 and step > 0 and step % self.every_n_steps == 0

    def _validation_follows(self, trainer: L.Trainer) -> bool:
        """Whether Lightning validates right after this training batch; the checkpoint is then taken after that."""
        if not trainer.enable_validation:
            return False
        return trainer.should_stop or trainer.global_step % trainer.val_check_batch == 0

    # -- what -----------------------------------------------------------------------------------------------

    def save_last(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write ``last.ckpt`` now; every process must call it, between two optimizer steps."""
        self._last_step = trainer.global_step
        self._save(trainer, module, LAST)

    def _save(self, trainer: L.Trainer, module: L.LightningModule, name: str) -> None:
        module.timer.pause()
        trainer.save_checkpoint(self.directory / name, weights_only=False)
        module.timer.start()

    def state_dict(self) -> dict:
        return {"monitor": self.monitor, "best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: dict) -> None:
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
        # Last of all, since restoring and building loaders may draw numbers.
        if (state := self.__dict__.pop("_random", None)) is not None:
            set_random_state(state)


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


# -- files ----------------------------------------------------------------------------------------------------


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush_directory(directory: Path) -> None:
    """Make a rename durable; file systems that cannot open a directory for this are left as they are."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
