"""Before a sweep is handed to SLURM: which jobs, whether they can run there, and what they share, made once."""

from __future__ import annotations

import getpass
import logging
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from selmodel.config import build
from selmodel.errors import UserError
from selmodel.sweep.grid import Job
from selmodel.sweep.status import ERROR_FILE, is_held
from selmodel.training.cluster import job_state
from selmodel.training.ownership import LOCK, is_alive, read_note
from selmodel.training.setup import build_corpus, check_config, count_devices
from selmodel.training.summary import RESULTS, results_step

log = logging.getLogger(__name__)

TIME_OPTION = "hydra.launcher.timeout_min"
JOB_NAME = "selmodel"  # what squeue shows
WARNING_SIGNAL = "USR1@120"  # two minutes before the end: enough for a step and a checkpoint
POLLED_EVERY = 5.0  # seconds between two questions to SLURM's controller
# Folders that are a node's own nearly everywhere.
LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")


class NothingToSubmit(Exception):
    """All jobs of a sweep are finished, or in the queue already."""


def is_slurm(launcher: DictConfig) -> bool:
    """Whether a launcher's configuration hands jobs to SLURM."""
    return str(launcher.get("_target_", "")).endswith(".SlurmLauncher")


def set_defaults(launcher: DictConfig) -> None:
    """What this project's jobs need of submitit's SLURM launcher, where the user has not said otherwise.

    A job that is about to end is told by SIGUSR1, saves its state after a step, and puts itself back into the queue, so
    its output is appended to. submitit's own signal (SIGUSR2) would begin it anew.
    """
    with open_dict(launcher):
        given = OmegaConf.to_container(launcher.additional_parameters)
        launcher.additional_parameters = {"signal": WARNING_SIGNAL, "open-mode": "append"} | given
        launcher.stderr_to_stdout = True
        if OmegaConf.to_container(launcher, resolve=False).get("name") == "${hydra.job.name}":
            launcher.name = JOB_NAME


def still_to_submit(
    launcher: DictConfig, directory: Path, jobs: Sequence[Job], configs: Sequence[DictConfig]
) -> list[int]:
    """Which of ``jobs``, by their place, are neither finished nor in the queue from an earlier submission.

    Args:
        launcher, directory, jobs, configs: as for ``check_submission``.
    """
    queued = queued_jobs(submitit_folder(launcher, directory))
    left = []
    for place, (job, cfg) in enumerate(zip(jobs, configs, strict=True)):
        if (results_step(directory / job.name / RESULTS) or 0) >= cfg.trainer.max_steps:
            log.info("%s: finished before", job.name)
        elif job.name in queued:
            log.info("%s: is running or in the queue already, as SLURM job %s", job.name, queued[job.name])
        else:
            left.append(place)
    return left


def submitit_folder(launcher: DictConfig, directory: Path) -> Path:
    """Where submitit keeps a folder for each job that it has submitted, by SLURM's id."""
    return Path(str(launcher.get("submitit_folder") or directory / ".submitit" / "%j")).parent


def submissions(folder: Path) -> set[str]:
    """SLURM's ids of what has been submitted from ``folder``, of submitit."""
    return {path.parent.name for path in folder.glob("*/*_submitted.pkl")}


def queued_jobs(folder: Path) -> dict[str, str]:
    """Names of a sweep's jobs that SLURM still has, each with SLURM's id, by what submitit has left in ``folder``."""
    submitted = submissions(folder)
    if not submitted:
        return {}
    command = ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%F_%K"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    live = {job_id.removesuffix("_N/A") for job_id in result.stdout.split()}
    return {name: job_id for job_id in submitted & live if (name := _submitted_name(folder, job_id)) is not None}


def follow_to_the_end(folder: Path, job_ids: Collection[str], directory: Path) -> None:
    """Wait until SLURM has none of ``job_ids`` any more, and leave in the folders of those that crashed why.

    submitit waits no longer than for the first that fails; a process that was killed could leave no word of its own.
    """
    while any(job_id in job_ids for job_id in queued_jobs(folder).values()):
        time.sleep(POLLED_EVERY)
    for job_id in sorted(job_ids):
        if (name := _submitted_name(folder, job_id)) is None:
            continue
        state = job_state(job_id)
        run_dir = directory / name
        # One that was cancelled is stopped, and has said so.
        if state in ("COMPLETED", "CANCELLED") or (run_dir / ERROR_FILE).exists() or is_held(run_dir / LOCK):
            continue
        if state is None and (run_dir / RESULTS).exists():  # too long ago for SLURM to know
            continue
        said = [line for path in sorted((folder / job_id).glob("*_log.out")) for line in _lines(path)]
        run_dir.mkdir(parents=True, exist_ok=True)
        reason = said[-1] if said else "it has written nothing"
        (run_dir / ERROR_FILE).write_text(
            f"SLURM job {job_id}: {state or 'ended'}: {reason}\n" + "".join(f"{line}\n" for line in said[-20:-1])
        )


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _submitted_name(folder: Path, job_id: str) -> str | None:
    """Name of the job that SLURM knows as ``job_id``."""
    from submitit.core.utils import DelayedSubmission  # of an extra

    try:
        overrides = DelayedSubmission.load(folder / job_id / f"{job_id}_submitted.pkl").args[0]
    except Exception:  # of another version, or damaged: it is as if it were not there
        return None
    prefix = "hydra.sweep.subdir="
    return next((one.removeprefix(prefix) for one in overrides if str(one).startswith(prefix)), None)


