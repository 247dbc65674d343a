"""Weights & Biases beside the CSV files: training never waits for it, and goes on whatever becomes of it."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from selmodel.errors import UserError
from selmodel.privacy import public
from selmodel.training import wandb_run
from selmodel.training.loggers import rows_logged, summary_metrics
from selmodel.training.wandb_run import LONGEST_TAG, STEP

log = logging.getLogger(__name__)


class WandbMetrics(Logger):
    """Sends each row of ``train.csv`` and ``validation.csv`` to a Weights & Biases run as well.

    One wandb run for each run directory: its id is kept there in ``wandb_id``, and a resumed run goes on with it. All
    figures have the optimizer step, ``trainer/step``, as x axis. wandb's own count of rows goes on from start to start,
    since it drops a row whose number is not higher than the last one's: steps that are trained again after a resume
    are sent again, and none is lost.

    wandb is called from a thread of its own, so that neither a server that does not answer nor a service process that
    hangs holds up training. What wandb raises is said once; the CSV files do not depend on it.

    Args:
        directory: the run's directory; wandb's files go to ``wandb`` in it.
        project, entity, group: as in ``wandb.init``.
        name: as shown by wandb; None for that of ``directory``.
        tags: of at most 64 characters each.
        mode: ``auto`` is online when a key is found (``WANDB_API_KEY`` or ``~/.netrc``) and offline otherwise, or what
            ``WANDB_MODE`` says; ``online``, ``offline`` and ``disabled`` are wandb's.
        system_metrics: whether wandb also records the use of processors, memory and GPU, and their kind.
        run_config: plain containers, recorded as the run's config without secrets
            (``selmodel.privacy.public``).

    Raises:
        UserError: for an unknown mode, ``online`` without a key, or a tag that wandb would refuse.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str = "selmodel",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str = "auto",
        system_metrics: bool = False,
        run_config: dict | None = None,
    ) -> None:
        super().__init__()
        self.directory = Path(directory)
        for tag in tags or ():
            if not 1 <= len(str(tag)) <= LONGEST_TAG:
                raise UserError(
                    f"logger.wandb.tags: {tag!r} has {len(str(tag))} characters; wandb takes 1 to {LONGEST_TAG}"
                )
        self.tags = list(dict.fromkeys(str(tag) for tag in tags or ()))
        self.run_config = run_config or {}
        resolved = wandb_run.resolve_mode(mode)
        if resolved == "offline" and rank_zero_only.rank == 0:
            reason = " (no key found)" if mode == "auto" and not wandb_run.has_key() else ""
            log.info("wandb: offline%s; send it later with: wandb sync '%s'", reason, self.directory / "wandb")
        self._open = functools.partial(
            wandb_run.open_run, self.directory, project=project, entity=entity, group=group,
            name=name or self.directory.resolve().name,
            mode=resolved, system_metrics=system_metrics,
        )  # fmt: skip
        self._feed: _Feed | None = None

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str | None:
        """The id of the wandb run; None before it is opened for the first time."""
        return wandb_run.known_id(self.directory)

    @property
    def save_dir(self) -> str:
        return str(self.directory)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration is recorded when the run is opened."""

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Opens the run: Lightning calls this in the process that trains, before the first step."""
        self._start()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._start().send({**metrics, STEP: step})

    @rank_zero_only
    def finish(self, exit_code: int = 0, *, stopped: bool = False) -> None:
        """Close the run, with the summary that the CSV files give; a later start may go on with it.

        Args:
            exit_code: 0 for a finished run; wandb shows another one as failed.
            stopped: whether the run was stopped to go on later; wandb shows it as preempted.
        """
        if self._feed is not None:
            self._feed.close(functools.partial(_close, self.directory, exit_code, stopped))
            self._feed = None

    def _start(self) -> _Feed:
        if self._feed is None:
            self._feed = _Feed(functools.partial(self._begin, rows_logged(self.directory)))
        return self._feed

    def _begin(self, rows: int) -> tuple[Any, int]:
        """The opened wandb run, and the number of its next row; ``rows``: what earlier starts may have sent."""
        run = self._open()
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)
        run.config.update(public(self.run_config), allow_val_change=True)
        # Added, so that tags given to the run elsewhere stay.
        run.tags = tuple(dict.fromkeys((*(run.tags or ()), *self.tags)))
        return run, max(rows, run.starting_step)


def _close(directory: Path, exit_code: int, stopped: bool, run: Any) -> None:
    try:
        run.summary.update(summary_metrics(directory))
        if stopped:
            run.mark_preempting()
    finally:
        run.finish(exit_code=exit_code)


class _Feed:
    """A thread that hands rows to a wandb run, one after the other, in the order they came.

    Args:
        begin: called in the thread; returns the run and the number of its first row.
    """

    # Opening may fail twice (online, then offline), and finishing has its own limit.
    PATIENCE = 3 * wandb_run.INIT_SECONDS + wandb_run.FINISH_SECONDS

    def __init__(self, begin: Callable[[], tuple[Any, int]]) -> None:
        self._begin = begin
        self._rows: queue.SimpleQueue = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def send(self, row: dict[str, Any]) -> None:
        """Queue ``row``; returns at once."""
        self._rows.put(row)

    def close(self, finish: Callable[[Any], None]) -> None:
        """Wait until all rows are handed over and ``finish`` has been called on the run, but not for ever."""
        self._rows.put(finish)
        self._thread.join(self.PATIENCE)
        if self._thread.is_alive():
            log.warning(
                "wandb has not taken everything in %.0f s and is left behind; train.csv is whole", self.PATIENCE
            )
        elif self._lost:
            log.info("wandb did not take %d rows; train.csv and validation.csv hold all", self._lost)

    def _work(self) -> None:
        try:
            run, number = self._begin()
        except Exception as error:
            log.warning("wandb cannot begin a run (%r); training goes on with the CSV files alone", error)
            run, number = None, 0
        while not callable(row := self._rows.get()):
            if run is None:
                self._lost += 1
                continue
            try:
                run.log(row, step=number, commit=True)  # committed at once, not with the next row
                number += 1
            except Exception as error:
                if not self._lost:
                    log.warning("wandb did not take a row (%r); training goes on, the CSV files hold it", error)
                self._lost += 1
        if run is not None:
            try:
                row(run)
            except Exception as error:
                log.warning("wandb cannot finish its run (%r); the CSV files are whole", error)
                _reset()


def _reset() -> None:
    """Let the next run of this process begin with a service process of its own, where this one's is gone."""
    import wandb

    try:
        wandb.teardown()
    except Exception as error:
        log.debug("wandb.teardown: %r", error)
