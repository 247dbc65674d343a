"""One training run from a composed configuration to its results on disk."""

from __future__ import annotations

import contextlib
import logging
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import selmodel
from selmodel.config import build, plain
from selmodel.data.caching import write_atomically
from selmodel.data.datamodule import DataModule
from selmodel.data.tokenizer import Tokenizer
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.training.checkpoint import CheckpointWriter, is_validation_pending
from selmodel.training.checkpoint_file import (
    LAST,
    read_checkpoint,
    remove_leftovers,
    set_aside,
    write_checkpoint,
)
from selmodel.training.cluster import cluster_environment, is_first_process, parting_at_the_end
from selmodel.training.guards import StopWhenExhausted
from selmodel.training.interrupt import (
    Interrupted,
    PendingValidation,
    StopOnSignal,
    requeueing,
    stopping_outside_training,
)
from selmodel.training.loggers import CSVMetrics
from selmodel.training.module import LanguageModel
from selmodel.training.ownership import only_writer
from selmodel.training.plan import print_plan
from selmodel.training.replay import replay
from selmodel.training.resume import changed_settings, check_identity, find_checkpoint
from selmodel.training.setup import build_data, build_model, build_trainer, check_config, resolve_precision
from selmodel.training.stall import StallWatch
from selmodel.training.summary import RESULTS, announce, print_summary, results_step, write_results
from selmodel.training.wandb_run import recorded_config, sweep_name, tags_of

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> ValidationResult | None:
    """Train as ``cfg`` (``configs/train.yaml``) says, or go on with the run in its directory.

    Returns:
        the last validation, or None when the run was already finished or only planned or a batch replayed.

    Raises:
        UserError: for every fault of configuration, data or checkpoint that the user can mend, before any training.
        Interrupted: when stopped by a signal; the state is saved.
    """
    check_config(cfg)
    run_dir = _run_dir(cfg)
    if cfg.plan or cfg.replay is not None:
        if cfg.plan:
            print_plan(cfg, run_dir)
        else:
            replay(cfg.replay)
        with contextlib.suppress(OSError):  # Hydra made it; one that holds a run stays
            run_dir.rmdir()
        return None
    # Of the processes of one run the first keeps others out.
    alone = only_writer(run_dir) if is_first_process(cluster_environment()) else contextlib.nullcontext()
    with requeueing(), stopping_outside_training(), alone, parting_at_the_end():
        return _train(cfg, run_dir)


def _train(cfg: DictConfig, run_dir: Path) -> ValidationResult | None:
    found = find_checkpoint(run_dir, str(cfg.resume))
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    tokenizer, data = build_data(cfg)
    model = build_model(cfg, tokenizer)
    identity = _identity(cfg, run_dir, model, tokenizer, data)
    resume_from = step = None
    damaged, pending = [], False
    if found is not None:
        resume_from, damaged = found.path, [path for path, _ in found.passed]
        for path, reason in found.passed:
            log.warning("%s: %s; passed over", path, reason)
        step = _check_checkpoint(found.checkpoint, resume_from, identity, data)
        pending = is_validation_pending(found.checkpoint)
    del found  # kept, the checkpoint, which Lightning reads again, would lie in memory all through training

    module = LanguageModel(
        model,
        build(cfg.optim),
        micro_batch_tokens=cfg.micro_batch_tokens,
        compile=cfg.compile,
        guards=build(cfg.guards),
    )
    writer = build(cfg.callbacks.checkpoint, directory=run_dir, identity=lambda: identity)
    writer.damaged = damaged
    metrics = CSVMetrics(run_dir)
    wandb = _wandb(cfg, run_dir, identity, model)
    others = [build(node) for name, node in cfg.callbacks.items() if name != "checkpoint" and node is not None]
    trainer = build_trainer(
        cfg,
        callbacks=[
            writer,
            *others,
            StallWatch(module.guards.stall_minutes),
            PendingValidation(writer),
            StopWhenExhausted(writer.save_last),
            StopOnSignal(writer),
        ],
        loggers=[metrics, *wandb],  # the CSV first: what wandb has, it has too
    )
    data.order.check_world(trainer.world_size)
    if step is not None:
        if step >= cfg.trainer.max_steps:
            log.info(
                "%s is finished: step %d of trainer.max_steps=%d. To train it longer, add run_dir='%s' and a higher "
                "trainer.max_steps; for a new run, another run_dir=...",
                run_dir, step, cfg.trainer.max_steps, run_dir,
            )  # fmt: skip
            if trainer.is_global_zero and resume_from.parent == run_dir:
                _put_back(run_dir, resume_from, damaged)
            if resume_from.parent == run_dir and results_step(run_dir / RESULTS) != step:
                return _write_missing_results(
                    run_dir, resume_from, step, trainer, module, data, writer, metrics, identity
                )
            return None
        log.info("resuming from %s at step %d", resume_from, step)
    if trainer.is_global_zero and (resume_from is None or resume_from.parent == run_dir):
        metrics.rewind(step or 0, validation_pending=pending)
    with _log_file(run_dir / "train.log") if trainer.is_global_zero else contextlib.nullcontext():
        if trainer.is_global_zero:
            remove_leftovers(run_dir)
            yaml = OmegaConf.to_yaml(OmegaConf.create(identity["config"]))
            write_atomically(run_dir / "config.yaml", yaml.encode())
            announce(run_dir, module, tokenizer, cfg)
        started = time.monotonic()
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
        finally:
            _finish_wandb(wandb, sys.exc_info()[1])
        metrics.flush()
        if trainer.is_global_zero:
            write_results(run_dir / RESULTS, module, trainer, writer, identity, time.monotonic() - started)
            # Where weights are shared out, one process alone cannot generate.
            sample = None if cfg.sample is None or model.is_sharded else build(cfg.sample)
            print_summary(run_dir, module, tokenizer, trainer, sample, cfg.seed)
    return module.validation


