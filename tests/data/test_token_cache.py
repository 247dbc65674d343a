"""Token caches: the batches of streaming the text, to the last token and with the same states."""

from __future__ import annotations

import gzip
import json
from itertools import islice

import numpy as np
import pytest
from corpus import EOS, NumberSource, NumberTokenizer, Simulation, number_source
from texts import HARD, prose

from selmodel.data import token_cache_writer
from selmodel.data.datamodule import DataModule
from selmodel.data.documents import TextDocuments
from selmodel.data.sources import LocalSource
from selmodel.data.stream import Stream, permutation
from selmodel.data.token_cache import ROWS_PER_BLOCK, TokenCache
from selmodel.data.token_cache_writer import build_token_cache
from selmodel.data.tokenizer import SentencePieceTokenizer
from selmodel.data.tokenizer_training import train_sentencepiece
from selmodel.errors import UserError

OPTIONS = {"streams": 8, "batch_size": 8, "context_length": 7}


def mutilated(source: NumberSource) -> NumberSource:
    """The source with rows that are skipped, and with an empty shard."""
    for number, texts in enumerate(source.splits["train"]):
        texts[number % 3 :: 4] = [None] * len(texts[number % 3 :: 4])
    source.splits["train"].append([])
    return source


@pytest.fixture
def numbers(tmp_path):
    """(source, its token cache)"""
    source = mutilated(number_source(4, rows=120))
    return source, build_token_cache(source, NumberTokenizer(), tmp_path / "cache")


def joined(blocks) -> dict[str, list[int]]:
    blocks = list(blocks)
    lengths = [np.diff(block.ends, prepend=0) for block in blocks]
    return {
        "rows": [int(row) for block in blocks for row in block.rows],
        "lengths": [int(n) for some in lengths for n in some],
        "tokens": [int(token) for block in blocks for token in block.tokens],
        "bytes": [int(n) for block in blocks if block.token_bytes is not None for n in block.token_bytes],
    }


@pytest.mark.parametrize(("start", "step"), [(0, 1), (1, 1), (7, 1), (0, 3), (5, 4), (29, 2), (1000, 1), (1000, 7)])
def test_blocks_hold_what_the_text_holds(numbers, start, step):
    source, cache = numbers
    text, cached = TextDocuments(source, NumberTokenizer()), cache.documents(NumberTokenizer())
    for split, with_bytes in (("train", False), ("validation", True)):
        assert cached.shards(split) == text.shards(split)
        for shard in range(len(text.shards(split))):
            expected = joined(text.blocks(split, shard, start, step, with_bytes))
            assert joined(cached.blocks(split, shard, start, step, with_bytes)) == expected


@pytest.mark.parametrize("step", [1, 3])
def test_shards_longer_than_a_block(tmp_path, step):
    rows = 3 * ROWS_PER_BLOCK * step + 5
    source = NumberSource({"train": [[str(2 + row % 1000) for row in range(rows)]], "validation": [["2"]]})
    cached = build_token_cache(source, NumberTokenizer(), tmp_path / "cache").documents(NumberTokenizer())
    blocks = list(cached.blocks("train", 0, 2, step))
    assert max(len(block.rows) for block in blocks) == ROWS_PER_BLOCK
    assert joined(blocks)["rows"] == list(range(2, rows, step))
    assert joined(blocks)["tokens"][::2] == [2 + row % 1000 for row in range(2, rows, step)]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 1)])
def test_batches_and_states_are_those_of_the_text(numbers, world_size, workers):
    source, cache = numbers
    text, cached = (Simulation(s, world_size, workers, **OPTIONS) for s in (source, cache))
    for _ in range(6):
        np.testing.assert_array_equal(text.train(10), cached.train(10))
        np.testing.assert_array_equal(text.module.states, cached.module.states)
    assert text.module.states[:, 0].min() >= 1  # every stream has been through the corpus
    np.testing.assert_array_equal(text.module.validation_set.tokens, cached.module.validation_set.tokens)
    np.testing.assert_array_equal(text.module.validation_set.token_bytes, cached.module.validation_set.token_bytes)
    assert text.module.protocol() == cached.module.protocol()


