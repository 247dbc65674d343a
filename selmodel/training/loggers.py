"""Metrics on disk, complete whatever else happens.

``train.csv`` and ``validation.csv`` in the run's directory hold one row for each logged optimizer step. They are
appended to line by line, so a killed run loses nothing that was logged, and a resumed one goes on in them.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import logging
import math
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from selmodel.data.caching import write_atomically
from selmodel.errors import UserError

log = logging.getLogger(__name__)


def read_rows(path: Path) -> list[dict[str, str]]:
    """All whole rows of a table, as text; none where the file is missing.

    A half-written last line, left by a kill or just being written, is not one.
    """
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    return list(csv.DictReader(lines))


class Table:
    """An append-only CSV file keyed by ``step``, ascending.

    Columns may appear later than the first row (the file is then rewritten once, through a temporary name). Numbers
    are written so that reading them gives the same float64.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        if path.exists():
            text = path.read_text(errors="replace")
            self.columns = next(csv.reader(text.splitlines()[:1]), []) if "\n" in text else []
            if not self.columns or self.columns[0] != "step":
                self.columns = []
                if text:
                    damaged = path.with_name(f"{path.stem}.damaged.csv")
                    log.warning("%s has no whole header line; kept as %s, beginning anew", path, damaged.name)
                    os.replace(path, damaged)

    def rows(self) -> list[dict[str, str]]:
        """All whole rows, see ``read_rows``."""
        return read_rows(self.path)

    def append(self, row: dict[str, Any]) -> None:
        """Add one row, written and flushed to the operating system before this returns.

        Raises:
            OSError: the disk refuses. The file is as it was before.
        """
        new = [key for key in row if key not in self.columns]
        if new:
            rows, columns = self.rows(), list(self.columns)
            self.columns += new
            try:
                self._rewrite(rows)
            except BaseException:
                self.columns = columns
                raise
        line = io.StringIO(newline="")
        csv.DictWriter(line, self.columns).writerow({key: _text(value) for key, value in row.items()})
        content = line.getvalue().encode()
        # Without a buffer, which would try again to write its rest when the file is closed.
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)  # half a row would run into the next one
                raise

    def rewind(self, step: int, overtaken: Path) -> int:
        """Move rows of steps after ``step``, which will be trained again, to the file ``overtaken``.

        Returns:
            how many rows were moved.
        """
        rows = self.rows()
        later = [row for row in rows if int(row["step"]) > step]
        text = self.path.read_text() if self.path.exists() else ""
        if later:
            aside = Table(overtaken)
            for row in later:
                aside.append({key: value for key, value in row.items() if value != ""})
        if later or (text and not text.endswith("\n")):
            self._rewrite([row for row in rows if int(row["step"]) <= step])
        return len(later)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows({key: value or "" for key, value in row.items()} for row in rows)
        try:
            write_atomically(self.path, text.getvalue().encode())
        except UserError as error:
            raise error.__cause__ or error from None


def _text(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


class CSVMetrics(Logger):
    """Writes training figures to ``train.csv`` and validation figures to ``validation.csv`` in ``directory``.

    Lightning's own CSV logger deletes the file of an earlier start, so a resumed run would lose its history.

    A disk that refuses does not stop training: the rows wait, and are written with the next ones.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self.directory = Path(directory)
        self._tables: dict[str, Table] = {}
        self._waiting: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}

    @property
    def name(self) -> str:
        return "csv"

    @property
    def save_dir(self) -> str:
        return str(self.directory)

    @property
    def version(self) -> str:
        return self.directory.name

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        name = "validation" if any(key.startswith("val/") for key in metrics) else "train"
        self._waiting[name].append({"step": step} | metrics)
        try:
            self._write(name)
        except OSError as error:
            if len(self._waiting[name]) == 1:
                log.error(
                    "step %s: %s.csv in %s could not be written (%s); its rows are kept in memory and tried again",
                    step, name, self.directory, error.strerror or error,
                )  # fmt: skip

    def _write(self, name: str) -> None:
        """Write the rows that wait. Raises OSError where the disk refuses; those not written go on waiting."""
        waiting = self._waiting[name]
        n_waiting = len(waiting)
        while waiting:
            self._table(name).append(waiting[0])
            waiting.pop(0)
        if n_waiting > 1:
            log.info("%s.csv can be written again: %d rows that waited are in it", name, n_waiting)

    @rank_zero_only
    def flush(self) -> None:
        """Write what waits. Raises UserError where the disk still refuses."""
        for name, waiting in self._waiting.items():
            try:
                self._write(name)
            except OSError as error:
                raise UserError(
                    f"{name}.csv in {self.directory} could not be written ({error.strerror or error}): {len(waiting)} "
                    "rows, from the last steps, are lost. Free space or mend the folder's rights, and run it again"
                ) from error

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration has a file of its own in the run's directory."""

    @rank_zero_only
    def rewind(self, step: int, *, validation_pending: bool = False) -> None:
        """Set aside what an earlier start logged after ``step``, which the run now resumes from.

        validation_pending: the validation of ``step`` itself will be done again too.
        """
        for name in ("train", "validation"):
            last = step - 1 if name == "validation" and validation_pending else step
            moved = self._table(name).rewind(last, self.directory / f"{name}.overtaken.csv")
            if moved:
                log.info("%d rows of %s.csv after step %d moved to %s.overtaken.csv", moved, name, step, name)

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._tables[name] = Table(self.directory / f"{name}.csv")
        return self._tables[name]


def rows_logged(directory: str | Path) -> int:
    """How many rows a run's directory holds of all its starts, those included that were trained again later."""
    names = ("train", "validation", "train.overtaken", "validation.overtaken")
    return sum(len(read_rows(Path(directory) / f"{name}.csv")) for name in names)


def summary_metrics(directory: str | Path) -> dict[str, float]:
    """The last and the best validation in a run's directory, one figure a name; empty before the first one.

    ``final/`` and ``best/`` (lowest finite loss, the first of equals), each with ``loss`` (nats per token),
    ``perplexity``, ``bits_per_byte``, ``accuracy`` on tasks, ``step``, and ``tokens`` trained on until then.
    """
    rows = [row for row in read_rows(Path(directory) / "validation.csv") if row.get("val/loss")]
    finite = [row for row in rows if math.isfinite(float(row["val/loss"]))]
    summary = {}
    for kind, row in (("final", rows[-1:]), ("best", sorted(finite, key=lambda row: float(row["val/loss"]))[:1])):
        for figures in row:
            summary[f"{kind}/step"] = int(figures["step"])
            summary[f"{kind}/tokens"] = int(figures["train/tokens"])
            for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
                if figures.get(f"val/{name}"):
                    summary[f"{kind}/{name}"] = float(figures[f"val/{name}"])
    return summary
