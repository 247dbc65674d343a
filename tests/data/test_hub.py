"""C4 from the Hub and from mirrors: listed once, read from the pinned revision, and clear about what is missing."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time

import pytest
from fake_hub import API, COUNTS, RESOLVE, REVISION, ROWS, FakeHub, row_text, shard_files, shard_name
from http_server import Fault, FaultyServer

from selmodel.data import hub
from selmodel.data.hub import C4Source
from selmodel.data.sources import LocalSource, Shard
from selmodel.data.transfer import Retries
from selmodel.errors import UserError

# Reads a source as a training process does, and prints what it found.
READ = """
import json, sys
from selmodel.data.hub import C4Source
from selmodel.errors import UserError
source = C4Source(cache_dir=sys.argv[1], timeout=1.0, backoff=0.01, max_wait=0.1)
try:
    source.prepare()
    rows = {s.name: list(source.rows(s)) for split in ("train", "validation") for s in source.shards(split)}
    print(json.dumps({"rows": rows, "describe": source.describe()}))
except UserError as error:
    print(json.dumps({"error": str(error)}))
"""


def read_hub(server, cache_dir, **environment) -> dict:
    """What READ prints in a process whose Hub is `server`; the libraries read HF_ENDPOINT when imported."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(cache_dir / "hf"),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, str(cache_dir)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def expected_rows() -> dict:
    return {
        shard_name(split, k): [[row, row_text(split, k, row)] for row in range(ROWS)]
        for split, count in COUNTS.items()
        for k in range(count)
    }


def quick(tmp_path, **options) -> C4Source:
    return C4Source(cache_dir=str(tmp_path), attempts=3, timeout=0.5, backoff=0.01, max_wait=0.05, **options)


# --- the Hub ---------------------------------------------------------------------------------------------------------


def test_hub_is_listed_once_and_read_at_the_pinned_revision(tmp_path):
    with FakeHub().running() as server:
        server.faults[f"{RESOLVE}/{shard_name('train', 1)}"] = [Fault(status=429), Fault(after=500), Fault(status=503)]
        first = read_hub(server, tmp_path)
        assert first["rows"] == expected_rows()
        assert any(path.startswith(API) for path in server.paths())
        wanted = [path for path in server.paths() if path.startswith(("/datasets", API))]
        assert all(REVISION in path for path in wanted)
        assert not any("README" in path or path.endswith(".py") for path in server.paths())

        server.requests.clear()
        second = read_hub(server, tmp_path)  # another process of the machine reads the list that is there
        assert second == first
        assert not any(path.startswith(API) for path in server.paths())

    described = first["describe"]
    assert (described["kind"], described["repository"], described["config"]) == ("c4", "allenai/c4", "en")
    assert described["revision"] == REVISION
    assert (described["train_files"], described["validation_files"]) == (3, 1)

    # The same files on a disk are the same corpus.
    for name, content in shard_files().items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    assert LocalSource(str(tmp_path / "copy")).describe()["fingerprint"] == described["fingerprint"]


def test_hub_without_the_revision_or_offline(tmp_path):
    with FakeHub().running() as server:
        server.always[f"{API}/revision/{REVISION}"] = Fault(status=404)
        error = read_hub(server, tmp_path)["error"]
        assert f"data.source.revision={REVISION}" in error
        assert "404" in error

        server.requests.clear()
        error = read_hub(server, tmp_path, HF_HUB_OFFLINE="1")["error"]
        assert "cannot be reached: HF_HUB_OFFLINE is set" in error
        assert "data=local data.root=DIR" in error
        assert "data=docstrings" in error
        assert server.requests == []


