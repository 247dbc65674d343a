"""Rows of one shard: gzip, lines, UTF-8 and JSON, with every fault named or counted.

A shard is a file of JSON lines, plain or gzipped, each line an object with a string `text`. Rows are numbered
by physical line from 0, so that a row keeps its number whatever is skipped before it.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from selmodel.data.transfer import TransferError, is_remote
from selmodel.errors import UserError

logger = logging.getLogger(__name__)

UNPACKED = 1 << 20  # bytes unpacked at once: a bound on memory even for a file of zeros
GZIP = b"\x1f\x8b"
LFS = b"version https://git-lfs"
BLANK = "blank line"


class ContentError(Exception):
    """The file came whole but is not what a shard should be."""


@dataclass
class SkipCounter:
    """What was left out with on_bad_shard="skip", by shard name.

    rows: number of rows left out (again in each epoch that meets them).
    shards: number of times the rest of the shard was given up because it could not be unpacked.
    Counts are those of the process that reads: a worker process has its own.
    """

    rows: dict[str, int] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)

    def skip_row(self, shard: str, row: int, reason: str) -> None:
        self.rows[shard] = self.rows.get(shard, 0) + 1
        logger.warning("%s, row %d: %s; row skipped (%d so far)", shard, row, reason, self.total_rows)

    def skip_shard(self, shard: str, row: int, reason: str) -> None:
        self.shards[shard] = self.shards.get(shard, 0) + 1
        logger.warning("%s: %s; skipped from row %d on (%d shards so far)", shard, reason, row, len(self.shards))

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())

    def __bool__(self) -> bool:
        return bool(self.rows or self.shards)


def check_on_bad_shard(value: str) -> str:
    if value not in ("error", "skip"):
        raise UserError(f"data.on_bad_shard={value!r}: expected 'error' or 'skip'")
    return value


def read_rows(
    name: str,
    location: str,
    open_blocks: Callable[[], Iterator[bytes]],
    start: int,
    step: int,
    *,
    on_bad_shard: str,
    skipped: SkipCounter,
    attempts: int = 1,
    backoff: float = 1.0,
) -> Iterator[tuple[int, str]]:
    """Yield (row, text) for rows start, start + step, start + 2 * step, ... of one shard.

    name: the shard in messages. open_blocks: gives its bytes from the first on; may be called again: a remote
    gzip file that does not unpack is read anew up to `attempts` times, continuing at the row reached.
    Raises UserError that names shard, row and the way out.
    """
    if start < 0 or step < 1:
        raise ValueError(f"start={start}, step={step}: expected start >= 0 and step >= 1")
    row = start
    failures = 0
    while True:
        try:
            blocks = open_blocks()
            if location.endswith(".gz"):
                blocks = unpack(blocks)
            for at, text, fault in _parsed(blocks, row, step):
                row = at + step
                if fault is None:
                    yield at, text
                elif on_bad_shard == "skip":
                    skipped.skip_row(name, at, fault)
                else:
                    raise UserError(
                        f"{name}, row {at}: {fault}. Mend the file, or leave such rows out with data.on_bad_shard=skip"
                    )
            return
        except TransferError as error:
            # A local file that cannot be read stays so; a connection may be back for the next shard, and a run
            # that left out what the network withheld would not be the same run twice.
            if on_bad_shard == "skip" and not is_remote(location):
                skipped.skip_shard(name, row, str(error))
                return
            raise UserError(
                f"{name}, row {row}: {location}: {error} (attempts: {error.attempts}). Check the file or the "
                "connection, then resume the run"
            ) from error
        except ContentError as error:
            failures += 1
            if is_remote(location) and failures < attempts:
                wait = backoff * 2 ** (failures - 1)
                logger.warning(
                    "%s, row %d: %s; read again in %.1f s, try %d of %d",
                    *(name, row, error, wait, failures + 1, attempts),
                )
                time.sleep(wait)
            elif on_bad_shard == "skip":
                skipped.skip_shard(name, row, str(error))
                return
            else:
                raise UserError(
                    f"{name}, row {row}: {location}: {error} (attempts: {failures}). "
                    "Replace the file, or leave it out with data.on_bad_shard=skip"
                ) from error


def _parsed(blocks: Iterator[bytes], start: int, step: int) -> Iterator[tuple[int, str, str | None]]:
    """(row, text, fault) of every step-th row; blank lines at the end of the file are no rows."""
    blank: list[int] = []  # blank rows that may yet turn out to be the end of the file
    for first, lines in numbered_lines(blocks, start):
        if blank and any(line.strip() for line in lines):
            yield from ((row, "", BLANK) for row in blank)
            blank = []
        for row in range(first + (start - first) % step, first + len(lines), step):
            text, fault = parse(lines[row - first])
            if fault == BLANK and not any(line.strip() for line in lines[row - first :]):
                blank.append(row)
            else:
                yield row, text, fault


def parse(line: bytes) -> tuple[str, str | None]:
    """(text, None) of a JSON line, or ("", what is wrong with it)."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 (byte {error.start} of the line)"
    except (ValueError, RecursionError) as error:
        return "", f"not valid JSON ({error})" if line.strip() else BLANK
    if not isinstance(record, dict):
        return "", f"expected a JSON object with 'text', found {type(record).__name__}"
    if "text" not in record:
        return "", f"no 'text' in the line (it has: {', '.join(sorted(record)[:8]) or 'nothing'})"
    text = record["text"]
    if not isinstance(text, str):
        return "", f"'text' is {type(text).__name__}, expected a string"
    if not text:
        return "", "'text' is empty"
    if b"\\u" in line:  # only an escape can smuggle half a surrogate pair in
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return "", f"'text' has half a surrogate pair at character {error.start}, which UTF-8 cannot hold"
    return text, None


