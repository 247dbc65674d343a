"""Perplexity of a model in Hugging Face's format under this project's protocol, in bits per byte.

The text is the first documents of a validation split, packed as in training: sequences of context_length tokens behind
a ``<BOS>``, documents ended by ``<EOS>``. Models with other tokenizers cut a text into other tokens, so perplexities
per token do not compare; bits per byte of the same text do.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.functional import cross_entropy

from selmodel.config import build
from selmodel.data.caching import write_atomically
from selmodel.data.datamodule import DataModule
from selmodel.data.sources import LocalSource, Source
from selmodel.data.validation import ValidationLoader, ValidationSet, read_validation_set
from selmodel.errors import UserError
from selmodel.evaluation.perplexity import ValidationResult, ValidationSums
from selmodel.evaluation.subject import LONGEST, Subject, load_subject
from selmodel.naming import run_name
from selmodel.training.loading import TrainedRun, load_run
from selmodel.training.summary import recorded_results, to_json

log = logging.getLogger(__name__)

SEQUENCES = 512
BATCH_TOKENS = 4096  # of one forward pass, unless data.validation_batch_size is given
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "data" / "c4.yaml"


def foreign_perplexity(cfg: DictConfig) -> ValidationResult:
    """``suite=perplexity`` of ``checkpoint=hf:PATH``: print and write the figures.

    With ``like=RUN`` on the text of that run's validation, byte for byte; else on ``data.root``, ``data.mirror`` or C4.

    Raises:
        UserError: for a model or corpus that cannot be had, and options that do not fit them.
    """
    faults = _faults(cfg)
    if faults:
        raise UserError("\n".join(faults))
    subject = load_subject(cfg)
    like = load_run(cfg.like) if cfg.like is not None else None
    if like:
        like.check_on_text(f"like={cfg.like}")
    reference = like.data(cfg.data, cache_dir=cfg.cache_dir) if like else None
    source = reference.source if reference else _source(cfg)
    length = _context_length(cfg, subject, like)
    data = DataModule(source, subject.tokenizer, context_length=length, batch_size=1, streams=1)
    data.prepare_data()
    wanted = None
    if reference:
        wanted = reference.validation_set.n_bytes
        texts = _covering(data, length, wanted)
    else:
        texts = read_validation_set(data.documents, length, cfg.data.validation_sequences or SEQUENCES)
    started = time.perf_counter()
    result = measure(subject, texts, cfg.data.validation_batch_size or max(1, BATCH_TOKENS // length))
    seconds = time.perf_counter() - started
    protocol = {
        "source": source.describe()["fingerprint"], "tokenizer_hash": subject.tokenizer.hash, "context_length": length,
        "document_mask": False, "validation_sequences": texts.n_sequences, "validation_tokens": result.tokens,
        "validation_bytes": result.bytes, "precision": subject.facts["precision"],
    }  # fmt: skip
    output = _output(cfg, subject, like)
    results = {**subject.facts, "validation": asdict(result), "protocol": protocol}
    write_atomically(output, to_json(results))
    for line in (
        subject.name,
        *result.lines(),
        f"  over                 {result.sequences:,} sequences of {length:,}, {result.tokens:,} tokens, "
        f"{result.bytes:,} bytes",
        f"  speed                {result.tokens / seconds:,.0f} tokens/s",
        *(_compared(like, reference.validation_set.n_bytes) if like else []),
        f"  written to           {output}",
    ):
        log.info(line)
    return result


@torch.inference_mode()
def measure(subject: Subject, texts: ValidationSet, batch_size: int) -> ValidationResult:
    """Loss of ``subject`` on ``texts``, which its tokenizer has cut, ``batch_size`` sequences at a time."""
    sums = ValidationSums(texts.tokens.shape[1] - 1)
    for batch in ValidationLoader(texts, batch_size):
        tokens = batch["tokens"].to(subject.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = subject.logits(inputs).float()
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        counted = batch.get("target_mask", torch.ones_like(targets, dtype=torch.bool).cpu())
        sums.update(losses, counted, batch["bytes"])
    return sums.result()


def _covering(data: DataModule, context_length: int, n_bytes: int) -> ValidationSet:
    """The sequences that hold the first ``n_bytes`` of the split; what comes after these bytes does not count.

    The last token counted may end short of them, by less than the token after it.
    """
    sequences = max(1, n_bytes // (4 * context_length))
    while True:
        texts = read_validation_set(data.documents, context_length, sequences)
        if texts.n_bytes >= n_bytes or texts.n_sequences < sequences:
            break
        sequences += -(-sequences // 2)
    ends = np.cumsum(texts.token_bytes.reshape(-1)).reshape(texts.token_bytes.shape)
    if ends[-1, -1] < n_bytes:
        raise UserError(
            f"like: its validation has {n_bytes:,} bytes of text, and the split fills {ends[-1, -1]:,} with this "
            "tokenizer, since the last sequence must be whole; lower data.validation_sequences"
        )
    mask = ends <= n_bytes
    needed = int((mask.any(1)).sum())
    return ValidationSet(texts.tokens[:needed], texts.token_bytes[:needed], texts.eos_id, mask[:needed])


def _faults(cfg: DictConfig) -> list[str]:
    faults = []
    length = cfg.context_length
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
        faults.append(f"context_length={length}: expected null or a whole number of at least 2")
    for name in ("validation_sequences", "validation_batch_size"):
        value = cfg.data[name]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            faults.append(f"data.{name}={value}: expected null or a whole number of at least 1")
    return faults


def _context_length(cfg: DictConfig, subject: Subject, like: TrainedRun | None) -> int:
    if cfg.context_length is not None:
        if cfg.context_length > subject.context_length:
            raise UserError(
                f"context_length={cfg.context_length}: {subject.name} takes {subject.context_length:,} tokens at most"
            )
        return cfg.context_length
    wanted = like.model.context_length if like else LONGEST
    if like and wanted > subject.context_length:
        log.warning(
            "context: %d tokens, all that %s takes; the run has %d", subject.context_length, subject.name, wanted
        )
    return min(wanted, subject.context_length)


def _source(cfg: DictConfig) -> Source:
    if cfg.data.root is not None:
        source: Source = LocalSource(cfg.data.root)
    else:
        node = OmegaConf.load(CONFIG)
        node = OmegaConf.create({"data": {**node, "mirror": cfg.data.mirror}, "cache_dir": cfg.cache_dir})
        source = build(node.data.source)
    source.prepare()
    return source


def _output(cfg: DictConfig, subject: Subject, like: TrainedRun | None) -> Path:
    if cfg.output:
        return Path(cfg.output).expanduser()
    name = subject.facts["checkpoint"].replace("/", "-").replace(":", "-")
    asked = {"context_length": cfg.context_length, "precision": cfg.precision}
    asked |= {f"data.{key}": cfg.data[key] for key in ("root", "validation_sequences")}
    asked = [f"{key}={value}" for key, value in asked.items() if value is not None]
    suffix = f"+{run_name(asked)}" if asked else ""
    return (like.path.parent if like else subject.folder) / f"evaluation-{name}{suffix}.json"


def _compared(like: TrainedRun, n_bytes: int) -> list[str]:
    """The run's own figure, where it is known for the same text."""
    validation = recorded_results(like.path, like.step).get("validation", {})
    if validation.get("bytes") != n_bytes:
        return []
    return [f"  the run              {validation['bits_per_byte']:.4f} bits per byte, {like.path}"]
