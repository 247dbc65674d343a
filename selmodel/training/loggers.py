"""Metrics on disk, complete whatever else happens, and Weights & Biases without prompts.

``train.csv`` and ``validation.csv`` in the run's directory hold one row for each logged optimizer step. They are
appended to line by line, so a killed run loses nothing that was logged, and a resumed one goes on in them.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from selmodel.data.caching import write_atomically
from selmodel.errors import UserError

log = logging.getLogger(__name__)


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
        """All whole rows, as text; a half-written last line, left by a kill, is not one."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
        return list(csv.DictReader(lines))

    def append(self, row: dict[str, Any]) -> None:
        """Add one row, written and flushed to the operating system before this returns."""
        new = [key for key in row if key not in self.columns]
        if new:
            rows = self.rows()
            self.columns += new
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow({key: _text(value) for key, value in row.items()})

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
        write_atomically(self.path, text.getvalue().encode())


def _text(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


class CSVMetrics(Logger):
    """Writes training figures to ``train.csv`` and validation figures to ``validation.csv`` in ``directory``.

    Lightning's own CSV logger deletes the file of an earlier start, so a resumed run would lose its history.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self.directory = Path(directory)
        self._tables: dict[str, Table] = {}

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
        validation = any(key.startswith("val/") for key in metrics)
        self._table("validation" if validation else "train").append({"step": step} | metrics)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration has a file of its own in the run's directory."""

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Set aside what an earlier start logged after ``step``, which the run now resumes from."""
        for name in ("train", "validation"):
            moved = self._table(name).rewind(step, self.directory / f"{name}.overtaken.csv")
            if moved:
                log.info("%d rows of %s.csv after step %d moved to %s.overtaken.csv", moved, name, step, name)

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._tables[name] = Table(self.directory / f"{name}.csv")
        return self._tables[name]


def wandb_logger(
    directory: str | Path,
    *,
    project: str = "selmodel",
    entity: str | None = None,
    name: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
    mode: str = "auto",
    run_config: dict | None = None,
) -> Logger:
    """A Weights & Biases logger that never asks and never hangs.

    Args:
        directory: the run's directory; wandb's files go below it, and the run's id is kept there in ``wandb_id``, so
            that a resumed run continues the same wandb run.
        project, entity, name, group, tags: as in ``wandb.init``.
        mode: ``auto`` is online when a key is found (``WANDB_API_KEY`` or ``~/.netrc``) and offline otherwise;
            ``online``, ``offline`` and ``disabled`` are wandb's.
        run_config: resolved configuration, recorded with the run.

    Raises:
        UserError: for an unknown mode, or ``online`` without a key.
    """
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    modes = ("auto", "online", "offline", "disabled")
    if mode not in modes:
        raise UserError(f"logger.wandb.mode={mode}: must be one of {', '.join(modes)}")
    has_key = _has_wandb_key()
    wanted = os.environ.get("WANDB_MODE")
    if mode == "online" and not has_key:
        raise UserError(
            "logger.wandb.mode=online: no key found in WANDB_API_KEY or ~/.netrc; run `wandb login`, or set "
            "logger.wandb.mode=offline"
        )
    if mode == "auto":
        mode = wanted or ("online" if has_key else "offline")
        if mode == "offline":
            reason = f"WANDB_MODE={wanted}" if wanted else "no key found"
            log.info("wandb: %s, logging offline below %s (send it later with `wandb sync`)", reason, directory)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    id_file = directory / "wandb_id"
    if not id_file.exists() and rank_zero_only.rank == 0:
        id_file.write_text(secrets.token_hex(4))
    run_id = id_file.read_text().strip() if id_file.exists() else None
    return WandbLogger(
        project=project,
        entity=entity,
        name=name,
        group=group,
        tags=list(tags or []),
        save_dir=str(directory),
        id=run_id,
        resume="allow",
        mode=mode,
        config=run_config,
        settings=wandb.Settings(init_timeout=60, console="off", silent=mode != "online"),
    )


def _has_wandb_key() -> bool:
    import netrc

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        entries = netrc.netrc()
    except (FileNotFoundError, netrc.NetrcParseError, PermissionError):
        return False
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    return entries.authenticators(host) is not None
