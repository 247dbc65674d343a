"""Training a SentencePiece model on a bounded, seeded sample of a corpus.

The unigram model is the default kind: it encodes about four times as fast as SentencePiece's BPE at equal
length of the encoded text (docs/LOG.md), and training takes seconds. Nothing in the text is changed: identity
normalisation, no dummy prefix, no whitespace removed, bytes for characters outside the vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from selmodel.data.caching import one_process, write_atomically
from selmodel.data.sources import Source
from selmodel.errors import UserError

logger = logging.getLogger(__name__)

BLANK = "\u2581"  # SentencePiece's sign for a space
LINE_BYTES = 4096  # the trainer's limit on one line of input; longer documents are split into several
SHARDS_AT_ONCE = 16  # the sample takes turns among this many shards, so one odd shard does not shape it
RESERVED = 3 + 256  # <unk>, <s>, </s> and the bytes
MAX_SKIPPED = 0.01  # share of the sample's bytes that may be left out
# What SentencePiece cannot take in training: NUL, its sign for a space and its sign for unknown. They are encoded
# as bytes later, so nothing is lost by a space in their place.
UNTRAINABLE = re.compile("[\0\u2581\u2585]")
FORMAT = 1  # counts up when the same options would give another model


@dataclass(frozen=True)
class TrainingReport:
    """What a tokenizer was trained on. Sizes in UTF-8 bytes; skipped_bytes are those the trainer never saw."""

    path: str
    hash: str
    model_type: str
    vocab_size: int
    documents: int
    split_documents: int
    sample_bytes: int
    skipped_bytes: int
    seconds: float


def sample_texts(source: Source, *, sample_bytes: int, seed: int = 0, split: str = "train") -> Iterator[str]:
    """Documents of `source` until `sample_bytes` bytes are reached: taken in turns from the beginnings of shards.

    Which shards, and their order, depends on the seed; a corpus smaller than sample_bytes is read whole.
    """
    shards = source.shards(split)
    order = np.random.default_rng(seed).permutation(len(shards))
    waiting = [source.rows(shards[i]) for i in reversed(order)]
    reading = []
    left = sample_bytes
    while left > 0 and (reading or waiting):
        while waiting and len(reading) < SHARDS_AT_ONCE:
            reading.append(waiting.pop())
        for rows in list(reading):
            _, text = next(rows, (0, None))
            if text is None:
                reading.remove(rows)
                continue
            yield text
            left -= len(text.encode("utf-8"))
            if left <= 0:
                break


def split_lines(text: str, limit: int = LINE_BYTES) -> Iterator[str]:
    """Cut `text` into parts of at most `limit` UTF-8 bytes: before a line end, else before a space, else anywhere.

    The parts join to the text.
    """
    data = text.encode("utf-8")
    begin = 0
    while len(data) - begin > limit:
        end = begin + limit
        for sign in (b"\n", b" "):
            cut = data.rfind(sign, begin + 1, end)
            if cut > 0:
                end = cut
                break
        else:
            while data[end] & 0xC0 == 0x80:  # not inside a character
                end -= 1
        yield data[begin:end].decode("utf-8")
        begin = end
    yield data[begin:].decode("utf-8")


class _Feed:
    """Documents as lines for the trainer, counted. Stops at `sample_bytes`."""

    def __init__(self, texts: Iterable[str], sample_bytes: int):
        self.texts = texts
        self.bound = sample_bytes
        self.documents = self.split_documents = self.sample_bytes = self.skipped_bytes = 0
        self.fault: UserError | None = None  # what reading the texts raised; the trainer reports it as its own

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._lines()
        except UserError as error:
            self.fault = error
            raise

    def _lines(self) -> Iterator[str]:
        for text in self.texts:
            size = len(text.encode("utf-8"))
            if size > self.bound - self.sample_bytes:  # the last document, up to the bound
                text = text.encode("utf-8")[: self.bound - self.sample_bytes].decode("utf-8", errors="ignore")
                size = len(text.encode("utf-8"))
            self.documents += 1
            self.sample_bytes += size
            self.split_documents += size > LINE_BYTES
            if UNTRAINABLE.search(text):
                self.skipped_bytes += sum(len(c.encode("utf-8")) for c in UNTRAINABLE.findall(text))
                text = UNTRAINABLE.sub(" ", text)
            yield from split_lines(text)
            if self.sample_bytes >= self.bound - 3:  # a cut character may leave up to 3 bytes
                return


def train_sentencepiece(
    texts: Iterable[str],
    path: str | os.PathLike,
    *,
    vocab_size: int = 8192,
    sample_bytes: int = 10_000_000,
    model_type: str = "unigram",
    option: str = "tokenizer",
) -> TrainingReport:
    """Train a model on the first `sample_bytes` bytes of `texts` and write it to `path`, with a report beside it.

    vocab_size counts the 3 special pieces (<unk> 0, <s> 1, </s> 2) and the 256 bytes. The same texts and options
    give the same file, byte for byte: the trainer runs on one thread. Memory is bounded by sample_bytes (about 25
    times as much), whatever `texts` holds. The file appears whole or not at all.
    Raises UserError where the texts are too few for vocab_size, vocab_size is too small for its characters,
    or more than 1 % of the bytes cannot be used.
    """
    if not isinstance(vocab_size, int) or vocab_size <= RESERVED:
        raise UserError(
            f"{option}.vocab_size={vocab_size}: expected a whole number above {RESERVED} (3 special pieces, 256 bytes)"
        )
    if not sample_bytes > 0:
        raise UserError(f"{option}.sample_bytes={sample_bytes}: expected the bytes of text to train on, above 0")
    path = Path(path)
    begin = time.monotonic()
    feed = _Feed(texts, sample_bytes)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(feed),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            max_sentence_length=LINE_BYTES,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if feed.fault is not None:
            raise feed.fault from None
        raise _training_fault(error, option, vocab_size, feed) from error
    if feed.skipped_bytes > MAX_SKIPPED * feed.sample_bytes:
        raise UserError(
            f"{option}: {feed.skipped_bytes} of the {feed.sample_bytes} bytes of the training sample are characters "
            f"SentencePiece cannot be trained on (NUL, U+2581, U+2585), more than {MAX_SKIPPED:.0%}. Is this text? "
            "Clean the corpus, or train on another one"
        )
    report = TrainingReport(
        path=str(path),
        hash=hashlib.sha256(model.getvalue()).hexdigest(),
        model_type=model_type,
        vocab_size=vocab_size,
        documents=feed.documents,
        split_documents=feed.split_documents,
        sample_bytes=feed.sample_bytes,
        skipped_bytes=feed.skipped_bytes,
        seconds=round(time.monotonic() - begin, 2),
    )
    write_atomically(report_path(path), json.dumps(dataclasses.asdict(report), indent=2).encode() + b"\n")
    write_atomically(path, model.getvalue())
    return report


def report_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def cached_path(cache_dir: str | os.PathLike, source: Source, *, vocab_size: int, sample_bytes: int, seed: int) -> Path:
    """Where the tokenizer trained on `source` with these options is kept."""
    depends = [FORMAT, source.describe()["fingerprint"], vocab_size, sample_bytes, seed]
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:12]
    return Path(cache_dir) / "tokenizers" / f"{source.name}-{vocab_size}-{key}.model"


def train_once(path: Path, source: Source | None, *, vocab_size: int, sample_bytes: int, seed: int) -> None:
    """Train and write `path` unless it is there; one process does it, the others wait for it."""
    if path.exists():
        return
    if source is None:
        raise UserError(f"tokenizer.path={path}: no such file, and there is no corpus to train one on")
    with one_process(path, "the tokenizer"):
        if path.exists():
            return
        source.prepare()
        logger.info("tokenizer %s is missing: training %d pieces on %s", path, vocab_size, source.name)
        texts = sample_texts(source, sample_bytes=sample_bytes, seed=seed)
        report = train_sentencepiece(texts, path, vocab_size=vocab_size, sample_bytes=sample_bytes)
        logger.info(
            "tokenizer trained in %.1f s on %d documents, %.1f MB (%d bytes skipped, %d documents split)",
            report.seconds,
            report.documents,
            report.sample_bytes / 1e6,
            report.skipped_bytes,
            report.split_documents,
        )


def _training_fault(error: RuntimeError, option: str, vocab_size: int, feed: _Feed) -> UserError:
    """SentencePiece's own message, in terms of what the user can change."""
    message = str(error)
    if most := re.search(r"too high.*<= (\d+)", message):
        return UserError(
            f"{option}.vocab_size={vocab_size} is more than {feed.sample_bytes} bytes of text can fill: at most "
            f"{most[1]} here. Set {option}.vocab_size={most[1]} or lower, or train on more text"
        )
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return UserError(
            f"{option}.vocab_size={vocab_size} is less than the characters and bytes of the text need: at least "
            f"{least[1]}. Set {option}.vocab_size={least[1]} or higher"
        )
    if not feed.sample_bytes:
        return UserError(f"{option}: no text to train on. Check the corpus")
    return UserError(f"{option}.vocab_size={vocab_size}: SentencePiece training failed: {message.splitlines()[-1]}")
