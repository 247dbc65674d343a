"""What the suites of an evaluation share: the trainer they run in, and where their figures go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig

from selmodel.naming import run_name
from selmodel.training.loading import TrainedRun
from selmodel.training.setup import build_trainer

log = logging.getLogger(__name__)


def evaluation_trainer(cfg: DictConfig, run: TrainedRun) -> L.Trainer:
    """A trainer that computes in the run's precision, or in ``cfg.precision`` where that is given.

    ``cfg.trainer.precision`` is set to it.
    """
    cfg.trainer.precision = cfg.precision or run.precision
    if cfg.trainer.precision != run.precision:
        log.warning("precision=%s: the run was trained and validated in %s", cfg.precision, run.precision)
    return build_trainer(cfg, callbacks=[], loggers=[])


def output_path(cfg: DictConfig, checkpoint: Path, kind: str = "evaluation", **options: Any) -> Path:
    """``cfg.output``, or a file beside the checkpoint, named by it and by what was asked for that the run has not.

    So an evaluation with other data or options does not replace another one. ``kind`` begins the name; ``options``
    are further ones that make a difference, those that are None left out.
    """
    if cfg.output:
        return Path(cfg.output).expanduser()
    changed = dict(options)
    changed |= {f"data.{name}": cfg.data[name] for name in ("root", "validation_sequences")}
    changed["precision"] = cfg.precision
    asked = [f"{name}={value}" for name, value in changed.items() if value is not None]
    suffix = f"+{run_name(asked)}" if asked else ""
    return checkpoint.parent / f"{kind}-{checkpoint.stem}{suffix}.json"
