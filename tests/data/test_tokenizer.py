"""Tokenizers: nothing of a text is lost, special ids are never made from text, and bytes are counted exactly."""

from __future__ import annotations

import io
import pickle
import socket
import time
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from texts import HARD, prose

from selmodel.data.sources import LocalSource
from selmodel.data.tokenizer import (
    HuggingFace,
    HuggingFaceTokenizer,
    SentencePiece,
    SentencePieceTokenizer,
    Tokenizer,
    load_or_train,
)
from selmodel.data.tokenizer_training import train_sentencepiece
from selmodel.errors import UserError

VOCAB = 500


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    train_sentencepiece(prose(300), path, vocab_size=VOCAB)
    return path


@pytest.fixture(scope="module")
def sp(model_path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model_path)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """A byte-level BPE tokenizer as GPT-2's, with one token for BOS and EOS, in a folder."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(prose(300), trainer)
    folder = tmp_path_factory.mktemp("hf")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", model_max_length=8
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hf(hf_folder) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(hf_folder))


@pytest.fixture(params=["sp", "hf"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


# --- both kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HARD)
def test_decoding_gives_the_text_back(tokenizer, kind):
    text = HARD[kind]
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert not set(ids.tolist()) & {tokenizer.bos_id, tokenizer.eos_id}
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


@pytest.mark.parametrize("kind", HARD)
def test_bytes_of_tokens_sum_to_the_bytes_of_the_text(tokenizer, kind):
    text = HARD[kind]
    ids = tokenizer.encode(text)
    sizes = tokenizer.token_bytes(text, ids)
    assert sizes.dtype == np.int64
    assert sizes.shape == ids.shape
    assert sizes.sum() == len(text.encode("utf-8"))
    assert (sizes >= 0).all()


def test_every_character_comes_back(sp):
    """All of Unicode but the surrogates, next to each other, between spaces and between letters."""
    batches = [range(begin, begin + 4096) for begin in range(0, 0x110000, 4096)]
    for batch in batches:
        characters = [chr(code) for code in batch if not 0xD800 <= code < 0xE000]
        texts = ["".join(characters), " ".join(characters), "a".join(characters)]
        for text, ids in zip(texts, sp.encode_batch(texts), strict=True):
            assert sp.decode(ids) == text


def test_a_batch_is_its_texts_one_by_one(tokenizer):
    texts = [*HARD.values(), *prose(5, seed=3)]
    batch = tokenizer.encode_batch(texts)
    assert len(batch) == len(texts)
    for text, ids in zip(texts, batch, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert tokenizer.encode_batch([]) == []


def test_special_ids_are_distinct_and_dropped_when_decoding(tokenizer):
    assert tokenizer.bos_id != tokenizer.eos_id
    ids = [tokenizer.bos_id, *tokenizer.encode("ba ce"), tokenizer.eos_id, *tokenizer.encode(" di"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "ba ce di"
    assert tokenizer.decode(np.array(ids)) == "ba ce di"
    assert tokenizer.decode(torch.tensor(ids)) == "ba ce di"
    assert tokenizer.decode([]) == ""


def test_half_a_surrogate_pair_is_refused_by_name(tokenizer):
    with pytest.raises(UserError, match=r"half a surrogate pair at character 2"):
        tokenizer.encode_batch(["fine", "ab\ud83dc"])


def test_cut_characters_are_marked_when_decoding(tokenizer):
    ids = tokenizer.encode("ba\U0001f600")
    assert tokenizer.decode(ids[:-1]) == "ba\ufffd"


def test_bytes_of_other_ids_are_refused(tokenizer):
    with pytest.raises(ValueError, match="not those of the text"):
        tokenizer.token_bytes("ba ce", tokenizer.encode("ba ce di"))


def test_state_and_pickle_give_the_same_tokenizer(tokenizer, tmp_path):
    torch.save(tokenizer.state(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert state["hash"] == tokenizer.hash
    for copy in (Tokenizer.from_state(state), pickle.loads(pickle.dumps(tokenizer))):
        assert type(copy) is type(tokenizer)
        for name in ("hash", "vocab_size", "bos_id", "eos_id"):
            assert getattr(copy, name) == getattr(tokenizer, name)
        for text in HARD.values():
            np.testing.assert_array_equal(copy.encode(text), tokenizer.encode(text))


def test_state_of_an_unknown_kind():
    with pytest.raises(UserError, match="'words'"):
        Tokenizer.from_state({"kind": "words", "file": torch.zeros(1, dtype=torch.uint8)})


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def test_bos_and_eos_have_their_ids(sp):
    assert (sp.bos_id, sp.eos_id, sp.vocab_size) == (1, 2, VOCAB)


def test_hash_is_that_of_the_file(sp, model_path):
    import hashlib

    assert sp.hash == hashlib.sha256(model_path.read_bytes()).hexdigest()


def test_ids_are_sentencepieces_own(sp, model_path):
    """Where the text has no space sign, for which SentencePiece alone gives a space."""
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    for text in [*HARD.values(), *prose(20, seed=5)]:
        if "\u2581" not in text:
            ids = sp.encode(text)
            assert ids.tolist() == oracle.encode(text)
            assert sp.decode(ids) == oracle.decode(ids.tolist())
    assert oracle.decode(oracle.encode("a\u2581b")) == "a b"  # what is mended here


def test_space_sign_is_three_bytes_between_the_pieces_around_it(sp):
    left, right = sp.encode("ba ").tolist(), sp.encode(" ce").tolist()
    model = sp._model
    sign = [model.piece_to_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x96, 0x81)]
    ids = sp.encode("ba \u2581 ce")
    assert ids.tolist() == left + sign + right
    assert sp.token_bytes("ba \u2581 ce", ids)[len(left) : len(left) + 3].tolist() == [1, 1, 1]


def test_bytes_by_token_by_hand(sp):
    """A space counts one byte (its sign in the pieces has three), a byte piece one, letters as in UTF-8."""
    text = "ba \u00e9"
    pieces = [sp._model.id_to_piece(int(i)) for i in sp.encode(text)]
    expected = [1 if piece.startswith("<0x") else len(piece.replace("\u2581", " ").encode()) for piece in pieces]
    assert sp.token_bytes(text, sp.encode(text)).tolist() == expected
    assert sum(expected) == 5


def lossy_model(**changes) -> bytes:
    options = {
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=prose(300), model_writer=model, vocab_size=400, minloglevel=2, **options | changes
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nfkc_cf"},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False},
    ],
    ids=str,
)
def test_model_that_changes_text_is_refused(tmp_path, changes):
    path = tmp_path / "t.model"
    path.write_bytes(lossy_model(**changes))
    with pytest.raises(UserError, match=r"tokenizer\.path=.*t\.model: the model changes text"):
        SentencePieceTokenizer(path)


def test_model_without_eos_is_refused(tmp_path):
    path = tmp_path / "t.model"
    path.write_bytes(lossy_model(eos_id=-1))
    with pytest.raises(UserError, match="no distinct <s> and </s>"):
        SentencePieceTokenizer(path)


@pytest.mark.parametrize("content", [b"", b"no model", b"\x00" * 1000])
def test_file_that_is_no_model(tmp_path, content):
    path = tmp_path / "t.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.path=.*t\.model: not a SentencePiece model"):
        SentencePieceTokenizer(path)


def test_truncated_model(tmp_path, model_path):
    path = tmp_path / "t.model"
    path.write_bytes(model_path.read_bytes()[:-500])
    with pytest.raises(UserError, match=r"tokenizer\.path="):
        SentencePieceTokenizer(path)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.path=.*gone: cannot be read: No such file"):
        SentencePieceTokenizer(tmp_path / "gone")


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def test_one_token_for_both_ends_gets_a_companion(hf):
    assert hf.eos_id == hf._model.token_to_id("<|endoftext|>")
    assert hf.bos_id == VOCAB  # added after the others
    assert hf.vocab_size == VOCAB + 1


def test_special_tokens_spelled_out_are_text(hf):
    for text in ("<|endoftext|>", "a<|endoftext|>b", "<|bos|>"):
        ids = hf.encode(text)
        assert hf.decode(ids) == text
        assert not set(ids.tolist()) & {hf.bos_id, hf.eos_id}


def test_long_texts_are_not_cut(hf):
    assert len(hf.encode("ba " * 1000)) > 1000  # the folder says model_max_length 8


def test_bytes_of_a_character_shared_by_tokens(hf):
    """An emoji that no merge has seen is four tokens: its four bytes are counted once."""
    ids = hf.encode("\U0001f600a")
    assert len(ids) == 5
    assert hf.token_bytes("\U0001f600a", ids).tolist() == [4, 0, 0, 0, 1]


def test_bytes_of_dropped_spaces_go_to_the_next_token():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b\u00e9": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words = HuggingFaceTokenizer(content=backend.to_str().encode())
    text = " a   b\u00e9 xyz  "
    ids = words.encode(text)
    assert ids.tolist() == [1, 2, 0]
    # " a", "   bé" (é is two bytes), " xyz  "
    assert words.token_bytes(text, ids).tolist() == [2, 6, 6]
    assert (words.bos_id, words.eos_id, words.vocab_size) == (3, 4, 5)


def test_build_from_a_folder(hf_folder, hf):
    assert HuggingFace(str(hf_folder)).build(None, None).hash == hf.hash


@pytest.mark.parametrize("name", ["no-such-folder/at/all", "nobody/no-such-model"])
def test_unknown_or_unreachable_name(name, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=rf"tokenizer\.name={name}.*tokenizer=sentencepiece"):
        HuggingFace(name).build(None, None)


def test_hub_that_cannot_be_reached_is_reported_soon(monkeypatch):
    """The library itself would try for a minute or three."""
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"tokenizer\.name=nobody/none .*cannot be reached.*tokenizer=sentencepiece"):
        HuggingFace("nobody/none").build(None, None)
    assert time.monotonic() - begin < 15


def test_name_is_not_set():
    with pytest.raises(UserError, match=r"tokenizer\.name is not set"):
        HuggingFace(None).build(None, None)


# --- building --------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    import json

    folder = tmp_path / "corpus"
    folder.mkdir()
    for k in range(3):
        rows = [json.dumps({"text": text}) for text in prose(120, seed=k)]
        (folder / f"c4-train.{k}.json").write_text("\n".join(rows))
    (folder / "c4-validation.0.json").write_text(json.dumps({"text": "ba"}))
    return LocalSource(str(folder))


def test_missing_tokenizer_is_trained_once_and_said_so(source, tmp_path, caplog):
    caplog.set_level("INFO", "selmodel")
    options = SentencePiece(vocab_size=VOCAB, sample_bytes=50_000)
    first = options.build(source, tmp_path / "cache")
    assert first.vocab_size == VOCAB
    assert "is missing: training" in caplog.text
    assert "trained in" in caplog.text

    caplog.clear()
    assert options.build(source, tmp_path / "cache").hash == first.hash
    assert caplog.text == ""


def test_cached_file_is_named_by_what_it_depends_on(source, tmp_path):
    cache = tmp_path / "cache"
    for options in (
        SentencePiece(vocab_size=VOCAB, sample_bytes=50_000),
        SentencePiece(vocab_size=VOCAB + 1, sample_bytes=50_000),
        SentencePiece(vocab_size=VOCAB, sample_bytes=60_000),
        SentencePiece(vocab_size=VOCAB, sample_bytes=50_000, seed=1),
    ):
        options.build(source, cache)
    assert len(list((cache / "tokenizers").glob("*.model"))) == 4

    (next((tmp_path / "corpus").glob("c4-train.0.json"))).write_text("\n".join(['{"text": "other ba ce"}'] * 5))
    SentencePiece(vocab_size=VOCAB, sample_bytes=50_000).build(LocalSource(source.root), cache)
    assert len(list((cache / "tokenizers").glob("*.model"))) == 5


def test_configured_path_is_trained_there_and_then_needs_no_corpus(source, tmp_path):
    path = tmp_path / "mine" / "t.model"
    options = SentencePiece(str(path), vocab_size=VOCAB, sample_bytes=50_000)
    trained = options.build(source, tmp_path / "cache")
    assert path.exists()
    assert options.build(None, tmp_path / "cache").hash == trained.hash


def test_file_of_another_size_names_both(source, tmp_path, model_path):
    with pytest.raises(UserError, match=rf"tokenizer\.vocab_size=600, but .*t\.model has {VOCAB} pieces"):
        load_or_train(model_path, source, vocab_size=600, cache_dir=tmp_path)


def test_no_file_and_no_corpus(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.path=.*gone: no such file"):
        load_or_train(tmp_path / "gone", None, vocab_size=VOCAB, cache_dir=tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.path is not set"):
        load_or_train(None, None, vocab_size=VOCAB, cache_dir=tmp_path)


def test_probes_cover_what_normalisation_would_change():
    """The texts every model is probed with do change under each kind of normalisation."""
    from selmodel.data.tokenizer import PROBES

    joined = "".join(PROBES)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert unicodedata.normalize(form, joined) != joined
