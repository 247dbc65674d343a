"""The embedded corpus: whole, in C4's layout, the same for the same packages, with disjoint splits."""

from __future__ import annotations

import gc
import gzip
import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from selmodel.data import docstrings
from selmodel.data.docstrings import DocstringsSource
from selmodel.data.sources import LocalSource
from selmodel.errors import UserError

SUBJECTS = ["the reader", "a writer", "this function", "the other class", "every module", "the old method"]
VERBS = ["returns", "keeps", "looks at", "forgets", "orders", "counts", "compares", "writes down"]
OBJECTS = ["all numbers", "the first value", "some files", "a list of names", "the last result", "its own arguments"]


def sentence(generator: random.Random) -> str:
    parts = [generator.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ["before", "after", "while"], SUBJECTS)]
    return f"{' '.join(parts)} {generator.choice(VERBS)} {generator.choice(OBJECTS)} again.".capitalize()


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Path:
    """A folder of Python files that stand for the installed packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    generator = random.Random(0)
    for k in range(30):
        functions = [
            f'def f{i}():\n    """{sentence(generator)} {sentence(generator)}\n\n    {sentence(generator)} '
            f'{sentence(generator)}\n    """\n'
            for i in range(20)
        ]
        (folder / f"module{k:02d}.py").write_text("\n".join(functions))
    (folder / "broken.py").write_text('"""' + sentence(generator) * 9 + '"""\ndef f(:')
    (folder / "code.py").write_text("x = 1\n" * 500 + '"""' + sentence(generator) * 3 + '"""')

    def files():
        for path in sorted(folder.glob("*.py")):
            yield f"package{int(path.stem[-1], 36) % 3}", "1.0", path
        yield "package0", "1.0", folder / "gone.py"

    monkeypatch.setattr(docstrings, "python_files", files)
    return folder


def texts(source, split: str) -> list[str]:
    return [text for shard in source.shards(split) for _, text in source.rows(shard)]


def test_layout_and_manifest(packages, tmp_path):
    source = DocstringsSource(cache_dir=str(tmp_path / "cache"))
    source.prepare()
    root = tmp_path / "cache" / "docstrings-v1"
    assert sorted(os.listdir(root)) == ["en", "manifest.json"]
    assert len(source.shards("train")) == 16
    assert len(source.shards("validation")) == 2
    train, validation = texts(source, "train"), texts(source, "validation")
    manifest = source.manifest()
    for split, documents in (("train", train), ("validation", validation)):
        assert manifest[split]["documents"] == len(documents) > 10
        assert manifest[split]["bytes"] == sum(len(text.encode()) for text in documents)
    assert manifest["packages"] == {f"package{k}": "1.0" for k in range(3)}
    assert not set(train) & set(validation)
    # C4's layout: another source reads the same folder.
    assert texts(LocalSource(str(root)), "validation") == validation


def test_no_sentence_twice(packages, tmp_path):
    (packages / "copy.py").write_text((packages / "module00.py").read_text())
    source = DocstringsSource(cache_dir=str(tmp_path / "cache"))
    blocks = [
        block for split in ("train", "validation") for text in texts(source, split) for block in text.split("\n\n")
    ]
    assert len(blocks) == len(set(blocks)) > 500


def test_same_packages_same_corpus_in_any_order_found(packages, tmp_path, monkeypatch):
    first = DocstringsSource(cache_dir=str(tmp_path / "a"))
    again = DocstringsSource(cache_dir=str(tmp_path / "b"))
    assert first.describe() | {"root": ""} == again.describe() | {"root": ""}
    names = [shard.name for split in ("train", "validation") for shard in first.shards(split)]
    assert all((first.root / name).read_bytes() == (again.root / name).read_bytes() for name in names)

    found = list(docstrings.python_files())
    monkeypatch.setattr(docstrings, "python_files", lambda: reversed(found))
    backwards = DocstringsSource(cache_dir=str(tmp_path / "c"))
    assert texts(backwards, "train") == texts(first, "train")  # no sentence of these packages occurs twice

    monkeypatch.setattr(docstrings, "python_files", lambda: iter(found[:-5]))
    assert DocstringsSource(cache_dir=str(tmp_path / "d")).describe()["fingerprint"] != first.describe()["fingerprint"]


