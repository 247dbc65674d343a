"""``evaluate.py``: figures of a checkpoint, by suite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from selmodel.config import build, check_options, did_you_mean, plain
from selmodel.data.caching import write_atomically
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.naming import run_name
from selmodel.training.checkpoint import LAST, read_checkpoint
from selmodel.training.module import LanguageModel
from selmodel.training.resume import check_identity, load_weights
from selmodel.training.setup import build_model, build_trainer, check_trainer
from selmodel.training.summary import to_json

log = logging.getLogger(__name__)

EVALUATE_KEYS = ("checkpoint", "suite", "output", "precision", "cache_dir", "data", "trainer")


def evaluate(cfg: DictConfig) -> ValidationResult:
    """Run ``cfg.suite`` (``configs/evaluate.yaml``) on ``cfg.checkpoint``, print and write the figures.

    Raises:
        UserError: for a checkpoint that is missing, damaged or of another kind, and an unknown suite.
    """
    check_options(cfg, EVALUATE_KEYS)
    if cfg.suite not in SUITES:
        raise UserError(
            f"suite={cfg.suite}: no such suite{did_you_mean(str(cfg.suite), list(SUITES))} "
            f"(expected one of {', '.join(SUITES)})"
        )
    if cfg.output and Path(cfg.output).expanduser().is_dir():
        raise UserError(f"output={cfg.output}: is a folder; expected the name of a JSON file")
    if cfg.checkpoint is None:
        raise UserError("checkpoint: not given; expected checkpoint=RUN/last.ckpt or the folder of a run")
    check_trainer(plain(cfg.trainer))
    path = Path(str(cfg.checkpoint)).expanduser()
    if path.is_dir():
        path = path / LAST
    return SUITES[cfg.suite](cfg, path)


def perplexity(cfg: DictConfig, path: Path) -> ValidationResult:
    """The validation of the run, done again from its checkpoint: loss, perplexity, bits per byte, by position."""
    checkpoint = read_checkpoint(path)
    run, tokenizer, module = load_module(checkpoint, path, cfg)
    source = build(run.data.source)
    source.prepare()
    data = build(run.data, source=source, tokenizer=tokenizer)
    stored = checkpoint["selmodel"]["environment"]
    trained_in = stored.get("precision", "auto")
    cfg.trainer.precision = cfg.precision or trained_in
    if cfg.trainer.precision != trained_in:
        log.warning("precision=%s: the run was trained and validated in %s", cfg.precision, trained_in)
    trainer = build_trainer(cfg, callbacks=[], loggers=[])
    trainer.validate(module, datamodule=data, verbose=False)
    result = module.validation
    if trainer.is_global_zero:
        output = output_path(cfg, path)
        results = {
            "checkpoint": path.name,
            "step": checkpoint["selmodel"]["step"],
            "validation": asdict(result),
            "protocol": data.protocol() | {"precision": cfg.trainer.precision},
            "environment": stored,
        }
        write_atomically(output, to_json(results))
        for line in (
            f"{path}, step {checkpoint['selmodel']['step']}",
            *result.lines(),
            f"  over                 {result.sequences:,} sequences, {result.tokens:,} tokens, {result.bytes:,} bytes",
            f"  written to           {output}",
        ):
            log.info(line)
    return result


def output_path(cfg: DictConfig, checkpoint: Path) -> Path:
    """``cfg.output``, or a file beside the checkpoint, named by it and by what was asked for that the run has not.

    So an evaluation with other data does not replace that of the run's own.
    """
    if cfg.output:
        return Path(cfg.output).expanduser()
    changed = {f"data.{name}": cfg.data[name] for name in ("root", "validation_sequences")}
    changed["precision"] = cfg.precision
    asked = [f"{name}={value}" for name, value in changed.items() if value is not None]
    suffix = f"+{run_name(asked)}" if asked else ""
    return checkpoint.parent / f"evaluation-{checkpoint.stem}{suffix}.json"


def load_module(checkpoint: dict, path: Path, cfg: DictConfig) -> tuple[DictConfig, Tokenizer, LanguageModel]:
    """The run's configuration, tokenizer and network, from its checkpoint alone.

    Args:
        checkpoint: as ``read_checkpoint`` returns it.
        path: where it came from, for messages.
        cfg: the evaluation's configuration; its ``data`` values that are not null replace the run's.
    """
    stored = checkpoint["selmodel"]
    run = OmegaConf.create(stored["config"])
    for key, value in cfg.data.items():
        if value is None:
            continue
        if key not in run.data:
            raise UserError(f"data.{key}={value}: the run's data ({run.data.source._target_}) has no such option")
        run.data[key] = value
        if key in run.data.source:
            run.data.source[key] = value
    if "cache_dir" in run.data.source:
        run.data.source.cache_dir = cfg.cache_dir
    tokenizer = Tokenizer.from_state(stored["tokenizer"])
    model = build_model(run, tokenizer)
    check_identity(checkpoint, {"architecture": model.options(), "tokenizer": stored["tokenizer"]}, path)
    module = LanguageModel(model, build(run.optim))
    load_weights(checkpoint, module)
    return run, tokenizer, module


SUITES: dict[str, Callable[[DictConfig, Path], ValidationResult]] = {"perplexity": perplexity}
