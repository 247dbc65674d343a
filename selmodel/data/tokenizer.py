"""Tokenizers: text to ids and back, with the bytes of text that each token stands for.

SentencePiece is the default: trained without any change to the text, so that decode(encode(text)) == text for
every text and bits per byte are comparable. Any fast Hugging Face tokenizer can take its place.
"""

from __future__ import annotations

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import torch

from selmodel.data.hub import from_hub
from selmodel.data.sources import Source
from selmodel.data.tokenizer_training import BLANK, cached_path, train_once
from selmodel.errors import UserError

logger = logging.getLogger(__name__)

# Texts that a tokenizer which changes text gives back changed: spaces at every place, line ends, an accent and
# a ligature that normalisation would rewrite, characters outside any vocabulary, spelled-out special pieces.
PROBES = (
    " a",
    "a ",
    "a  b",
    "\t\n\r\n",
    "e\u0301 \u00e9 \ufb01 \u00bd",
    "\U0001f600\x00\x07",
    f"{BLANK}a",
    "<s></s><unk>",
)


class Tokenizer(ABC):
    """Text to ids without special tokens, and back. Pickles by content.

    name: where it came from, for messages. vocab_size: number of ids, special ones included.
    bos_id, eos_id: distinct ids that no text encodes to. hash: sha256 (hexadecimal) of the model file's content.
    """

    name: str
    vocab_size: int
    bos_id: int
    eos_id: int
    hash: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32 [n_tokens], without BOS and EOS. UserError for half a surrogate pair."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are dropped, bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def token_bytes(self, text: str, ids: np.ndarray) -> np.ndarray:
        """UTF-8 bytes of `text` that each of its `ids` stands for: int64 [n_tokens], summing to the length of
        the text in bytes. `ids` must be encode(text), else ValueError."""

    @abstractmethod
    def state(self) -> dict:
        """Everything needed to build the tokenizer again: plain types and one uint8 tensor, "file"."""

    @staticmethod
    def from_state(state: dict) -> Tokenizer:
        """The tokenizer that `state` was taken from."""
        content = state["file"].numpy().tobytes()
        if state["kind"] == "sentencepiece":
            return SentencePieceTokenizer(content=content)
        if state["kind"] == "huggingface":
            return HuggingFaceTokenizer(content=content, bos_token=state["bos"], eos_token=state["eos"])
        raise UserError(f"tokenizer of kind {state['kind']!r}: expected 'sentencepiece' or 'huggingface'")

    def encode(self, text: str) -> np.ndarray:
        """Ids of one text: int32 [n_tokens]."""
        return self.encode_batch([text])[0]

    def __reduce__(self):
        return Tokenizer.from_state, (self.state(),)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model that leaves text as it is.

    path: the .model file; or content: its bytes. A model that changes text (normalisation, dummy prefix,
    removed spaces, no byte fallback) is refused with UserError: bits per byte would be wrong.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, content: bytes | None = None):
        where = f"tokenizer.path={path}" if path is not None else "tokenizer"
        if content is None:
            try:
                content = Path(path).read_bytes()
            except OSError as error:
                raise UserError(
                    f"{where}: cannot be read: {error.strerror}. Expected a SentencePiece model file"
                ) from error
        self.name = str(path or "sentencepiece")
        self._content = content
        self.hash = hashlib.sha256(content).hexdigest()
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.load_from_serialized_proto(content)
        except Exception as error:
            raise UserError(
                f"{where}: not a SentencePiece model ({len(content)} bytes). Remove it to train one anew"
            ) from error
        self.vocab_size = self._model.get_piece_size()
        self.bos_id, self.eos_id = self._model.bos_id(), self._model.eos_id()
        if self.bos_id < 0 or self.eos_id < 0 or self.bos_id == self.eos_id:
            raise UserError(f"{where}: the model has no distinct <s> and </s>. Train one with data/train_tokenizer.py")
        self._pieces = [_piece_bytes(self._model, i) for i in range(self.vocab_size)]
        self._lengths = np.array([len(piece) for piece in self._pieces], dtype=np.int64)
        if any(self._model.is_byte(i) for i in range(self.vocab_size)):
            # SentencePiece writes a space as BLANK, so a BLANK in the text would come back as a space. Byte pieces
            # keep it.
            blank = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in BLANK.encode()]
        else:
            blank = [self._model.unk_id()]
        self._blank = np.array(blank, dtype=np.int32)
        for text in PROBES:
            if self.decode(self.encode(text)) != text:
                raise UserError(
                    f"{where}: the model changes text: {text!r} becomes {self.decode(self.encode(text))!r}. Train one "
                    "that does not with data/train_tokenizer.py"
                )

    @property
    def content(self) -> bytes:
        """The model file."""
        return self._content

    def piece(self, i: int) -> str:
        """The piece of an id, spaces written as U+2581; every id has another. IndexError beyond the vocabulary."""
        return self._model.id_to_piece(i)

    def piece_id(self, piece: str) -> int:
        """The id of a piece; that of <unk> where there is no such piece."""
        return self._model.piece_to_id(piece)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            # One by one: a batch would start a thread, and is no faster.
            return [self._encode(text) for text in texts]
        except (RuntimeError, TypeError) as error:  # which of them, and what they say, differs between versions
            for text in texts:
                _check_utf8(text)
            raise RuntimeError("SentencePiece failed to encode a text") from error

    def _encode(self, text: str) -> np.ndarray:
        if BLANK not in text:
            return self._model.encode(text, return_type="numpy")
        parts = [self._model.encode(part, return_type="numpy") for part in text.split(BLANK)]
        joined = [parts[0]]
        for part in parts[1:]:
            joined += [self._blank, part]
        return np.concatenate(joined)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[i] for i in _plain(ids)).decode("utf-8", errors="replace")

    def token_bytes(self, text: str, ids: np.ndarray) -> np.ndarray:
        lengths = self._lengths[np.asarray(ids, dtype=np.int64)]
        if lengths.sum() != len(text.encode("utf-8")):
            raise ValueError("token_bytes: the ids are not those of the text")
        return lengths

    def state(self) -> dict:
        return {
            "kind": "sentencepiece",
            "hash": self.hash,
            "file": torch.frombuffer(bytearray(self._content), dtype=torch.uint8),
        }


