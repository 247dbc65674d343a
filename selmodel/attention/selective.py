"""Selective attention (arXiv 2410.02703): one head's votes mask keys from all heads of later queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from selmodel.attention.base import Attention
from selmodel.attention.kernels import Kernel, announce, resolve_kernel
from selmodel.attention.live import check_live_keys, death_thresholds
from selmodel.attention.selection import selection_statistics
from selmodel.errors import UserError


class SelectiveAttention(Attention):
    """Selective attention; `selmodel.attention.selection` holds the definition. It adds no parameters.

    Options, beside those of `Attention`:

    selection_head: the query head whose logits are the votes; the paper takes 0.
    kernel: "auto", or the name of one (see `selmodel.attention.kernels`).
    live_keys: "off"; "auto", leave out keys that F has pushed so low that nothing above rounding is lost; or a number,
    the F from which keys are left out, which changes the function computed (see `selmodel.attention.live`). auto
    makes attention cheaper as selection sets in; qk_norm keeps its bound small.
    memory_loss: None, or a mapping with eps, the weight of the memory loss (paper: 0.1; 0 is off), and tau,
    the F from which a key counts as gone (paper: 1). While eps > 0, the layer returns its memory term.

    Raises UserError for a selection head that does not exist, an unknown kernel, or a bad eps or tau.
    """

    supports_cache = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool = False,
        selection_head: int = 0,
        kernel: str = "auto",
        live_keys: str | float = "auto",
        memory_loss: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, n_kv_heads, qk_norm=qk_norm)
        if not isinstance(selection_head, int) or not 0 <= selection_head < n_heads:
            raise UserError(
                f"attention.selection_head={selection_head} with model.n_heads={n_heads}: "
                f"the selection head must be one of 0..{n_heads - 1}"
            )
        self.selection_head = selection_head
        self.memory_loss_eps, self.memory_loss_tau = _read_memory_loss(memory_loss)
        self.live_keys = _read_live_keys(live_keys, kernel)
        self.kernel_name = kernel
        self.kernel = self._resolve_kernel()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Attention.attend`."""
        if self.record_statistics:
            key_head = self.selection_head // (self.n_heads // self.n_kv_heads)
            self.statistics = selection_statistics(
                q[:, self.selection_head],
                k[:, key_head],
                document_ids,
                tau=self.memory_loss_tau,
                thresholds=death_thresholds(q, k, v, self.live_keys),
            )
        if not torch.compiler.is_compiling():
            announce(self.kernel, self.live_keys)
        return self.kernel.function(
            q,
            k,
            v,
            selection_head=self.selection_head,
            document_ids=document_ids,
            memory_tau=self.memory_loss_tau if self.memory_loss_eps > 0 else None,
            live_keys=self.live_keys,
        )

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention.attend_causally`. Exact, also where live_keys is a number: a cache leaves no key out."""
        live_keys = self.live_keys if isinstance(self.live_keys, str) else "auto"
        announce(self.kernel, live_keys)
        out, _ = self.kernel.function(q, k, v, selection_head=self.selection_head, live_keys=live_keys)
        return out

    def options(self) -> dict[str, Any]:
        """See `Attention.options`. Kernel and memory loss do not change the function that is computed."""
        options = {**super().options(), "selection_head": self.selection_head}
        # "off" and "auto" compute the same function.
        return options if isinstance(self.live_keys, str) else {**options, "live_keys": self.live_keys}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelectiveAttention:
        """Choose the kernel anew when the parameters move; not in forward, which may be compiled."""
        super()._apply(fn, recurse)
        self.kernel = self._resolve_kernel()
        return self

    def _resolve_kernel(self) -> Kernel:
        weight = self.wq.weight
        return resolve_kernel(self.kernel_name, weight.device, dtype=weight.dtype, head_dim=self.head_dim)


def _read_live_keys(live_keys: str | float, kernel: str) -> str | float:
    # YAML reads off as false.
    live_keys = "off" if live_keys is False else live_keys
    try:
        live_keys = check_live_keys(live_keys)
    except ValueError:
        raise UserError(
            f"attention.live_keys={live_keys!r}: expected off, auto, "
            "or the F from which keys are left out, a number above 0 such as 30"
        ) from None
    if kernel == "eager" and not isinstance(live_keys, str):
        raise UserError(
            f"attention.live_keys={live_keys} with attention.kernel=eager, which leaves no key out: "
            "choose another kernel, or live_keys=off"
        )
    return live_keys


def _read_memory_loss(memory_loss: Mapping[str, float | None] | None) -> tuple[float, float]:
    """eps and tau of the option; (0, 1) when it is off."""
    if memory_loss is None:
        return 0.0, 1.0
    if not isinstance(memory_loss, Mapping):
        raise UserError(f"attention.memory_loss={memory_loss!r}: expected null, or a mapping of eps and tau")
    if "eps" not in memory_loss or set(memory_loss) - {"eps", "tau"}:
        raise UserError(
            f"attention.memory_loss={dict(memory_loss)}: expected eps (the weight, 0 is off) and tau if not 1"
        )
    eps, tau = memory_loss["eps"], memory_loss.get("tau", 1.0)
    eps = 0.0 if eps is None else eps
    if not _is_finite(eps) or eps < 0:
        raise UserError(f"attention.memory_loss.eps={eps!r}: expected 0 (off) or a weight, such as 0.1")
    if not _is_finite(tau) or tau <= 0:
        raise UserError(f"attention.memory_loss.tau={tau!r}: expected a number above 0, such as 1.0")
    return float(eps), float(tau)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
