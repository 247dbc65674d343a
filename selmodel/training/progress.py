"""What a person sees while a run trains: a bar in a terminal, sparse plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import lightning as L
from tqdm import tqdm

from selmodel.errors import UserError

log = logging.getLogger(__name__)


class Progress(L.Callback):
    """Shows step, loss, speed and the latest validation.

    Args:
        bar: ``auto`` shows a bar when standard error is a terminal and plain lines otherwise; true and false
            choose by hand.
        line_seconds: at least this many seconds between two plain lines, so that a week of training gives a log that
            can be read. Validations always get a line.
    """

    def __init__(self, *, bar: bool | str = "auto", line_seconds: float = 10.0) -> None:
        if bar not in ("auto", True, False):
            raise UserError(f"callbacks.progress.bar={bar}: must be auto, true or false")
        if not line_seconds >= 0:
            raise UserError(f"callbacks.progress.line_seconds={line_seconds}: must be 0 or more seconds")
        self.bar = sys.stderr.isatty() if bar == "auto" else bool(bar)
        self.line_seconds = line_seconds
        self._bar: tqdm | None = None
        self._last_line = 0.0
        self._started = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._started = self._last_line = time.monotonic()
        self._first_step = trainer.global_step
        if self.bar:
            self._bar = tqdm(
                total=trainer.max_steps if trainer.max_steps > 0 else None,
                initial=trainer.global_step,
                unit="step",
                desc="training",
                dynamic_ncols=True,
                smoothing=0.05,
            )

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(", ".join(self._figures(trainer)), refresh=False)
        elif time.monotonic() - self._last_line >= self.line_seconds or step == trainer.max_steps:
            self._last_line = time.monotonic()
            figures = [f"step {step}/{trainer.max_steps}", *self._figures(trainer)]
            if step > self._first_step and trainer.max_steps > step:
                left = (self._last_line - self._started) / (step - self._first_step) * (trainer.max_steps - step)
                figures.append(f"{_duration(left)} left")
            log.info(", ".join(figures))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        result = module.validation
        if trainer.sanity_checking or not trainer.is_global_zero or result is None or trainer.state.fn != "fit":
            return
        line = f"step {trainer.global_step}: {result.line()}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            log.info(line)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @staticmethod
    def _figures(trainer: L.Trainer) -> list[str]:
        metrics = trainer.callback_metrics
        figures = []
        if "train/loss" in metrics:
            figures.append(f"loss {float(metrics['train/loss']):.4f}")
        if "val/loss" in metrics:
            figures.append(f"val {float(metrics['val/loss']):.4f}")
        if "throughput/tokens_per_second" in metrics:
            figures.append(f"{float(metrics['throughput/tokens_per_second']):,.0f} tokens/s")
        return figures


def _duration(seconds: float) -> str:
    """``seconds`` as ``2h03m``, ``3m20s`` or ``41s``."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    if seconds >= 60:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds}s"