def check_submission(
    launcher: DictConfig, typed: Collection[str], directory: Path, jobs: Sequence[Job], configs: Sequence[DictConfig]
) -> None:
    """Everything that can be known to be wrong before a job is queued, in one message.

    Args:
        launcher: configuration of the launcher.
        typed: names of Hydra's options that were typed.
        directory: of the sweep.
        jobs, configs: what is to be submitted, and each job's composed configuration.

    Raises:
        UserError: with every fault.
    """
    faults = _launcher_faults(launcher, typed)
    world = int(launcher.get("nodes") or 1) * int(launcher.get("tasks_per_node") or 1)
    for job, cfg in zip(jobs, configs, strict=True):
        faults += [f"{job.name}: {fault}" for fault in _job_faults(cfg, launcher, world)]
        run_dir = directory / job.name
        if is_held(run_dir / LOCK) or ((note := read_note(run_dir)) and is_alive(note)):
            note = read_note(run_dir)
            owner = f"{note.get('host', 'unknown host')}, SLURM job {note.get('job_id') or 'none'}"
            faults.append(f"{job.name}: is being trained by another job ({owner}); wait for it, or cancel it")
    if faults:
        raise UserError("nothing was submitted:\n" + "\n".join(dict.fromkeys(faults)))


def _launcher_faults(launcher: DictConfig, typed: Collection[str]) -> list[str]:
    faults = []
    if TIME_OPTION not in typed:
        faults.append(
            f"{TIME_OPTION}: not given; the wall time of a job in minutes is needed, such as {TIME_OPTION}=240 (a job "
            "that needs longer goes back into the queue and on from its checkpoint)"
        )
    elif launcher.timeout_min < 1:
        faults.append(f"{TIME_OPTION}={launcher.timeout_min}: expected a whole number of at least 1, in minutes")
    if shutil.which("sbatch") is None:
        return [
            *faults,
            "hydra/launcher=submitit_slurm: there is no SLURM on this machine (sbatch was not found); submit from a "
            "login node, or leave the launcher out to run the sweep here",
        ]
    partition = launcher.get("partition")
    known = _partitions()
    if partition is not None and known and str(partition) not in known:
        faults.append(f"hydra.launcher.partition={partition}: no such partition (expected one of {', '.join(known)})")
    return faults


def _partitions() -> list[str]:
    """Names of the cluster's partitions; none where it cannot be asked."""
    try:
        result = subprocess.run(["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(result.stdout.split())) if result.returncode == 0 else []


def _job_faults(cfg: DictConfig, launcher: DictConfig, world: int) -> list[str]:
    try:
        check_config(cfg)
        build(cfg.data, source=None, tokenizer=None).order.check_world(world)
    except UserError as error:
        return str(error).splitlines()
    faults = []
    trainer = OmegaConf.to_container(cfg.trainer, resolve=True)
    nodes, tasks = int(launcher.get("nodes") or 1), int(launcher.get("tasks_per_node") or 1)
    devices = trainer.get("devices", "auto")
    # "auto" is decided on the node; a login node's devices say nothing.
    if devices not in ("auto", -1, "-1") and count_devices(trainer) != tasks:
        faults.append(
            f"trainer.devices={devices} with hydra.launcher.tasks_per_node={tasks}: a process for each device is "
            "needed; set both to the same number"
        )
    if int(trainer.get("num_nodes") or 1) != nodes:
        faults.append(
            f"trainer.num_nodes={trainer.get('num_nodes')} with hydra.launcher.nodes={nodes}: set both to the same "
            "number"
        )
    return faults


def prepare(configs: Sequence[DictConfig]) -> None:
    """Make what jobs share (corpus, list of files, tokenizer) here and once, so that they do not all wait for it.

    Raises:
        UserError: the corpus or the tokenizer cannot be had.
    """
    done: list[Any] = []
    for cfg in configs:
        parts = [OmegaConf.to_container(cfg[name], resolve=True) for name in ("data", "tokenizer")]
        for name in ("batch_size", "context_length", "seed", "validation_sequences"):
            parts[0].pop(name, None)
        if parts in done:
            continue
        done.append(parts)
        _, tokenizer = build_corpus(cfg)
        log.info(
            "prepared: %s, tokenizer of %d pieces",
            parts[0]["source"]["_target_"].rsplit(".", 1)[-1],
            tokenizer.vocab_size,
        )
        warn_of_local_folders(
            {
                "cache_dir": cfg.cache_dir,
                "data.root": cfg.data.get("root"),
                "tokenizer.path": cfg.tokenizer.get("path"),
                "sweep": cfg.runs_root,
            }
        )


def warn_of_local_folders(folders: Mapping[str, object]) -> None:
    """Say which of the folders (by option; None: not set) the nodes of a cluster will probably not see."""
    for name, folder in folders.items():
        path = None if folder is None else Path(str(folder)).expanduser().absolute()
        if path is not None and any(path.is_relative_to(local) for local in LOCAL_FOLDERS):
            log.warning("%s=%s: is a folder of this machine alone on most clusters; nodes may not see it", name, path)
