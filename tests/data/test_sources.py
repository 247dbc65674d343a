"""Folders of shards: what is found, what is refused, and how a corpus is named."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from selmodel.data.sources import LocalSource, Shard, fingerprint
from selmodel.errors import UserError


def write(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def write_corpus(folder: Path, shards: int = 3) -> Path:
    for k in range(shards):
        write(folder / f"c4-train.{k:05d}-of-{shards:05d}.json.gz", f"train {k} a", f"train {k} b", f"train {k} c")
    write(folder / "c4-validation.00000-of-00001.json.gz", "validation a", "validation b")
    return folder


def names(source: LocalSource, split: str) -> list[str]:
    return [shard.name for shard in source.shards(split)]


@pytest.mark.parametrize("inside", ["", "en"])
def test_shards_in_the_folder_or_in_en(tmp_path, inside):
    write_corpus(tmp_path / inside)
    source = LocalSource(str(tmp_path))
    source.prepare()
    prefix = "en/" if inside else ""
    assert names(source, "train") == [f"{prefix}c4-train.{k:05d}-of-00003.json.gz" for k in range(3)]
    assert names(source, "validation") == [f"{prefix}c4-validation.00000-of-00001.json.gz"]
    shard = source.shards("train")[1]
    assert list(source.rows(shard)) == [(0, "train 1 a"), (1, "train 1 b"), (2, "train 1 c")]
    assert list(source.rows(shard, 1)) == [(1, "train 1 b"), (2, "train 1 c")]
    assert list(source.rows(shard, 0, 2)) == [(0, "train 1 a"), (2, "train 1 c")]


@pytest.mark.parametrize("ending", [".json.gz", ".jsonl.gz", ".json", ".jsonl"])
def test_plain_and_packed_files(tmp_path, ending):
    write(tmp_path / f"c4-train.0{ending}", "a", "b")
    write(tmp_path / f"c4-validation.0{ending}", "c")
    source = LocalSource(str(tmp_path))
    assert [text for shard in source.shards("train") for _, text in source.rows(shard)] == ["a", "b"]
    assert [text for shard in source.shards("validation") for _, text in source.rows(shard)] == ["c"]


def test_other_names_by_pattern(tmp_path):
    write(tmp_path / "books-1.jsonl", "a")
    write(tmp_path / "held-out.jsonl", "b")
    source = LocalSource(str(tmp_path), train_pattern="books-*", validation_pattern="held-out*")
    assert names(source, "train") == ["books-1.jsonl"]
    assert names(source, "validation") == ["held-out.jsonl"]


def test_root_is_not_set():
    for root in (None, ""):
        with pytest.raises(UserError, match=r"data\.root is not set.*data\.root=DIR"):
            LocalSource(root).prepare()


def test_root_is_missing_or_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"data\.root=.*nowhere: no such folder"):
        LocalSource(str(tmp_path / "nowhere")).prepare()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.root=.*file: not a folder"):
        LocalSource(str(tmp_path / "file")).shards("train")


def test_empty_folder_names_what_is_expected(tmp_path):
    with pytest.raises(UserError) as caught:
        LocalSource(str(tmp_path)).prepare()
    message = str(caught.value)
    assert f"data.root={tmp_path}: no train and no validation shards" in message
    for word in ("c4-train.*", "c4-validation.*", ".json.gz", "found: nothing"):
        assert word in message


def test_folder_without_validation_shards(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "c4-validation.00000-of-00001.json.gz").unlink()
    with pytest.raises(UserError, match=r"no validation shards.*found: c4-train\.00000"):
        LocalSource(str(tmp_path)).shards("train")


@pytest.mark.parametrize("value", ["skp", "", None, True])
def test_on_bad_shard_is_error_or_skip(value):
    with pytest.raises(UserError, match=r"data\.on_bad_shard=.*'error' or 'skip'"):
        LocalSource("x", on_bad_shard=value)


def test_unknown_split(tmp_path):
    with pytest.raises(ValueError, match="test"):
        LocalSource(str(write_corpus(tmp_path))).shards("test")


def test_file_both_plain_and_packed_would_be_read_twice(tmp_path):
    write_corpus(tmp_path)
    write(tmp_path / "c4-train.00001-of-00003.json", "again")
    with pytest.raises(UserError, match=r"c4-train\.00001-of-00003\.json .*read twice"):
        LocalSource(str(tmp_path)).prepare()


def test_broken_link_is_named_not_left_out(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "c4-train.9.json.gz").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"c4-train\.9\.json\.gz: a link to .*gone"):
        LocalSource(str(tmp_path)).prepare()


def test_files_left_out_and_missing_shards_are_logged(tmp_path, caplog):
    write_corpus(tmp_path)
    (tmp_path / "c4-train.00001-of-00003.json.gz").rename(tmp_path / "c4-train.00001-of-00003.json.gz.part")
    LocalSource(str(tmp_path)).prepare()
    assert "c4-train.00001-of-00003.json.gz.part is not read" in caplog.text
    assert "holds 2 of the 3 train shards" in caplog.text


def test_bad_shard_and_row_through_a_source(tmp_path):
    write_corpus(tmp_path)
    broken = tmp_path / "c4-train.00001-of-00003.json.gz"
    broken.write_bytes(broken.read_bytes()[:-9])
    (tmp_path / "c4-train.00002-of-00003.json.gz").write_bytes(
        gzip.compress(b'{"text": "x"}\n{"body": "y"}\n{"text": "z"}')
    )

    strict = LocalSource(str(tmp_path))
    shards = strict.shards("train")
    with pytest.raises(UserError, match=r"c4-train\.00001-of-00003\.json\.gz, row"):
        list(strict.rows(shards[1]))
    with pytest.raises(UserError, match=r"c4-train\.00002-of-00003\.json\.gz, row 1: no 'text'"):
        list(strict.rows(shards[2]))

    lenient = LocalSource(str(tmp_path), on_bad_shard="skip")
    for shard in shards[:2]:
        list(lenient.rows(shard))
    assert list(lenient.rows(shards[2])) == [(0, "x"), (2, "z")]
    assert lenient.skipped.shards == {shards[1].name: 1}
    assert lenient.skipped.rows == {shards[2].name: 1}


def test_description_and_fingerprint(tmp_path):
    here = LocalSource(str(write_corpus(tmp_path / "here")))
    there = LocalSource(str(write_corpus(tmp_path / "there" / "en").parent))
    assert here.describe() | {"root": None, "fingerprint": None} == {
        "kind": "local",
        "root": None,
        "train_files": 3,
        "validation_files": 1,
        "fingerprint": None,
    }
    assert here.describe()["root"] == str(tmp_path / "here")
    assert here.describe()["fingerprint"] == there.describe()["fingerprint"]
    json.dumps(here.describe())  # plain types

    write(tmp_path / "here" / "c4-train.00000-of-00003.json.gz", *map(str, range(100)))
    assert LocalSource(str(tmp_path / "here")).describe()["fingerprint"] != there.describe()["fingerprint"]


def test_fingerprint_depends_on_names_sizes_and_splits():
    def of(**splits):
        return fingerprint(
            {split: [Shard(n, "/anywhere", size) for n, size in files] for split, files in splits.items()}
        )

    base = of(train=[("a", 1), ("b", 2)], validation=[("c", 3)])
    assert base == of(train=[("b", 2), ("x/a", 1)], validation=[("c", 3)])
    assert len(base) == 16
    others = [
        of(train=[("a", 1), ("b", 3)], validation=[("c", 3)]),
        of(train=[("a", 1), ("d", 2)], validation=[("c", 3)]),
        of(train=[("a", 1)], validation=[("b", 2), ("c", 3)]),
        of(train=[("a", 2), ("b", 1)], validation=[("c", 3)]),
    ]
    assert len({base, *others}) == 5


def test_a_source_pickles_and_reads_elsewhere(tmp_path):
    source = LocalSource(str(write_corpus(tmp_path)))
    source.prepare()
    copy = pickle.loads(pickle.dumps(source))
    assert copy.shards("train") == source.shards("train")
    assert list(copy.rows(copy.shards("train")[0])) == list(source.rows(source.shards("train")[0]))
    assert copy.describe() == source.describe()
