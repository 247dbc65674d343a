"""C4 on the Hugging Face Hub at a pinned revision, or on a mirror of it.

The list of files is resolved once per machine, by `datasets`, and kept in the cache folder; the shards' bytes are
read from the addresses that belong to the pinned commit. Nothing of the repository is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from selmodel.data.caching import one_process, write_atomically
from selmodel.data.sources import SPLITS, FileSource, Shard, list_folder
from selmodel.data.transfer import Retries, TransferError, fetch, is_remote, remote_size
from selmodel.errors import UserError

logger = logging.getLogger(__name__)

PATTERNS = {"train": "c4-train.*.json.gz", "validation": "c4-validation.*.json.gz"}
C4_FILES = {"train": 1024, "validation": 8}  # of the configuration "en"
IN_INDEX = re.compile(r"c4-(train|validation)\.[\w.-]+?\.json\.gz(?![\w.])")
REACH = Retries(attempts=2, timeout=10.0, backoff=1.0, max_wait=5.0)  # for the first contact with the Hub
REACH_SECONDS = 45.0  # bound on all of it: looking up a name has no time limit of its own
ALTERNATIVES = "Use shards from a folder (data=local data.root=DIR) or the embedded corpus (data=docstrings)"


class C4Source(FileSource):
    """allenai/c4 from the Hub, or the same files from a mirror.

    repository, config, revision: data set, its folder of shards, and the commit that is read. A branch or tag is
    resolved to its commit when the files are listed, and stays with that commit.
    mirror: a folder or an http(s) address with the same layout (its subfolder `config` holds the shards); the
    Hub is not asked then. HF_ENDPOINT names another Hub, HF_HUB_OFFLINE=1 forbids asking it.
    attempts, timeout, backoff, max_wait: how a shard's download is retried, see Retries. An unreachable Hub is
    reported within a minute.
    on_bad_shard: "error" or "skip", see Source. cache_dir: where the list of files is kept.
    """

    name = "c4"

    def __init__(
        self,
        *,
        cache_dir: str,
        repository: str = "allenai/c4",
        config: str = "en",
        revision: str = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
        mirror: str | None = None,
        attempts: int = 5,
        timeout: float = 30.0,
        backoff: float = 1.0,
        max_wait: float = 60.0,
        on_bad_shard: str = "error",
    ):
        super().__init__(on_bad_shard=on_bad_shard, retries=Retries(attempts, timeout, backoff, max_wait))
        if mirror and is_remote(mirror) and "@" in urlsplit(mirror).netloc:
            raise UserError(
                f"data.mirror={urlsplit(mirror).scheme}://...@{urlsplit(mirror).hostname}: an address with a password "
                "is not accepted, since addresses are logged and stored with a run. Serve the mirror without one, or "
                "copy it into a folder (data=local data.root=DIR)"
            )
        self.repository = repository
        self.config = config
        self.revision = revision
        self.mirror = mirror.rstrip("/") if mirror and is_remote(mirror) else mirror
        key = [self.mirror or "", repository, config, "" if mirror else revision]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        self.list_path = Path(cache_dir).expanduser().absolute() / "file_lists" / f"c4-{config}-{digest}.json"
        self.commit: str | None = None  # known once listed

    def describe(self) -> dict:
        return super().describe() | {
            "repository": self.repository,
            "config": self.config,
            "revision": self.commit,  # None for a mirror, which does not say what it holds
            "mirror": self.mirror,
        }

    def headers(self, shard: Shard) -> Mapping[str, str]:
        return {} if self.mirror else _hub_headers()

    def open_shard(self, shard: Shard) -> Iterator[bytes]:
        if not self.mirror and _offline():
            raise TransferError("HF_HUB_OFFLINE is set")
        try:
            yield from super().open_shard(shard)
        except TransferError as error:
            if not (error.changed and is_remote(shard.location)):
                raise
            reason = f"{error}; remove {self.list_path} to list the files anew"
            raise TransferError(reason, error.attempts, changed=True) from error

    def _list(self) -> dict[str, list[Shard]]:
        if self.mirror and not is_remote(self.mirror):
            root = Path(self.mirror).expanduser().absolute()
            return list_folder(root, PATTERNS, "data.mirror", subfolder=self.config)
        return self._read_list()

    def _read_list(self) -> dict[str, list[Shard]]:
        if not self.list_path.exists():
            with one_process(self.list_path, "the list of C4's files"):
                if not self.list_path.exists():
                    listed = self._list_mirror() if self.mirror else self._list_hub()
                    write_atomically(self.list_path, json.dumps(listed, indent=1).encode())
        try:
            listed = json.loads(self.list_path.read_text())
            self.commit = None if self.mirror else listed["revision"]
            return {
                split: [Shard(name, self._location(name), size) for name, size in sorted(listed[split])]
                for split in SPLITS
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.list_path}: not a list of C4's files ({error}). Remove it") from error

    def _location(self, name: str) -> str:
        if self.mirror:
            return f"{self.mirror}/{name}"
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repository, name, repo_type="dataset", revision=self.commit)

    def _list_hub(self) -> dict:
        """{"train": [[name, size], ...], ...} of the pinned revision, as `datasets` resolves it."""
        commit = self._commit()
        logger.info("resolving the files of %s (%s) at revision %s", self.repository, self.config, commit)
        import datasets
        from huggingface_hub import HfFileSystem

        folder = f"datasets/{self.repository}@{commit}/{self.config}"
        data_files = {split: f"hf://{folder}/{pattern}" for split, pattern in PATTERNS.items()}
        try:
            # The JSON builder by name: no card, no script, nothing of the repository decides how it is read.
            builder = datasets.load_dataset_builder("json", data_files=data_files)
            sizes = {
                PurePosixPath(entry["name"]).name: entry["size"]
                for entry in HfFileSystem().ls(folder, detail=True, expand_info=False)
            }
            listed = {
                split: [
                    [f"{self.config}/{name}", sizes[name]]
                    for name in sorted(PurePosixPath(url).name for url in builder.config.data_files[split])
                ]
                for split in SPLITS
            }
        except Exception as error:  # of several libraries; each is a Hub that does not give the list
            raise UserError(
                f"data=c4: the files of {self.repository} ({self.config}) at revision {self.revision} cannot be "
                f"listed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}. "
                f"{ALTERNATIVES}"
            ) from error
        return {"repository": self.repository, "revision": commit, **listed}

    def _commit(self) -> str:
        """The commit that `revision` names now."""
        try:
            return json.loads(ask_hub(f"api/datasets/{self.repository}/revision/{self.revision}"))["sha"]
        except TransferError as error:
            if error.status in (401, 403, 404):
                raise UserError(
                    f"data.source.repository={self.repository} data.source.revision={self.revision}: {error}. "
                    f"{ALTERNATIVES}"
                ) from error
            raise UserError(f"data=c4: {error}. {ALTERNATIVES}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"data=c4: the answer is not the Hub's. Check HF_ENDPOINT. {ALTERNATIVES}") from error

    def _list_mirror(self) -> dict:
        """{"train": [[name, size], ...], ...} from the mirror's index page or, without one, by C4's names."""
        logger.info("resolving the files of the mirror %s", self.mirror)
        names = self._index(f"{self.config}/") or self._index("")
        if not names:
            names = {
                split: [f"{self.config}/c4-{split}.{i:05d}-of-{n:05d}.json.gz" for i in range(n)]
                for split, n in C4_FILES.items()
            }
        listed: dict = {}
        for split in SPLITS:
            with ThreadPoolExecutor(16) as pool:
                try:
                    sizes = list(pool.map(self._size, names.get(split, [])))
                except TransferError as error:
                    raise UserError(
                        f"data.mirror={self.mirror}: {error} (attempts: {error.attempts}). Expected C4's layout "
                        f"below it, like {self.config}/c4-train.00000-of-01024.json.gz. {ALTERNATIVES}"
                    ) from error
            if not sizes:
                raise UserError(
                    f"data.mirror={self.mirror}: its index lists no {split} shards. Expected {PATTERNS[split]}"
                )
            listed[split] = [list(pair) for pair in zip(names[split], sizes, strict=True)]
        return {"mirror": self.mirror, **listed}

    def _index(self, folder: str) -> dict[str, list[str]]:
        """Shard names by split that the index page of `folder` mentions; empty where there is no such page."""
        try:
            page = fetch(f"{self.mirror}/{folder}", retries=self.retries).decode("utf-8", errors="replace")
        except TransferError as error:
            if error.status is None or error.status >= 500:
                raise UserError(
                    f"data.mirror={self.mirror}: cannot be reached: {error} (attempts: {error.attempts}). "
                    f"{ALTERNATIVES}"
                ) from error
            return {}
        names: dict[str, list[str]] = {}
        for match in sorted({match[0]: match[1] for match in IN_INDEX.finditer(page)}.items()):
            names.setdefault(match[1], []).append(folder + match[0])
        return names

    def _size(self, name: str) -> int | None:
        try:
            return remote_size(self._location(name), retries=self.retries)
        except TransferError as error:
            raise TransferError(f"{name}: {error}", error.attempts, status=error.status) from error


def from_hub(
    load: Callable[..., Any], name: str, what: str, expected: str, *, revision: str | None = None, **options: Any
) -> Any:
    """`load(name, revision=..., **options)`, a `from_pretrained`: from a folder, the cache or the Hub.

    The Hub is asked first whether it has the repository, which fails soon where the library would try for minutes.
    Where the model cannot be had: UserError, which begins with `what` and ends with `expected`.
    """
    try:
        try:
            return load(name, revision=revision, local_files_only=True, **options)
        except Exception:
            if os.path.isdir(name):
                raise
            ask_hub(f"api/models/{name}/revision/{revision or 'main'}")
            return load(name, revision=revision, **options)
    except Exception as error:  # many kinds, by what is missing: network, repository, file, class
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise UserError(f"{what}: cannot be loaded: {reason}. Expected {expected}") from error


def ask_hub(path: str) -> bytes:
    """The Hub's answer at `path`, the first contact with it: within REACH_SECONDS, or TransferError."""
    from huggingface_hub import constants

    problem = f"the Hugging Face Hub ({constants.ENDPOINT}) cannot be reached"
    if _offline():
        raise TransferError(f"{problem}: HF_HUB_OFFLINE is set")
    outcome: list[bytes | TransferError] = []

    def ask() -> None:
        try:
            outcome.append(fetch(f"{constants.ENDPOINT}/{path}", retries=REACH, headers=_hub_headers()))
        except TransferError as error:
            if error.status in (401, 403, 404):
                reason = f"the Hub has nothing there, or does not show it to you (HTTP status {error.status})"
            else:
                reason = f"{problem}: {error} (attempts: {error.attempts})"
            outcome.append(TransferError(reason, error.attempts, status=error.status))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    if not outcome:
        raise TransferError(f"{problem}: no answer in {REACH_SECONDS:.0f} s")
    if isinstance(outcome[0], TransferError):
        raise outcome[0]
    return outcome[0]


def _hub_headers() -> dict[str, str]:
    """The user's token for the Hub, where there is one."""
    from huggingface_hub.utils import build_hf_headers

    return {key: value for key, value in build_hf_headers().items() if key.lower() == "authorization"}


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE
