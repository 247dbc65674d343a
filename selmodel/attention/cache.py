"""The key/value cache: a layer holds no more keys than its budget, in memory allocated once.

A layer has min(K, context) + 1 slots: K keys between queries, and the one that a query brings with it. A key that
leaves frees its slot for the next one, so nothing is moved and nothing allocated while tokens are decoded, and the
rows of a batch may hold different keys. Which key leaves: `selmodel.attention.pruning`.

A chunk of several tokens gives the same as its tokens one by one. It is computed in parallel, but for the rules that
read attention weights ("h2o", "tova"), which go token by token once the layer is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from selmodel.attention.pruning import (
    DEFAULT_SINKS,
    NEVER,
    Rule,
    attend_under_budget,
    layer_rules,
    take_keys,
    total_votes,
)
from selmodel.attention.selection import accumulation_dtype
from selmodel.errors import UserError

if TYPE_CHECKING:
    from selmodel.attention.base import Attention
    from selmodel.model import Transformer


class LayerCache:
    """The keys that one layer holds, and attention to them.

    attention: of the layer. capacity: the keys held at most between queries; equal to the rule's budget where
    there is a rule. rule: None: no key leaves, and at most `capacity` tokens fit.

    k, v [b, n_kv_heads, slots, head_dim], keys as `Attention.project` gives them. F [b, slots], float32 (float64 for
    a float64 cache): selective attention alone. sums [b, slots], of the same type: the sum of the weights of each
    key, for "h2o" alone. age [b, slots], int32, with a rule alone: see `positions`. Of each, `held` slots are in use
    between queries: the first ones until a key has left, then all but the one in `free` [b, 1].
    """

    def __init__(
        self,
        attention: Attention,
        batch_size: int,
        capacity: int,
        rule: Rule | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.n_heads, self.n_kv_heads, self.head_dim = attention.n_heads, attention.n_kv_heads, attention.head_dim
        self.selection_head = attention.selection_head
        self.capacity, self.rule = capacity, rule
        slots = capacity + 1
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            size = (batch_size, self.n_kv_heads, slots, self.head_dim)
            self.k, self.v = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
            zeros = torch.zeros(batch_size, slots, dtype=accumulation_dtype(dtype), device=device)
            self.F = zeros.clone() if self.selection_head is not None else None
            self.sums = zeros.clone() if rule is not None and rule.sums_weights else None
            self.age = zeros.to(torch.int32) if rule is not None else None
            self.free = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
            # Where scatter_ writes. Views and constants, made once because a decoding step is short.
            self._free_key = self.free[:, :, None, None].expand(-1, self.n_kv_heads, 1, self.head_dim)
            self._zero = zeros[:, :1].clone()
        self.reset()

    def reset(self) -> None:
        """Forget all keys. What the slots hold is not read again before it is written."""
        self.length = 0  # tokens seen
        self.held = 0
        self._in_order = True  # the keys are in the first slots, oldest first
        self.free.zero_()

    def reorder(self, rows: Tensor) -> None:
        """See `KVCache.reorder`."""
        for tensor in (self.k, self.v, self.F, self.sums, self.age, self.free):
            if tensor is not None:
                tensor.copy_(tensor.index_select(0, rows))

    @property
    def tensors(self) -> list[Tensor]:
        """All that the layer has allocated."""
        return [x for x in (self.k, self.v, self.F, self.sums, self.age, self.free, self._zero) if x is not None]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.untyped_storage().nbytes() for x in self.tensors)

    @property
    def positions(self) -> Tensor:
        """Positions [b, slots], int64, of the keys. In a slot that is not in use it means nothing."""
        slot = torch.arange(self.k.shape[2], device=self.k.device).expand(len(self.k), -1)
        # Keys that never leave are the first tokens, and stay in the slots with their number.
        return slot if self.age is None else torch.where(self.age == NEVER, slot, self.age.long())

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append the keys of m tokens, attend, and let go of what exceeds the budget. No gradient.

        q [b, n_heads, m, head_dim]; k, v [b, n_kv_heads, m, head_dim]. Returns out, shaped and typed as q.
        """
        device_type = q.device.type
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device_type):
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                return self.attend(attention, q, k, v)
        k, v = k.to(self.k.dtype), v.to(self.v.dtype)
        m = q.shape[2]
        if m == 1:
            return self._attend_one(q, k, v)
        if self.held + m <= self.capacity:
            return self._attend_roomy(attention, q, k, v)
        if self.rule.reads_weights:
            return self._attend_one_by_one(attention, q, k, v)
        return self._attend_full(q, k, v)

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A decoding step: as few operations as possible."""
        b, h, _, d = q.shape
        query, rule, F = self.length, self.rule, self.F
        held = self.held + 1
        self.k.scatter_(2, self._free_key, k)
        self.v.scatter_(2, self._free_key, v)
        keys, values, age = self.k, self.v, self.age
        if rule is not None:
            age.scatter_(1, self.free, NEVER if query < rule.n_protected else query)
        if F is not None:
            F.scatter_(1, self.free, self._zero)
        if held < keys.shape[2]:
            keys, values = keys[:, :, :held], values[:, :, :held]
            age = None if age is None else age[:, :held]
            F = None if F is None else F[:, :held]

        weights = None
        if F is None and (rule is None or not rule.reads_weights) and q.dtype.itemsize < 4:
            # float32 logits of half precision keys without a float32 copy of them
            out = scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), enable_gqa=True)
        else:
            dtype = accumulation_dtype(q.dtype)
            queries = q.reshape(b * self.n_kv_heads, -1, d).to(dtype) * d**-0.5  # [b * h_kv, group, d]
            logits = torch.bmm(queries, keys.flatten(0, 1).to(dtype).mT)
            if F is not None:
                by_head = logits.view(b, h, held)
                S = by_head[:, self.selection_head].relu()
                by_head.sub_(F[:, None])
            weights = logits.softmax(-1)
            out = torch.bmm(weights, values.flatten(0, 1).to(dtype)).view(b, h, 1, d).to(q.dtype)

        if F is not None:
            F.add_(S)
            F.scatter_(1, self.free, self._zero)  # no query votes for its own key,
            if rule is None or rule.n_protected:  # and none for <BOS>, in slot 0 if it cannot leave
                F[:, :1].zero_()
            else:
                F.masked_fill_(age == 0, 0.0)
        if rule is not None and rule.reads_weights:
            weights = weights.view(b, h, held).sum(1)
            if self.sums is not None:
                sums = self.sums[:, :held]
                sums.scatter_(1, self.free, self._zero)
                weights = sums.add_(weights)
        if held > self.capacity:
            rule.leaving(F, weights, age, query, out=self.free)
            self._in_order = False
        else:
            self.held = held
            self.free.add_(1)
        self.length += 1
        return out

    def _attend_roomy(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A chunk after which no key leaves; none has left before, so the slots are in order."""
        m, first = q.shape[2], self.held
        new, used = slice(first, first + m), slice(0, first + m)
        self.k[:, :, new], self.v[:, :, new] = k, v
        if self.rule is not None:
            self.age[:, new] = self.rule.protect(torch.arange(first, first + m, device=q.device))
        if first == 0 and self.sums is None:
            out = attention.attend_causally(q, k.to(q.dtype), v.to(q.dtype))
            if self.F is not None:
                key_head = self.selection_head * self.n_kv_heads // self.n_heads
                self.F[:, new] = total_votes(q[:, self.selection_head], k[:, key_head].to(q.dtype))
        else:
            sums = None
            if self.sums is not None:
                self.sums[:, new] = 0.0
                sums = self.sums[:, used]
            F = None if self.F is None else self.F[:, :first]
            out, _, F = attend_under_budget(
                q, self.k[:, :, used], self.v[:, :, used], None,
                selection_head=self.selection_head, F=F, weight_sums=sums,
            )  # fmt: skip
            if F is not None:
                self.F[:, used] = F
        self.held += m
        self.length += m
        self.free.fill_(self.held)
        return out.to(q.dtype)

    def _attend_full(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A chunk that overflows the layer."""
        m, held = q.shape[2], slice(0, self.held)
        positions = self.positions
        old = [self.k[:, :, held], self.v[:, :, held], positions[:, held]]
        F = None if self.F is None else self.F[:, held]
        if not self._in_order:
            # All slots but the free one, oldest first.
            order = positions.scatter(1, self.free, NEVER).argsort(1)[:, held]
            old = [take_keys(self.k, order), take_keys(self.v, order), positions.gather(1, order)]
            F = None if F is None else self.F.gather(1, order)
        new_positions = torch.arange(self.length, self.length + m, device=q.device).expand(len(q), -1)
        if self.held:
            k, v = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)
        out, index, F = attend_under_budget(q, k, v, self.rule, selection_head=self.selection_head, F=F)
        self.held = self.capacity
        self.length += m
        held = slice(0, self.held)
        self.k[:, :, held], self.v[:, :, held] = take_keys(k, index), take_keys(v, index)
        self.age[:, held] = self.rule.protect(torch.cat((old[2], new_positions), 1).gather(1, index))
        if F is not None:
            self.F[:, held] = F
        self.free.fill_(self.held)
        self._in_order = True
        return out.to(q.dtype)

    def _attend_one_by_one(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A chunk that overflows the layer, by a rule that needs the weights of every query."""
        room = self.capacity - self.held
        outs = []
        if room > 1:
            outs.append(self._attend_roomy(attention, *(x[:, :, :room] for x in (q, k, v))))
        else:
            room = 0
        for t in range(room, q.shape[2]):
            outs.append(self._attend_one(*(x[:, :, t : t + 1] for x in (q, k, v))))
        return torch.cat(outs, 2)


class KVCache:
    """Keys and values of all layers, for `Transformer.forward(tokens, cache=...)`.

    model: its attention must support caching (`Attention.supports_cache`). batch_size: sequences, which advance
    together. budgets: None, the keys that every layer may hold, or a list with one number per layer, each at least
    2; None: none leaves. rule: a name in `selmodel.attention.pruning.RULES`; None is "selective" for selective
    attention, and standard attention has no default. n_sinks: of rule "oldest". dtype, device: the model's if
    None. context_length: the most tokens that the cache may see; None is the model's. It may exceed the model's
    where positions are not learned.

    Layer l allocates min(K[l], context_length) + 1 slots of keys and values. Raises UserError, with all faults in
    one message.
    """

    def __init__(
        self,
        model: Transformer,
        batch_size: int = 1,
        budgets: int | Sequence[int] | None = None,
        *,
        rule: str | None = None,
        n_sinks: int = DEFAULT_SINKS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        context_length: int | None = None,
    ) -> None:
        layers = [block.attention for block in model.blocks]
        context_length = model.context_length if context_length is None else context_length
        if not layers[0].supports_cache:
            raise UserError(f"{type(layers[0]).__name__} does not support a cache; evaluate without one (cache=False)")
        if batch_size < 1 or context_length < 1:
            raise UserError(
                f"batch_size={batch_size}, context_length={context_length}: a cache needs 1 or more of each"
            )
        if model.positions == "learned" and context_length > model.context_length:
            raise UserError(
                f"context_length={context_length} of a cache with model.context_length={model.context_length} and "
                "learned positions: there is no position after the table's; ask for less"
            )
        rules = layer_rules(
            budgets, rule, len(layers), votes=layers[0].selection_head is not None, n_sinks=n_sinks
        ) or [None] * len(layers)
        weight = model.embedding.weight
        self.batch_size, self.context_length = batch_size, context_length
        self.budgets = [context_length if rule is None else min(rule.budget, context_length) for rule in rules]
        self.layers = [
            LayerCache(
                attention, batch_size, capacity, layer_rule, dtype=dtype or weight.dtype, device=device or weight.device
            )
            for attention, capacity, layer_rule in zip(layers, self.budgets, rules, strict=True)
        ]

    @property
    def length(self) -> int:
        """Tokens seen since the start or the last reset: the position of the next token."""
        return self.layers[-1].length

    @property
    def nbytes(self) -> int:
        """Bytes allocated. They do not depend on what is held."""
        return sum(layer.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Forget what was seen, to start another sequence."""
        for layer in self.layers:
            layer.reset()

    def reorder(self, rows: Tensor) -> None:
        """Sequence i goes on from what sequence rows[i] has seen, as beam search asks for. rows [b], int64."""
        for layer in self.layers:
            layer.reorder(rows)

    def check_fits(self, tokens: Tensor) -> None:
        """Raise UserError unless a chunk of tokens [b, m] can be appended."""
        b, m = tokens.shape
        if b != self.batch_size:
            raise UserError(
                f"tokens of batch size {b} with a cache of batch_size={self.batch_size}: make one that fits"
            )
        if m < 1:
            raise UserError(
                f"tokens have shape {list(tokens.shape)}: expected at least one token to append to the cache"
            )
        if self.length + m > self.context_length:
            raise UserError(
                f"{m} tokens after the {self.length} in the cache exceed context_length={self.context_length}: "
                "reset the cache, shorten the input, or make a longer cache if the model's positions allow it"
            )