def unreachable_hub(monkeypatch, url):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_hub_that_refuses_connections_is_reported_at_once(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unreachable_hub(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}")
    begin = time.monotonic()
    with pytest.raises(UserError) as caught:
        C4Source(cache_dir=str(tmp_path)).prepare()
    assert time.monotonic() - begin < 10
    message = str(caught.value)
    assert "cannot be reached" in message
    assert "data=local data.root=DIR" in message
    assert "data=docstrings" in message


def test_hub_that_never_answers_is_reported_within_the_bound(tmp_path, monkeypatch):
    """As behind a firewall that drops packets. The bounds as shipped allow for less than a minute."""
    assert hub.REACH_SECONDS < 55
    monkeypatch.setattr(hub, "REACH", Retries(attempts=2, timeout=30.0))
    monkeypatch.setattr(hub, "REACH_SECONDS", 1.0)
    with FaultyServer().running() as server:
        server.answer = lambda *_: server.stopped.wait(20)
        unreachable_hub(monkeypatch, server.url)
        begin = time.monotonic()
        with pytest.raises(UserError, match=r"cannot be reached: no answer in 1 s.*data=docstrings"):
            C4Source(cache_dir=str(tmp_path)).prepare()
        assert time.monotonic() - begin < 5


def test_token_goes_to_the_hub_and_not_to_a_mirror(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    shard = Shard("en/s", "https://somewhere/en/s")
    assert C4Source(cache_dir=str(tmp_path)).headers(shard) == {"authorization": "Bearer hf_secret"}
    assert C4Source(cache_dir=str(tmp_path), mirror="http://127.0.0.1/").headers(shard) == {}


# --- mirrors ---------------------------------------------------------------------------------------------------------


def mirror_server(index: str | None = "/c4/en/") -> FaultyServer:
    files = {f"/c4/{name}": content for name, content in shard_files().items()}
    if index is not None:
        links = "".join(f'<a href="{name.split("/")[1]}">{name.split("/")[1]}</a>\n' for name in shard_files())
        files[index] = f"<html>{links}<a href='c4-train.00009-of-00003.json.gz.part'>x</a></html>".encode()
    return FaultyServer(files=files)


def test_mirror_is_listed_by_its_index_and_read(tmp_path):
    with mirror_server().running() as server:
        source = quick(tmp_path, mirror=f"{server.url}/c4/")
        source.prepare()
        rows = {
            shard.name: [[row, text] for row, text in source.rows(shard)]
            for split in COUNTS
            for shard in source.shards(split)
        }
        assert rows == expected_rows()
        described = source.describe()
        assert described["mirror"] == f"{server.url}/c4"
        assert described["revision"] is None

        server.requests.clear()
        again = quick(tmp_path, mirror=f"{server.url}/c4/")
        assert again.shards("train") == source.shards("train")
        assert pickle.loads(pickle.dumps(again)).describe() == described
        assert server.requests == []  # the list is kept


def test_mirror_address_of_the_folder_with_the_shards_itself(tmp_path):
    with mirror_server().running() as server:
        source = quick(tmp_path, mirror=f"{server.url}/c4/en")
        assert [shard.name for shard in source.shards("train")] == [shard_name("train", k)[3:] for k in range(3)]
        assert [row for row, _ in source.rows(source.shards("train")[2], 7, 50)] == [7, 57, 107, 157]


def test_mirror_without_an_index_has_c4s_names(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "C4_FILES", COUNTS)
    with mirror_server(index=None).running() as server:
        source = quick(tmp_path, mirror=f"{server.url}/c4")
        assert [shard.name for shard in source.shards("train")] == [shard_name("train", k) for k in range(3)]
        assert source.shards("train")[0].size == len(shard_files()[shard_name("train", 0)])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429),
        Fault(status=500),
        Fault(after=700),
        Fault(after=700, no_length=True),
        Fault(after=9, then="hang"),
    ],
    ids=str,
)
def test_mirror_with_faults_gives_the_same_rows(tmp_path, fault):
    with mirror_server().running() as server:
        source = quick(tmp_path, mirror=f"{server.url}/c4")
        shard = source.shards("train")[1]
        server.faults[f"/c4/{shard.name}"] = [fault, fault]
        assert [[row, text] for row, text in source.rows(shard)] == expected_rows()[shard.name]
        assert server.faults[f"/c4/{shard.name}"] == []


