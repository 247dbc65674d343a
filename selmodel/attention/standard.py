"""Standard attention: softmax(q·k / sqrt(d)) · v, by PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from selmodel.attention.base import Attention
from selmodel.attention.selection import attended_pairs


class StandardAttention(Attention):
    """Causal softmax attention, the baseline. Options: those of `Attention`."""

    supports_cache = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Attention.attend`. The memory term is None: nothing is ever masked."""
        n = q.shape[2]
        mask = None
        if document_ids is not None:
            mask = attended_pairs(n, n, document_ids, device=q.device)[:, None]  # [batch, 1, query, key]
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.n_kv_heads != self.n_heads
        )
        return out, None