class HuggingFaceTokenizer(Tokenizer):
    """A fast Hugging Face tokenizer.

    name_or_path: a model name on the Hub or a folder with tokenizer.json. revision: commit, tag or branch.
    Where it has no distinct BOS and EOS, a special token is added for the missing one. Special tokens spelled
    out in a text are encoded as text. Whether text survives unchanged is the tokenizer's own affair.
    content, bos_token, eos_token: tokenizer.json itself and its special tokens, in place of a name.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        revision: str | None = None,
        *,
        content: bytes | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ):
        import tokenizers

        # Data loader workers are forked processes, one core each: threads of the tokenizer would only be in the way.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if content is None:
            content, bos_token, eos_token = _load_hugging_face(name_or_path, revision)
        self.name = name_or_path or "huggingface"
        self._model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._model.no_truncation()
        self._model.no_padding()
        if bos_token == eos_token:
            bos_token = None  # GPT-2 uses one token for both
        self._bos = bos_token or self._add_special("<|bos|>")
        self._eos = eos_token or self._add_special("<|eos|>")
        self._model.encode_special_tokens = True
        self._content = self._model.to_str().encode("utf-8")
        self.vocab_size = self._model.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._model.token_to_id(self._bos)
        self.eos_id = self._model.token_to_id(self._eos)
        self.hash = hashlib.sha256(self._content + f"\0{self._bos}\0{self._eos}".encode()).hexdigest()

    @property
    def content(self) -> bytes:
        """tokenizer.json."""
        return self._content

    @property
    def bos_token(self) -> str:
        return self._bos

    @property
    def eos_token(self) -> str:
        return self._eos

    def _add_special(self, token: str) -> str:
        self._model.add_special_tokens([token])
        return token

    def _encodings(self, texts: Sequence[str]) -> list:
        for text in texts:
            _check_utf8(text)
        return self._model.encode_batch(list(texts), add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self._encodings(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode(_plain(ids), skip_special_tokens=True)

    def token_bytes(self, text: str, ids: np.ndarray) -> np.ndarray:
        (encoding,) = self._encodings([text])
        if not np.array_equal(encoding.ids, np.asarray(ids)):
            raise ValueError("token_bytes: the ids are not those of the text")
        # position[c]: UTF-8 bytes before character c
        position = np.concatenate([[0], np.cumsum([len(c.encode("utf-8")) for c in text], dtype=np.int64)])
        # A token stands for the text from where its predecessors ended to its own end: what lies between two
        # tokens (a dropped space) goes to the latter, a character shared by several tokens to the first of them.
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        ends = np.maximum.accumulate(ends) if len(ends) else ends
        if len(ends):
            ends[-1] = len(text)
        return np.diff(position[ends], prepend=0)

    def state(self) -> dict:
        return {
            "kind": "huggingface",
            "hash": self.hash,
            "file": torch.frombuffer(bytearray(self._content), dtype=torch.uint8),
            "bos": self._bos,
            "eos": self._eos,
        }


class SentencePiece:
    """Option group `tokenizer=sentencepiece`: a SentencePiece file, trained first where it is missing.

    path: the model file; None: one in the cache folder, named by what it depends on (corpus, options).
    vocab_size: number of ids, 3 special and 256 byte pieces included. sample_bytes: UTF-8 bytes of training
    text it is trained on; training holds about 25 times as much in memory. seed: chooses the sample.
    """

    def __init__(
        self,
        path: str | None = None,
        vocab_size: int = 8192,
        sample_bytes: int = 10_000_000,
        seed: int = 0,
    ):
        self.path = path
        self.vocab_size = vocab_size
        self.sample_bytes = sample_bytes
        self.seed = seed

    def build(self, source: Source | None, cache_dir: str | os.PathLike) -> SentencePieceTokenizer:
        """The tokenizer; `source` is read only where the file is missing. UserError, see load_or_train."""
        return load_or_train(
            self.path or getattr(source, "tokenizer_path", None),  # a token cache brings its own
            source,
            vocab_size=self.vocab_size,
            cache_dir=cache_dir,
            seed=self.seed,
            sample_bytes=self.sample_bytes,
        )


class HuggingFace:
    """Option group `tokenizer=huggingface`: name (on the Hub, or a folder) and revision."""

    def __init__(self, name: str | None = None, revision: str | None = None):
        self.name = name
        self.revision = revision

    def build(self, source: Source | None = None, cache_dir: str | os.PathLike | None = None) -> HuggingFaceTokenizer:
        if not self.name:
            raise UserError(
                "tokenizer.name is not set: give a name on the Hugging Face Hub or a folder, tokenizer.name=gpt2"
            )
        return HuggingFaceTokenizer(self.name, self.revision)


def load_or_train(
    path: str | os.PathLike | None,
    source: Source | None,
    *,
    vocab_size: int,
    cache_dir: str | os.PathLike,
    seed: int = 0,
    sample_bytes: int = 10_000_000,
) -> SentencePieceTokenizer:
    """The tokenizer at `path`, or in `cache_dir` where path is None; trained on `source` first if missing.

    One process of a machine trains while the others wait. UserError where the file has another vocab_size, is
    no lossless SentencePiece model, or cannot be trained.
    """
    if path is None:
        if source is None:
            raise UserError(
                "tokenizer.path is not set, and there is no corpus to train a tokenizer on. Set tokenizer.path"
            )
        source.prepare()
        path = cached_path(cache_dir, source, vocab_size=vocab_size, sample_bytes=sample_bytes, seed=seed)
    path = Path(path).expanduser().absolute()
    train_once(path, source, vocab_size=vocab_size, sample_bytes=sample_bytes, seed=seed)
    tokenizer = SentencePieceTokenizer(path)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size}, but {path} has {tokenizer.vocab_size} pieces. Set "
            f"tokenizer.vocab_size={tokenizer.vocab_size}, or another tokenizer.path to train one there"
        )
    return tokenizer


def _piece_bytes(model: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    """The bytes of text piece i stands for; none for special pieces."""
    piece = model.id_to_piece(i)
    if model.is_byte(i):
        return bytes([int(piece[1:-1], 16)])
    if model.is_control(i) or model.is_unknown(i):
        return b""
    return piece.replace(BLANK, " ").encode("utf-8")


def _plain(ids: Iterable[int]) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _check_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"text with half a surrogate pair at character {error.start} ({text[error.start]!r}) is not valid "
            "Unicode and cannot be encoded. Remove the character"
        ) from error


def _load_hugging_face(name: str, revision: str | None) -> tuple[bytes, str | None, str | None]:
    """(tokenizer.json, BOS token, EOS token) from a folder, the cache or the Hub. UserError where it cannot be had."""
    from transformers import AutoTokenizer

    loaded = from_hub(
        AutoTokenizer.from_pretrained,
        name,
        f"tokenizer.name={name} (revision {revision or 'default'})",
        "a name on the Hugging Face Hub or a folder with tokenizer.json; without a network use tokenizer=sentencepiece",
        revision=revision,
        use_fast=True,
        trust_remote_code=False,
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"tokenizer.name={name}: has no fast version (tokenizer.json). Choose a fast tokenizer")
    return backend.to_str().encode("utf-8"), loaded.bos_token, loaded.eos_token
