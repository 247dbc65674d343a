"""Selective attention by fused Triton kernels, on NVIDIA GPUs of compute capability 8.0 and newer.

Two operators, registered with `torch.library`: one for the forward pass, one for its gradient. `torch.compile`,
activation checkpointing and DDP see each as one opaque operator. Importing this module does not import triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selmodel.attention.kernels import triton_config
from selmodel.attention.kernels.common import check_inputs, empty_like
from selmodel.attention.kernels.triton_config import MAX_HEAD_DIM, availability
from selmodel.attention.live import death_thresholds
from selmodel.attention.selection import document_starts

__all__ = ["availability", "selective_attention"]


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    selection_head: int = 0,
    document_ids: Tensor | None = None,
    memory_tau: float | None = None,
    live_keys: str | float = "off",
) -> tuple[Tensor, Tensor | None]:
    """out and M, as `selmodel.attention.kernels` describes it.

    Logits, F, softmax and gradients are accumulated in float32; out has the type of q, in memory [b, n, h, d].
    Inputs are read in place if their last dimension is contiguous. Beside inputs and outputs it holds
    4 * b * n * n / 16 bytes, or half of that: F at every 16th or 32nd query. Twice that in the backward pass.

    Raises ValueError for float64, heads of more than 128 features, and devices on which Triton cannot run.
    """
    check_inputs(q, k, v, selection_head, document_ids, memory_tau)
    _check_supported(q)
    thresholds = death_thresholds(q, k, v, live_keys, memory_tau)
    starts = None if document_ids is None else first_positions(document_ids)
    out, _, _, memory = triton_forward(q, k, v, starts, thresholds, selection_head, memory_tau)
    return out, (None if memory_tau is None else memory)


def first_positions(document_ids: Tensor) -> Tensor:
    """The position of the first token of each token's document: [b, n] int32 from document_ids [b, n]."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device)
    return torch.where(document_starts(document_ids), position, 0).cummax(dim=1).values.to(torch.int32)


def unsupported(dtype: torch.dtype | None, head_dim: int | None) -> str | None:
    """None if the kernels take inputs of that type and head size (None: not known yet), else what they lack."""
    if dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        return f"its heads have at most {MAX_HEAD_DIM} features, and the inputs {head_dim}"
    return None


def disagreement(reference: Callable[..., tuple[Tensor, Tensor | None]], device: torch.device | str) -> str | None:
    """None if on this device the kernels compute what `reference`, another kernel, computes; else what is wrong.

    Outputs and gradients of one small input, with live keys and without. Takes as long as compiling the kernels does.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 150, 64, generator=generator).to(device, torch.bfloat16) for _ in range(4))

    def results(function, live_keys):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = function(*inputs, live_keys=live_keys)
        return (out, *torch.autograd.grad(out, inputs, grad))

    try:
        with torch.enable_grad(), torch.autocast(torch.device(device).type, enabled=False):
            expected = results(reference, "off")
            for live_keys in ("off", "auto"):
                pairs = zip(("out", "dq", "dk", "dv"), results(selective_attention, live_keys), expected, strict=True)
                for name, x, y in pairs:
                    error = ((x.float() - y.float()).norm() / y.float().norm()).item()
                    if not error < 0.02:  # bfloat16 rounds to 0.004; a NaN fails too
                        return f"here its {name} differs from that of another kernel by {error:.0%}"
    except Exception as error:
        return f"it fails here: {type(error).__name__}: {str(error).strip()[:200]}"
    return None


def _check_supported(q: Tensor) -> None:
    reason = unsupported(q.dtype, q.shape[3]) or availability(q.device.type)
    if reason is not None:
        raise ValueError(f"attention.kernel=triton: {reason}. Choose attention.kernel=blockwise instead")


@torch.library.custom_op("selmodel::triton_forward", mutates_args=())
def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    thresholds: Tensor | None,
    selection_head: int,
    memory_tau: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [b, h, n, d], lse [b, h, n] and carries [b, lines, n] in units of ln 2, and M [b, n] ([0] without tau).

    starts [b, n] int32: see `first_positions`. thresholds [b, n]: the F from which each key is dead.
    """
    from selmodel.attention.kernels import triton_launch

    results = _forward_outputs(q, memory_tau)
    triton_launch.forward(q, k, v, starts, thresholds, selection_head, memory_tau, *results)
    return results


@triton_forward.register_fake
def _(q, k, v, starts, thresholds, selection_head, memory_tau):
    return _forward_outputs(q, memory_tau)


def _forward_outputs(q: Tensor, memory_tau: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, h, n, d = q.shape
    n_lines = -(-n // triton_config.tiles_for(q).line)
    return (
        empty_like(q),
        q.new_empty(b, h, n, dtype=torch.float32),
        q.new_zeros(b, n_lines, n, dtype=torch.float32),  # what no kernel writes, none reads; but it is an output
        q.new_empty((b, n) if memory_tau is not None else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("selmodel::triton_backward", mutates_args=())
def triton_backward(
    d_out: Tensor,
    d_memory: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    carries: Tensor,
    starts: Tensor | None,
    thresholds: Tensor | None,
    selection_head: int,
    memory_tau: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each in its type and in memory [b, n, heads, d]."""
    from selmodel.attention.kernels import triton_launch

    grads = empty_like(q), empty_like(k), empty_like(v)
    triton_launch.backward(
        d_out, d_memory, q, k, v, out, lse, carries, starts, thresholds, selection_head, memory_tau, *grads
    )
    return grads


@triton_backward.register_fake
def _(d_out, d_memory, q, k, v, out, lse, carries, starts, thresholds, selection_head, memory_tau):
    return empty_like(q), empty_like(k), empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, starts, thresholds, selection_head, memory_tau = inputs
    out, lse, carries, _ = output
    ctx.save_for_backward(q, k, v, out, lse, carries, starts, thresholds)
    ctx.options = (selection_head, memory_tau)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, _, __, d_memory):
    q, k, v, out, lse, carries, starts, thresholds = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    if ctx.options[1] is None:
        d_memory = None
    grads = triton_backward(d_out, d_memory, q, k, v, out, lse, carries, starts, thresholds, *ctx.options)
    return (*grads, None, None, None, None)


triton_forward.register_autograd(_backward, setup_context=_save)
