"""Sampling text from a model."""

from __future__ import annotations

import torch
from torch import Tensor

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
) -> Tensor:
    """Continue ``prompt`` token by token, without a cache: every token costs one forward pass over all before it.

    Args:
        model: left in the mode (training or evaluation) it is in.
        prompt: [position] int64, beginning with ``<BOS>``.
        n_tokens: how many tokens to add at most; fewer when ``eos_id`` comes or the model's context is full.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: samples among the likeliest tokens whose probabilities reach this sum.
        eos_id: ends the text when sampled (it is not returned).
        generator: source of randomness on the prompt's device; None for torch's own.

    Returns:
        [position] int64: the prompt and what was added.

    Raises:
        UserError: for a prompt that is empty or longer than the context, or an option out of range.
    """
    if temperature < 0:
        raise UserError(f"temperature={temperature}: must be 0 (the likeliest token) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: must be above 0 and at most 1")
    if not 0 < len(prompt) <= model.context_length:
        raise UserError(
            f"prompt of {len(prompt)} tokens: expected from 1 to model.context_length={model.context_length}"
        )
    tokens = prompt
    for _ in range(min(n_tokens, model.context_length - len(prompt))):
        logits = model(tokens[None]).logits[0, -1].float()
        token = sample(logits, temperature, top_p, generator)
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