def test_mirror_that_fails_for_good_names_shard_row_and_attempts(tmp_path):
    with mirror_server().running() as server:
        source = quick(tmp_path, mirror=f"{server.url}/c4", on_bad_shard="skip")
        shard = source.shards("train")[1]
        server.always[f"/c4/{shard.name}"] = Fault(status=429)
        with pytest.raises(UserError, match=r"en/c4-train\.00001-of-00003\.json\.gz, row 4: .*429.*attempts: 3"):
            list(source.rows(shard, 4))
        assert not source.skipped


def test_mirror_that_changed_names_the_list_to_remove(tmp_path):
    with mirror_server().running() as server:
        source = quick(tmp_path, mirror=f"{server.url}/c4")
        shard = source.shards("train")[0]
        server.files[f"/c4/{shard.name}"] = server.files[f"/c4/{shard.name}"][:-1]
        with pytest.raises(UserError, match=r"changed; remove .*file_lists/c4-en-\w+\.json to list the files anew"):
            list(source.rows(shard))


def test_mirror_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "C4_FILES", COUNTS)
    with FaultyServer().running() as server:
        with pytest.raises(UserError, match=r"data\.mirror=.*c4-train\.00000-of-00003\.json\.gz: HTTP status 404"):
            quick(tmp_path, mirror=server.url).prepare()
        server.always["/en/"] = Fault(status=500)
        with pytest.raises(UserError, match=r"data\.mirror=.*cannot be reached: HTTP status 500.*data=docstrings"):
            quick(tmp_path, mirror=server.url).prepare()
        server.always["/en/"] = Fault()
        server.files["/en/"] = b"c4-train.00000-of-00001.json.gz"
        server.files["/en/c4-train.00000-of-00001.json.gz"] = b""
        with pytest.raises(UserError, match="lists no validation shards"):
            quick(tmp_path, mirror=server.url).prepare()
    assert list((tmp_path / "file_lists").glob("*.json")) == []  # nothing wrong is kept


def test_mirror_in_a_folder(tmp_path):
    for name, content in shard_files().items():
        (tmp_path / "c4" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c4" / name).write_bytes(content)
    source = quick(tmp_path, mirror=str(tmp_path / "c4"))
    assert [shard.name for shard in source.shards("train")] == [shard_name("train", k) for k in range(3)]
    assert source.describe()["fingerprint"] == LocalSource(str(tmp_path / "c4")).describe()["fingerprint"]
    with pytest.raises(UserError, match=r"data\.mirror=.*nowhere: no such folder"):
        quick(tmp_path, mirror=str(tmp_path / "nowhere")).prepare()


def test_damaged_list_is_named(tmp_path):
    source = quick(tmp_path, mirror="http://127.0.0.1:9/")
    source.list_path.parent.mkdir()
    source.list_path.write_text('{"train": 3}')
    with pytest.raises(UserError, match=r"file_lists.*Remove it"):
        source.prepare()


def test_lists_of_different_places_are_kept_apart(tmp_path):
    sources = [
        quick(tmp_path),
        quick(tmp_path, revision="main"),
        quick(tmp_path, config="realnewslike"),
        quick(tmp_path, repository="someone/c4"),
        quick(tmp_path, mirror="http://a/"),
        quick(tmp_path, mirror="http://b/"),
    ]
    assert len({source.list_path for source in sources}) == len(sources)
    assert quick(tmp_path, mirror="http://a").list_path == sources[4].list_path


def test_an_address_with_a_password_is_refused_and_not_repeated(tmp_path):
    with pytest.raises(UserError) as error:
        C4Source(cache_dir=str(tmp_path), mirror="http://user:secret@127.0.0.1:1/c4")
    assert "data.mirror=http://...@127.0.0.1" in str(error.value)
    assert "secret" not in str(error.value)
