"""Where text comes from: a source gives shards, a shard gives numbered rows.

Everything above this file (streams, tokenizer training) knows a source by three questions only: which shards
has a split, which rows has a shard, and how is this corpus named in the records of a run.
"""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from selmodel.data.reader import SkipCounter, check_on_bad_shard, read_rows
from selmodel.data.transfer import Retries, read_blocks
from selmodel.errors import UserError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
SUFFIXES = (".json.gz", ".jsonl.gz", ".json", ".jsonl")
NAMED_COUNT = re.compile(r"-of-(\d+)\.")  # c4-train.00003-of-01024.json.gz says how many there should be


@dataclass(frozen=True)
class Shard:
    """One file of a corpus.

    name: short and stable, names the file in messages ("en/c4-train.00003-of-01024.json.gz").
    location: path or URL. size: bytes of the file as it lies there, or None where unknown.
    """

    name: str
    location: str
    size: int | None = None


class Source(ABC):
    """A corpus of text in JSON lines. Pickles, so that worker processes can read it.

    on_bad_shard: "error" stops at a file that cannot be unpacked or a row without usable text; "skip" leaves
    it out, logs and counts it in `skipped`. What fails on the way (no connection) is an error with either: the
    order of a run must not depend on the network's weather.
    """

    name: str

    def __init__(self, *, on_bad_shard: str = "error", retries: Retries | None = None):
        self.on_bad_shard = check_on_bad_shard(on_bad_shard)
        self.retries = retries or Retries()
        self.skipped = SkipCounter()

    @abstractmethod
    def prepare(self) -> None:
        """Slow work done once per machine, before anything is read. Idempotent; safe in several processes."""

    @abstractmethod
    def shards(self, split: str) -> list[Shard]:
        """Shards of "train" or "validation", sorted by name. UserError where there are none."""

    @abstractmethod
    def describe(self) -> dict:
        """What a run records of its corpus: kind, place, number of files, fingerprint; plain types only."""

    def headers(self, shard: Shard) -> Mapping[str, str]:
        """HTTP headers with which `shard` is asked for."""
        return {}

    def open_shard(self, shard: Shard) -> Iterator[bytes]:
        """The bytes of a shard as they lie there, from the first on, wherever that is. Raises TransferError."""
        return read_blocks(shard.location, size=shard.size, retries=self.retries, headers=self.headers(shard))

    def rows(self, shard: Shard, start: int = 0, step: int = 1) -> Iterator[tuple[int, str]]:
        """Yield (row, text) for rows start, start + step, ...; the others are not parsed.

        Rows are physical lines counted from 0; text is never empty and always encodes to UTF-8.
        Raises UserError naming shard and row.
        """
        return read_rows(
            shard.name,
            shard.location,
            lambda: self.open_shard(shard),
            start,
            step,
            on_bad_shard=self.on_bad_shard,
            skipped=self.skipped,
            attempts=self.retries.attempts,
            backoff=self.retries.backoff,
        )


class FileSource(Source):
    """A source whose shards are files that are listed once."""

    def __init__(self, *, on_bad_shard: str = "error", retries: Retries | None = None):
        super().__init__(on_bad_shard=on_bad_shard, retries=retries)
        self._listed: dict[str, list[Shard]] | None = None

    @abstractmethod
    def _list(self) -> dict[str, list[Shard]]:
        """The files by split, sorted by name. Called once. UserError where there are none."""

    def _files(self) -> dict[str, list[Shard]]:
        if self._listed is None:
            self._listed = self._list()
        return self._listed

    def prepare(self) -> None:
        """List the files. UserError where they cannot be had."""
        self._files()

    def shards(self, split: str) -> list[Shard]:
        return list(self._files()[check_split(split)])

    def describe(self) -> dict:
        files = self._files()
        return {
            "kind": self.name,
            "train_files": len(files["train"]),
            "validation_files": len(files["validation"]),
            "fingerprint": fingerprint(files),
        }