def unpack(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Gzip, of one or several members. Raises ContentError where it is none, is damaged or ends early."""
    engine = None
    for block in blocks:
        while block:
            if engine is None or engine.eof:
                if engine is not None:
                    block = block.lstrip(b"\0")  # members may be padded with zeros
                    if not block:
                        break
                elif not block.startswith(GZIP[: len(block)]):
                    hint = " (a Git LFS pointer: git lfs pull)" if block.startswith(LFS) else ""
                    raise ContentError(f"not a gzip file, though its name ends in .gz{hint}")
                engine = zlib.decompressobj(wbits=31)
            before = engine.copy()
            try:
                data = engine.decompress(block, UNPACKED)
            except zlib.error as error:
                yield from _up_to_damage(before, block)
                raise ContentError(f"damaged gzip data ({error})") from error
            block = engine.unused_data if engine.eof else engine.unconsumed_tail
            if data:
                yield data
    if engine is None:
        raise ContentError("not a gzip file: it is empty")
    if not engine.eof:
        raise ContentError("the gzip data ends early (a truncated file)")


def _up_to_damage(engine, block: bytes) -> Iterator[bytes]:
    """What unpacks of a damaged block, byte by byte: the rows before the damage must not depend on how the file
    was cut into blocks, or a run that skips the rest would not be the same run twice."""
    try:
        for i in range(len(block)):
            yield engine.decompress(block[i : i + 1])
    except zlib.error:
        return


def numbered_lines(blocks: Iterator[bytes], start: int = 0) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (number of the first line, lines) in groups, from line `start` on, without line ends.

    Lines before `start` are counted, not cut out. A line end at the end of the file opens no further line.
    """
    number = 0
    parts: list[bytes] = []  # the beginning of a line that goes on in the next block
    for block in blocks:
        end = block.rfind(b"\n")
        if end < 0:
            parts.append(block)
            continue
        parts.append(block[:end])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts = [block[end + 1 :]]
        count = data.count(b"\n") + 1
        if number + count > start:
            lines = data.split(b"\n")
            before = max(0, start - number)
            yield number + before, lines[before:]
        number += count
    data = b"".join(parts)
    if data and number >= start:
        yield number, [data]
