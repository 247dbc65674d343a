"""Rows of a shard: numbering, skipping without parsing, and every fault by file and row."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from functools import partial

import pytest
from http_server import Fault, FaultyServer

from selmodel.data import reader
from selmodel.data.reader import SkipCounter, numbered_lines, read_rows, unpack
from selmodel.data.transfer import Retries, read_blocks
from selmodel.errors import UserError

GOOD = b'{"text": "a"}'


def blocks_of(data: bytes, size: int):
    return (data[i : i + size] for i in range(0, len(data), size))


def rows(data: bytes, start=0, step=1, *, on_bad_shard="error", skipped=None, name="s.json", size=1 << 17):
    """Rows of a local shard with content `data`, which arrives in blocks of `size` bytes."""
    skipped = SkipCounter() if skipped is None else skipped
    open_blocks = partial(blocks_of, data, size)
    return list(read_rows(name, name, open_blocks, start, step, on_bad_shard=on_bad_shard, skipped=skipped))


def gather(iterator, got: list) -> None:
    """Append what `iterator` gives until it ends or raises."""
    for item in iterator:
        got.append(item)


def lines(*texts: str, ends: bool = True) -> bytes:
    return b"\n".join(json.dumps({"text": text}).encode() for text in texts) + b"\n" * ends


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("data", [b"", b"\n", b"a", b"a\n", b"\n\na\n\n", b"a\nbb\n\nccc", b"abcdefg\nh\n", b"\n\n\n"])
def test_numbered_lines_are_those_of_the_whole_text(data, size):
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()  # a line end ends a line, it does not begin one
    for start in range(len(expected) + 2):
        got = [
            (number + k, line)
            for number, group in numbered_lines(blocks_of(data, size), start)
            for k, line in enumerate(group)
        ]
        assert got == list(enumerate(expected))[start:]


@pytest.mark.parametrize("size", [5, 64, 1 << 17])
@pytest.mark.parametrize("ends", [True, False])
def test_every_start_and_step(size, ends):
    texts = [f"text {i} " * (i % 5 + 1) for i in range(23)]
    data = lines(*texts, ends=ends)
    for start in range(25):
        for step in (1, 2, 3, 7, 30):
            assert rows(data, start, step, size=size) == list(enumerate(texts))[start::step]


def test_rows_between_and_before_are_not_parsed(monkeypatch):
    parsed = []
    monkeypatch.setattr(reader, "parse", lambda line: parsed.append(line) or ("a", None))
    rows(b"".join(b"%d\n" % i for i in range(20)), start=4, step=5)
    assert parsed == [b"4", b"9", b"14", b"19"]


def test_line_ends_of_windows_and_a_space_around():
    assert rows(b'{"text": "a"}\r\n  {"text": "b"} \r\n') == [(0, "a"), (1, "b")]


def test_text_survives_as_it_is():
    text = ' \t"quoted"\\ \u2028 \u0085 \n\r\n \U0001f600 e\u0301 \x00 \ufeff '
    for dumped in (json.dumps({"text": text}), json.dumps({"text": text}, ensure_ascii=False)):
        assert rows(dumped.encode() + b"\n") == [(0, text)]


# --- bad rows --------------------------------------------------------------------------------------------------------

BAD = {
    "invalid JSON": (b'{"text": "a"', "not valid JSON"),
    "two values": (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
    "deep JSON": (b'{"text": ' + b"[" * 200_000 + b"}", "not valid JSON"),
    "not an object": (b'["text"]', "expected a JSON object with 'text', found list"),
    "no text": (b'{"url": "u", "body": "b"}', "no 'text' in the line .it has: body, url."),
    "text is null": (b'{"text": null}', "'text' is NoneType, expected a string"),
    "text is a number": (b'{"text": 3}', "'text' is int, expected a string"),
    "empty text": (b'{"text": ""}', "'text' is empty"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "not UTF-8 .byte 13"),
    "encoded surrogate": (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    "escaped surrogate": (b'{"text": "ab\\ud800"}', "half a surrogate pair at character 2"),
    "escaped surrogate, upper case": (b'{"text": "\\uDC00"}', "half a surrogate pair at character 0"),
    "blank line": (b"", "blank line"),
    "spaces": (b"  \t", "blank line"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_row_is_an_error_that_names_file_and_row(kind, packed):
    line, reason = BAD[kind]
    data = b"\n".join([GOOD, GOOD, line, GOOD]) + b"\n"
    name = "en/c4-train.00003-of-00016.json" + ".gz" * packed
    with pytest.raises(UserError, match=reason) as caught:
        rows(gzip.compress(data) if packed else data, name=name)
    assert f"{name}, row 2: " in str(caught.value)
    assert "data.on_bad_shard=skip" in str(caught.value)


@pytest.mark.parametrize("kind", BAD)
def test_bad_row_is_skipped_counted_and_logged(kind, caplog):
    line, reason = BAD[kind]
    data = b"\n".join([GOOD, line, GOOD, line, GOOD]) + b"\n"
    skipped = SkipCounter()
    assert [row for row, _ in rows(data, on_bad_shard="skip", skipped=skipped)] == [0, 2, 4]
    assert skipped.rows == {"s.json": 2}
    assert skipped.shards == {}
    assert [f"row {row}: " in record.message for row, record in zip((1, 3), caplog.records, strict=True)] == [True] * 2
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_bad_rows_of_other_streams_do_not_count():
    data = b"\n".join([GOOD, b"bad", GOOD, b"bad"])
    skipped = SkipCounter()
    assert rows(data, 0, 2, on_bad_shard="skip", skipped=skipped) == [(0, "a"), (2, "a")]
    assert not skipped


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\n \n\n", b"\n" * 50])
@pytest.mark.parametrize("size", [4, 1 << 17])
def test_blank_lines_at_the_end_are_no_rows(end, size):
    assert rows(GOOD + b"\n" + GOOD + end, size=size) == [(0, "a"), (1, "a")]


@pytest.mark.parametrize("size", [4, 1 << 17])
def test_blank_lines_before_a_row_are_bad_rows(size):
    skipped = SkipCounter()
    data = GOOD + b"\n\n\n" + GOOD + b"\n\n"
    assert rows(data, size=size, on_bad_shard="skip", skipped=skipped) == [(0, "a"), (3, "a")]
    assert skipped.rows == {"s.json": 2}
    with pytest.raises(UserError, match="row 1: blank line"):
        rows(data, size=size)


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n"])
def test_a_file_without_rows(data):
    assert rows(data) == []
    assert rows(gzip.compress(data), name="s.json.gz") == []


def test_an_escaped_pair_is_one_character():
    assert rows(b'{"text": "\\ud83d\\ude00"}') == [(0, "\U0001f600")]


# --- gzip ------------------------------------------------------------------------------------------------------------

TEXTS = [f"{i} " * 2000 for i in range(300)]
PACKED = gzip.compress(lines(*TEXTS), mtime=0)


@pytest.mark.parametrize("size", [1, 10, 1000, 1 << 17])
def test_unpack_in_any_blocks(size):
    data = PACKED[:0] + gzip.compress(b"abc" * 5000) + gzip.compress(b"") + gzip.compress(b"de") + b"\0" * 512
    assert b"".join(unpack(blocks_of(data, size))) == gzip.decompress(data)


def test_unpacking_is_bounded_in_memory():
    zeros = zlib.compressobj(wbits=31)
    data = b"".join([zeros.compress(bytes(1 << 26)), zeros.flush()])  # 64 MiB in 65 KB
    assert max(len(block) for block in unpack(iter([data]))) <= reader.UNPACKED


BROKEN = {
    "not gzip": (lines("a"), "not a gzip file", 0),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull", 0),
    "empty": (b"", "empty", 0),
    "one byte": (PACKED[:1], "ends early", 0),
    "header alone": (PACKED[:10], "ends early", 0),
    "half": (PACKED[: len(PACKED) // 2], "ends early", 100),
    "last byte missing": (PACKED[:-1], "ends early", 300),
    # a second member whose first block is of no known kind
    "damaged in the second member": (gzip.compress(lines(*TEXTS[:100])) + PACKED[:10] + b"\x07" * 50, "damaged", 100),
    "wrong checksum": (PACKED[:-8] + bytes(4) + PACKED[-4:], "damaged", 300),
    "garbage behind": (PACKED + b"garbage", "damaged", 300),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_gzip_is_an_error_that_names_file_and_row(kind):
    data, reason, least = BROKEN[kind]
    got = []
    iterator = read_rows(
        "en/s.json.gz", "/d/s.json.gz", partial(blocks_of, data, 999), 0, 1, on_bad_shard="error", skipped=None
    )
    with pytest.raises(UserError, match=reason) as caught:
        gather(iterator, got)
    assert got == list(enumerate(TEXTS))[: len(got)]  # what came before is right
    assert len(got) >= least
    assert f"en/s.json.gz, row {len(got)}: " in str(caught.value)
    assert "data.on_bad_shard=skip" in str(caught.value)


@pytest.mark.parametrize("kind", BROKEN)
def test_rest_of_broken_gzip_is_skipped_counted_and_logged(kind, caplog):
    data, _, least = BROKEN[kind]
    skipped = SkipCounter()
    got = rows(data, on_bad_shard="skip", skipped=skipped, name="s.json.gz", size=999)
    assert got == list(enumerate(TEXTS))[: len(got)]
    assert len(got) >= least
    assert skipped.shards == {"s.json.gz": 1}
    assert "s.json.gz" in caplog.text
    assert f"row {len(got)} on" in caplog.text


@pytest.mark.parametrize("kind", BROKEN)
def test_rows_before_the_damage_do_not_depend_on_the_blocks(kind):
    data, _, least = BROKEN[kind]
    counts = set()
    for size in (1, 17, 999, 5000, 1 << 17):
        got = rows(data, on_bad_shard="skip", name="s.json.gz", size=size)
        assert got == list(enumerate(TEXTS))[: len(got)]
        counts.add(len(got))
    assert len(counts) == 1
    assert counts.pop() >= least


def test_unreadable_local_file(tmp_path):
    missing = str(tmp_path / "s.json")
    options = {"on_bad_shard": "error", "skipped": SkipCounter()}
    with pytest.raises(UserError, match=r"en/s.json, row 0: .*No such file"):
        list(read_rows("en/s.json", missing, partial(read_blocks, missing), 0, 1, **options))
    options["on_bad_shard"] = "skip"
    assert list(read_rows("en/s.json", missing, partial(read_blocks, missing), 0, 1, **options)) == []
    assert options["skipped"].shards == {"en/s.json": 1}


# --- over the network ------------------------------------------------------------------------------------------------


def remote_rows(server, *, start=0, step=1, on_bad_shard="error", skipped=None, attempts=3):
    url = f"{server.url}/s.json.gz"
    retries = Retries(attempts=attempts, timeout=0.5, backoff=0.01, max_wait=0.05)
    return read_rows(
        "en/s.json.gz",
        url,
        partial(read_blocks, url, retries=retries),
        start,
        step,
        on_bad_shard=on_bad_shard,
        skipped=skipped,
        attempts=attempts,
        backoff=0.01,
    )


FAULTS = {
    "429": [Fault(status=429)],
    "500 twice": [Fault(status=500)] * 2,
    "closed mid-file": [Fault(after=3000)],
    "closed mid-file, length unknown": [Fault(after=3000, no_length=True)],
    "closed in the first byte": [Fault(after=1, no_length=True)],
    "hangs before the answer": [Fault(after=0, then="hang")],
    "hangs mid-file": [Fault(after=3000, then="hang")],
    "several": [Fault(after=3000), Fault(status=503)],
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(("start", "step"), [(0, 1), (7, 4)])
def test_same_rows_through_faults(kind, start, step):
    with FaultyServer(files={"/s.json.gz": PACKED}, faults={"/s.json.gz": list(FAULTS[kind])}).running() as server:
        assert list(remote_rows(server, start=start, step=step)) == list(enumerate(TEXTS))[start::step]
        assert len(server.requests) == len(FAULTS[kind]) + 1


@pytest.mark.parametrize("on_bad_shard", ["error", "skip"])
@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(after=3, then="hang"), Fault(after=0), Fault(status=404)], ids=str
)
def test_network_failure_is_an_error_with_shard_row_and_attempts(fault, on_bad_shard):
    """Never a skip: which rows a run reads must not depend on the state of the network."""
    site = FaultyServer(files={"/s.json.gz": PACKED}, always={"/s.json.gz": fault})
    with site.running() as server, pytest.raises(UserError) as caught:
        list(remote_rows(server, start=5, on_bad_shard=on_bad_shard, skipped=SkipCounter()))
    attempts = 1 if fault.status == 404 else 3
    assert "en/s.json.gz, row 5: " in str(caught.value)
    assert f"(attempts: {attempts})" in str(caught.value)


def test_network_failure_mid_file_names_the_row_reached():
    with FaultyServer(files={"/s.json.gz": PACKED}).running() as server:
        server.faults["/s.json.gz"] = [Fault(after=len(PACKED) // 2)] + [Fault(status=500)] * 3
        iterator, got = remote_rows(server), []
        with pytest.raises(UserError) as caught:
            gather(iterator, got)
    assert 0 < len(got) < len(TEXTS)
    assert got == list(enumerate(TEXTS))[: len(got)]
    assert f"row {len(got)}: " in str(caught.value)


def test_file_truncated_at_its_source_is_never_a_short_shard():
    half = PACKED[: len(PACKED) // 2]
    with FaultyServer(files={"/s.json.gz": half}).running() as server:
        with pytest.raises(UserError, match=r"ends early .*attempts: 3"):
            list(remote_rows(server))
        skipped = SkipCounter()
        got = list(remote_rows(server, on_bad_shard="skip", skipped=skipped))
    assert got == list(enumerate(TEXTS))[: len(got)]
    assert skipped.shards == {"en/s.json.gz": 1}


def test_bad_rows_count_once_though_the_file_is_read_again():
    data = gzip.compress(b"bad\n" + lines(*TEXTS))
    with FaultyServer(files={"/s.json.gz": data}).running() as server:
        server.faults["/s.json.gz"] = [Fault(after=len(data) // 2, no_length=True)]
        skipped = SkipCounter()
        got = list(remote_rows(server, on_bad_shard="skip", skipped=skipped))
    assert [text for _, text in got] == TEXTS
    assert skipped.rows == {"en/s.json.gz": 1}
    assert skipped.shards == {}


def test_a_reader_left_half_way_closes_its_file(tmp_path):
    path = tmp_path / "s.json.gz"
    path.write_bytes(PACKED)
    closed = []

    def open_blocks():
        try:
            yield from read_blocks(str(path))
        finally:
            closed.append(True)

    iterator = read_rows("s", str(path), open_blocks, 0, 1, on_bad_shard="error", skipped=None)
    next(iterator)
    iterator.close()
    assert closed == [True]
