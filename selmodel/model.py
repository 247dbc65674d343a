"""The decoder-only transformer: pre-norm, SwiGLU, any kind of attention, and its one initialiser."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from selmodel.attention.base import Attention
from selmodel.attention.cache import KVCache, LayerCache
from selmodel.attention.pruning import DEFAULT_SINKS
from selmodel.attention.rotary import Rotary, rotary_tables
from selmodel.attention.selection import SelectionStatistics
from selmodel.errors import UserError

POSITIONS = ("learned", "rope", "none")
WIDTH_PER_DEPTH = 64  # the paper's size rule: d_model = 64 * depth
MLP_MULTIPLE = 64  # the SwiGLU width is rounded up to a multiple, which matrix units like
NORM_EPS = 1e-6
INIT_STD = 0.02
EMBEDDING_STD = 0.1  # of untied token embeddings
DRAWN = ("embedding", "position_embedding", "wq", "wk", "wv", "wo", "gate", "up", "down", "head")


class ModelOutput(NamedTuple):
    """What a forward pass returns."""

    logits: Tensor  # [b, n, vocab_size], of the next token at every position
    memory: Tensor | None  # [n_layers, b, n], M of every layer; None where the attention gives none


class Transformer(nn.Module):
    """A decoder-only language model. Its size is one number, depth; each part of it can be overridden.

    vocab_size: number of token ids; the tokenizer decides it.
    attention: called as attention(d_model=, n_heads=, head_dim=, n_kv_heads=) for every layer, and returns
    an `Attention`: usually functools.partial of a subclass with its options.

    Options of the config group `model`:

    depth: sets n_layers = n_heads = depth and d_model = 64 * depth, as in the paper (12 is about 100M
    parameters). n_layers, n_heads, d_model: override it; n_heads * head_dim need not equal d_model.
    n_kv_heads: key/value heads, a divisor of n_heads; None means n_heads. head_dim: features per head.
    d_ff: hidden width of SwiGLU; None means 8/3 * d_model rounded up to a multiple of 64, which makes its
    three matrices as large as the two of a plain MLP of width 4 * d_model.
    context_length: the longest input in tokens, at least 2.
    positions: "learned" (a table added to the embeddings, as in the paper), "rope" (rotary, with rope_base)
    or "none".
    tie_embeddings: the embedding matrix is the output matrix too.
    checkpoint_activations: keep only each layer's input for the backward pass and compute the rest again:
    less memory, about a third more time, the same numbers.

    Raises UserError, with all faults in one message, for values that make no model.
    """

    def __init__(
        self,
        vocab_size: int,
        attention: Callable[..., Attention],
        *,
        depth: int = 12,
        n_layers: int | None = None,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        head_dim: int = 64,
        d_model: int | None = None,
        d_ff: int | None = None,
        context_length: int = 512,
        positions: str = "learned",
        rope_base: float = 10000.0,
        tie_embeddings: bool = False,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        given = {
            "vocab_size": vocab_size,
            "depth": depth,
            "n_layers": n_layers,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "d_model": d_model,
            "d_ff": d_ff,
            "context_length": context_length,
        }
        faults = _size_faults(given) + _position_faults(positions, rope_base, head_dim)
        self.vocab_size, self.context_length = vocab_size, context_length
        depth = depth if _is_count(depth) else 0  # a bad one is on the list; what follows from it is no fault
        self.n_layers = depth if n_layers is None else n_layers
        self.n_heads = depth if n_heads is None else n_heads
        self.n_kv_heads = self.n_heads if n_kv_heads is None else n_kv_heads
        self.head_dim = head_dim
        self.d_model = WIDTH_PER_DEPTH * depth if d_model is None else d_model
        self.positions, self.rope_base = positions, rope_base
        self.tie_embeddings, self.checkpoint_activations = bool(tie_embeddings), bool(checkpoint_activations)

        layer_sizes = {
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "head_dim": self.head_dim,
            "n_kv_heads": self.n_kv_heads,
        }
        if all(_is_count(size) for size in layer_sizes.values()):
            faults += _attention_faults(attention, layer_sizes)
        if faults:
            raise UserError("; ".join(faults))

        self.d_ff = MLP_MULTIPLE * -(-8 * self.d_model // (3 * MLP_MULTIPLE)) if d_ff is None else d_ff
        self.embedding = nn.Embedding(vocab_size, self.d_model)
        learned = positions == "learned"
        self.position_embedding = nn.Embedding(context_length, self.d_model) if learned else None
        self.blocks = nn.ModuleList(
            Block(attention(**layer_sizes), self.d_model, self.d_ff) for _ in range(self.n_layers)
        )
        self.norm = nn.RMSNorm(self.d_model, eps=NORM_EPS)
        self.head = None if self.tie_embeddings else nn.Linear(self.d_model, vocab_size, bias=False)
        self.init_weights()

    def forward(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> ModelOutput:
        """tokens [b, n], integer, n <= context_length; document_ids [b, n] or None (see selmodel.attention).

        Logits are in the type the model computes in. Positions count from the start of the sequence, also
        inside its later documents. Raises UserError when the tokens are longer than the context.

        cache: the tokens follow what it has seen, a chunk of any length, and are appended to it; the logits are
        theirs. There are then no documents, no memory term and no gradient.
        last_only: the logits of the last position alone, [b, 1, vocab_size]: all that generation needs of a prompt.
        """
        n = tokens.shape[1]
        first = 0
        if cache is not None:
            if torch.is_grad_enabled():  # a gradient that ends at the cache would be a wrong one
                with torch.no_grad():
                    return self.forward(tokens, document_ids, cache=cache, last_only=last_only)
            if document_ids is not None:
                raise UserError("document_ids with a cache: a cache holds one document; evaluate documents without it")
            cache.check_fits(tokens)
            first = cache.length
        elif n > self.context_length:
            raise UserError(
                f"an input of {n} tokens with model.context_length={self.context_length}: shorten the input "
                "or build the model with a longer context"
            )
        x, rotary = self.embed(tokens, first)
        memories = []
        for layer, block in enumerate(self.blocks):
            if cache is not None:
                x, memory = block(x, rotary, None, cache.layers[layer])
            elif self.checkpoint_activations and torch.is_grad_enabled():
                x, memory = checkpoint(block, x, rotary, document_ids, use_reentrant=False)
            else:
                x, memory = block(x, rotary, document_ids)
            if memory is not None:
                memories.append(memory)
        logits = self.unembed(x[:, -1:] if last_only else x)
        return ModelOutput(logits, torch.stack(memories) if memories else None)

    def embed(self, tokens: Tensor, first: int = 0) -> tuple[Tensor, Rotary | None]:
        """What enters the first block: x [b, n, d_model], and the rotation of positions first .. first + n - 1."""
        position = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position)
        return x, rotary_tables(position, self.head_dim, self.rope_base) if self.positions == "rope" else None

    def unembed(self, x: Tensor) -> Tensor:
        """The logits [b, n, vocab_size] from what leaves the last block, x [b, n, d_model]."""
        output_matrix = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x), output_matrix)

    def pruned(
        self,
        tokens: Tensor,
        budgets: int | Sequence[int] | None,
        *,
        rule: str | None = None,
        n_sinks: int = DEFAULT_SINKS,
    ) -> ModelOutput:
        """The forward pass of whole sequences under budgets, in parallel, and exactly as token by token.

        tokens [b, n]; budgets, rule and n_sinks as for `selmodel.attention.cache.KVCache`. No gradient. Raises
        UserError for a bad one of these, and for tokens longer than the context.
        """
        context_length = max(1, tokens.shape[1])
        cache = KVCache(self, len(tokens), budgets, rule=rule, n_sinks=n_sinks, context_length=context_length)
        return self.forward(tokens, cache=cache)  # not self(...): torch.compile would trace the cache

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Set every parameter of the model anew.

        | parameter                      | distribution                    | why                                   |
        |--------------------------------|---------------------------------|---------------------------------------|
        | embedding                      | normal, std 0.1; 0.02 when tied | learns faster; tied, the first logits |
        |                                |                                 | would be far from uniform             |
        | position_embedding             | normal, std 0.02                | GPT-2                                 |
        | wq, wk, wv, wo, gate, up, down | normal, std 0.02                | GPT-2, without its division of wo and |
        |                                |                                 | down by sqrt(2 layers), which was     |
        |                                |                                 | worse for both kinds (docs/LOG.md)    |
        | head (untied)                  | normal, std 0.02                | first loss near log(vocab)            |
        | norms                          | 1                               | identity                              |

        Each parameter draws in float32 on the CPU from a generator of its own, seeded by `seed` and the
        parameter's name. So one seed gives bit-identical values for every kind of attention and device. A
        parameter of another name, which a kind of attention has added, keeps its constructor's value.
        seed None: a seed from PyTorch's global generator.
        """
        seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        for name, parameter in self.named_parameters():
            layer = name.split(".")[-2]
            if parameter.is_meta:  # values come later
                continue
            if "norm" in layer:
                parameter.fill_(1.0)
            elif layer in DRAWN:
                std = EMBEDDING_STD if layer == "embedding" and not self.tie_embeddings else INIT_STD
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * std)

    @property
    def is_sharded(self) -> bool:
        """Whether its weights are shared out over several devices (FSDP2)."""
        return isinstance(self, FSDPModule)

    @property
    def memory_loss_eps(self) -> float:
        """Weight of the memory loss that the attention asks for; 0 means that it is off."""
        return self.blocks[0].attention.memory_loss_eps

    @torch.no_grad()
    def selection_statistics(self, tokens: Tensor, document_ids: Tensor | None = None) -> SelectionStatistics | None:
        """Statistics of selection, each field [n_layers]; None for a kind of attention without selection.

        Runs one forward pass of its own, without gradients and past torch.compile and checkpointing, so the
        training step itself stays untouched; a part of a batch is enough for a log line.
        """
        layers = [block.attention for block in self.blocks]
        for layer in layers:
            layer.record_statistics, layer.statistics = True, None
        try:
            # Through its hooks, which fetch the weights, where they are shared out.
            (self if self.is_sharded else self.forward)(tokens, document_ids)
            statistics = [layer.statistics for layer in layers]
        finally:
            for layer in layers:
                layer.record_statistics, layer.statistics = False, None
        if any(one is None for one in statistics):
            return None
        return SelectionStatistics(*(torch.stack(field) for field in zip(*statistics, strict=True)))

    def options(self) -> dict[str, Any]:
        """The resolved architecture as plain values: a checkpoint records it, a resumed run must match it."""
        return {
            "vocab_size": self.vocab_size,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "context_length": self.context_length,
            "positions": self.positions,
            "rope_base": float(self.rope_base) if self.positions == "rope" else None,
            "tie_embeddings": self.tie_embeddings,
            "attention": self.blocks[0].attention.options(),
        }

    def n_parameters(self) -> dict[str, int]:
        """Number of parameters by part, and in total. A tied output matrix counts once, as embedding."""
        counts = dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0)
        parts = {"embedding": "embedding", "position_embedding": "positions", "norm": "norms", "head": "head"}
        parts |= {"attention": "attention", "mlp": "mlp", "attention_norm": "norms", "mlp_norm": "norms"}
        for name, parameter in self.named_parameters():
            path = name.split(".")  # blocks.3.attention.wq.weight, head.weight
            counts[parts[path[2] if path[0] == "blocks" else path[0]]] += parameter.numel()
        return {**counts, "total": sum(counts.values())}

    def flops_per_token(self, context_length: int | None = None) -> int:
        """Floating-point operations of the matrix products, forward and backward, per token of training.

        Forward, 2 per multiply-add: every weight matrix once (embedding tables are look-ups; the output
        matrix counts whether tied or not), and in each layer q·k and weights·v over the (n + 1) / 2 keys that
        a query of n tokens has on average. Backward: twice the forward. Not counted: norms, softmax,
        activations, F, the optimizer, and what checkpoint_activations computes again.
        n is context_length, or the model's when None.
        """
        n = self.context_length if context_length is None else context_length
        query_width, key_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        per_layer = self.d_model * 2 * (query_width + key_width) + 3 * self.d_model * self.d_ff
        weights = self.n_layers * per_layer + self.d_model * self.vocab_size
        attention = self.n_layers * query_width * (n + 1)  # two products over (n + 1) / 2 keys
        return 3 * 2 * (weights + attention)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: Attention, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.mlp = SwiGLU(d_model, d_ff)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, n, d_model] -> the same shape, and the attention's memory term [b, n] or None."""
        out, memory = self.attention(self.attention_norm(x), rotary, document_ids, cache)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), memory


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer, arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _size_faults(given: dict[str, int | None]) -> list[str]:
    """Faults of each size by itself; None stands for a size that depth decides."""
    least = {"vocab_size": 2, "context_length": 2}
    return [
        f"model.{name}={value!r}: expected an integer of at least {least.get(name, 1)}"
        for name, value in given.items()
        if not _is_count(value, least.get(name, 1))
        and not (value is None and name in ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff"))
    ]


def _position_faults(positions: str, rope_base: float, head_dim: int) -> list[str]:
    if positions not in POSITIONS:
        return [f"model.positions={positions}: choose one of {', '.join(POSITIONS)}"]
    faults = []
    if positions == "rope" and _is_count(head_dim) and head_dim % 2:
        faults.append(
            f"model.head_dim={head_dim} with model.positions=rope: rotary features come in pairs; "
            "take an even head_dim or positions=learned"
        )
    if positions == "rope" and not (isinstance(rope_base, int | float) and 0 < rope_base < float("inf")):
        faults.append(f"model.rope_base={rope_base}: expected a number above 0, such as 10000")
    return faults


def _attention_faults(attention: Callable[..., Attention], sizes: dict[str, int]) -> list[str]:
    """Faults of head counts and attention options, found by building one layer and throwing it away."""
    kind, options = getattr(attention, "func", attention), getattr(attention, "keywords", {})  # partial
    parameters = inspect.signature(kind).parameters
    try:
        inspect.signature(kind).bind(**options, **sizes)
    except TypeError as error:
        choices = ", ".join(name for name in parameters if name not in sizes)
        return [f"attention: {error}; the options of {kind.__name__} are {choices}"]
    try:
        attention(**sizes)
    except UserError as error:
        return [str(error)]
    return []
