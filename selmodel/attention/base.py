"""What every kind of attention shares: projections, grouped key/value heads, query/key norm, rotation.

A further kind is a subclass with `attend`, in a file of its own, and a YAML that names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from selmodel.attention.rotary import Rotary, apply_rotary
from selmodel.attention.selection import SelectionStatistics
from selmodel.errors import UserError

if TYPE_CHECKING:
    from selmodel.attention.cache import LayerCache

QK_NORM_EPS = 1e-6


class Attention(nn.Module, ABC):
    """Causal self-attention of one layer; subclasses implement `attend`.

    d_model: width of the layer's input and output. n_heads: query heads. head_dim: features per head;
    n_heads * head_dim need not equal d_model. n_kv_heads: key/value heads, a divisor of n_heads; None means
    n_heads (no grouping). The model passes these four; the rest are options of the config group `attention`:

    qk_norm: divide each query and key by its root mean square (without a learned scale), so that no logit
    exceeds sqrt(head_dim). False in the paper.

    Parameters, without biases, equal in name, shape and order for every kind that adds none:
    wq [n_heads * head_dim, d_model], wk and wv [n_kv_heads * head_dim, d_model],
    wo [d_model, n_heads * head_dim].
    Raises UserError when n_heads is no multiple of n_kv_heads.
    """

    # Weight of the memory loss that this layer's `memory` is meant for; kinds without one leave it at 0.
    memory_loss_eps: float = 0.0
    # The query head whose votes are subtracted from the logits of all heads; None for kinds without votes.
    selection_head: int | None = None
    # Whether `attend` is softmax(q·k / sqrt(d) - F) · v over all earlier keys, which `LayerCache` computes.
    supports_cache: bool = False

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise UserError(
                f"model.n_kv_heads={n_kv_heads} with model.n_heads={n_heads}: "
                "the key/value heads must divide the query heads"
            )
        self.d_model, self.n_heads, self.head_dim, self.n_kv_heads = d_model, n_heads, head_dim, n_kv_heads
        self.qk_norm = bool(qk_norm)
        self.wq = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, d_model, bias=False)
        # Set record_statistics, run a forward, read statistics. Costs nothing while it is False.
        self.record_statistics = False
        self.statistics: SelectionStatistics | None = None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attention itself.

        q [b, n_heads, n, head_dim]; k, v [b, n_kv_heads, n, head_dim]; document_ids [b, n] or None, as in
        `selmodel.attention.selection`. Returns out, shaped as q, and the memory term [b, n] or None. It must
        be causal, and keep documents apart when document_ids is given.
        """

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend` for a whole sequence of one document, without a memory term. Returns out alone."""
        return self.attend(q, k, v, None)[0]

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, n, d_model] -> out [b, n, d_model] and the memory term [b, n] or None.

        With a cache, x follows what the cache has seen, there are no documents, no memory term and no gradient.
        """
        q, k, v = self.project(x, rotary)
        if cache is None:
            out, memory = self.attend(q, k, v, document_ids)
        else:
            out, memory = cache.attend(self, q, k, v), None
        return self.wo(out.transpose(1, 2).flatten(2)), memory

    def project(self, x: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x [b, n, d_model] -> q [b, n_heads, n, head_dim], k and v [b, n_kv_heads, n, head_dim].

        Query and key are normalised and rotated where the model asks for it, so they are what a cache stores.
        """
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        if self.qk_norm:
            q, k = _rms_norm(q), _rms_norm(k)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        return q, k, v

    def options(self) -> dict[str, Any]:
        """What, beside the shapes, decides the function computed. Plain values; checkpoints compare them."""
        return {"kind": type(self).__name__, "qk_norm": self.qk_norm}


def _rms_norm(x: Tensor) -> Tensor:
    """x / root mean square of its last dimension, computed in float32 at least, in the type of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.rms_norm(wide, (x.shape[-1],), eps=QK_NORM_EPS).to(x.dtype)
