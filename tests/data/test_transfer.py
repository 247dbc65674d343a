"""Downloads from a server that misbehaves: the same bytes, or an error after a bounded time."""

from __future__ import annotations

import random
import socket
import time
from email.utils import formatdate

import pytest
from http_server import Fault, FaultyServer

from selmodel.data.transfer import Retries, TransferError, fetch, read_blocks, remote_size

# 3 MiB: larger than a block, than the socket's buffers and than the progress that forgives earlier failures.
BODY = random.Random(0).randbytes(3 << 20)
QUICK = Retries(attempts=3, timeout=0.5, backoff=0.01, max_wait=0.05)


@pytest.fixture
def server():
    with FaultyServer(files={"/f": BODY}).running() as server:
        yield server


def read(server, retries=QUICK, **options) -> bytes:
    return b"".join(read_blocks(f"{server.url}/f", retries=retries, **options))


def ranges(server) -> list[str | None]:
    return [headers.get("Range") for _, _, headers in server.requests]


def test_a_file_arrives_whole_in_one_request(server):
    assert read(server) == BODY
    assert ranges(server) == [None]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_status_is_tried_again(server, status):
    server.faults["/f"] = [Fault(status=status)] * 2
    assert read(server) == BODY
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_lasting_status_fails_at_once(server, status):
    server.always["/f"] = Fault(status=status)
    with pytest.raises(TransferError, match=str(status)) as caught:
        read(server)
    assert caught.value.status == status
    assert len(server.requests) == 1


@pytest.mark.parametrize("after", [0, 1, 1000, len(BODY) - 1])
@pytest.mark.parametrize("no_length", [False, True])
def test_connection_closed_mid_file_continues_at_the_byte_reached(server, after, no_length):
    server.faults["/f"] = [Fault(after=after, no_length=no_length)]
    if no_length:  # the end of the connection is the only end there is; the known size tells it from a loss
        assert read(server, size=len(BODY)) == BODY
    else:
        assert read(server) == BODY
    assert ranges(server) == [None, f"bytes={after}-" if after else None]


def test_server_without_ranges_is_read_again_and_skipped_to_the_byte_reached(server):
    server.ranges = False
    server.faults["/f"] = [Fault(after=1000), Fault(after=500), Fault(after=2000)]
    # The second answer ends before the byte reached by the first; the third passes it.
    assert read(server, Retries(attempts=4, timeout=0.5, backoff=0.01)) == BODY
    assert len(server.requests) == 4


@pytest.mark.parametrize("then", ["hang", "drip"])
@pytest.mark.parametrize("after", [0, 5000])
def test_silent_or_dripping_connection_is_left_and_continued(server, then, after):
    server.faults["/f"] = [Fault(after=after, then=then)]
    begin = time.monotonic()
    assert read(server) == BODY
    assert 0.4 < time.monotonic() - begin < 5


def test_error_after_all_attempts_in_bounded_time(server):
    server.always["/f"] = Fault(after=100, then="hang")
    begin = time.monotonic()
    with pytest.raises(TransferError, match="no answer") as caught:
        read(server)
    assert caught.value.attempts == 3
    assert len(server.requests) == 3
    # 3 silent connections of 0.5 s and 2 short waits
    assert 1.4 < time.monotonic() - begin < 5


def test_progress_forgives_earlier_failures(server):
    mebibyte = 1 << 20
    # Two failures (one less than the attempts) after every mebibyte or more of progress, five in all.
    server.faults["/f"] = [Fault(after=mebibyte), Fault(status=500), Fault(after=mebibyte), Fault(status=500)]
    assert read(server) == BODY
    server.faults["/f"] = [Fault(after=10)] * 3  # 10 bytes at a time are no progress
    with pytest.raises(TransferError):
        read(server)


def test_refused_connection_fails_after_the_attempts():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TransferError, match="refused") as caught:
        fetch(f"http://127.0.0.1:{port}/f", retries=QUICK)
    assert caught.value.attempts == 3


