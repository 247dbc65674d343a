"""Training a tokenizer: bounded, repeatable, nothing dropped in silence, one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
from texts import prose

from selmodel.data.sources import LocalSource, Shard
from selmodel.data.tokenizer import SentencePieceTokenizer, load_or_train
from selmodel.data.tokenizer_training import (
    LINE_BYTES,
    report_path,
    sample_texts,
    split_lines,
    train_sentencepiece,
)
from selmodel.errors import UserError

VOCAB = 500


class ListSource:
    """Shards of documents in memory; remembers how far each was read."""

    name = "list"

    def __init__(self, shards: list[list[str]]):
        self.texts = shards
        self.read = [0] * len(shards)

    def shards(self, split: str) -> list[Shard]:
        return [Shard(str(k), str(k)) for k in range(len(self.texts))]

    def rows(self, shard: Shard, start: int = 0, step: int = 1):
        for row, text in enumerate(self.texts[int(shard.name)]):
            self.read[int(shard.name)] += 1
            yield row, text


# --- the sample ------------------------------------------------------------------------------------------------------


def test_sample_takes_turns_among_shards_and_stops_at_the_bound():
    source = ListSource([[f"{k}{row}" + "x" * 98 for row in range(10)] for k in range(3)])
    texts = list(sample_texts(source, sample_bytes=650))
    assert len(texts) == 7  # documents of 100 bytes; the seventh reaches 650
    assert [len({text[0] for text in texts[i : i + 3]}) for i in (0, 3)] == [3, 3]
    assert [text[1] for text in texts] == list("0001112")
    assert sum(source.read) == 7


def test_sample_counts_bytes_not_characters():
    source = ListSource([["é" * 50] * 10])
    assert len(list(sample_texts(source, sample_bytes=250))) == 3


def test_sample_of_a_small_corpus_is_all_of_it():
    source = ListSource([["a", "b", "c"], [], ["d"], ["e", "f"]])
    assert sorted(sample_texts(source, sample_bytes=10**6)) == list("abcdef")
    assert list(sample_texts(ListSource([[], []]), sample_bytes=100)) == []


def test_sample_of_many_shards_opens_few_at_once():
    source = ListSource([[f"{k} {row}" for row in range(100)] for k in range(200)])
    texts = list(sample_texts(source, sample_bytes=500))
    assert sum(read > 0 for read in source.read) == 16
    assert len(set(texts)) == len(texts)
    all_of_them = ListSource(source.texts)
    assert len(list(sample_texts(all_of_them, sample_bytes=10**9))) == 20_000
    assert all_of_them.read == [100] * 200


def test_sample_depends_on_the_seed_alone():
    def of(seed):
        return list(
            sample_texts(
                ListSource([[f"{k} {row}" for row in range(50)] for k in range(40)]), sample_bytes=900, seed=seed
            )
        )

    assert of(0) == of(0)
    assert of(0) != of(1)


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [7, 10, 50])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "short",
        "a b c d e f g h i j",
        "ab\ncd ef\ngh ij kl",
        "no_space_at_all" * 5,
        "é" * 40,
        "\U0001f600" * 20,
        " " * 60,
        "\n" * 60,
    ],
)
def test_lines_join_to_the_text_within_the_limit(text, limit):
    parts = list(split_lines(text, limit))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= limit for part in parts)
    assert all(parts) or text == ""


def test_lines_are_cut_before_line_ends_then_spaces_then_anywhere():
    assert list(split_lines("aa bb\ncc dd ee", 10)) == ["aa bb", "\ncc dd ee"]
    assert list(split_lines("aa bb cc dd ee", 10)) == ["aa bb cc", " dd ee"]
    assert list(split_lines("aaaaaaaaaaaabb", 10)) == ["aaaaaaaaaa", "aabb"]
    assert list(split_lines("aaaaaaaaa\U0001f600", 10)) == ["aaaaaaaaa", "\U0001f600"]


# --- training --------------------------------------------------------------------------------------------------------


def test_model_and_report(tmp_path):
    texts = list(prose(200))
    report = train_sentencepiece(texts, tmp_path / "deep" / "t.model", vocab_size=VOCAB)
    path = tmp_path / "deep" / "t.model"
    assert SentencePieceTokenizer(path).vocab_size == VOCAB
    assert report.hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert report.documents == 200
    assert report.sample_bytes == sum(len(text.encode()) for text in texts)
    assert (report.skipped_bytes, report.split_documents) == (0, 0)
    written = json.loads(report_path(path).read_text())
    assert written["hash"] == report.hash
    assert sorted(os.listdir(tmp_path / "deep")) == ["t.model", "t.model.json"]


def test_same_texts_same_file_and_other_texts_another(tmp_path):
    def train(name, seed):
        train_sentencepiece(prose(200, seed=seed), tmp_path / name, vocab_size=VOCAB)
        return (tmp_path / name).read_bytes()

    assert train("a", 0) == train("b", 0)
    assert train("a", 0) != train("c", 1)


def test_training_is_the_same_in_another_process(tmp_path):
    """Also with other environment settings for threads."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from texts import prose;"
        "from selmodel.data.tokenizer_training import train_sentencepiece;"
        f"print(train_sentencepiece(prose(200), sys.argv[2], vocab_size={VOCAB}).hash)"
    )
    arguments = [sys.executable, "-c", code, os.path.dirname(__file__), str(tmp_path / "t.model")]
    done = subprocess.run(
        arguments, env=os.environ | {"OMP_NUM_THREADS": "7", "PYTHONHASHSEED": "5"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == train_sentencepiece(prose(200), tmp_path / "u.model", vocab_size=VOCAB).hash


def test_only_the_first_bytes_are_read(tmp_path):
    read = []

    def endless():
        for text in iter(lambda: next(documents), None):
            read.append(text)
            yield text

    documents = prose(10**9)
    report = train_sentencepiece(endless(), tmp_path / "t.model", vocab_size=VOCAB, sample_bytes=60_000)
    assert 59_997 <= report.sample_bytes <= 60_000
    assert sum(len(text.encode()) for text in read[:-1]) < 60_000
    assert report.documents == len(read)


def trainers_log(capfd, texts, path, monkeypatch, **options) -> str:
    """What the trainer itself says it read, which is the oracle for what was dropped."""
    import sentencepiece

    train = sentencepiece.SentencePieceTrainer.train
    monkeypatch.setattr(
        sentencepiece.SentencePieceTrainer, "train", lambda **given: train(**given | {"minloglevel": 0})
    )
    capfd.readouterr()
    train_sentencepiece(texts, path, **options)
    return capfd.readouterr().err


def test_long_documents_are_split_not_dropped(tmp_path, capfd, monkeypatch):
    """The trainer says so itself: it skips no line, and counts every character but the line ends of its lines."""
    long = ["".join(prose(60, seed=k)) for k in range(5)] + ["x" * 20_000, "é" * 9_000]
    assert all(len(text.encode()) > LINE_BYTES for text in long)
    path = tmp_path / "t.model"
    log = trainers_log(capfd, long, path, monkeypatch, vocab_size=VOCAB)
    assert "skipped" not in log.lower()
    lines = [line for text in long for line in split_lines(text)]
    assert f"Loaded all {len(lines)} sentences" in log
    report = json.loads(report_path(path).read_text())
    assert report["split_documents"] == 7
    assert report["skipped_bytes"] == 0


def test_reserved_characters_do_not_drop_their_line(tmp_path, capfd, monkeypatch):
    texts = list(prose(300))
    texts[5] += "\u2585"
    texts[6] = "\u2581" + texts[6] + "\x00\x00"
    path = tmp_path / "t.model"
    log = trainers_log(capfd, texts, path, monkeypatch, vocab_size=VOCAB)
    assert "skipped" not in log.lower()
    assert "null" not in log.lower()
    assert re.search(r"Loaded all 3\d\d sentences", log)
    assert json.loads(report_path(path).read_text())["skipped_bytes"] == 3 + 3 + 1 + 1


def test_more_than_a_hundredth_skipped_is_an_error(tmp_path):
    texts = list(prose(100))
    total = sum(len(text.encode()) for text in texts)
    path = tmp_path / "t.model"
    train_sentencepiece([*texts, "\x00" * (total // 101)], path, vocab_size=400)
    with pytest.raises(UserError, match=r"of the training sample .*more than 1%"):
        train_sentencepiece([*texts, "\x00" * (total // 98)], tmp_path / "u.model", vocab_size=400)
    assert not (tmp_path / "u.model").exists()


def test_too_many_pieces_says_what_is_possible(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size=8192 .*at most (\d+)") as caught:
        train_sentencepiece(prose(50), tmp_path / "t.model", vocab_size=8192)
    possible = int(re.search(r"at most (\d+)", str(caught.value))[1])
    train_sentencepiece(prose(50), tmp_path / "t.model", vocab_size=possible)
    assert SentencePieceTokenizer(tmp_path / "t.model").vocab_size == possible


def test_too_few_pieces_says_what_is_needed(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size=262 .*at least (\d+)") as caught:
        train_sentencepiece(prose(50), tmp_path / "t.model", vocab_size=262)
    needed = int(re.search(r"at least (\d+)", str(caught.value))[1])
    train_sentencepiece(prose(50), tmp_path / "t.model", vocab_size=needed)
    assert SentencePieceTokenizer(tmp_path / "t.model").vocab_size == needed


@pytest.mark.parametrize("size", [0, -5, 2.5, 259])
def test_impossible_number_of_pieces(tmp_path, size):
    with pytest.raises(UserError, match=rf"tokenizer\.vocab_size={size}"):
        train_sentencepiece(prose(50), tmp_path / "t.model", vocab_size=size)


def test_impossible_sample(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.sample_bytes=0"):
        train_sentencepiece(prose(50), tmp_path / "t.model", sample_bytes=0)


@pytest.mark.parametrize("texts", [[], [""], ["", "\n"]])
def test_no_text(tmp_path, texts):
    with pytest.raises(UserError, match="tokenizer"):
        train_sentencepiece(texts, tmp_path / "t.model", vocab_size=VOCAB)
    assert not (tmp_path / "t.model").exists()


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/t\.model.*cannot be written"):
        train_sentencepiece(prose(100), tmp_path / "file" / "t.model", vocab_size=400)


# --- several processes -----------------------------------------------------------------------------------------------


def make(root, cache, start, results):
    import logging

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("selmodel").addHandler(handler)
    logging.getLogger("selmodel").setLevel("INFO")
    start.wait()
    tokenizer = load_or_train(None, LocalSource(root), vocab_size=1400, cache_dir=cache, sample_bytes=400_000)
    results.put((tokenizer.hash, sum("training" in message for message in messages)))


@pytest.mark.slow
def test_one_process_trains_the_others_wait(tmp_path):
    rows = [json.dumps({"text": text}) for text in prose(3000)]
    for split in ("train", "validation"):
        (tmp_path / f"c4-{split}.0.json").write_text("\n".join(rows))
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [
        context.Process(target=make, args=(str(tmp_path), str(tmp_path / "cache"), start, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    with contextlib.suppress(RuntimeError):
        start.set()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert len({digest for digest, _ in got}) == 1
    assert sum(trained for _, trained in got) == 1
