"""Sampling text from a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    top_k: int | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    cache: bool | KVCache = True,
    budgets: int | Sequence[int] | None = None,
    rule: str | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Tensor:
    """Continue ``prompt`` token by token.

    Args:
        model: left in the mode (training or evaluation) it is in.
        prompt: [position] int64, beginning with ``<BOS>``.
        n_tokens: how many tokens to add at most; fewer when ``eos_id`` comes or the context is full.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: samples among the likeliest tokens whose probabilities reach this sum.
        top_k: samples among this many likeliest tokens, before top_p; None: all.
        eos_id: ends the text when sampled (it is not returned).
        generator: source of randomness on the prompt's device; None for torch's own.
        cache: keep keys and values, so that a token costs one step. False, or a kind of attention that cannot: every
            token costs a forward pass over all before it. A ``KVCache`` for one sequence brings its own budgets, is
            reset first, and is left with what it holds.
        budgets: how many keys each layer may hold, one number or one per layer; None: all. Needs a cache.
        rule: which key leaves; see ``selmodel.attention.pruning``. None: "selective" for selective attention.
        on_token: called with each token that is added, as soon as it is known.

    Returns:
        [position] int64: the prompt and what was added.

    Raises:
        UserError: for a prompt that is empty or longer than the context, an option out of range, budgets without a
            cache, budgets beside a ``KVCache``, and a model whose logits are not finite.
    """
    faults = sampling_faults(temperature, top_p, top_k)
    if faults:
        raise UserError("; ".join(faults))
    limit, owner = model.context_length, "model"
    if isinstance(cache, KVCache) and cache.context_length < limit:
        limit, owner = cache.context_length, "cache"
    if not 0 < len(prompt) <= limit:
        raise UserError(f"prompt of {len(prompt)} tokens: expected from 1 to {owner}.context_length={limit}")
    length = min(len(prompt) + max(n_tokens, 0), limit)
    keys = _keys(model, length, cache, budgets, rule)
    tokens = new = prompt
    for _ in range(length - len(prompt)):
        if keys is None:
            output = model(tokens[None], last_only=True)
        else:
            # Not through model(...): torch.compile would trace the cache, whose state differs at every step.
            output = model.forward(new[None], cache=keys, last_only=True)
        logits = output.logits[0, -1].float()
        if not math.isfinite(logits.max().item()):  # NaN, if there is one, is the maximum
            raise UserError(
                f"the model's logits after {len(tokens)} tokens are not finite: it has diverged, or its dtype is too "
                "narrow; use an earlier checkpoint, or a wider dtype"
            )
        token = sample(logits, temperature, top_p, generator, top_k=top_k)
        new = token[None]
        if eos_id is not None and token.item() == eos_id:
            break
        tokens = torch.cat([tokens, token[None]])
        if on_token is not None:
            on_token(token.item())
    return tokens


def _keys(
    model: Transformer, length: int, cache: bool | KVCache, budgets: int | Sequence[int] | None, rule: str | None
) -> KVCache | None:
    """The cache to generate with, for ``length`` tokens; None: without."""
    if isinstance(cache, KVCache):
        if budgets is not None or rule is not None:
            raise UserError(
                f"budgets={budgets}, rule={rule} beside a cache, which has budgets={cache.budgets} of its own: "
                "give the one or the other"
            )
        cache.reset()
        return cache
    pruned = budgets is not None or rule is not None
    if pruned and not cache:
        raise UserError(
            f"budgets={budgets}, rule={rule} with cache=False: only a cache can let go of keys; leave it on"
        )
    if cache and (pruned or model.blocks[0].attention.supports_cache):
        return KVCache(model, 1, budgets, rule=rule, context_length=length)
    return None


def sampling_faults(temperature: float, top_p: float, top_k: int | None = None) -> list[str]:
    """What is out of range of the options of ``generate`` that choose among tokens, one line each."""
    faults = []
    if not 0 <= temperature < math.inf:
        faults.append(f"temperature={temperature}: must be 0 (the likeliest token) or more")
    if not 0 < top_p <= 1:
        faults.append(f"top_p={top_p}: must be above 0 and at most 1")
    if top_k is not None and top_k < 1:
        faults.append(f"top_k={top_k}: must be at least 1, or null for all tokens")
    return faults


def sample(
    logits: Tensor,
    temperature: float,
    top_p: float,
    generator: torch.Generator | None = None,
    *,
    top_k: int | None = None,
) -> Tensor:
    """One token id (scalar int64) from ``logits`` [vocabulary] float32; see ``generate`` for the options."""
    if temperature == 0:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        # Of several tokens with the k-th largest logit all stay.
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    # Less the largest first, so that no temperature overflows; one that float32 would round to 0 acts as the least.
    scaled = (logits - logits.max()) / max(temperature, torch.finfo(torch.float32).tiny)
    probabilities, order = torch.softmax(scaled, -1).sort(descending=True)
    # A token stays when the likelier ones together have not reached top_p, so the first always stays.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return order[torch.multinomial(probabilities, 1, generator=generator)[0]]
