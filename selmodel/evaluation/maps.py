"""``suite=maps``: for one text, which token masks which (S), how masked each is in the end (F), what a budget keeps.

S and F are those of one forward pass with all keys; with budgets, when a key leaves is that of decoding the text token
by token under them. See ``selmodel.attention.selection`` for the definition.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from selmodel.attention.cache import KVCache
from selmodel.attention.selection import accumulation_dtype, selection_scores
from selmodel.budgets import Pruning, read_budgets
from selmodel.data.caching import write_atomically
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.evaluation.setup import output_path
from selmodel.model import Transformer
from selmodel.training.loading import load_run

log = logging.getLogger(__name__)

STAYS = -1  # in LayerMap.leaves: the key is still held at the end
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TOLD = 5  # most masked tokens that the screen names per layer


@dataclass(frozen=True)
class LayerMap:
    """Selection in one layer.

    Attributes:
        S: [n, n] float32, votes of query i (row) against key j (column); 0 on and above the diagonal and for <BOS>.
        F: [n] float32, of each key after the last query: the sum of its column of S.
        leaves: [n] int64, the query with which each key leaves under the budget, STAYS where it is held in the end;
            None without budgets.
    """

    S: Tensor
    F: Tensor
    leaves: Tensor | None = None


@dataclass(frozen=True)
class TextMap:
    """Selection in all layers for one text.

    Attributes:
        tokens: ids, ``<BOS>`` first.
        labels: the tokens as text; what is no text of its own in angle brackets.
        layers: first to last.
        facts: of the checkpoint, for captions: plain values.
    """

    tokens: list[int]
    labels: list[str]
    layers: list[LayerMap]
    facts: dict[str, Any]


def maps(cfg: DictConfig) -> TextMap:
    """Write the maps of ``cfg.text`` as an HTML page and a PNG, and print the most masked tokens.

    Raises:
        UserError: a checkpoint without selection, a text that is missing, empty or longer than the context, and files
            that exist, without ``overwrite=true``.
    """
    from selmodel.evaluation.map_figure import draw  # draws, which other suites should not wait for
    from selmodel.evaluation.map_page import page

    if cfg.text is None:
        raise UserError('text: not given; expected text="a text", or text=- to read it from standard input')
    if not isinstance(cfg.overwrite, bool):
        raise UserError(f"overwrite={cfg.overwrite}: expected true or false")
    text = _text(str(cfg.text))
    run = load_run(cfg.checkpoint)
    model = run.model
    if model.blocks[0].attention.selection_head is None:
        raise UserError(
            f"checkpoint={run.path}: is of {model.options()['attention']['kind']}, which masks nothing; expected a run "
            "with attention=selective"
        )
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(text).tolist()]
    if len(ids) > model.context_length:
        raise UserError(
            f"text: has {len(ids):,} tokens with <BOS>, and the model's context is {model.context_length:,}; expected "
            "a shorter text"
        )
    budgets = OmegaConf.to_container(cfg.budgets) if OmegaConf.is_list(cfg.budgets) else cfg.budgets
    pruning = read_budgets(budgets, model, rule=cfg.rule, n_sinks=cfg.n_sinks)
    html, png = _outputs(cfg, run.path, text)
    facts = {
        "checkpoint": f"{run.path.parent.name}/{run.path.name}", "step": run.step, "n_layers": model.n_layers,
        "selection_head": model.blocks[0].attention.selection_head,
        "budgets": None if pruning.budgets is None else list(pruning.budgets), "rule": pruning.rule,
    }  # fmt: skip
    found = TextMap(ids, token_labels(run.tokenizer, ids), layer_maps(model, ids, pruning), facts)
    write_atomically(html, page(found).encode())
    write_atomically(png, draw(found))
    log.info("%s, step %d: %d tokens", run.path, run.step, len(ids))
    log.info("  %-5s %8s %8s  %s", "layer", "mean F", "F above 1", "most masked, with F")
    for number, layer in enumerate(found.layers):
        most = layer.F.argsort(descending=True, stable=True)[:TOLD].tolist()
        shown = ", ".join(f"{found.labels[j]!r} {layer.F[j]:.1f}" for j in most if layer.F[j] > 0)
        share = (layer.F > 1).float().mean().item()
        log.info("  %-5d %8.2f %8.0f%%  %s", number, layer.F.mean().item(), 100 * share, shown or "nothing")
    log.info("  written to %s and %s", html, png.name)
    return found


@torch.no_grad()
def layer_maps(model: Transformer, ids: list[int], pruning: Pruning | None = None) -> list[LayerMap]:
    """Selection of every layer of ``model`` for the tokens ``ids``, of at most its context."""
    tokens = torch.tensor(ids, device=model.embedding.weight.device)[None]
    with recorded_scores(model) as found:
        model.forward(tokens)
    scores = [S[0].float().cpu() for S in found]
    leaves = [None] * len(scores)
    if pruning is not None and pruning.budgets is not None:
        leaves = departures(model, ids, pruning)
    return [LayerMap(S, S.sum(0), left) for S, left in zip(scores, leaves, strict=True)]


@contextmanager
def recorded_scores(model: Transformer) -> Iterator[list[Tensor]]:
    """Collects S [b, n, n] of each layer, first to last, from the forward pass inside; float32, float64 for float64."""
    scores: list[Tensor] = []

    def record(attention: Any, arguments: tuple) -> None:
        x, rotary, document_ids = (*arguments, None, None)[:3]
        q, k, _ = attention.project(x, rotary)
        head = attention.selection_head
        queries, keys = q[:, head], k[:, head * attention.n_kv_heads // attention.n_heads]
        dtype = accumulation_dtype(q.dtype)
        logits = queries.to(dtype) * attention.head_dim**-0.5 @ keys.to(dtype).mT
        scores.append(selection_scores(logits, document_ids))

    handles = [block.attention.register_forward_pre_hook(record) for block in model.blocks]
    try:
        yield scores
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def departures(model: Transformer, ids: list[int], pruning: Pruning) -> list[Tensor]:
    """Per layer, int64 [n]: the query with which each key leaves, by decoding token by token; STAYS for those held."""
    cache = KVCache(model, 1, **pruning.arguments(), context_length=len(ids))
    leaves = [torch.full((len(ids),), STAYS) for _ in cache.layers]
    held: list[set[int]] = [set() for _ in cache.layers]
    for query, token in enumerate(ids):
        model.forward(torch.tensor([[token]], device=model.embedding.weight.device), cache=cache)
        for number, layer in enumerate(cache.layers):
            slot = torch.arange(layer.k.shape[2])
            used = (slot != layer.free[0].cpu()) & (slot <= layer.held)
            now = set(layer.positions[0].cpu()[used].tolist())
            for key in (held[number] | {query}) - now:
                leaves[number][key] = query
            held[number] = now
    return leaves


def token_labels(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Each token as text. Special tokens and bytes that are no character of their own stand in angle brackets."""
    special = {tokenizer.bos_id: "⟨BOS⟩", tokenizer.eos_id: "⟨EOS⟩"}
    return [special.get(i) or _label(tokenizer, i) for i in ids]


