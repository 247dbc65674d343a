"""`selmodel.model.Transformer` behind the interface of Hugging Face's causal language models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from selmodel.attention.cache import KVCache
from selmodel.budgets import read_budgets
from selmodel.errors import UserError
from selmodel.huggingface.cache import SelModelCache, groups_of, join_rows, left_padding
from selmodel.huggingface.configuration import SelModelConfig


class SelModelForCausalLM(PreTrainedModel, GenerationMixin):
    """A trained model for ``from_pretrained``, ``forward`` and ``generate``.

    ``generate()`` keeps keys and values in a cache that holds no more than ``config.budgets``; set them
    (``model.config.budgets = 64``) or give a cache of ``make_cache``. Without a cache all keys are attended to.

    Not supported, with an error: attention weights and hidden states as outputs, ``inputs_embeds``, and assisted
    generation, which takes tokens back.
    """

    config_class = SelModelConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False  # model.checkpoint_activations of the configuration of a run does it
    _no_split_modules = ("Block",)
    _is_stateful = True  # keys that have left do not come back

    def __init__(self, config: SelModelConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        self._settled: tuple | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The model has set its weights."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Linear | None:
        """None where the output matrix is the embedding."""
        return self.model.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.model.head = value

    def make_cache(
        self,
        budgets: int | Sequence[int] | str | None = None,
        *,
        rule: str | None = None,
        n_sinks: int | None = None,
        context_length: int | None = None,
    ) -> SelModelCache:
        """An empty cache for ``generate(cache=...)`` or ``forward(cache=...)``, for one batch of any size.

        Args:
            budgets: keys that each layer may hold: a number, one per layer, or a file written by a budget search;
                None: all.
            rule, n_sinks: which key leaves, see ``selmodel.attention.cache.KVCache``.
            context_length: the most tokens it may see; None: the model's.

        Raises:
            UserError: for values that do not fit the model.
        """
        pruning = read_budgets(budgets, self.model, rule=rule, n_sinks=n_sinks)
        return SelModelCache(
            lambda rows: KVCache(self.model, rows, **pruning.arguments(), context_length=context_length)
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: SelModelCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits, and the loss where there are labels.

        Args:
            input_ids: [b, n] int64, beginning with ``<BOS>`` as in training.
            attention_mask: [b, n], 0 for padding on the left, or on the right where there is no cache. A row gives
                what it gives alone. With a cache that has seen tokens it may be longer, and is not read.
            cache: of ``make_cache``; input_ids follow what it has seen. There is then no gradient.
            labels: [b, n] int64, input_ids themselves or -100 where a token does not count; the loss is the mean
                cross entropy of the counted tokens, each predicted from those before it.
            use_cache: make a cache, with the budgets of the configuration, if none is given. None: no.
            logits_to_keep: logits of the last tokens alone; 0: of all.
            return_dict: False: a tuple of what is not None.

        Returns:
            loss (or None), logits [b, n, vocab_size] (0 at padding on the left), cache (or None).

        Raises:
            UserError: for tokens beyond the context, a mask with holes, and outputs that there are not.
        """
        if output_attentions or output_hidden_states:
            raise UserError("output_attentions, output_hidden_states: are not available; leave them out")
        self._settle()
        if cache is None and use_cache:
            cache = self.make_cache(**self._pruning())
        if cache is None:
            logits = self._without_cache(input_ids, attention_mask, labels is None and logits_to_keep == 1)
        elif isinstance(cache, SelModelCache):
            logits = cache.forward(
                self.model.forward, input_ids, attention_mask, labels is None and logits_to_keep == 1
            )
        else:
            raise UserError(f"a cache of type {type(cache).__name__}: expected one made by make_cache()")
        loss = None
        if labels is not None:
            flat = logits[:, :-1].flatten(0, 1).float()
            loss = cross_entropy(flat, labels[:, 1:].to(logits.device).flatten(), ignore_index=-100)
        output = CausalLMOutputWithPast(loss=loss, logits=logits[:, -logits_to_keep:], cache=cache)
        return output if return_dict in (None, True) else output.to_tuple()

    def _without_cache(self, tokens: Tensor, attention_mask: Tensor | None, last_only: bool) -> Tensor:
        def run(rows: Tensor | None, padding: int) -> Tensor:
            part = (tokens if rows is None else tokens[rows])[:, padding:]
            return self.model(part, last_only=last_only).logits

        groups = groups_of(left_padding(attention_mask, tokens, right=True))
        return join_rows(groups, run, len(tokens), 1 if last_only else tokens.shape[1])

    def _pruning(self) -> dict:
        return {"budgets": self.config.budgets, "rule": self.config.rule, "n_sinks": self.config.n_sinks}

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """The cache of one call of ``generate``, with room for just its tokens."""
        if model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            return
        if generation_config.cache_implementation is not None:
            raise UserError(
                f"cache_implementation={generation_config.cache_implementation}: the model brings its own cache; "
                "leave it out, and set config.budgets for a smaller one"
            )
        limit = self.config.context_length
        if self.config.positions == "learned" and max_cache_length > limit:
            raise UserError(
                f"generate() of up to {max_cache_length + 1} tokens, prompt included, with context_length={limit}: "
                "ask for fewer new tokens (max_new_tokens) or shorten the prompt"
            )
        model_kwargs["cache"] = self.make_cache(**self._pruning(), context_length=max(1, max_cache_length))

    def _settle(self) -> None:
        """Choose attention kernels for where the weights are now; loading puts them there one by one."""
        weight = self.model.embedding.weight
        if self._settled != (weight.device, weight.dtype):
            self._settled = (weight.device, weight.dtype)
            for block in self.model.blocks:
                block.attention._apply(lambda tensor: tensor)

    @torch.no_grad()
    def resize_token_embeddings(self, *arguments, **options) -> nn.Embedding:
        """Refused: ids beyond the tokenizer's have no trained logits."""
        raise UserError("resize_token_embeddings: the vocabulary is fixed; train with a tokenizer that has the tokens")
