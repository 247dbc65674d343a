"""``evaluate.py report=NAME sweep=DIR``: makes a report, prints it, and writes it into the sweep's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from selmodel.data.caching import write_atomically
from selmodel.errors import UserError
from selmodel.report.comparisons import context_size, memory_loss, model_size, perplexity_vs_heads
from selmodel.report.curves import loss_by_position, training_curves
from selmodel.report.figures import save
from selmodel.report.measured import memory, task_accuracy
from selmodel.report.runs import Run, read_sweep
from selmodel.report.shared import Report, protocol
from selmodel.report.tables import row, to_csv, to_lines, to_markdown
from selmodel.report.upload import log_report

log = logging.getLogger(__name__)


FOLDER = "report"  # in the sweep's


def write_report(name: str, directory: Path) -> list[Path]:
    """Make the report ``name`` of the sweep in ``directory``; write and print it.

    Writes ``report/NAME.csv`` (a row for each run), ``NAME.md`` (the summary), ``NAME.png`` and ``NAME.svg`` into the
    sweep's folder, and nothing outside it.

    Returns:
        the files written; none where nothing can be compared yet, which is said.

    Raises:
        UserError: no sweep is there, or its runs were trained or measured differently.
    """
    runs, missing = read_sweep(directory)
    lines, files = [f"{name}: {len(runs)} finished runs in {directory}"], []
    if runs:
        report = REPORTS[name](runs)
        missing = [*missing, *report.notes]
        if report.rows:
            files = _write(report, directory / FOLDER)
            missing += _send(report, directory, files)
            lines += ["", *to_lines(report.rows)]
    if missing:
        lines += ["", *missing]
    if files:
        lines += ["", f"written to {directory / FOLDER}: {', '.join(path.name for path in files)}"]
    elif not runs:
        lines += ["", "nothing to report yet: no run has finished"]
    for line in lines:
        log.info(line)
    return files


def _write(report: Report, folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    csv, markdown = folder / f"{report.name}.csv", folder / f"{report.name}.md"
    write_atomically(csv, to_csv(report.table or [row(run) for run in report.runs]))
    text = to_markdown(report.rows) + "\n" + "".join(f"- {note}\n" for note in [*report.notes, protocol(report.runs)])
    write_atomically(markdown, text.encode())
    figures = [] if report.figure is None else save(report.figure, folder / report.name)
    return [csv, markdown, *figures]


def _send(report: Report, directory: Path, files: Sequence[Path]) -> list[str]:
    """Add the report to Weights & Biases where its runs were trained with it; what is in the way is returned."""
    try:
        log_report(directory, files, runs=[run.directory for run in report.runs], figures=report.summary)
    except Exception as error:  # of a library and a service; the files are there
        return [f"not added to wandb: {error}"]
    return []


def write_all(directory: Path) -> list[Path]:
    """Every report that the sweep's runs allow; what does not fit is said."""
    files = []
    runs, _ = read_sweep(directory)
    for name in REPORTS:
        if runs and not _applies(name, runs):
            continue
        try:
            files += write_report(name, directory)
        except UserError as error:
            log.info("%s: left out: %s", name, str(error))
        log.info("")
    return files


def _applies(name: str, runs: Sequence[Run]) -> bool:
    """Whether the axis of a comparison has several values among the runs."""
    axis = {
        "perplexity_vs_heads": "model.n_heads", "context_size": "model.context_length", "model_size": "model.d_model",
        "memory_loss": "attention.memory_loss.eps",
    }.get(name)  # fmt: skip
    return axis is None or len({run.settings[axis] for run in runs}) > 1


REPORTS: dict[str, Callable[[list[Run]], Report]] = {
    "perplexity_vs_heads": perplexity_vs_heads,
    "context_size": context_size,
    "model_size": model_size,
    "memory_loss": memory_loss,
    "loss_by_position": loss_by_position,
    "training_curves": training_curves,
    "memory": memory,
    "task_accuracy": task_accuracy,
}
