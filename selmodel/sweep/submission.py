"""Before a sweep is handed to SLURM: whether it can run there, and what its jobs share, made once."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from selmodel.config import build
from selmodel.errors import UserError
from selmodel.sweep.grid import Job
from selmodel.sweep.status import is_held
from selmodel.training.ownership import LOCK, is_alive, read_note
from selmodel.training.setup import build_corpus, check_config, count_devices

log = logging.getLogger(__name__)

TIME_OPTION = "hydra.launcher.timeout_min"
WARNING_SIGNAL = "USR1@120"  # two minutes before the end: enough for a step and a checkpoint
# Folders that are a node's own nearly everywhere.
LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")


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
        for name, folder in (("cache_dir", cfg.cache_dir), ("data.root", cfg.data.get("root"))):
            if folder is not None and str(Path(str(folder)).expanduser().absolute()).startswith(LOCAL_FOLDERS):
                log.warning(
                    "%s=%s: is a folder of this machine alone on most clusters; nodes may not see it", name, folder
                )
