"""The embedded corpus: English prose from the documentation of the Python packages installed here.

It needs no network and no download, so that the whole pipeline runs anywhere. It is written once, in C4's layout;
what it holds depends on the installed packages, and its fingerprint on what it holds.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from selmodel.data.caching import one_process, write_atomically
from selmodel.data.prose import docstrings, prose_blocks
from selmodel.data.sources import FileSource, Shard, list_folder
from selmodel.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = 1  # counts up when the same packages would give another corpus
SEED = 0
MIN_WORDS = 15  # in a document
SHARDS = {"train": 16, "validation": 2}
VALIDATION_SHARE = 16  # one document in so many, by the hash of its text
DENSITY = 0.2  # share of a file in triple quotes below which parsing it is not worth the time
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "testing", "idle_test", "__pycache__"})


class DocstringsSource(FileSource):
    """English prose from the documentation strings of the installed packages and the standard library.

    cache_dir: the corpus is written to its subfolder docstrings-v1 once, and read from there ever after: remove
    that folder to build it anew, from the packages installed then.
    on_bad_shard: "error" or "skip", see Source.
    """

    name = "docstrings"

    def __init__(self, *, cache_dir: str, on_bad_shard: str = "error"):
        super().__init__(on_bad_shard=on_bad_shard)
        self.root = Path(cache_dir).expanduser().absolute() / f"docstrings-v{FORMAT}"

    def prepare(self) -> None:
        """Write the corpus unless it is there: seconds, once per machine."""
        if self._manifest_path.exists():
            return
        with one_process(self.root, "the docstrings corpus"):
            if not self._manifest_path.exists():
                build(self.root)

    def manifest(self) -> dict:
        """Counts and sizes by split, Python and package versions, and the hash of all text."""
        self.prepare()
        try:
            return json.loads(self._manifest_path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self._manifest_path}: not readable ({error}). Remove {self.root} to build it anew"
            ) from error

    def describe(self) -> dict:
        manifest = self.manifest()
        return super().describe() | {
            "root": str(self.root),
            "documents": manifest["train"]["documents"] + manifest["validation"]["documents"],
            "fingerprint": manifest["content"][:16],
        }

    @property
    def _manifest_path(self) -> Path:
        return self.root / "manifest.json"

    def _list(self) -> dict[str, list[Shard]]:
        self.prepare()
        patterns = {split: f"c4-{split}.*.json.gz" for split in SHARDS}
        return list_folder(self.root, patterns, "the docstrings corpus")


def build(root: Path) -> dict:
    """Write the corpus to the folder `root`, which appears whole or not at all; return its manifest."""
    begin = time.monotonic()
    logger.info("building the docstrings corpus in %s from the installed packages", root)
    documents, packages = collect()
    if not documents:
        raise UserError(
            "data=docstrings: no documentation found in the installed packages. Use data=local data.root=DIR"
        )
    # In the order of a hash: shuffled, and the same whatever the order in which packages were found.
    order = sorted((_digest(text), text) for text in documents)
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for digest, text in order:
        splits["validation" if digest[-1] % VALIDATION_SHARE == 0 else "train"].append(text)
    content = hashlib.sha256()
    manifest: dict = {"format": FORMAT, "seed": SEED}
    draft = root.with_name(f".{root.name}.{os.getpid()}")
    for left in root.parent.glob(f".{root.name}.*[0-9]"):  # of a process that died; the lock is ours
        shutil.rmtree(left)
    try:
        for split, texts in splits.items():
            for text in texts:
                content.update(f"{split}\0{text}\0".encode())
            for k in range(SHARDS[split]):
                name = f"c4-{split}.{k:05d}-of-{SHARDS[split]:05d}.json.gz"
                lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts[k :: SHARDS[split]]]
                data = "".join(line + "\n" for line in lines).encode()
                write_atomically(draft / "en" / name, gzip.compress(data, 6, mtime=0))
            manifest[split] = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        manifest |= {"content": content.hexdigest(), "python": platform.python_version(), "packages": packages}
        write_atomically(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
        draft.rename(root)
    except OSError as error:
        raise UserError(
            f"{root}: cannot be written ({error.strerror or error}). Remove it, or set another cache_dir"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    logger.info(
        "docstrings corpus built in %.0f s: %d documents, %.1f MB of text for training, %.1f MB for validation",
        time.monotonic() - begin,
        len(documents),
        manifest["train"]["bytes"] / 1e6,
        manifest["validation"]["bytes"] / 1e6,
    )
    return manifest


def collect() -> tuple[list[str], dict[str, str]]:
    """(documents, {package: version} of those that gave any). No block of text occurs twice."""
    seen: set[bytes] = set()
    documents: list[str] = []
    packages: dict[str, str] = {}
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are many objects and no cycles: the collector would take half of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, on other people's code
            for package, version, path in python_files():
                found = list(_documents(path, seen))
                if found:
                    packages[package] = version
                    documents += found
    finally:
        if collecting:
            gc.enable()
    return documents, packages


def _documents(path: Path, seen: set[bytes]) -> Iterator[str]:
    try:
        code = path.read_bytes()
    except OSError:
        return
    if sum(map(len, code.split(b'"""')[1::2])) < DENSITY * len(code):
        return
    for docstring in docstrings(code):
        fresh = []
        for block in prose_blocks(docstring):
            digest = _digest(block)
            if digest is not None and digest not in seen:
                seen.add(digest)
                fresh.append(block)
        if sum(len(block.split()) for block in fresh) >= MIN_WORDS:
            yield "\n\n".join(fresh)


def python_files() -> Iterator[tuple[str, str, Path]]:
    """(package, version, file) of all Python files of the installed packages, sorted, then the standard library's."""
    installed = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name and name != "selmodel":
            installed.setdefault(name, distribution)  # the first on the path is the one that is imported
    for name, distribution in sorted(installed.items()):
        version = distribution.version
        for file in sorted(distribution.files or []):
            if file.suffix == ".py" and ".." not in file.parts and not SKIPPED_FOLDERS.intersection(file.parts):
                yield name, version, Path(distribution.locate_file(file))
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for file in sorted(files):
            if file.endswith(".py"):
                yield "python", platform.python_version(), Path(folder, file)


def _digest(text: str) -> bytes | None:
    """Orders, splits and deduplicates; None for text that UTF-8 cannot hold."""
    try:
        return hashlib.sha256(f"{SEED}\0{text}".encode()).digest()
    except UnicodeEncodeError:
        return None