def test_documents_are_shuffled(packages, tmp_path):
    """Neighbours in a file do not stay neighbours: the order is that of a hash."""
    source = DocstringsSource(cache_dir=str(tmp_path / "cache"))
    documents, _ = docstrings.collect()
    place = {text: k for k, text in enumerate(documents)}
    order = [place[text] for text in texts(source, "train")]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < len(order) / 20


def test_written_once(packages, tmp_path, monkeypatch):
    first = DocstringsSource(cache_dir=str(tmp_path / "cache"))
    first.prepare()
    monkeypatch.setattr(docstrings, "collect", lambda: pytest.fail("built again"))
    again = DocstringsSource(cache_dir=str(tmp_path / "cache"))
    again.prepare()
    assert again.describe() == first.describe()


def test_interrupted_build_leaves_nothing_and_the_next_one_cleans_up(packages, tmp_path, monkeypatch):
    source = DocstringsSource(cache_dir=str(tmp_path / "cache"))
    compress = gzip.compress
    calls = []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return compress(*args, **options)

    monkeypatch.setattr(gzip, "compress", failing)
    with pytest.raises(KeyboardInterrupt):
        source.prepare()
    assert os.listdir(source.root.parent) == [".docstrings-v1.lock"]
    left = source.root.with_name(".docstrings-v1.99999")  # as of a process that was killed
    (left / "en").mkdir(parents=True)
    source.prepare()
    assert source.manifest()["train"]["documents"] == len(texts(source, "train"))
    assert not left.exists()


def test_garbage_collection_is_on_again(packages, monkeypatch):
    assert gc.isenabled()
    docstrings.collect()
    assert gc.isenabled()
    monkeypatch.setattr(docstrings, "_documents", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        docstrings.collect()
    assert gc.isenabled()


def test_no_documentation_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "python_files", lambda: iter(()))
    with pytest.raises(UserError, match=r"data=docstrings: no documentation .*data=local data\.root=DIR"):
        DocstringsSource(cache_dir=str(tmp_path)).prepare()


def test_folder_without_manifest_is_named(packages, tmp_path):
    source = DocstringsSource(cache_dir=str(tmp_path))
    (source.root / "en").mkdir(parents=True)
    with pytest.raises(UserError, match=r"docstrings-v1: cannot be written .*Remove it"):
        source.prepare()


def test_files_of_installed_packages():
    """Packages come sorted and the standard library last; tests and this project itself are left out."""
    found = list(docstrings.python_files())
    names = [name for name, _, _ in found]
    assert {"torch", "numpy", "python"} <= set(names)
    assert "selmodel" not in names
    assert names == sorted(name for name in names if name != "python") + ["python"] * names.count("python")
    assert not any({"tests", "test", "site-packages"} & set(path.parts) for name, _, path in found if name == "python")


@pytest.mark.slow
def test_corpus_of_the_packages_installed_here(tmp_path):
    begin = time.monotonic()
    source = DocstringsSource(cache_dir=str(tmp_path))
    source.prepare()
    assert time.monotonic() - begin < 60
    manifest = source.manifest()
    assert manifest["train"]["bytes"] > 4e6
    assert manifest["validation"]["bytes"] > 2e5
    assert "torch" in manifest["packages"]
    train, validation = texts(source, "train"), texts(source, "validation")
    assert not set(train) & set(validation)
    sizes = [sum(1 for _ in source.rows(shard)) for shard in source.shards("train")]
    assert max(sizes) - min(sizes) <= 1
    # Prose: nine characters of ten are letters, spaces, or the marks of sentences.
    sample = "".join(validation)
    assert sum(c.isalpha() or c in " .,;:'\n" for c in sample) > 0.9 * len(sample)
    assert json.dumps(source.describe())
