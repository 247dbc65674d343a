"""The kernels of selective attention: one signature, chosen once, announced in the log.

    selective_attention(
        q, k, v, *, selection_head=0, document_ids=None, memory_tau=None, live_keys="off"
    ) -> (out, memory)

q [b, h, n, d]; k, v [b, h_kv, n, d] with h a multiple of h_kv (query head h uses key head h // (h / h_kv));
one floating type and one device. selection_head: a query head; it reads the keys of its own group.
document_ids [b, n], integer: documents are adjacent, and none attends to or masks another. memory_tau: ask
for the memory term. live_keys: "off"; "auto", leave out keys whose F has grown so large that what is lost is
below rounding; or a number, the F from which keys are left out (see `selmodel.attention.live`). Returns out
[b, h, n, d] in the type of q, and memory [b, n], the M of `selmodel.attention.selection.memory_term` in float32
(float64 for float64 inputs), or None.

A kernel is a module with that function, a row in `KERNELS` and, where "auto" should take it, a line in `_best`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selmodel.attention.kernels import blockwise, eager, triton_op
from selmodel.errors import UserError

log = logging.getLogger(__name__)

KernelFunction = Callable[..., tuple[Tensor, Tensor | None]]

KERNELS: dict[str, KernelFunction] = {
    "eager": eager.selective_attention,
    "blockwise": blockwise.selective_attention,
    "triton": triton_op.selective_attention,
}


@dataclass(frozen=True)
class Kernel:
    """A chosen kernel: its name, the function with the signature above, and why it was chosen."""

    name: str
    function: KernelFunction
    reason: str


def resolve_kernel(
    name: str, device: torch.device | str, *, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> Kernel:
    """The kernel called `name`, or for "auto" the best one for `device`.

    dtype and head_dim of the inputs, where known, are taken into account. Later calls return the same object.
    Raises UserError for an unknown name, and for "triton" where it cannot run. (A module is built on the CPU and
    then moved, so on a machine with a CUDA device "triton" is accepted there too; its call is what fails.)
    """
    if name != "auto" and name not in KERNELS:
        choices = ", ".join(["auto", *KERNELS])
        raise UserError(f"attention.kernel={name}: no such kernel; choose one of {choices}")
    return _choose(name, torch.device(device).type, dtype, head_dim)


@functools.cache
def announce(kernel: Kernel, live_keys: str | float) -> None:
    """Write one log line on what was chosen and why, the first time that the kernel is used so."""
    log.info("selective attention: %s (%s), live keys %s", kernel.name, kernel.reason, live_keys)


@functools.cache
def _choose(name: str, device_type: str, dtype: torch.dtype | None, head_dim: int | None) -> Kernel:
    if name == "auto":
        name, reason = _best(device_type, dtype, head_dim)
    else:
        reason = f"asked for by attention.kernel, on {device_type}"
        missing = _triton_lacks("cuda", dtype, head_dim) if name == "triton" else None
        if missing is not None:
            raise UserError(f"attention.kernel=triton: {missing}; choose attention.kernel=auto")
    return Kernel(name, KERNELS[name], reason)


def _best(device_type: str, dtype: torch.dtype | None, head_dim: int | None) -> tuple[str, str]:
    """The kernel that "auto" takes on a kind of device, and why."""
    if device_type != "cuda":
        return "blockwise", f"the fastest on {device_type}"
    missing = _triton_lacks(device_type, dtype, head_dim) or _disagreement()
    if missing is None:
        return "triton", "fused, for CUDA devices"
    return "blockwise", f"on cuda without the fused triton kernel: {missing}"


@functools.cache
def _disagreement() -> str | None:
    """The fused kernels have to prove themselves on the GPU at hand before they are chosen unasked."""
    log.info("checking the fused kernels of selective attention on this GPU against another one, once")
    return triton_op.disagreement(blockwise.selective_attention, "cuda")


def _triton_lacks(device_type: str, dtype: torch.dtype | None, head_dim: int | None) -> str | None:
    return triton_op.availability(device_type) or triton_op.unsupported(dtype, head_dim)


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    selection_head: int = 0,
    document_ids: Tensor | None = None,
    memory_tau: float | None = None,
    live_keys: str | float = "off",
    kernel: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Selective attention by the kernel named, with the signature described at the top of this module."""
    function = resolve_kernel(kernel, q.device).function
    return function(
        q,
        k,
        v,
        selection_head=selection_head,
        document_ids=document_ids,
        memory_tau=memory_tau,
        live_keys=live_keys,
    )
