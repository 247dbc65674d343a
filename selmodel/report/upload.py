"""Adds to Weights & Biases what is only known after training: reports, budgets, figures that compare runs.

Each run keeps the one wandb run it was trained with, and a sweep's report gets one of its own, kept in the report's
folder. Both follow ``logger.wandb`` of the configuration that the runs were trained with: what was logged offline stays
offline, below ``wandb`` in the same folder, until ``wandb sync`` sends it. Files are sent as they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
from omegaconf import OmegaConf

from selmodel.errors import UserError
from selmodel.training.wandb_run import open_run, resolve_mode, sweep_name

log = logging.getLogger(__name__)

# The reports (`python evaluate.py report=NAME`), by whose names their figures are shown.
FIGURES = (
    "perplexity_vs_heads", "context_size", "model_size", "memory_loss", "loss_by_position", "training_curves", "memory",
    "task_accuracy",
)  # fmt: skip
MEDIA = "figures/"  # what the names of images begin with in wandb
_KINDS = {".png": "figures", ".svg": "figures", ".pdf": "figures"}


def wandb_options(run_dir: str | Path) -> dict[str, Any] | None:
    """``logger.wandb`` of a run's ``config.yaml``; None where the run has no such file or was trained without wandb.

    Raises:
        UserError: for a file that is something else.
    """
    path = Path(run_dir) / "config.yaml"
    if not path.exists():
        return None
    try:
        options = OmegaConf.to_container(OmegaConf.load(path))["logger"]["wandb"]
    except Exception as error:  # of many kinds, by what is wrong with the file
        raise UserError(f"{path}: not the configuration of a run ({type(error).__name__})") from error
    return options


def log_artifacts(run_dir: str | Path, files: Iterable[str | Path]) -> None:
    """Add ``files`` to the wandb run of ``run_dir``, as one artifact for each kind.

    The kinds are ``budgets`` (JSON files whose name begins so), ``figures`` (PNG, SVG, PDF) and ``reports`` (anything
    else). An artifact is named by its kind and the run's id; logged again, it gets another version.

    Raises:
        UserError: for a file that is missing, two of one name, a run trained without wandb, and one that is training.
    """
    paths = _checked(files)
    with _of_run(Path(run_dir)) as run:
        _log_files(run, paths)


def update_summary(run_dir: str | Path, figures: Mapping[str, float | str | None]) -> None:
    """Set summary figures of the wandb run of ``run_dir``, such as ``{"equivalent_heads": 3.7}``.

    Raises:
        UserError: for a run trained without wandb, and one that is training.
    """
    with _of_run(Path(run_dir)) as run:
        run.summary.update(dict(figures))


def log_report(
    sweep: str | Path,
    files: Iterable[str | Path],
    *,
    runs: Sequence[str | Path],
    figures: Mapping[Path, Mapping[str, float | str | None]] | None = None,
) -> bool:
    """Add the report of a sweep: a wandb run of its own in the sweep's group, with PNG files to look at.

    Args:
        sweep: folder of the sweep; the report's run keeps its files in ``report`` there.
        files: tables and figures, kept as artifacts by kind, which are named by the report where all files of a kind
            have its name (``perplexity_vs_heads.csv``, ``.md``); a PNG is also shown, as ``figures/NAME``.
        runs: directories of the runs that the report is on; the first one trained with wandb says where to.
        figures: summary figures of single runs, by their directory (see ``update_summary``); those of runs trained
            without wandb are passed over.

    Returns:
        whether anything was added: not where no run was trained with wandb.

    Raises:
        UserError: for a file that is missing, two of one name, and a run that is training.
    """
    paths = _checked(files)
    options = next((found for run in runs if (found := wandb_options(run)) is not None), None)
    if options is None:
        return False
    group = options.get("group") or sweep_name(Path(runs[0]), multirun=True)
    folder = Path(sweep) / "report"
    with _opened(folder, options, name="report", group=group, job_type="report") as run:
        images = _images([path for path in paths if path.suffix == ".png"])
        if images:
            run.log(images)
        _log_files(run, paths, by_name=True)
    for run_dir, values in (figures or {}).items():
        if wandb_options(run_dir) is not None:
            update_summary(run_dir, values)
    return True


@contextlib.contextmanager
def _of_run(run_dir: Path) -> Iterator[Any]:
    options = wandb_options(run_dir)
    if options is None:
        raise UserError(f"{run_dir}: was trained without Weights & Biases; train with logger=wandb to have a run there")
    lock = filelock.FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"{run_dir}: is being trained; add to its wandb run when that has finished") from None
    try:
        with _opened(run_dir, options) as run:
            yield run
    finally:
        lock.release()


@contextlib.contextmanager
def _opened(directory: Path, options: Mapping[str, Any], **how: Any) -> Iterator[Any]:
    settings = {"name": None, "group": None, "job_type": None} | how
    before = os.environ.get("WANDB_DATA_DIR")
    # wandb copies what it will send later to a folder of the user's that the run's directory would not take along.
    os.environ["WANDB_DATA_DIR"] = str(directory.resolve() / "wandb" / "staged")
    try:
        run = open_run(
            directory, project=options["project"], entity=options.get("entity"),
            mode=resolve_mode(options.get("mode", "auto")), **settings,
        )  # fmt: skip
        code = 1
        try:
            yield run
            code = 0
        finally:
            run.finish(exit_code=code)
    finally:
        if before is None:
            del os.environ["WANDB_DATA_DIR"]
        else:
            os.environ["WANDB_DATA_DIR"] = before


def _checked(files: Iterable[str | Path]) -> list[Path]:
    paths = [Path(file) for file in files]
    faults = [f"{path}: no such file" for path in paths if not path.is_file()]
    names = [path.name for path in paths]
    faults += [f"{name}: given more than once" for name in sorted({name for name in names if names.count(name) > 1})]
    if faults:
        raise UserError("\n".join(faults))
    return paths


def _kind(path: Path) -> str:
    if path.suffix == ".json" and path.name.startswith("budgets"):
        return "budgets"
    return _KINDS.get(path.suffix, "reports")


def _log_files(run: Any, paths: Sequence[Path], *, by_name: bool = False) -> None:
    import wandb

    for kind in sorted({_kind(path) for path in paths}):
        of_kind = [path for path in paths if _kind(path) == kind]
        names = {path.stem for path in of_kind}
        # Two reports of one sweep are two artifacts, not versions of one.
        prefix = f"{names.pop()}-" if by_name and len(names) == 1 else ""
        artifact = wandb.Artifact(f"{prefix}{kind}-{run.id}", type=kind)
        for path in of_kind:
            artifact.add_file(str(path), name=path.name)
        run.log_artifact(artifact)


def _images(paths: Sequence[Path]) -> dict[str, Any]:
    import wandb

    try:
        return {f"{MEDIA}{path.stem}": wandb.Image(str(path)) for path in paths}
    except wandb.errors.Error as error:  # pillow is missing, which matplotlib brings
        log.warning("wandb shows no images (%s); the figures are there as files", error)
        return {}
