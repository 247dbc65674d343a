"""Bytes of one file, from a local path or over HTTP, whole or not at all.

`read_blocks` is the only place that touches a disk or a network for shard bytes. Over HTTP it retries what may
pass (429, 5xx, a lost or silent connection) and continues at the byte it had reached, so that the bytes that
come out are those of one undisturbed download. A download that ends before the length the server announced is
a lost connection, never the end of the file.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import logging
import netrc
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

BLOCK = 1 << 17  # bytes asked for at once; large enough that Python's share of the work is small
PROGRESS = 1 << 20  # bytes after which earlier failures of the same file are forgiven
SLOWEST = 256  # bytes per second; a connection slower than this over one timeout counts as silent
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class TransferError(Exception):
    """The bytes could not be had.

    attempts: how often it was tried. status: the HTTP status of the last answer, if there was one.
    changed: the file is another one than was expected.
    """

    def __init__(self, reason: str, attempts: int = 1, *, status: int | None = None, changed: bool = False):
        super().__init__(reason)
        self.attempts = attempts
        self.status = status
        self.changed = changed


@dataclass(frozen=True)
class Retries:
    """How long a remote file is tried before it is given up.

    attempts: tries in a row without progress (1 MiB) before the error; 1 means no retry.
    timeout: seconds without a byte (or below 256 bytes per second) before a connection counts as lost.
    backoff: seconds before the second try; doubles each time, with jitter of up to a half on top.
    max_wait: bound in seconds on one wait, the server's Retry-After included.

    A file that never answers is therefore given up after at most attempts * 2 * timeout seconds (connecting
    and reading) plus (attempts - 1) * max_wait; with the defaults a refused connection takes about 20
    seconds, a silent server about 3 minutes.
    """

    attempts: int = 5
    timeout: float = 30.0
    backoff: float = 1.0
    max_wait: float = 60.0

    def wait(self, failures: int, retry_after: float | None) -> float:
        """Seconds to wait after `failures` (>= 1) tries in a row have failed."""
        seconds = self.backoff * 2 ** (failures - 1)
        seconds *= 1 + 0.5 * _JITTER.random()
        return min(max(seconds, retry_after or 0.0), self.max_wait)


# Its own generator: reading data must not move the global one. The operating system seeds it, so that workers
# that fail together do not come back together.
_JITTER = random.SystemRandom()


class _Passing(Exception):
    """A failure that may pass: worth another try."""

    def __init__(self, reason: str, retry_after: float | None = None, status: int | None = None):
        super().__init__(reason)
        self.retry_after = retry_after
        self.status = status


def is_remote(location: str) -> bool:
    return location.startswith(("http://", "https://"))


def read_blocks(
    location: str,
    *,
    size: int | None = None,
    retries: Retries | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[bytes]:
    """Yield the bytes of `location` (a path or an http(s) URL) in blocks, in order, each byte once.

    size: bytes the file is known to have, if known; another length is an error.
    headers: sent with HTTP requests, and not passed on to another host by a redirect.
    Raises TransferError.
    """
    if is_remote(location):
        yield from _http_blocks(location, size, retries or Retries(), headers or {})
    else:
        yield from _local_blocks(location, size)


def fetch(url: str, *, retries: Retries | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The whole body of a small file. Raises TransferError."""
    return b"".join(read_blocks(url, retries=retries, headers=headers))


def remote_size(url: str, *, retries: Retries | None = None, headers: Mapping[str, str] | None = None) -> int | None:
    """Length in bytes of the file at `url` as the server states it, or None. Raises TransferError."""
    retries = retries or Retries()
    failures = 0
    while True:
        try:
            # One byte is asked for: a server without ranges states the length as well, and is left alone then.
            with _open_http(url, 0, retries.timeout, headers or {}, last=0) as (_, total):
                return total
        except _Passing as fault:
            failures += 1
            _give_up_or_wait(url, fault, failures, retries)


def _local_blocks(path: str, size: int | None) -> Iterator[bytes]:
    read = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                read += len(block)
                yield block
    except OSError as error:
        raise TransferError(f"cannot be read: {error.strerror or error}") from error
    if size is not None and read != size:
        raise _changed(read, size)


