"""Ways to compute attention, and how far each is from the definition."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from measuring import Skipped, guarded
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from selmodel.attention.kernels import KERNELS
from selmodel.attention.selection import accumulate, accumulation_dtype, selection_scores

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without selection: what every other time is a ratio to."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def by_kernel(q: Tensor, k: Tensor, v: Tensor, *, name: str, live_keys: str) -> Tensor:
    return KERNELS[name](q, k, v, live_keys=live_keys)[0]


def x_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        from x_transformers.attend import Attend
    except ImportError as error:
        raise Skipped("not installed: pip install -e '.[bench]'") from error
    if k.shape[1] != q.shape[1]:
        # It shares key head j among the query heads j, j + h_kv, ..., the others among those that lie side by side.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return Attend(causal=True, selective=True, heads=q.shape[1])(q, k, v)[0]


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention with F as a tensor [b, n, n] that its score function reads."""
    if q.device.type == "cpu" and q.requires_grad and torch.is_grad_enabled():
        raise Skipped("FlexAttention has no backward pass on the CPU")
    b, h, n, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    F = accumulate(selection_scores(q[:, 0].to(dtype) @ k[:, 0].to(dtype).mT * d**-0.5))

    def minus_F(score, batch, head, query, key):
        return score - F[batch, query, key]

    attention, block_mask = _compiled_flex(n, q.device)
    return attention(q, k, v, score_mod=minus_F, block_mask=block_mask, enable_gqa=h != k.shape[1])


@functools.cache
def _compiled_flex(n: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return key <= query

    return torch.compile(flex_attention, dynamic=False), create_block_mask(causal, None, None, n, n, device=device)


CONTENDERS: dict[str, Contender] = {
    "standard": standard,
    "eager": functools.partial(by_kernel, name="eager", live_keys="off"),
    "x-transformers": x_transformers,
    "flex": flex,
    "blockwise": functools.partial(by_kernel, name="blockwise", live_keys="off"),
    "blockwise-live": functools.partial(by_kernel, name="blockwise", live_keys="auto"),
    "triton": functools.partial(by_kernel, name="triton", live_keys="off"),
    "triton-live": functools.partial(by_kernel, name="triton", live_keys="auto"),
}

# These keep about four numbers (logits, weights, their gradients) for every pair of tokens, for each of these heads.
QUADRATIC = {"eager": "all", "x-transformers": "all", "flex": "one"}


def quadratic_bytes(name: str, b: int, h: int, n: int, dtype: torch.dtype) -> int:
    """About what a contender keeps that grows by the square of the context n."""
    heads = {"all": h, "one": 1}[QUADRATIC[name]] if name in QUADRATIC else 0
    return 4 * b * heads * n * n * accumulation_dtype(dtype).itemsize


def forward(contender: Contender, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None = None) -> Tensor:
    """out [b, h, n, d], without gradient."""
    with torch.no_grad():
        return contender(q, k, v)


def forward_backward(contender: Contender, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The gradients of q, k and v, for the gradient `grad` [b, h, n, d] of the output."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    contender(q, k, v).backward(grad)
    return [q.grad, k.grad, v.grad]


MEASURES = {"forward": forward, "forward_backward": forward_backward}


def random_tensors(
    b: int, h: int, h_kv: int, n: int, d: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output: normal, unit variance, in memory [b, n, heads, d] as projections give."""
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(
        torch.randn(b, n, heads, d, generator=generator, device=device).to(dtype).transpose(1, 2)
        for heads in (h, h_kv, h_kv, h)
    )


def disagreement(name: str, dtype: torch.dtype, device: torch.device, n: int = 256) -> dict[str, float | Skipped]:
    """How far a contender is from the definition in float64, on small random inputs of unit variance.

    By measure, the norm of the error over the norm of what is exact; of three gradients the worst.
    """
    tensors = random_tensors(2, 4, 4, n, 32, dtype, device)
    exact = [x.double() for x in tensors]
    errors: dict[str, float | Skipped] = {}
    for measure, function in MEASURES.items():
        expected = function(CONTENDERS["eager"], *exact)
        try:
            found = guarded(function, CONTENDERS[name], *tensors)
        except Skipped as reason:
            errors[measure] = reason
            continue
        pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
        errors[measure] = max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)
    return errors
