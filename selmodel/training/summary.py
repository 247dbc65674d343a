"""What a run says of itself: its first lines, its results on disk, and its last screen."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from selmodel.data.caching import write_atomically
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.inference.generation import generate, sampling_faults
from selmodel.training.checkpoint import CheckpointWriter
from selmodel.training.checkpoint_file import BEST, LAST
from selmodel.training.module import LanguageModel

log = logging.getLogger(__name__)

RESULTS = "results.json"


@dataclass(frozen=True)
class Sample:
    """A text generated at the end of training (config ``sample``).

    Attributes:
        prompt: what it begins with.
        tokens: how many tokens are added at most.
        temperature, top_p: as in ``selmodel.inference.generation.generate``.

    Raises:
        UserError: naming each option that is out of range.
    """

    prompt: str = "The"
    tokens: int = 80
    temperature: float = 0.8
    top_p: float = 0.95

    def __post_init__(self) -> None:
        faults = []
        if self.tokens < 1:
            faults.append(f"sample.tokens={self.tokens}: must be at least 1; sample=null asks for no sample")
        faults += [f"sample.{fault}" for fault in sampling_faults(self.temperature, self.top_p)]
        if faults:
            raise UserError("\n".join(faults))

    def text(self, module: LanguageModel, tokenizer: Tokenizer, seed: int) -> str:
        """The prompt and its continuation; of a prompt longer than the context only the end is used."""
        ids = tokenizer.encode(self.prompt).tolist()[-(module.model.context_length - 1) :]
        prompt = torch.tensor([tokenizer.bos_id, *ids], device=module.device)
        generator = torch.Generator(device=module.device).manual_seed(seed)
        training = module.training
        module.eval()
        try:
            tokens = generate(
                module.model, prompt, self.tokens, temperature=self.temperature, top_p=self.top_p,
                eos_id=tokenizer.eos_id, generator=generator,
            )  # fmt: skip
        finally:
            module.train(training)
        return tokenizer.decode(tokens.tolist())


def announce(run_dir: Path, module: LanguageModel, tokenizer: Tokenizer, cfg: DictConfig) -> None:
    """Log where the run lies, and the sizes of its model and data."""
    options = module.model.options()
    log.info("run directory: %s", run_dir)
    log.info(
        "model: %s, %d layers of %d heads of %d, d_model %d, context %d, %s parameters",
        options["attention"]["kind"], options["n_layers"], options["n_heads"], options["head_dim"],
        options["d_model"], options["context_length"], f"{module.model.n_parameters()['total']:,}",
    )  # fmt: skip
    log.info(
        "data: %s, %d pieces, %d sequences of %d tokens a step, %d steps",
        cfg.data.source._target_.rsplit(".", 1)[-1], tokenizer.vocab_size, cfg.data.batch_size,
        cfg.model.context_length, cfg.trainer.max_steps,
    )  # fmt: skip


def write_results(
    path: Path,
    module: LanguageModel,
    trainer: L.Trainer,
    writer: CheckpointWriter,
    identity: dict,
    seconds: float,
    *,
    step: int | None = None,
) -> None:
    """Write ``results.json``: the last validation, how it was measured, and what was trained.

    step: optimizer steps trained, where the trainer at hand has not done so itself.
    """
    results = {
        "step": trainer.global_step if step is None else step,
        "tokens": module.tokens_seen,
        "tokens_per_second": module.tokens_per_second,
        "seconds_this_start": seconds,
        "validation": asdict(module.validation),
        "best": {"monitor": writer.monitor, "value": writer.best, "step": writer.best_step},
        "protocol": trainer.datamodule.protocol() | {"precision": identity["environment"]["precision"]},
        "data": identity["data"],
        "skipped_this_start": trainer.datamodule.skipped(),
        "parameters": module.model.n_parameters(),
        "architecture": identity["architecture"],
        "environment": identity["environment"],
    }
    write_atomically(path, to_json(results))


def results_step(path: Path) -> int | None:
    """The optimizer step that a ``results.json`` is of; None where it is missing or damaged."""
    try:
        return json.loads(path.read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_results(checkpoint: Path, step: int) -> dict[str, Any]:
    """Figures of ``checkpoint``, which is of ``step``: those of its evaluation, or those that its run ended with.

    Empty where there are none of this very step.
    """
    for name in (f"evaluation-{checkpoint.stem}.json", RESULTS):
        try:
            results = json.loads((checkpoint.parent / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(results, dict) and results.get("step") == step and isinstance(results.get("validation"), dict):
            return results
    return {}


def to_json(value: Any) -> bytes:
    """``value`` as indented JSON; numbers that JSON has no word for (NaN, infinity) become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_summary(
    run_dir: Path, module: LanguageModel, tokenizer: Tokenizer, trainer: L.Trainer, sample: Sample | None, seed: int
) -> None:
    """The last screen: figures, a sample, where everything lies, and the next command."""
    result = module.validation
    lines = [
        "",
        f"finished at step {trainer.global_step}, {module.tokens_seen:,} tokens",
        *result.lines(),
        f"  tokens per second    {module.tokens_per_second or 0:,.0f}",
    ]
    if not math.isfinite(result.loss):
        lines += ["", "the run has diverged: its loss is not a number; a lower optim.lr or longer optim.warmup_steps"]
    elif sample is not None:
        text = sample.text(module, tokenizer, seed)
        lines += ["", "a sample:", *(f"  {line}" for line in text.splitlines())]
    checkpoints = ", ".join(name for name in (LAST, BEST) if (run_dir / name).exists())
    lines += [
        "",
        f"in {run_dir}:",
        f"  {checkpoints:<29}checkpoints",
        f"  {'train.csv, validation.csv':<29}metrics by step",
        f"  {'results.json':<29}the figures above, and how they were measured",
        f"  {'config.yaml':<29}the resolved configuration",
        "",
        f"next: python evaluate.py 'checkpoint={run_dir / LAST}'",
    ]
    for line in lines:
        log.info(line)