def _put_back(run_dir: Path, whole: Path, damaged: list[Path]) -> None:
    """Of a finished run: keep damaged checkpoints under another name, and let ``last.ckpt`` be the finished one.

    A kill between the last ``best.ckpt`` and the last ``last.ckpt`` leaves an older one there too.
    """
    for path in damaged:
        log.warning("%s: is damaged, kept as %s", path, set_aside(path).name)
    if whole.name != LAST:
        write_checkpoint(read_checkpoint(whole), run_dir / LAST)
        log.info("%s is now what %s is", LAST, whole.name)


def _write_missing_results(
    run_dir: Path, checkpoint: Path, step: int, trainer: L.Trainer, module: LanguageModel, data: DataModule,
    writer: CheckpointWriter, metrics: CSVMetrics, identity: dict,
) -> ValidationResult:  # fmt: skip
    """The end of a run that was cut off between its last checkpoint and its results: validate again, and write them."""
    log.info("its %s is missing or older: validating once more", RESULTS)
    trainer.validate(module, datamodule=data, ckpt_path=checkpoint, weights_only=True, verbose=False)
    if trainer.is_global_zero:
        if writer.validation_pending:
            metrics.rewind(step, validation_pending=True)
            metrics.log_metrics(module.validation.metrics() | {"train/tokens": module.tokens_seen}, step)
            metrics.flush()
            writer.finish_pending(checkpoint, module.validation)
        write_results(run_dir / RESULTS, module, trainer, writer, identity, 0.0, step=step)
        for line in module.validation.lines():
            log.info(line)
    return module.validation


def _check_checkpoint(checkpoint: dict, path: Path, identity: dict, data: DataModule) -> int:
    """Whether the run may go on from ``checkpoint``, before anything is written; returns the step it was taken at."""
    check_identity(checkpoint, identity, path)
    data.load_state_dict(checkpoint[type(data).__qualname__])  # refuses another order of the data
    for line in changed_settings(checkpoint["selmodel"]["config"], identity["config"]):
        log.info("changed since the checkpoint: %s", line)
    return checkpoint["selmodel"]["step"]


def _run_dir(cfg: DictConfig) -> Path:
    directory = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else cfg.run_dir
    return Path(directory).expanduser().resolve()


def _identity(cfg: DictConfig, run_dir: Path, model, tokenizer: Tokenizer, data: DataModule) -> dict:
    """What this run is, in plain containers: goes into every checkpoint and result."""
    config = plain(cfg) | {"run_dir": str(run_dir)}
    if config["data"].get("root"):  # as typed it would mean another folder elsewhere
        root = str(Path(config["data"]["root"]).expanduser().absolute())
        config["data"]["root"] = config["data"]["source"]["root"] = root
    return {
        "config": config,
        "architecture": model.options(),
        "tokenizer": tokenizer.state(),
        "data": data.source.describe(),
        "environment": {
            "selmodel": selmodel.__version__,
            "git_commit": git_commit(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # a subclass of str otherwise
            "lightning": L.__version__,
            "precision": resolve_precision(config["trainer"]),
        },
    }


def git_commit() -> str | None:
    """Commit of the source tree, with ``-dirty`` when files differ from it; None outside a git checkout."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _wandb(cfg: DictConfig, run_dir: Path, identity: dict, model) -> list:
    """The Weights & Biases logger where one is wanted; which sweep it belongs to, and what was typed, are filled in."""
    node = cfg.logger.wandb
    if node is None:
        return []
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    overrides = hydra.overrides.task if hydra else []
    multirun = hydra is not None and hydra.mode == RunMode.MULTIRUN
    return [
        build(
            node,
            directory=run_dir,
            group=node.get("group") or sweep_name(run_dir, multirun=multirun),
            tags=[*plain(node).get("tags", ()), *tags_of(overrides)],
            run_config=recorded_config(identity, model.n_parameters()),
        )
    ]


def _finish_wandb(loggers: list, error: BaseException | None) -> None:
    """Close the run, so that the next one of this process (a sweep's) is not logged into it."""
    stopped = isinstance(error, Interrupted | KeyboardInterrupt)
    for logger in loggers:
        code = 128 + getattr(error, "signal", signal.SIGINT) if stopped else int(error is not None)
        logger.finish(exit_code=code, stopped=stopped)


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """What is logged meanwhile goes into ``path`` too, after what an earlier start left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk: what has been said is said on the screen too
            handler.close()
