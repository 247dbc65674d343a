"""Building a token cache: shard by shard, in any number of processes, continued after any interruption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from selmodel.data.caching import one_process, write_atomically
from selmodel.data.documents import TextDocuments
from selmodel.data.sources import SPLITS, Source
from selmodel.data.token_cache import BEGUN, FORMAT, INDEX, MODEL, TokenCache, read_index, shard_faults
from selmodel.errors import UserError

if TYPE_CHECKING:
    from selmodel.data.tokenizer import Tokenizer


class Progress(NamedTuple):
    """How far a build is: shards and tokens done so far, of how many shards, and seconds spent."""

    shards: int
    of: int
    tokens: int
    new_tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = self.new_tokens / max(self.seconds, 1e-9)
        return f"token cache: {self.shards} of {self.of} shards, {self.tokens:,} tokens, {rate:,.0f} tokens/s"


def build_token_cache(
    source: Source,
    tokenizer: Tokenizer,
    root: str | Path,
    *,
    workers: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> TokenCache:
    """Writes the token cache of `source` into the folder `root`, or continues one that was interrupted.

    Both splits are written, the validation split with the bytes per token that bits per byte need. Shards
    that are there already are kept; a whole cache is left as it is.

    Args:
        source: the text.
        tokenizer: what turns it into tokens.
        root: the cache folder; made if missing.
        workers: processes that write one shard each at a time; 0 writes them in this process.
        progress: called after every shard.

    Raises:
        UserError: `root` holds (the beginning of) a cache of something else, or a shard cannot be read.
    """
    root = Path(root).expanduser().absolute()
    source.prepare()
    header = {
        "format": FORMAT,
        "dtype": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "source": source.describe(),
    }
    with one_process(root, "a token cache"):
        for name in (INDEX, BEGUN):
            if (root / name).exists():
                _check_header(root / name, header)
        if not _is_whole(root):
            _write_json(root / BEGUN, header)
            _write_tokenizer(root, tokenizer)
            splits = _write_shards(source, tokenizer, root, header["dtype"], workers, progress)
            _write_json(root / INDEX, {**header, "splits": splits})
            (root / BEGUN).unlink()
    cache = TokenCache(str(root))
    cache.prepare()
    return cache


def _is_whole(root: Path) -> bool:
    try:
        read_index(root)
    except (UserError, OSError):
        return False
    return True


def _write_tokenizer(root: Path, tokenizer: Tokenizer) -> None:
    """Keeps the SentencePiece model beside the tokens, so that a cache can be used where its text is not."""
    state = tokenizer.state()
    if state["kind"] == "sentencepiece":
        write_atomically(root / MODEL, state["file"].numpy().tobytes())


def _check_header(path: Path, ours: dict[str, Any]) -> None:
    """UserError if the file describes a cache of other tokens than `ours`."""
    try:
        theirs = _identity(json.loads(path.read_text()))
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: not written by a token cache build ({error}). Empty the folder and build anew"
        ) from error
    ours = _identity(ours)
    if theirs != ours:
        faults = [f"{key} {theirs[key]} there, {ours[key]} here" for key in ours if theirs[key] != ours[key]]
        raise UserError(
            f"{path.parent} holds a token cache of something else: {'; '.join(faults)}. Choose another folder, or "
            "empty this one"
        )


def _identity(header: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": header.get("format"),
        "tokenizer": header.get("tokenizer_hash"),
        "source fingerprint": header.get("source", {}).get("fingerprint"),
    }


def _write_shards(
    source: Source,
    tokenizer: Tokenizer,
    root: Path,
    dtype: str,
    workers: int,
    progress: Callable[[Progress], None] | None,
) -> dict[str, list[dict[str, Any]]]:
    splits: dict[str, list] = {split: [None] * len(source.shards(split)) for split in SPLITS}
    todo = []
    for split, records in splits.items():
        for number in range(len(records)):
            records[number] = _finished(root, split, number, dtype)
            if records[number] is None:
                todo.append((split, number))
    kept = sum(record["tokens"] for records in splits.values() for record in records if record)
    began, new = time.monotonic(), 0
    for split, number, record in _written(source, tokenizer, root, dtype, workers, todo):
        splits[split][number] = record
        new += record["tokens"]
        if progress is not None:
            done = sum(record is not None for records in splits.values() for record in records)
            of = sum(map(len, splits.values()))
            progress(Progress(done, of, kept + new, new, time.monotonic() - began))
    return splits


def _written(
    source: Source, tokenizer: Tokenizer, root: Path, dtype: str, workers: int, todo: list[tuple[str, int]]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Writes shards and yields (split, number, record) of each as it is done, in any order."""
    if workers == 0:
        for split, number in todo:
            yield split, number, _write_shard(source, tokenizer, root, dtype, split, number)
        return
    # Started afresh rather than forked: connections and threads of this process do not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(_write_shard, source, tokenizer, root, dtype, split, number): (split, number)
            for split, number in todo
        }
        try:
            for job in as_completed(jobs):
                yield *jobs[job], job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _write_shard(
    source: Source, tokenizer: Tokenizer, root: Path, dtype: str, split: str, number: int
) -> dict[str, Any]:
    """Writes one shard and its record; returns the record."""
    path = root / f"{split}-{number:05d}"
    suffixes = [".rows", ".tokens", *([".bytes"] if split == "validation" else [])]
    parts = {suffix: path.with_suffix(f"{suffix}.part") for suffix in suffixes}
    documents = TextDocuments(source, tokenizer)
    try:
        rows, ends = _write_tokens(documents, split, number, dtype, parts)
        with open(parts[".rows"], "wb") as file:
            np.stack([rows, ends]).astype("<i8").tofile(file)
        for suffix, part in parts.items():
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path.with_suffix(suffix))
    except OSError as error:  # reading has errors of its own
        raise UserError(
            f"{path}: cannot be written: {error.strerror}. Make room or choose another folder; the same command "
            "continues there where it stopped"
        ) from error
    tokens = int(ends[-1]) if len(ends) else 0
    record = {"name": documents.shards(split)[number], "rows": len(rows), "tokens": tokens}
    _write_json(path.with_suffix(".json"), record)
    return record


def _write_tokens(
    documents: TextDocuments, split: str, number: int, dtype: str, parts: dict[str, Path]
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the tokens of a shard, and their bytes where `parts` has a file for them; returns rows and ends."""
    with_bytes = ".bytes" in parts
    rows, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    with open(parts[".tokens"], "wb") as tokens_file, open(parts.get(".bytes", os.devnull), "wb") as bytes_file:
        for block in documents.blocks(split, number, with_bytes=with_bytes):
            least, most = int(block.tokens.min()), int(block.tokens.max())
            if least < 0 or most > np.iinfo(dtype).max:
                raise ValueError(f"token ids {least}..{most} do not fit {dtype}: the tokenizer's vocab_size is wrong")
            tokens_file.write(block.tokens.astype(dtype).tobytes())
            if with_bytes:
                bytes_file.write(block.token_bytes.astype("<u4").tobytes())
            rows.append(block.rows)
            lengths.append(np.diff(block.ends, prepend=0))
    return np.concatenate(rows), np.cumsum(np.concatenate(lengths))


def _finished(root: Path, split: str, number: int, dtype: str) -> dict[str, Any] | None:
    """The record of a shard that an earlier build finished, or None."""
    path = root / f"{split}-{number:05d}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    return None if shard_faults(root, split, number, record, dtype) else record


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode())
