"""Folders as runs leave them, with made-up figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def make_run(
    sweep: Path,
    name: str,
    *,
    attention: str = "standard",
    loss: float | None = 3.0,
    heads: int = 4,
    layers: int = 2,
    context: int = 8,
    seed: int = 0,
    eps: float | None = None,
    curve: tuple[tuple[int, float], ...] = (),
    by_position: list[float | None] | None = None,
    commit: str = "a" * 40,
    **changed: Any,
) -> Path:
    """A finished run; ``changed`` replaces values of its protocol."""
    run = sweep / name
    run.mkdir(parents=True)
    selective = attention == "selective"
    protocol = {
        "source": "5eed" * 4, "tokenizer_hash": "70ce" * 16, "context_length": context, "document_mask": False,
        "validation_sequences": 64 // context, "validation_tokens": 64, "validation_bytes": 200, "precision": "32-true",
    } | changed  # fmt: skip
    kind = {"kind": "SelectiveAttention" if selective else "StandardAttention", "qk_norm": False}
    results = {
        "step": 10,
        "tokens": 5120,
        "validation": {
            "loss": loss,
            "perplexity": None,
            "bits_per_byte": None if loss is None else loss / 2,
            "loss_by_position": by_position or [loss] * context,
        },
        "protocol": protocol,
        "parameters": {"attention": 100 * heads * layers, "mlp": 10, "total": 100 * heads * layers + 10},
        "architecture": {
            "vocab_size": 50, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "head_dim": 16, "d_model": 32,
            "d_ff": 64, "context_length": context, "positions": "rope",
            "attention": kind | ({"selection_head": 0} if selective else {}),
        },
        "environment": {"git_commit": commit},
    }  # fmt: skip
    (run / "results.json").write_text(json.dumps(results))
    config = {
        "seed": seed,
        "attention": {"memory_loss": {"eps": eps, "tau": 1.0}} if selective else {},
        "data": {"batch_size": 512 // context},
        "optim": {"_target_": "x", "lr": 0.1, "schedule_steps": 10},
        "compile": False,
        "trainer": {"max_steps": 10},
    }
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    lines = ["step,val/loss,train/tokens", *(f"{i},{loss},{tokens}" for i, (tokens, loss) in enumerate(curve))]
    (run / "validation.csv").write_text("\n".join(lines) + "\n")
    return run


def heads_sweep(sweep: Path) -> Path:
    """Standard at 1, 2, 4 heads with losses 4, 3, 2 (two seeds, 0.1 apart), selective at 1 and 2 with 3 and 1.5."""
    for heads, loss in ((1, 4.0), (2, 3.0), (4, 2.0)):
        for seed in (0, 1):
            make_run(sweep, f"standard-{heads}-{seed}", loss=loss + 0.1 * seed, heads=heads, seed=seed)
    for heads, loss in ((1, 3.05), (2, 1.5)):
        make_run(sweep, f"selective-{heads}-0", attention="selective", loss=loss, heads=heads)
    return sweep