def test_a_run_may_move_between_text_and_cache(numbers):
    source, cache = numbers
    expected = Simulation(source, 1, 0, **OPTIONS).train(20)
    state, got = None, []
    for corpus in (source, cache, source, cache):
        run = Simulation(corpus, 1, 0, state=state, **OPTIONS)
        got += list(run.train(5))
        state = run.module.state_dict()
    np.testing.assert_array_equal(got, expected)


@pytest.fixture(scope="module")
def prose_corpus(tmp_path_factory):
    """(folder in C4's layout, tokenizer): prose and texts that are hard to keep."""
    root = tmp_path_factory.mktemp("prose")
    texts = [text for text in [*prose(200), *HARD] if text]
    for name, some in (
        ("c4-train.00000-of-00002", texts[::2]),
        ("c4-train.00001-of-00002", texts[1::2]),
        ("c4-validation.00000-of-00001", texts[::3]),
    ):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (root / f"{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    train_sentencepiece(prose(300), root / "t.model", vocab_size=500)
    return root, SentencePieceTokenizer(root / "t.model")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_real_text(prose_corpus, tmp_path, workers):
    """Real shards and a real tokenizer, from text to batches: text and cache agree, and batches decode to the texts."""
    root, tokenizer = prose_corpus
    source = LocalSource(str(root))
    cache = build_token_cache(source, tokenizer, tmp_path / "cache", workers=workers)
    assert cache.index["dtype"] == "<u2"
    assert (tmp_path / "cache" / "tokenizer.model").read_bytes() == (root / "t.model").read_bytes()
    text, cached = (
        Simulation(s, 1, 0, tokenizer=tokenizer, streams=2, batch_size=4, context_length=64) for s in (source, cache)
    )
    np.testing.assert_array_equal(text.train(30), cached.train(30))
    np.testing.assert_array_equal(text.module.states, cached.module.states)
    validation = cached.module.validation_set
    np.testing.assert_array_equal(validation.token_bytes, text.module.validation_set.token_bytes)

    texts = [[text for _, text in source.rows(shard)] for shard in source.shards("train")]
    for index, shard in enumerate(permutation(2, seed=0, epoch=0)):
        tokens = np.zeros(cache.index["splits"]["train"][shard]["tokens"], dtype=np.int32)
        Stream(cached.module.documents, index, 2, seed=0).fill(tokens)
        documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1)[:-1]
        assert [tokenizer.decode(document) for document in documents] == texts[shard]


def test_every_row_is_stored_once_and_only_once(numbers):
    source, cache = numbers
    rows = sum(text is not None for texts in source.splits["train"] for text in texts)
    assert sum(record["rows"] for record in cache.index["splits"]["train"]) == rows


def test_large_vocabularies_take_more_bits(tmp_path):
    source = NumberSource({"train": [["70000 65535"]], "validation": [["2"]]})
    cache = build_token_cache(source, NumberTokenizer(vocab_size=70_001), tmp_path / "cache")
    assert cache.index["dtype"] == "<u4"
    (block,) = cache.documents(NumberTokenizer()).blocks("train", 0)
    assert block.tokens.tolist() == [70000, 65535, EOS]
    with pytest.raises(ValueError, match=r"2\.\.70000 do not fit <u2|1\.\.70000 do not fit <u2"):
        build_token_cache(source, NumberTokenizer(vocab_size=65_536), tmp_path / "other")


def test_progress_counts_shards_and_tokens(tmp_path):
    source, lines = number_source(3, rows=30), []
    cache = build_token_cache(source, NumberTokenizer(), tmp_path / "cache", progress=lines.append)
    assert [(p.shards, p.of) for p in lines] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert lines[-1].tokens == sum(record["tokens"] for split in cache.index["splits"].values() for record in split)
    assert str(lines[0]).startswith("token cache: 1 of 4 shards, ")


def test_an_interrupted_build_goes_on_and_ends_as_an_undisturbed_one(tmp_path, monkeypatch):
    def build(name, **options):
        return build_token_cache(number_source(4, rows=60), NumberTokenizer(), tmp_path / name, **options)

    def stop_after_two(progress):
        if progress.shards == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("stopped", progress=stop_after_two)
    with pytest.raises(UserError, match=r"no token cache there.*a build began there and did not end"):
        TokenCache(str(tmp_path / "stopped")).prepare()
    (tmp_path / "stopped" / "train-00000.tokens").write_bytes(b"")  # one of the two was not written whole
    written = []
    monkeypatch.setattr(
        token_cache_writer,
        "_write_shard",
        lambda *args, write=token_cache_writer._write_shard: written.append(args[4:]) or write(*args),
    )
    build("stopped")
    assert written == [("train", 0), ("train", 2), ("train", 3), ("validation", 0)]
    build("undisturbed")
    files = sorted(path.name for path in (tmp_path / "undisturbed").iterdir())
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == files
    assert not [name for name in files if name.endswith(".part")]
    for name in files:
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    written.clear()
    build("undisturbed")
    assert written == []


