"""Sampling text from a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selmodel.attention.cache import KVCache
from selmodel.errors import UserError
from selmodel.model import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    cached: bool = True,
    budgets: int | Sequence[int] | None = None,
    rule: str | None = None,
) -> Tensor:
    """Continue ``prompt`` token by token.

    Args:
        model: left in the mode (training or evaluation) it is in.
        prompt: [position] int64, beginning with ``<BOS>``.
        n_tokens: how many tokens to add at most; fewer when ``eos_id`` comes or the model's context is full.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: samples among the likeliest tokens whose probabilities reach this sum.
        eos_id: ends the text when sampled (it is not returned).
        generator: source of randomness on the prompt's device; None for torch's own.
        cached: keep keys and values, so that a token costs one step. Without, and for kinds of attention that cannot,
            every token costs a forward pass over all before it.
        budgets: how many keys each layer may hold, one number or one per layer; None: all. Needs a cache.
        rule: which key leaves; see ``selmodel.attention.pruning``. None: "selective" for selective attention.

    Returns:
        [position] int64: the prompt and what was added.

    Raises:
        UserError: for a prompt that is empty or longer than the context, an option out of range, and budgets without
            a cache.
    """
    if temperature < 0:
        raise UserError(f"temperature={temperature}: must be 0 (the likeliest token) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: must be above 0 and at most 1")
    if not 0 < len(prompt) <= model.context_length:
        raise UserError(
            f"prompt of {len(prompt)} tokens: expected from 1 to model.context_length={model.context_length}"
        )
    cache = None
    length = min(len(prompt) + max(n_tokens, 0), model.context_length)
    if budgets is not None and not cached:
        raise UserError(f"budgets={budgets} with cached=False: only a cache can let go of keys; leave cached on")
    if cached and (budgets is not None or rule is not None or model.blocks[0].attention.supports_cache):
        cache = KVCache(model, 1, budgets, rule=rule, context_length=length)
    tokens = new = prompt
    for _ in range(length - len(prompt)):
        if cache is None:
            output = model(tokens[None])
        else:
            # Not through model(...): torch.compile would trace the cache, whose state differs at every step.
            output = model.forward(new[None], cache=cache)
        logits = output.logits[0, -1].float()
        token = sample(logits, temperature, top_p, generator)
        new = token[None]
        if eos_id is not None and token.item() == eos_id:
            break
        tokens = torch.cat([tokens, token[None]])
    return tokens


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token id (scalar int64) from ``logits`` [vocabulary] float32; see ``generate`` for the options."""
    if temperature == 0:
        return logits.argmax()
    probabilities, order = torch.softmax(logits / temperature, -1).sort(descending=True)
    # A token stays when the likelier ones together have not reached top_p, so the first always stays.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return order[torch.multinomial(probabilities, 1, generator=generator)[0]]