def check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {SPLITS}")
    return split


def fingerprint(shards: Mapping[str, list[Shard]]) -> str:
    """16 hexadecimal digits that name a corpus: a hash of file names and sizes of each split.

    Folders do not enter, so the same files have the same fingerprint on the Hub, on a mirror and on a disk.
    """
    digest = hashlib.sha256()
    for split in SPLITS:
        for name, size in sorted((PurePosixPath(shard.name).name, shard.size) for shard in shards.get(split, [])):
            digest.update(f"{split} {name} {size}\n".encode())
    return digest.hexdigest()[:16]


def list_folder(
    root: Path, patterns: Mapping[str, str], option: str, *, subfolder: str = "en"
) -> dict[str, list[Shard]]:
    """Shards by split in `root` or, where it has none, in its `subfolder`.

    Raises UserError naming `option` where a split has none.
    """
    try:
        if not root.exists():
            raise UserError(
                f"{option}={root}: no such folder. Expected a folder with shards like c4-train.00000-of-00016.json.gz"
            )
        if not root.is_dir():
            raise UserError(f"{option}={root}: not a folder. Give the folder that holds the shards")
        for folder in (root, root / subfolder):
            found = {split: _matching(root, folder, pattern) for split, pattern in patterns.items()}
            if any(found.values()):
                break
        present = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise UserError(f"{option}={root}: cannot be read ({error.strerror}). Check its permissions") from error
    if missing := [split for split in SPLITS if not found[split]]:
        raise UserError(
            f"{option}={root}: no {' and no '.join(missing)} shards. Expected files named "
            f"{' and '.join(patterns[split] for split in missing)}, ending in {', '.join(SUFFIXES)}, in the folder "
            f"or in its subfolder {subfolder}; found: {', '.join(present[:5]) or 'nothing'}"
            f"{' ...' if len(present) > 5 else ''}"
        )
    for split in SPLITS:
        named = NAMED_COUNT.search(found[split][0].name)
        if named and int(named[1]) > len(found[split]):
            logger.warning("%s=%s holds %d of the %d %s shards", option, root, len(found[split]), int(named[1]), split)
    return found


def _matching(root: Path, folder: Path, pattern: str) -> list[Shard]:
    shards = []
    for path in folder.glob(pattern):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            continue
        if not path.name.endswith(SUFFIXES):
            logger.warning("%s is not read: its name does not end in %s", path, ", ".join(SUFFIXES))
            continue
        if not path.exists():
            raise UserError(f"{path}: a link to {path.readlink()}, which is missing. Restore it or remove the link")
        shards.append(Shard(name, str(path), path.stat().st_size))
    names = {shard.name for shard in shards}
    for name in sorted(names):
        if name + ".gz" in names:
            raise UserError(f"{folder}: {name} lies there both plain and as .gz, and would be read twice. Remove one")
    return sorted(shards, key=lambda shard: shard.name)


class LocalSource(FileSource):
    """A folder in C4's layout: JSON lines with `text`, plain or gzipped.

    root: the folder that holds the shards, or whose subfolder `en` does.
    train_pattern, validation_pattern: file name patterns of the two splits.
    on_bad_shard: "error" or "skip", see Source.
    """

    name = "local"

    def __init__(
        self,
        root: str | None = None,
        *,
        train_pattern: str = "c4-train.*",
        validation_pattern: str = "c4-validation.*",
        on_bad_shard: str = "error",
    ):
        super().__init__(on_bad_shard=on_bad_shard)
        self.root = root
        self.patterns = {"train": train_pattern, "validation": validation_pattern}

    def describe(self) -> dict:
        return super().describe() | {"root": str(self.root)}

    def _list(self) -> dict[str, list[Shard]]:
        if not self.root:
            raise UserError(
                "data.root is not set: data=local reads shards from a folder. Set data.root=DIR, or use data=docstrings"
            )
        return list_folder(Path(self.root).expanduser().absolute(), self.patterns, "data.root")
