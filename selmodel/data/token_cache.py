"""A corpus tokenized once and read many times: memory-mapped shards that give the batches of streaming the text.

A cache folder mirrors the shards of a source one by one:

    index.json                 tokenizer hash, source description, and per shard its name, rows and tokens
    train-00000.tokens         uint16 or uint32 [tokens]: ids of every row, each row followed by EOS
    train-00000.rows           int64 [2, rows]: index of each row in the text shard; end of each row in .tokens
    train-00000.json           the record of a shard that is written: its name, rows and tokens
    validation-00000.bytes     uint32 [tokens]: UTF-8 bytes of source text per token, 0 for EOS
    tokenizer.model            the tokenizer, where it is a SentencePiece model

Rows keep the numbers they have in the text shard, so that the state of a stream means the same in both, and a
run may switch between them. All numbers are little-endian. Every file is written beside its place and renamed
into it, index.json last: a folder with an index is a whole cache, one without can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selmodel.data.documents import Block, Documents
from selmodel.data.sharing import SharedRows
from selmodel.data.sources import SPLITS, Shard, Source, check_split
from selmodel.errors import UserError

if TYPE_CHECKING:
    from selmodel.data.tokenizer import Tokenizer

FORMAT = 1
INDEX = "index.json"
MODEL = "tokenizer.model"
BEGUN = "begun.json"  # what a cache that is not whole yet is being made of
ROWS_PER_BLOCK = 4096  # rows looked up at once; bounds what a stream holds of a shard's index
REMEDY = "Build it with: python data/cache_tokens.py"


class TokenCache(Source):
    """Reads a token cache in place of the text it was made of.

    root: the cache folder.
    """

    name = "tokens"

    def __init__(self, root: str | None = None) -> None:
        super().__init__()
        self.root = root
        self._index: dict[str, Any] | None = None

    @property
    def index(self) -> dict[str, Any]:
        """The contents of index.json. UserError unless every file it names is there with the size it should have."""
        if self._index is None:
            if not self.root:
                raise UserError(f"data.root is not set: data=tokens reads a token cache. {REMEDY}")
            root = Path(self.root).expanduser().absolute()
            if not (root / INDEX).exists():
                begun = " (a build began there and did not end; the same command continues it)"
                raise UserError(
                    f"data.root={self.root}: no token cache there, {root / INDEX} does not exist"
                    f"{begun if (root / BEGUN).exists() else ''}. {REMEDY}"
                )
            self._index = read_index(root)
        return self._index

    @property
    def tokenizer_path(self) -> Path | None:
        """The SentencePiece model the cache was made with, where it was one."""
        path = Path(self.root or "").expanduser().absolute() / MODEL
        return path if path.exists() else None

    def prepare(self) -> None:
        _ = self.index

    def shards(self, split: str) -> list[Shard]:
        root = Path(self.root or "").expanduser().absolute()
        return [
            Shard(record["name"], str(root / f"{split}-{number:05d}.tokens"))
            for number, record in enumerate(self.index["splits"][check_split(split)])
        ]

    def describe(self) -> dict:
        """The description of the text the cache was made of: the corpus is the same."""
        return dict(self.index["source"])

    def rows(self, shard: Shard, start: int = 0, step: int = 1) -> Iterator[tuple[int, str]]:
        raise UserError(
            f"data.root={self.root}: a token cache holds no text to train a tokenizer on (asked for {shard.name}). "
            f"Use the tokenizer of the cache: tokenizer.path={Path(self.root or '') / MODEL}"
        )

    def documents(self, tokenizer: Tokenizer) -> CachedDocuments:
        """The documents of the cache. UserError if another tokenizer made it."""
        if tokenizer.hash != self.index["tokenizer_hash"]:
            raise UserError(
                f"data.root={self.root}: the token cache was made with tokenizer {self.index['tokenizer_hash']}, "
                f"the run uses {tokenizer.hash}. Use the tokenizer of the cache, or build a cache for this one"
            )
        return CachedDocuments(str(Path(self.root).expanduser().absolute()), self.index)


class CachedDocuments(Documents):
    """Documents of a token cache, memory-mapped.

    root: the cache folder. index: the contents of its index.json.
    """

    def __init__(self, root: str, index: dict[str, Any]) -> None:
        self.root = root
        self.index = index
        self.bos_id = index["bos_id"]
        self.eos_id = index["eos_id"]

    def shards(self, split: str) -> list[str]:
        return [record["name"] for record in self.index["splits"][split]]

    def blocks(
        self,
        split: str,
        shard: int,
        start: int = 0,
        step: int = 1,
        with_bytes: bool = False,
        shared: SharedRows | None = None,
    ) -> Iterator[Block]:
        record = self.index["splits"][split][shard]
        if record["rows"] == 0:
            return
        path = Path(self.root) / f"{split}-{shard:05d}"
        rows, ends = _map(path.with_suffix(".rows"), "<i8", 2 * record["rows"]).reshape(2, -1)
        tokens = _map(path.with_suffix(".tokens"), self.index["dtype"], record["tokens"])
        token_bytes = _map(path.with_suffix(".bytes"), "<u4", record["tokens"]) if with_bytes else None
        first = int(np.searchsorted(rows, start))
        for i in range(first, len(rows), ROWS_PER_BLOCK * step):
            j = min(i + ROWS_PER_BLOCK * step, len(rows))
            if step == 1:
                # All rows: their tokens lie end to end in the file already.
                begin, end = (int(ends[i - 1]) if i else 0), int(ends[j - 1])
                some_bytes = None if token_bytes is None else token_bytes[begin:end]
                yield Block(rows[i:j], ends[i:j] - begin, tokens[begin:end], some_bytes)
                continue
            chosen = i + np.flatnonzero((rows[i:j] - start) % step == 0)
            if len(chosen):
                stops = ends[chosen]
                starts = np.where(chosen > 0, ends[chosen - 1], 0)
                spans = list(zip(starts.tolist(), stops.tolist(), strict=True))
                yield Block(
                    rows[chosen],
                    np.cumsum(stops - starts),
                    np.concatenate([tokens[a:b] for a, b in spans]),
                    None if token_bytes is None else np.concatenate([token_bytes[a:b] for a, b in spans]),
                )


def shard_faults(root: Path, split: str, number: int, record: dict[str, Any], dtype: str) -> list[str]:
    """What is wrong with the files of one shard."""
    sizes = {".rows": 16 * record["rows"], ".tokens": np.dtype(dtype).itemsize * record["tokens"]}
    if split == "validation":
        sizes[".bytes"] = 4 * record["tokens"]
    faults = []
    for suffix, size in sizes.items():
        path = root / f"{split}-{number:05d}{suffix}"
        if not path.exists():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != size:
            faults.append(f"{path} has {path.stat().st_size} bytes instead of {size}")
    return faults


def read_index(root: Path) -> dict[str, Any]:
    """The contents of index.json. UserError unless the files it names are there with the sizes they should have."""
    try:
        index = json.loads((root / INDEX).read_text())
        if index["format"] != FORMAT:
            raise UserError(
                f"{root / INDEX}: format {index['format']}, expected {FORMAT}: build the cache again with this version"
            )
        faults = [
            fault
            for split in SPLITS
            for number, record in enumerate(index["splits"][split])
            for fault in shard_faults(root, split, number, record, index["dtype"])
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{root / INDEX}: not the index of a token cache ({error!r}). {REMEDY}") from error
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise UserError(
            f"damaged token cache: {'; '.join(faults[:5])}{more}. Copy the files again, or run data/cache_tokens.py "
            "again, which writes the damaged shards anew"
        )
    return index


def _map(path: Path, dtype: str, length: int) -> np.ndarray:
    """A read-only view of the file's numbers: [length]."""
    try:
        # A plain array over the map: slicing np.memmap itself costs several times as much.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(length,)))
    except (OSError, ValueError) as error:
        raise UserError(f"token cache file {path} cannot be read: {error}") from error
