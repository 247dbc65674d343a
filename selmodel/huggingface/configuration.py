"""The configuration of an exported model: its architecture, and the keys its cache holds."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from selmodel.attention.selective import SelectiveAttention
from selmodel.attention.standard import StandardAttention
from selmodel.errors import UserError
from selmodel.model import Transformer

KINDS = {kind.__name__: kind for kind in (SelectiveAttention, StandardAttention)}


class SelModelConfig(PreTrainedConfig):
    """What ``config.json`` holds. Sizes as in ``selmodel.model.Transformer``, which explains them.

    attention: ``Attention.options()``: the kind and what, beside the sizes, decides its function.
    budgets: keys that each layer's cache may hold in ``generate()``, one number or one per layer; None: all.
    rule, n_sinks: which key leaves, see ``selmodel.attention.cache.KVCache``.
    """

    model_type = "selmodel"
    # The names by which other libraries ask.
    attribute_map = {  # noqa: RUF012  transformers reads it from the class
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "context_length",
        "tie_word_embeddings": "tie_embeddings",
    }

    vocab_size: int = 8192
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int = 12
    head_dim: int = 64
    d_model: int = 768
    d_ff: int = 2048
    context_length: int = 512
    positions: str = "learned"
    rope_base: float | None = None
    tie_embeddings: bool = False
    attention: dict | None = None
    budgets: int | list[int] | None = None
    rule: str | None = None
    n_sinks: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    @classmethod
    def from_model(cls, model: Transformer, **others: Any) -> SelModelConfig:
        """The configuration of ``model``; ``others`` are further fields.

        Raises:
            UserError: for a kind of attention that is not selmodel's own: nothing could load it.
        """
        options = model.options()
        if options["attention"]["kind"] not in KINDS:
            raise UserError(
                f"attention of kind {options['attention']['kind']}: is not part of selmodel, so an exported model "
                f"could not be loaded; expected one of {', '.join(KINDS)}"
            )
        return cls(**options, **others)

    def build(self) -> Transformer:
        """The model, with initial weights.

        Raises:
            UserError: with all faults in one message, for values that make no model.
        """
        options = dict(self.attention or {"kind": "StandardAttention"})
        kind = options.pop("kind", None)
        if kind not in KINDS:
            raise UserError(f"attention.kind={kind} in config.json: expected one of {', '.join(KINDS)}")

        def attention(**sizes: int):
            return KINDS[kind](**sizes, **options)

        sizes = (
            "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_model", "d_ff", "context_length", "positions",
            "tie_embeddings",
        )  # fmt: skip
        chosen = {name: getattr(self, name) for name in sizes}
        if self.rope_base is not None:
            chosen["rope_base"] = self.rope_base
        return Transformer(self.vocab_size, attention, **chosen)
