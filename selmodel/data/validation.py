"""The fixed validation set: the same sequences whatever the batch size and the number of devices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from selmodel.data.documents import Documents
from selmodel.data.packing import BlockCursor, document_ids
from selmodel.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidationSet:
    """Packed sequences and the bytes behind them.

    `tokens` int32 [sequences, context_length + 1], BOS first; `token_bytes` int64 [sequences,
    context_length]: UTF-8 bytes of source text that each target tokens[:, 1:] stands for, 0 for EOS.
    `target_mask` bool [sequences, context_length]: which targets count; None when all do.
    """

    tokens: np.ndarray
    token_bytes: np.ndarray
    eos_id: int
    target_mask: np.ndarray | None = None

    @property
    def n_sequences(self) -> int:
        return len(self.tokens)

    @property
    def n_tokens(self) -> int:
        """Number of targets, EOS included."""
        return self.token_bytes.size

    @property
    def n_bytes(self) -> int:
        """Bytes of source text: the denominator of bits per byte."""
        return int(self.token_bytes.sum())


def read_validation_set(documents: Documents, context_length: int, sequences: int) -> ValidationSet:
    """The first `sequences` sequences of the validation split, in file order, packed like training data.

    Where the split holds fewer, those it fills completely are used, and the log says how many.

    Raises:
        UserError: not one sequence can be filled.
    """
    shards = range(len(documents.shards("validation")))
    cursor = BlockCursor(
        chain.from_iterable(documents.blocks("validation", shard, with_bytes=True) for shard in shards)
    )
    tokens = np.empty((sequences, context_length + 1), dtype=np.int32)
    token_bytes = np.empty((sequences, context_length), dtype=np.int64)
    tokens[:, 0] = documents.bos_id
    found = 0
    while found < sequences and cursor.take(tokens[found, 1:], token_bytes[found]) == context_length:
        found += 1
    if found == 0:
        raise UserError(
            f"the validation split holds fewer than model.context_length={context_length} tokens in "
            f"{len(shards)} shard(s), the first of them {documents.shards('validation')[0]}: not one "
            "sequence can be filled. Add validation documents or shorten the context."
        )
    if found < sequences:
        log.warning(
            "validation: the split fills %d of data.validation_sequences=%d sequences; using %d",
            found, sequences, found,
        )  # fmt: skip
    return ValidationSet(tokens[:found], token_bytes[:found], documents.eos_id)


class ValidationLoader:
    """The batches of one rank: sequences rank, rank + world_size, ... in order.

    Every rank has the same number of batches of the same shapes: where sequences do not divide evenly,
    padding rows of weight 0 stand in, so that no rank waits for another in a collective. Sums weighted by
    "weight" are those of the whole set for any batch size and number of ranks.

    Each batch is a dict: "tokens" int64 [b, context_length + 1]; "bytes" int64 [b, context_length] source
    bytes of each target; "weight" float32 [b]; "document_ids" int32 [b, context_length + 1] if
    `document_mask`.
    """

    def __init__(
        self,
        validation_set: ValidationSet,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        document_mask: bool = False,
    ) -> None:
        self.validation_set = validation_set
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.document_mask = document_mask

    @property
    def rows(self) -> int:
        """Rows each rank goes through, padding included."""
        return -(-self.validation_set.n_sequences // self.world_size)

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data = self.validation_set
        for start in range(0, self.rows, self.batch_size):
            rows = np.arange(start, min(start + self.batch_size, self.rows))
            indices = self.rank + rows * self.world_size
            real = indices < data.n_sequences
            # A padding row repeats a real sequence, so that its loss is an ordinary number, and weighs
            # nothing.
            indices = np.where(real, indices, 0)
            tokens = data.tokens[indices]
            batch = {
                "tokens": torch.from_numpy(tokens.astype(np.int64)),
                "bytes": torch.from_numpy(data.token_bytes[indices] * real[:, None]),
                "weight": torch.from_numpy(real.astype(np.float32)),
            }
            if self.document_mask:
                batch["document_ids"] = torch.from_numpy(document_ids(tokens, data.eos_id))
            if data.target_mask is not None:
                batch["target_mask"] = torch.from_numpy(data.target_mask[indices])
            yield batch
