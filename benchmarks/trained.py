"""A trained selective model and text of its own, for benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import OmegaConf
from torch import Tensor

from selmodel.attention import SelectiveAttention
from selmodel.config import build
from selmodel.errors import UserError
from selmodel.evaluation.run import load_module
from selmodel.model import Transformer
from selmodel.training.checkpoint import read_checkpoint


def read_trained(path: Path, data_root: str | None, batch: int) -> tuple[Transformer, Tensor]:
    """The network of a run with selective attention, and its first validation sequences, [batch, n + 1] int64.

    data_root: where the run's corpus lies now; None: where it lay.
    Raises UserError for a checkpoint that cannot be read, one of another kind of attention, and one trained with a
    document mask, which not every contender takes.
    """
    cfg = {"root": data_root, "validation_batch_size": batch, "validation_sequences": batch, "workers": 0}
    default_cache = Path.home() / ".cache" / "selmodel"  # as in configs/evaluate.yaml
    cache_dir = os.environ.get("SELMODEL_CACHE", str(default_cache))
    run, tokenizer, module = load_module(
        read_checkpoint(path), path, OmegaConf.create({"data": cfg, "cache_dir": cache_dir})
    )
    if not isinstance(module.model.blocks[0].attention, SelectiveAttention):
        raise UserError(f"--checkpoint {path}: its attention is not selective; take a run of attention=selective")
    if run.data.get("document_mask"):
        raise UserError(f"--checkpoint {path}: it was trained with data.document_mask=true; take one without")
    source = build(run.data.source)
    source.prepare()
    data = build(run.data, source=source, tokenizer=tokenizer)
    data.setup("validate")
    tokens = next(iter(data.val_dataloader()))["tokens"]
    if len(tokens) < batch:
        raise UserError(f"--batch {batch}: the run's validation text has {len(tokens)} sequences; take at most as many")
    return module.model.eval(), tokens[:batch]
