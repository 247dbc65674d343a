"""Pieces of text that together are the text, whatever the tokens."""

from __future__ import annotations

import random

import pytest

from selmodel.data.tasks import Parity, TaskTokenizer
from selmodel.data.tokenizer import SentencePieceTokenizer, Tokenizer
from selmodel.inference.text import TextStream
from tests.data.texts import HARD


class Bytes(Tokenizer):
    """A token per byte: the hardest case."""

    def __init__(self) -> None:
        self.vocab_size, self.bos_id, self.eos_id = 258, 256, 257

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_batch(self, texts):
        return [list(text.encode()) for text in texts]

    def token_bytes(self, text, ids):
        raise NotImplementedError

    def state(self):
        raise NotImplementedError


def pieces_of(tokenizer: Tokenizer, ids: list[int], first: int = 0) -> list[str]:
    stream = TextStream(tokenizer, ids[:first])
    pieces = [stream.push(i) for i in ids[first:]]
    return [*pieces, stream.flush()]


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("first", [0, 2])
def test_pieces_together_are_the_text(kind, first):
    text = HARD[kind]
    ids = list(text.encode())
    pieces = pieces_of(Bytes(), ids, first)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_a_character_comes_when_its_last_byte_is_there():
    assert pieces_of(Bytes(), list("aé\U0001f600b".encode())) == ["a", "", "é", "", "", "", "\U0001f600", "b", ""]


def test_half_a_character_at_the_end_is_shown_when_nothing_follows():
    assert pieces_of(Bytes(), list("aé".encode())[:-1]) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_never_lost(seed):
    generator = random.Random(seed)
    ids = [generator.choice([*range(258), 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80]) for _ in range(60)]
    pieces = pieces_of(Bytes(), ids)
    assert "".join(pieces) == Bytes().decode(ids)


def test_special_tokens_show_nothing():
    stream = TextStream(Bytes())
    assert [stream.push(i) for i in (256, 97, 257, 98)] == ["", "a", "", "b"]


def test_words_keep_their_spaces():
    tokenizer = TaskTokenizer().build(Parity())
    ids = tokenizer.encode("1 odd 0 odd").tolist()
    assert pieces_of(tokenizer, ids) == ["1", " odd", " 0", " odd", ""]


def test_sentencepiece_pieces_together_are_the_text(tmp_path):
    from selmodel.data.sources import LocalSource
    from selmodel.data.tokenizer import load_or_train
    from tests.conftest import write_corpus

    source = LocalSource(write_corpus(tmp_path / "corpus"))
    tokenizer = load_or_train(tmp_path / "t.model", source, vocab_size=400, cache_dir=tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    for text in (*HARD.values(), "the people said"):
        ids = tokenizer.encode(text).tolist()
        assert "".join(pieces_of(tokenizer, ids)) == text


def test_a_token_without_text_does_not_swallow_the_space_after_it():
    tokenizer = TaskTokenizer().build(Parity())
    ids = [0, *tokenizer.encode("1 odd").tolist(), 1, *tokenizer.encode("0 odd").tolist()]
    assert pieces_of(tokenizer, ids) == ["", "1", " odd", "", " 0", " odd", ""]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
