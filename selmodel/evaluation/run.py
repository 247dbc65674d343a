"""``evaluate.py``: figures of a checkpoint, by suite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from selmodel.config import check_options, did_you_mean, plain
from selmodel.data.caching import write_atomically
from selmodel.errors import UserError
from selmodel.evaluation.accuracy import task_accuracy
from selmodel.evaluation.analysis import analysis
from selmodel.evaluation.budget_suite import budget_search
from selmodel.evaluation.foreign import foreign_perplexity
from selmodel.evaluation.maps import maps
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.evaluation.pruning import pruning, pruning_rules
from selmodel.evaluation.setup import evaluation_trainer, output_path
from selmodel.evaluation.subject import is_foreign
from selmodel.sweep.status import status
from selmodel.training.loading import load_run
from selmodel.training.setup import check_trainer
from selmodel.training.summary import to_json

log = logging.getLogger(__name__)

EVALUATE_KEYS = (
    "checkpoint", "suite", "output", "precision", "cache_dir", "data", "trainer", "budgets", "rule", "n_sinks",
    "n_keys", "search", "lengths", "report", "sweep", "export", "export_dtype", "overwrite",
    "like", "context_length", "text", "hellaswag", "tasks", "num_fewshot", "limit", "batch_size",
)  # fmt: skip


def evaluate(cfg: DictConfig) -> object:
    """Run ``cfg.suite`` (``configs/evaluate.yaml``) on ``cfg.checkpoint``, print and write the figures.

    Raises:
        UserError: for a checkpoint that is missing, damaged or of another kind, and an unknown suite.
    """
    check_options(cfg, EVALUATE_KEYS)
    if cfg.report is not None:
        return write_report(cfg)
    if cfg.sweep is not None:
        raise UserError(f"sweep={cfg.sweep}: is read by a report; expected report=NAME, one of {', '.join(REPORTS)}")
    if cfg.export is not None:
        from selmodel.inference.export import export  # transformers, which other suites should not wait for

        return export(cfg)
    if cfg.suite not in SUITES:
        raise UserError(
            f"suite={cfg.suite}: no such suite{did_you_mean(str(cfg.suite), list(SUITES))} "
            f"(expected one of {', '.join(SUITES)})"
        )
    if is_foreign(cfg.checkpoint) and cfg.suite not in FOREIGN_SUITES:
        raise UserError(
            f"suite={cfg.suite} with checkpoint={cfg.checkpoint}: needs a model of train.py; for one in Hugging Face's "
            f"format expected one of {', '.join(FOREIGN_SUITES)}"
        )
    if cfg.like is not None and not is_foreign(cfg.checkpoint):
        raise UserError(f"like={cfg.like}: gives the text for a checkpoint=hf:PATH; leave it out")
    if cfg.output and Path(cfg.output).expanduser().is_dir():
        raise UserError(f"output={cfg.output}: is a folder; expected the name of a JSON file")
    if cfg.checkpoint is None:
        raise UserError("checkpoint: not given; expected checkpoint=RUN/last.ckpt or the folder of a run")
    check_trainer(plain(cfg.trainer))
    return SUITES[cfg.suite](cfg)


def check_report(name: str | None, option: str = "report") -> None:
    """Refuse the name of a report that there is not. Raises UserError."""
    if name is not None and name not in REPORTS:
        raise UserError(
            f"{option}={name}: no such report{did_you_mean(str(name), REPORTS)} (expected one of {', '.join(REPORTS)})"
        )


def write_report(cfg: DictConfig) -> None:
    """Write ``cfg.report`` on the sweep in the folder ``cfg.sweep``, from the files there alone."""
    check_report(cfg.report)
    if cfg.sweep is None:
        raise UserError(f"report={cfg.report}: of which sweep? expected sweep=DIR, such as sweep=multirun/NAME")
    if cfg.checkpoint is not None:
        raise UserError(
            f"checkpoint={cfg.checkpoint} with report={cfg.report}: a report reads sweep=DIR; leave one out"
        )
    make_report(cfg.report, Path(str(cfg.sweep)).expanduser())


def make_report(name: str, directory: Path) -> None:
    """Print the report ``name``, one of ``REPORTS``, on the sweep in ``directory``, and write its files there."""
    if name == "status":
        status(directory)
        return
    from selmodel.report import run as reports  # draws, which other suites should not wait for

    if name == "all":
        reports.write_all(directory)
    else:
        reports.write_report(name, directory)


def perplexity(cfg: DictConfig) -> ValidationResult:
    """The validation of the run, done again from its checkpoint: loss, perplexity, bits per byte, by position."""
    if is_foreign(cfg.checkpoint):
        return foreign_perplexity(cfg)
    run = load_run(cfg.checkpoint)
    data = run.data(cfg.data, cache_dir=cfg.cache_dir)
    trainer = evaluation_trainer(cfg, run)
    trainer.validate(run.module, datamodule=data, verbose=False)
    result = run.module.validation
    if trainer.is_global_zero:
        output = output_path(cfg, run.path)
        results = {
            "checkpoint": run.path.name,
            "step": run.step,
            "validation": asdict(result),
            "protocol": data.protocol() | {"precision": cfg.trainer.precision},
            "environment": run.environment,
        }
        write_atomically(output, to_json(results))
        for line in (
            f"{run.path}, step {run.step}",
            *result.lines(),
            f"  over                 {result.sequences:,} sequences, {result.tokens:,} tokens, {result.bytes:,} bytes",
            f"  written to           {output}",
        ):
            log.info(line)
    return result


def hellaswag(cfg: DictConfig) -> dict:
    """See ``selmodel.evaluation.harness``."""
    from selmodel.evaluation import harness  # lm-eval takes seconds to import, and may not be installed

    return harness.hellaswag(cfg)


def lm_eval(cfg: DictConfig) -> dict:
    """See ``selmodel.evaluation.harness``."""
    from selmodel.evaluation import harness

    return harness.lm_eval_tasks(cfg)


SUITES: dict[str, Callable[[DictConfig], object]] = {
    "perplexity": perplexity,
    "pruning": pruning,
    "pruning_rules": pruning_rules,
    "budget_search": budget_search,
    "task_accuracy": task_accuracy,
    "maps": maps,
    "analysis": analysis,
    "hellaswag": hellaswag,
    "lm_eval": lm_eval,
}

FOREIGN_SUITES = ("perplexity", "hellaswag", "lm_eval")  # that take checkpoint=hf:PATH

# Of these selmodel.report.run makes all but the first; named here, so that a mistake is answered at once.
REPORTS = (
    "status", "all", "perplexity_vs_heads", "context_size", "model_size", "memory_loss", "memory", "loss_by_position",
    "training_curves", "task_accuracy",
)  # fmt: skip
