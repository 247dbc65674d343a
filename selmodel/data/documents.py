"""Tokenized documents by shard and row: what streams and validation read, whatever stands behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from selmodel.data.sharing import SharedRows

if TYPE_CHECKING:
    from selmodel.data.sources import Source
    from selmodel.data.tokenizer import Tokenizer

# A text block grows from one row to ROWS_PER_BLOCK, so that seeking to a row tokenizes little beyond it while
# long reads still hand the tokenizer many rows at a time; CHARS_PER_BLOCK bounds what a stream holds in
# memory.
ROWS_PER_BLOCK = 32
CHARS_PER_BLOCK = 1 << 16


@dataclass(slots=True)
class Block:
    """Consecutive documents of one shard, each followed by EOS, joined end to end.

    `rows` int64 [k] ascending row indices; `ends` int64 [k] end of each document in `tokens`, EOS included;
    `tokens` integer [ends[-1]]; `token_bytes` integer [ends[-1]] UTF-8 bytes of source text per token (0 for
    EOS), or None where they were not asked for. k >= 1.
    """

    rows: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray
    token_bytes: np.ndarray | None = None


class Documents(ABC):
    """A corpus as token ids. Must pickle: worker processes get a copy."""

    bos_id: int
    eos_id: int

    @property
    def skipped(self) -> np.ndarray:
        """What this process left out as unreadable so far: int64 [rows, rests of shards]."""
        return np.zeros(2, dtype=np.int64)

    @abstractmethod
    def shards(self, split: str) -> list[str]:
        """Names of the shards of `split` ("train" or "validation"), in a fixed order; never empty."""

    @abstractmethod
    def blocks(
        self,
        split: str,
        shard: int,
        start: int = 0,
        step: int = 1,
        with_bytes: bool = False,
        shared: SharedRows | None = None,
    ) -> Iterator[Block]:
        """Rows start, start + step, start + 2 * step, ... of shard number `shard`, as blocks.

        Rows that the source skips are absent. Reaching `start` must not tokenize the rows before it. Readers that
        take the other rows of the shard in this process pass the same `shared`; text is then unpacked once for all.
        """


class TextDocuments(Documents):
    """Documents tokenized while they are read from a `Source`."""

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.bos_id = tokenizer.bos_id
        self.eos_id = tokenizer.eos_id
        self._shards: dict[str, list] = {}

    @property
    def skipped(self) -> np.ndarray:
        counter = self.source.skipped
        return np.array([counter.total_rows, sum(counter.shards.values())], dtype=np.int64)

    def _source_shards(self, split: str) -> list:
        if split not in self._shards:
            self._shards[split] = self.source.shards(split)
        return self._shards[split]

    def shards(self, split: str) -> list[str]:
        return [shard.name for shard in self._source_shards(split)]

    def blocks(
        self,
        split: str,
        shard: int,
        start: int = 0,
        step: int = 1,
        with_bytes: bool = False,
        shared: SharedRows | None = None,
    ) -> Iterator[Block]:
        read = partial(self.source.rows, self._source_shards(split)[shard])
        found = read(start, step) if shared is None else shared.rows(start % step, read)
        rows, texts, chars, limit = [], [], 0, 1
        for row, text in found:
            rows.append(row)
            texts.append(text)
            chars += len(text)
            if len(rows) >= limit or chars >= CHARS_PER_BLOCK:
                yield self._encode(rows, texts, with_bytes)
                rows, texts, chars, limit = [], [], 0, min(2 * limit, ROWS_PER_BLOCK)
        if rows:
            yield self._encode(rows, texts, with_bytes)

    def _encode(self, rows: list[int], texts: list[str], with_bytes: bool) -> Block:
        documents = self.tokenizer.encode_batch(texts)
        ends = np.cumsum([len(ids) + 1 for ids in documents], dtype=np.int64)
        tokens = np.full(ends[-1], self.eos_id, dtype=np.int32)
        token_bytes = np.zeros(ends[-1], dtype=np.int64) if with_bytes else None
        for text, ids, end in zip(texts, documents, ends, strict=True):
            tokens[end - 1 - len(ids) : end - 1] = ids
            if token_bytes is not None:
                token_bytes[end - 1 - len(ids) : end - 1] = self.tokenizer.token_bytes(text, ids)
        return Block(np.asarray(rows, dtype=np.int64), ends, tokens, token_bytes)