def test_a_fault_in_the_text_names_the_row_and_leaves_no_cache(prose_corpus, tmp_path):
    root, tokenizer = prose_corpus
    (tmp_path / "c4-train.00000-of-00001.json").write_text('{"text": "a"}\n{"text": 5}\n')
    (tmp_path / "c4-validation.00000-of-00001.json").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"c4-train.00000-of-00001.json, row 1"):
        build_token_cache(LocalSource(str(tmp_path)), tokenizer, tmp_path / "cache")
    with pytest.raises(UserError, match="no token cache there"):
        TokenCache(str(tmp_path / "cache")).prepare()


def test_another_tokenizer_is_refused(numbers):
    _, cache = numbers
    other = NumberTokenizer(name="other")
    with pytest.raises(UserError, match=f"made with tokenizer {NumberTokenizer().hash}, the run uses {other.hash}"):
        DataModule(cache, other, **OPTIONS).setup("fit")


@pytest.mark.parametrize(
    ("source", "tokenizer", "named"),
    [
        (number_source(4, rows=61), NumberTokenizer(), "source fingerprint"),
        (number_source(4, rows=60), NumberTokenizer(name="other"), "tokenizer"),
    ],
)
def test_a_folder_with_a_cache_of_something_else_is_left_alone(tmp_path, source, tokenizer, named):
    build_token_cache(number_source(4, rows=60), NumberTokenizer(), tmp_path / "cache")
    before = {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    with pytest.raises(UserError, match=f"token cache of something else: {named}"):
        build_token_cache(source, tokenizer, tmp_path / "cache")
    assert {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before


@pytest.mark.parametrize("file", ["train-00001.tokens", "train-00001.rows", "validation-00000.bytes"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_missing_and_truncated_files_are_named_and_can_be_mended(tmp_path, file, damage):
    source = number_source(4, rows=60)
    build_token_cache(source, NumberTokenizer(), tmp_path)
    whole = (tmp_path / file).read_bytes()
    if damage == "missing":
        (tmp_path / file).unlink()
        says = f"{file} is missing"
    else:
        (tmp_path / file).write_bytes(whole[:-2])
        says = f"{file} has {len(whole) - 2} bytes instead of {len(whole)}"
    with pytest.raises(UserError, match=says):
        TokenCache(str(tmp_path)).prepare()
    build_token_cache(source, NumberTokenizer(), tmp_path)
    assert (tmp_path / file).read_bytes() == whole
    TokenCache(str(tmp_path)).prepare()


def test_a_file_lost_after_the_start_is_named(numbers):
    _, cache = numbers
    documents = cache.documents(NumberTokenizer())
    next(documents.blocks("train", 0))
    (cache_file,) = [s.location for s in cache.shards("train")][:1]
    open(cache_file, "wb").close()
    with pytest.raises(UserError, match=r"train-00000.tokens cannot be read"):
        next(documents.blocks("train", 0))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_an_index_that_is_none(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(UserError, match=r"index.json: (not the index of a token cache|format 99, expected 1)"):
        TokenCache(str(tmp_path)).prepare()


def test_no_root_no_folder_no_text(tmp_path, numbers):
    with pytest.raises(UserError, match=r"data.root is not set"):
        TokenCache().prepare()
    with pytest.raises(UserError, match=r"nowhere: no token cache there"):
        TokenCache(str(tmp_path / "nowhere")).prepare()
    _, cache = numbers
    with pytest.raises(UserError, match=r"holds no text .* tokenizer.path=.*tokenizer.model"):
        cache.rows(cache.shards("train")[0])


def test_reading_a_cache_tokenizes_nothing(numbers):
    _, cache = numbers
    tokenizer = NumberTokenizer()
    module = DataModule(cache, tokenizer, **OPTIONS)
    module.setup("fit")
    list(islice(iter(module.train_dataloader()), 5))
    assert tokenizer.encoded == 0