def _http_blocks(url: str, size: int | None, retries: Retries, headers: Mapping[str, str]) -> Iterator[bytes]:
    offset = 0  # bytes handed on
    forgiven = 0  # value of offset when failures were last counted afresh
    failures = 0
    while True:
        try:
            with _open_http(url, offset, retries.timeout, headers) as (response, total):
                if total is not None and size is not None and total != size:
                    raise _changed(total, size)
                size = total if size is None else size
                for block in _body(response, retries.timeout):
                    offset += len(block)
                    yield block
            if size is not None and offset != size:
                raise _Passing(f"the connection closed after {offset} of {size} bytes")
            return
        except _Passing as fault:
            if offset - forgiven >= PROGRESS:
                failures, forgiven = 0, offset
            failures += 1
            _give_up_or_wait(url, fault, failures, retries)


def _changed(size: int, expected: int) -> TransferError:
    return TransferError(f"the file has {size} bytes, where {expected} were expected: it changed", changed=True)


def _give_up_or_wait(url: str, fault: _Passing, failures: int, retries: Retries) -> None:
    if failures >= retries.attempts:
        raise TransferError(str(fault), failures, status=fault.status) from fault
    seconds = retries.wait(failures, fault.retry_after)
    logger.warning("%s: %s; try %d of %d in %.1f s", url, fault, failures + 1, retries.attempts, seconds)
    time.sleep(seconds)


@contextmanager
def _open_http(url: str, offset: int, timeout: float, headers: Mapping[str, str], last: int | None = None):
    """Yield (response positioned at byte `offset`, length of the whole file or None). last: last byte wanted."""
    # identity: a json.gz must arrive as it lies there, not unpacked on the way
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "selmodel"})
    for key, value in {**_login(url), **headers}.items():
        # A redirect to a content network must not carry the Hub's token along.
        request.add_unredirected_header(key, value)
    if offset or last is not None:
        request.add_header("Range", f"bytes={offset}-{'' if last is None else last}")
    response = None
    try:
        try:
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            response = error
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            raise _Passing(_reason(error)) from error
        total = _check_status(response, offset, timeout)
        yield response, total
    finally:
        if response is not None:
            response.close()


def _login(url: str) -> dict[str, str]:
    """The header for a login that ~/.netrc (or the file that NETRC names) has for the host; empty where it has none."""
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return {}
    # The default entry of a netrc is for anonymous FTP.
    if entry is None or not entry[0] or not entry[2]:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{entry[0]}:{entry[2]}".encode()).decode()}


def _check_status(response, offset: int, timeout: float) -> int | None:
    """Length of the whole file; leaves `response` at byte `offset`."""
    status = response.status
    if status in PASSING_STATUS:
        raise _Passing(f"HTTP status {status} ({response.reason})", _retry_after(response.headers), status)
    length = response.headers.get("Content-Length")
    if status == 206:
        unit, _, total = response.headers.get("Content-Range", "").partition("/")
        if unit.split("-")[0] != f"bytes {offset}":
            raise TransferError(
                f"answered a request for bytes from {offset} with Content-Range {unit!r}", status=status
            )
        return int(total) if total.isdigit() else None
    if status == 416:  # the file ends where we stand (or before)
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if total != str(offset):
            raise TransferError(f"the file ends before byte {offset}: it changed", status=status, changed=True)
        return offset
    if status != 200:
        raise TransferError(f"HTTP status {status} ({response.reason})", status=status)
    total = int(length) if length is not None and length.isdigit() else None
    left = offset  # the server has no ranges: read again up to where we stood
    for block in _body(response, timeout, bound=offset):
        left -= len(block)
    if left:
        raise _Passing(f"the connection closed after {offset - left} of {total or 'unknown'} bytes")
    return total


def _body(response, timeout: float, bound: int | None = None) -> Iterator[bytes]:
    """Blocks of the body, at most `bound` bytes of it. A connection that only drips is a fault too."""
    waited, received = 0.0, 0
    while bound is None or bound > 0:
        begin = time.monotonic()
        try:
            block = response.read1(BLOCK if bound is None else min(BLOCK, bound))
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(_reason(error)) from error
        if not block:
            return
        # Only time spent waiting for the server counts, not what the reader does between blocks.
        waited += time.monotonic() - begin
        received += len(block)
        if waited > timeout:
            if received < SLOWEST * waited:
                raise _Passing(f"only {received} bytes came in {waited:.0f} s")
            waited, received = 0.0, 0
        if bound is not None:
            bound -= len(block)
        yield block


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None)  # URLError wraps the socket's error
    error = reason if isinstance(reason, BaseException) else error
    if isinstance(error, TimeoutError):
        return "no answer within the time limit"
    return f"{type(error).__name__}: {error}"


def _retry_after(headers) -> float | None:
    """Seconds asked for by Retry-After, given as seconds or as a date."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
