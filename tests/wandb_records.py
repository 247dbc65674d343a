"""Reads what wandb wrote below a directory: the records of its ``.wandb`` files, which it would send to its server.

The files are logs in LevelDB's format (blocks of 32 KiB; records cut into first, middle and last fragments) of
protobuf messages, after a header of seven bytes.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

HEADER = 7  # bytes, of the file, and of each fragment: checksum (4), length (2), kind (1)
BLOCK = 32768
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator:
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, message = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        fragment = data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or len(fragment) < length:
            return  # cut short by a kill
        message = fragment if kind in (WHOLE, FIRST) else message + fragment
        if kind in (WHOLE, LAST):
            yield Record.FromString(message)


class Start:
    """What one start of a run left.

    Attributes:
        rows: history, in order: values by name.
        config, summary: as they stood at the end.
        run: the last ``RunRecord``: id, group, tags, name, host, ...
        exit_code: None when the run was cut short.
        artifacts: ``ArtifactRecord``s.
        preempting: whether the run was marked as stopped to go on later.
        text: of all records, to search.
    """

    def __init__(self, path: Path) -> None:
        self.rows: list[dict] = []
        self.config: dict = {}
        self.summary: dict = {}
        self.run = None
        self.exit_code: int | None = None
        self.artifacts = []
        self.preempting = False
        self.x_axes: dict[str, str] = {}  # by the pattern of the metrics drawn over it
        self.kinds: list[str] = []
        self.text = ""
        for record in records(path):
            kind = record.WhichOneof("record_type")
            self.kinds.append(kind)
            self.text += str(record)
            if kind == "run":
                self.run = record.run
            elif kind == "history":
                self.rows.append({_key(item): json.loads(item.value_json) for item in record.history.item})
            elif kind == "config":
                self.config |= {_key(item): json.loads(item.value_json) for item in record.config.update}
            elif kind == "summary":
                self.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
            elif kind == "metric" and record.metric.step_metric:
                self.x_axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                self.artifacts.append(record.request.log_artifact.artifact)
            elif kind == "preempting":
                self.preempting = True


def _key(item) -> str:
    return ".".join(item.nested_key) if item.nested_key else item.key


def starts(directory: Path, *, killed: int = 0) -> list[Start]:
    """Every start that logged offline below ``directory/wandb``, in the order they began, which ``wandb sync`` keeps.

    wandb closes its file a moment after the run has finished: waits until all but ``killed`` starts are whole.
    """
    deadline = time.monotonic() + 10
    while True:
        found = [Start(path) for path in directory.glob("wandb/offline-run-*/*.wandb")]
        if sum(start.exit_code is None for start in found) <= killed:
            return sorted(found, key=lambda start: start.run.start_time.ToNanoseconds() if start.run else 0)
        assert time.monotonic() < deadline, f"{directory}: not every start was finished"
        time.sleep(0.02)