def _label(tokenizer: Tokenizer, i: int) -> str:
    text = tokenizer.decode([i])
    if text and REPLACEMENT not in text:
        return text
    piece = tokenizer.piece(i) if hasattr(tokenizer, "piece") else ""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return f"⟨{byte[1]}⟩" if byte else f"⟨{piece.strip('<>') or i}⟩"


def _text(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"text=-: standard input is not UTF-8 (at byte {error.start}); expected UTF-8 text"
            ) from error
    if not text:
        raise UserError('text: is empty; expected text="a text", or text=- with one on standard input')
    return text


def _outputs(cfg: DictConfig, checkpoint: Path, text: str) -> tuple[Path, Path]:
    """The page and the figure to write, neither of them there unless it may be replaced."""
    if cfg.output and Path(cfg.output).suffix != ".html":
        raise UserError(
            f"output={cfg.output}: expected the name of an HTML file, such as map.html; the PNG goes beside it"
        )
    html = Path(cfg.output).expanduser() if cfg.output else output_path(
        cfg, checkpoint, "maps", text=re.sub(r"\W+", "-", text)[:40].strip("-"), budgets=cfg.budgets, rule=cfg.rule
    ).with_suffix(".html")  # fmt: skip
    png = html.with_suffix(".png")
    there = [path for path in (html, png) if path.exists()]
    if there and not cfg.overwrite:
        raise UserError(
            f"{', '.join(map(str, there))}: exists; expected another output=FILE.html, or overwrite=true to replace it"
        )
    return html, png
