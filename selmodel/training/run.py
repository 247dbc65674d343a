"""One training run from a composed configuration to its results on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import selmodel
from selmodel.config import build, check_options, plain
from selmodel.data.datamodule import DataModule
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.inference.generation import generate
from selmodel.training.checkpoint import BEST, LAST, AtomicCheckpointIO, CheckpointWriter, read_checkpoint
from selmodel.training.interrupt import StopOnSignal
from selmodel.training.loggers import CSVMetrics
from selmodel.training.module import LanguageModel
from selmodel.training.progress import Progress
from selmodel.training.resume import changed_settings, check_identity, find_checkpoint

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> ValidationResult | None:
    """Train as ``cfg`` (``configs/train.yaml``) says, or go on with the run in its directory.

    Returns:
        the last validation, or None when the run was already finished.

    Raises:
        UserError: for every fault of configuration, data or checkpoint that the user can mend, before any training.
        Interrupted: when stopped by a signal; the state is saved.
    """
    check_config(cfg)
    run_dir = _run_dir(cfg)
    resume_from = find_checkpoint(run_dir, str(cfg.resume))
    checkpoint = read_checkpoint(resume_from) if resume_from else None

    L.seed_everything(cfg.seed, workers=True, verbose=False)
    tokenizer, data = build_data(cfg)
    model = build_model(cfg, tokenizer)
    identity = _identity(cfg, model, tokenizer, data)
    if checkpoint is not None:
        check_identity(checkpoint, identity, resume_from)
        for line in changed_settings(checkpoint["selmodel"]["config"], identity["config"]):
            log.info("changed since the checkpoint: %s", line)

    module = LanguageModel(model, build(cfg.optim), micro_batch_tokens=cfg.micro_batch_tokens, compile=cfg.compile)
    writer = CheckpointWriter(run_dir, lambda: identity, **cfg.callbacks.checkpoint)
    metrics = CSVMetrics(run_dir)
    trainer = build_trainer(
        cfg,
        callbacks=[writer, Progress(**cfg.callbacks.progress), StopOnSignal(writer.save_last)],
        loggers=[metrics, *_wandb(cfg, run_dir, identity)],
    )
    if checkpoint is not None:
        step = checkpoint["selmodel"]["step"]
        if step >= cfg.trainer.max_steps:
            log.info(
                "%s is finished: step %d of trainer.max_steps=%d. To train it longer, add run_dir='%s' and a higher "
                "trainer.max_steps; for a new run, another run_dir=...",
                run_dir, step, cfg.trainer.max_steps, run_dir,
            )  # fmt: skip
            return None
        if trainer.is_global_zero and resume_from == run_dir / LAST:
            metrics.rewind(step)
        log.info("resuming from %s at step %d", resume_from, step)
    with _log_file(run_dir / "train.log") if trainer.is_global_zero else contextlib.nullcontext():
        if trainer.is_global_zero:
            _write_atomically(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(identity["config"])))
            _announce(run_dir, module, data, tokenizer, cfg)
        started = time.monotonic()
        trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
        _report(cfg, run_dir, module, tokenizer, identity, trainer, time.monotonic() - started)
    return module.validation


def check_config(cfg: DictConfig) -> None:
    """Everything that can be known to be wrong before a file is read, all faults in one message.

    Raises:
        UserError: with every fault found.
    """
    check_options(cfg)
    vocab_size = cfg.tokenizer.get("vocab_size") or 2
    checks = (
        lambda: check_trainer(plain(cfg.trainer)),
        lambda: build(cfg.optim),
        lambda: _check_model(cfg, vocab_size),
        lambda: build(cfg.data, source=None, tokenizer=None),
        lambda: build(cfg.data.source),
        lambda: build(cfg.tokenizer),
    )
    faults = []
    for check in checks:
        try:
            check()
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))


def _check_model(cfg: DictConfig, vocab_size: int) -> None:
    with torch.device("meta"):  # no memory, no initial values
        build(cfg.model, attention=build(cfg.attention), vocab_size=vocab_size)


def check_trainer(options: dict) -> None:
    """Refuse trainer options that would silently do nothing here, or count something other than optimizer steps."""
    faults = []
    for name, instead in (
        ("accumulate_grad_batches", "micro_batch_tokens cuts the batch into passes that fit"),
        ("gradient_clip_val", "set optim.gradient_clip"),
        ("max_epochs", "set trainer.max_steps"),
    ):
        if name in options:
            faults.append(f"trainer.{name}={options[name]}: not used here; {instead}")
    for name in ("max_steps", "val_check_interval", "log_every_n_steps"):
        value = options.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            faults.append(f"trainer.{name}={value}: must be a whole number of optimizer steps, at least 1")
    if faults:
        raise UserError("\n".join(faults))


def build_data(cfg: DictConfig) -> tuple[Tokenizer, DataModule]:
    """The tokenizer (trained first when its file is missing) and the data module that ``cfg`` describes."""
    source = build(cfg.data.source)
    source.prepare()
    tokenizer = build(cfg.tokenizer).build(source, cfg.cache_dir)
    return tokenizer, build(cfg.data, source=source, tokenizer=tokenizer)


def build_model(cfg: DictConfig, tokenizer: Tokenizer):
    """The network of ``cfg``, its weights initialised from ``cfg.seed``."""
    model = build(cfg.model, attention=build(cfg.attention), vocab_size=tokenizer.vocab_size)
    model.init_weights(cfg.seed)
    return model


def build_trainer(cfg: DictConfig, *, callbacks: list, loggers: list) -> L.Trainer:
    """A Lightning trainer from ``cfg.trainer`` with what this project's module and data need."""
    options = plain(cfg.trainer)
    if options.get("precision") == "auto":
        options["precision"] = _best_precision(options.get("accelerator", "auto"))
    options |= {
        "max_epochs": -1,  # the training stream has no end
        "check_val_every_n_epoch": None,  # steps alone count
        "use_distributed_sampler": False,  # the data module shares the sequences out
        "enable_checkpointing": False,  # CheckpointWriter does it
        "enable_progress_bar": False,  # Progress does it
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        "logger": loggers,
        "plugins": [AtomicCheckpointIO()],
    }
    options.pop("_target_", None)
    try:
        return L.Trainer(**options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer: {error}") from error


def _best_precision(accelerator: str) -> str:
    gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bf16-mixed" if gpu else "32-true"


def _run_dir(cfg: DictConfig) -> Path:
    directory = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else cfg.run_dir
    return Path(directory).expanduser().resolve()


def _identity(cfg: DictConfig, model, tokenizer: Tokenizer, data: DataModule) -> dict:
    """What this run is, in plain containers: goes into every checkpoint and result."""
    return {
        "config": plain(cfg),
        "architecture": model.options(),
        "tokenizer": tokenizer.state(),
        "data": data.source.describe(),
        "environment": {
            "selmodel": selmodel.__version__,
            "git_commit": git_commit(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # a subclass of str otherwise
            "lightning": L.__version__,
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


def _wandb(cfg: DictConfig, run_dir: Path, identity: dict) -> list:
    if cfg.logger.wandb is None:
        return []
    return [build(cfg.logger.wandb, directory=run_dir, run_config=identity["config"])]


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
        handler.close()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _announce(run_dir: Path, module: LanguageModel, data: DataModule, tokenizer: Tokenizer, cfg: DictConfig) -> None:
    options = module.model.options()
    sizes = module.model.n_parameters()
    log.info("run directory: %s", run_dir)
    log.info(
        "model: %s, %d layers of %d heads of %d, d_model %d, context %d, %s parameters",
        options["attention"]["kind"], options["n_layers"], options["n_heads"], options["head_dim"],
        options["d_model"], options["context_length"], f"{sizes['total']:,}",
    )  # fmt: skip
    log.info(
        "data: %s, %d pieces, %d sequences of %d tokens a step, %d steps",
        cfg.data.source._target_.rsplit(".", 1)[-1], tokenizer.vocab_size, cfg.data.batch_size,
        cfg.model.context_length, cfg.trainer.max_steps,
    )  # fmt: skip


def _report(
    cfg: DictConfig, run_dir: Path, module: LanguageModel, tokenizer: Tokenizer, identity: dict,
    trainer: L.Trainer, seconds: float,
) -> None:  # fmt: skip
    """Write ``results.json`` and print what a person wants to know at the end."""
    result = module.validation
    if not trainer.is_global_zero or result is None:
        return
    results = {
        "step": trainer.global_step,
        "tokens": module.tokens_seen,
        "tokens_per_second": module.tokens_per_second,
        "seconds_this_start": seconds,
        "validation": asdict(result),
        "best": trainer.callbacks[0].best if trainer.callbacks else None,
        "protocol": trainer.datamodule.protocol(),
        "data": identity["data"],
        "skipped_this_start": trainer.datamodule.skipped(),
        "parameters": module.model.n_parameters(),
        "architecture": identity["architecture"],
        "environment": identity["environment"],
    }
    _write_atomically(run_dir / "results.json", json.dumps(results, indent=2) + "\n")
    lines = [
        "",
        f"finished at step {trainer.global_step}, {module.tokens_seen:,} tokens",
        f"  validation loss      {result.loss:.4f} nats per token",
        f"  perplexity           {result.perplexity:.2f}",
        f"  bits per byte        {result.bits_per_byte:.4f}",
        f"  tokens per second    {module.tokens_per_second or 0:,.0f}",
    ]
    if cfg.sample.prompt is not None:
        lines += ["", "a sample:", _sample(cfg, module, tokenizer), ""]
    lines += [
        f"in {run_dir}:",
        f"  {LAST}, {BEST}         checkpoints",
        "  train.csv, validation.csv    metrics by step",
        "  results.json                 the figures above, and how they were measured",
        "  config.yaml                  the resolved configuration",
        "",
        f"next: python evaluate.py 'checkpoint={run_dir / LAST}'",
    ]
    for line in "\n".join(lines).splitlines():
        log.info(line)


def _sample(cfg: DictConfig, module: LanguageModel, tokenizer: Tokenizer) -> str:
    prompt = torch.tensor([tokenizer.bos_id, *tokenizer.encode(cfg.sample.prompt).tolist()], device=module.device)
    generator = torch.Generator(device=module.device).manual_seed(cfg.seed)
    training = module.training
    module.eval()
    tokens = generate(
        module.model, prompt, cfg.sample.tokens, temperature=cfg.sample.temperature, top_p=cfg.sample.top_p,
        eos_id=tokenizer.eos_id, generator=generator,
    )  # fmt: skip
    module.train(training)
    return "  " + tokenizer.decode(tokens.tolist()).replace("\n", "\n  ")