def test_another_length_than_expected_is_an_error(server):
    with pytest.raises(TransferError, match="3145728 bytes, where 3145729") as caught:
        read(server, size=len(BODY) + 1)
    assert caught.value.changed


def test_file_that_changes_between_attempts_is_an_error(server):
    server.faults["/f"] = [Fault(after=1000)]
    blocks = read_blocks(f"{server.url}/f", retries=QUICK)
    next(blocks)
    server.files["/f"] = BODY[:-1]
    with pytest.raises(TransferError, match="changed"):
        list(blocks)


def test_file_shortened_below_the_byte_reached_is_an_error(server):
    server.faults["/f"] = [Fault(after=1000)]
    blocks = read_blocks(f"{server.url}/f", retries=QUICK)
    next(blocks)
    server.files["/f"] = BODY[:10]
    with pytest.raises(TransferError, match="changed"):
        list(blocks)


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("1", 0.95, 1.5), ("3600", 0.95, 2.0), ("0", 0.0, 0.5), ("soon", 0.0, 0.5)],
)
def test_retry_after_is_honoured_within_bounds(server, header, low, high):
    server.faults["/f"] = [Fault(status=429, headers=(("Retry-After", header),))]
    begin = time.monotonic()
    read(server, Retries(attempts=2, timeout=1, backoff=0.01, max_wait=1.0))
    assert low < time.monotonic() - begin < high


def test_retry_after_as_a_date(server):
    server.faults["/f"] = [Fault(status=503, headers=(("Retry-After", formatdate(time.time() + 2.5, usegmt=True)),))]
    begin = time.monotonic()
    read(server, Retries(attempts=2, timeout=1, backoff=0.01, max_wait=10))
    assert 1.0 < time.monotonic() - begin < 4  # a date has whole seconds


def test_waits_double_with_jitter_and_are_bounded():
    retries = Retries(backoff=1.0, max_wait=6.0)
    for failures, low in ((1, 1.0), (2, 2.0), (3, 4.0)):
        waits = [retries.wait(failures, None) for _ in range(50)]
        assert all(low <= wait <= 1.5 * low for wait in waits)
        assert len(set(waits)) > 40  # workers that failed together come back apart
    assert retries.wait(10, None) == 6.0


def test_waiting_leaves_the_global_generator_alone():
    random.seed(1)
    before = random.getstate()
    Retries().wait(1, None)
    assert random.getstate() == before


def test_headers_do_not_follow_a_redirect_to_another_place(server):
    server.answer = lambda method, path, headers, body: (
        (302, {"Location": f"{server.url}/f"}, b"") if path == "/moved" else None
    )
    got = fetch(f"{server.url}/moved", retries=QUICK, headers={"Authorization": "Bearer secret"})
    assert got == BODY
    assert [headers.get("Authorization") for _, _, headers in server.requests] == ["Bearer secret", None]


def test_size_is_told_without_reading_the_file(server):
    assert remote_size(f"{server.url}/f", retries=QUICK) == len(BODY)
    server.ranges = False
    assert remote_size(f"{server.url}/f", retries=QUICK) == len(BODY)
    server.faults["/f"] = [Fault(status=500)]
    assert remote_size(f"{server.url}/f", retries=QUICK) == len(BODY)
    with pytest.raises(TransferError, match="404"):
        remote_size(f"{server.url}/g", retries=QUICK)


def test_empty_file(server):
    server.files["/f"] = b""
    assert read(server) == b""
    assert remote_size(f"{server.url}/f", retries=QUICK) == 0


def test_local_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(BODY)
    assert b"".join(read_blocks(str(path), size=len(BODY))) == BODY
    with pytest.raises(TransferError, match="changed"):
        list(read_blocks(str(path), size=5))
    with pytest.raises(TransferError, match="No such file"):
        list(read_blocks(str(tmp_path / "g")))
