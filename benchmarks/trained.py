"""A trained selective model and text of its own, for benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from selmodel.attention import SelectiveAttention
from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training.loading import load_run


def read_trained(path: Path, data_root: str | None, batch: int) -> tuple[Transformer, Tensor]:
    """The network of a run with selective attention, and its first validation sequences, [batch, n + 1] int64.

    data_root: where the run's corpus lies now; None: where it lay.
    Raises UserError for a checkpoint that cannot be read, one of another kind of attention, and one trained with a
    document mask, which not every contender takes.
    """
    run = load_run(path)
    if not isinstance(run.model.blocks[0].attention, SelectiveAttention):
        raise UserError(f"--checkpoint {path}: its attention is not selective; take a run of attention=selective")
    if run.config.data.get("document_mask"):
        raise UserError(f"--checkpoint {path}: it was trained with data.document_mask=true; take one without")
    overrides = {"root": data_root, "validation_batch_size": batch, "validation_sequences": batch, "workers": 0}
    default_cache = Path.home() / ".cache" / "selmodel"  # as in configs/evaluate.yaml
    data = run.data(overrides, cache_dir=os.environ.get("SELMODEL_CACHE", default_cache))
    data.setup("validate")
    tokens = next(iter(data.val_dataloader()))["tokens"]
    if len(tokens) < batch:
        raise UserError(f"--batch {batch}: the run's validation text has {len(tokens)} sequences; take at most as many")
    return run.model, tokens[:batch]
