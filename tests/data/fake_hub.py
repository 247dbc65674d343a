"""The part of the Hugging Face Hub that serves one data set in C4's layout."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

from http_server import FaultyServer

REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"  # the default of C4Source
RESOLVE = f"/datasets/allenai/c4/resolve/{REVISION}"
API = "/api/datasets/allenai/c4"
JSON = {"Content-Type": "application/json"}
ROWS = 200
COUNTS = {"train": 3, "validation": 1}


def shard_name(split: str, k: int) -> str:
    return f"en/c4-{split}.{k:05d}-of-{COUNTS[split]:05d}.json.gz"


def row_text(split: str, k: int, row: int) -> str:
    return f"{split} {k} {row} " + str(row**5) * 20


def shard_files() -> dict[str, bytes]:
    """Content by name of a small C4: three shards of 200 rows for training, one for validation."""
    return {
        shard_name(split, k): gzip.compress(
            b"".join(json.dumps({"text": row_text(split, k, row)}).encode() + b"\n" for row in range(ROWS)), mtime=0
        )
        for split, count in COUNTS.items()
        for k in range(count)
    }


@dataclass
class FakeHub(FaultyServer):
    """Answers what listing and reading `allenai/c4` at REVISION asks; everything else is 404."""

    def __post_init__(self) -> None:
        self.files = {f"{RESOLVE}/{name}": body for name, body in shard_files().items()}
        self.files[f"{RESOLVE}/README.md"] = b"---\nconfigs: nonsense\n---\n"  # must not be looked at
        self.files[f"{RESOLVE}/c4.py"] = b"raise SystemExit('a script of the repository ran')"

    def answer(self, method: str, path: str, headers: dict, body: bytes):
        path = path.split("?")[0]
        if path == f"{API}/revision/{REVISION}":
            return 200, JSON, json.dumps({"_id": "0", "id": "allenai/c4", "sha": REVISION, "siblings": []}).encode()
        names = {url.removeprefix(f"{RESOLVE}/"): len(content) for url, content in self.files.items()}
        if path == f"{API}/tree/{REVISION}":
            entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "en"}]
            entries += [_entry(name, size) for name, size in names.items() if "/" not in name]
        elif path == f"{API}/tree/{REVISION}/en":
            entries = [_entry(name, size) for name, size in names.items() if name.startswith("en/")]
        else:
            return None
        return 200, JSON, json.dumps(entries).encode()


def _entry(path: str, size: int) -> dict:
    return {"type": "file", "oid": "0" * 40, "size": size, "path": path}
