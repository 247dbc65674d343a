"""The cache of ``generate()``: `selmodel.attention.cache.KVCache`, for batches whose rows are padded on the left."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache

from selmodel.attention.cache import KVCache
from selmodel.errors import UserError


class SelModelCache(Cache):
    """Keys and values of a batch, under budgets if there are any.

    A `KVCache` holds rows that begin together. Rows with the same number of padding tokens on the left form a group,
    and each group has a `KVCache` of its own, which never sees the padding; so a row of a padded batch gives what it
    gives alone.

    make: makes the `KVCache` of a number of rows.
    """

    def __init__(self, make: Callable[[int], KVCache]) -> None:
        super().__init__(layers=[])
        self._make = make
        self.seen = 0  # columns of the batch, padding included
        self._groups: list[tuple[Tensor | None, int, KVCache]] = []  # rows (None: all), padding, keys

    def forward(self, model: Callable, tokens: Tensor, attention_mask: Tensor | None, last_only: bool) -> Tensor:
        """Append tokens [b, m] and return their logits, [b, m, vocabulary] or [b, 1, vocabulary]; 0 at padding.

        attention_mask: [b, n], as `left_padding` expects it; read at the first call alone, for later tokens are none
        of them padding.
        """
        if not self._groups:
            self._groups = [
                (rows, padding, self._make(len(tokens) if rows is None else len(rows)))
                for rows, padding in groups_of(left_padding(attention_mask, tokens))
            ]
        first, self.seen = self.seen, self.seen + tokens.shape[1]

        def run(rows: Tensor | None, padding: int, keys: KVCache) -> Tensor:
            part = (tokens if rows is None else tokens[rows])[:, max(0, padding - first) :]
            return model(part, cache=keys, last_only=last_only).logits

        return join_rows(self._groups, run, len(tokens), 1 if last_only else tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(keys.nbytes for _, _, keys in self._groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included; the layers may hold fewer."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the model refuses what is too long."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from what row beam_idx[i] has seen. Beams of one prompt have the same padding."""
        for rows, _, keys in self._groups:
            chosen = beam_idx if rows is None else torch.searchsorted(rows, beam_idx[rows])
            keys.reorder(chosen)

    def reset(self) -> None:
        """Forget what was seen."""
        self.seen, self._groups = 0, []

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a key that has left cannot come back."""
        if tokens_to_remove:
            raise UserError("the cache cannot give back tokens that it has seen; assisted generation needs that")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused; no mode of generation that the model supports needs it."""
        raise UserError("the cache cannot repeat its rows; repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused; no mode of generation that the model supports needs it."""
        raise UserError("the cache cannot leave out rows; start anew with fewer prompts")

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # of no layers, transformers would take all() to be true

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.seen} tokens seen)"


def left_padding(attention_mask: Tensor | None, tokens: Tensor, *, right: bool = False) -> Tensor | None:
    """Padding tokens on the left of each row: int64 [b]; None where there are none.

    attention_mask: [b, n] of 0 and 1, or None; tokens [b, n]. right: padding on the right is allowed too, which nothing
    before it sees.

    Raises:
        UserError: for a mask that hides tokens elsewhere, has another shape, or hides a whole row.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != tokens.shape:
        raise UserError(
            f"attention_mask of shape {list(attention_mask.shape)}: expected that of input_ids, {list(tokens.shape)}, "
            "with 0 for padding"
        )
    mask = attention_mask != 0
    if mask.all():
        return None
    padding = mask.int().argmax(1)  # of the first 1
    ends = mask.shape[1] - mask.flip(1).int().argmax(1) if right else mask.shape[1]
    if not mask.any(1).all():
        raise UserError("attention_mask hides all tokens of a row: expected at least one token, such as <BOS>")
    if not torch.equal(mask.sum(1), ends - padding):
        where = "before or after the tokens of a row" if right else "on the left, padding_side='left'"
        raise UserError(f"attention_mask hides tokens in other places: expected padding {where}")
    return padding


def groups_of(padding: Tensor | None) -> list[tuple[Tensor | None, int]]:
    """(rows, padding) of the rows that share a padding [b]; (None, padding) where all do."""
    if padding is None:
        return [(None, 0)]
    values = padding.unique().tolist()
    if len(values) == 1:
        return [(None, values[0])]
    return [((padding == value).nonzero()[:, 0], value) for value in values]


def join_rows(groups: list[tuple], run: Callable[..., Tensor], n_rows: int, n_columns: int) -> Tensor:
    """The results [rows, m, v] of ``run(*group)``, each at the right end of its rows of [n_rows, n_columns, v]."""
    whole = None
    for group in groups:
        part = run(*group)
        rows = group[0]
        if rows is None and part.shape[1] == n_columns:
            return part
        if whole is None:
            whole = part.new_zeros(n_rows, n_columns, part.shape[2])
        columns = slice(n_columns - part.shape[1], None)
        if rows is None:
            whole[:, columns] = part
        else:
            whole[rows, columns] = part
    return whole
