"""SLURM: which job this process belongs to, how its processes find each other, and how it is put back into the queue.

One place decides; Lightning's own handling of SLURM's signals is switched off. A run stops after a whole step with its
state saved (interrupt.py), and only then is the job requeued. What counts as a job is a batch job; an interactive
allocation (``salloc``, ``srun --pty bash``) is a plain machine: there a signal stops a run and nothing is queued.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment

from selmodel.errors import UserError

log = logging.getLogger(__name__)

# Names that SLURM gives to interactive jobs: salloc's, and the shells that `srun --pty SHELL` runs.
INTERACTIVE_NAMES = ("interactive", "bash", "sh", "zsh", "fish", "tcsh", "csh", "dash")
# By these SLURM, or a user's --signal option, announces the end of a job: preemption and the time limit.
REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Starts in a row that may end before their first step and still be requeued: a job that never gets anywhere stops.
STARTS_WITHOUT_A_STEP = 3
TIMEOUT = 20  # seconds for a question to SLURM's controller


@dataclass(frozen=True)
class SlurmJob:
    """The batch job that this process runs in.

    Attributes:
        job_id: its own.
        name: as given by ``--job-name``, or the script's.
        array: "MASTER_INDEX" of an array's element; None otherwise.
        restarts: how often it has been requeued.
        in_step: started by ``srun``, as one of ``n_tasks`` processes, the ``rank``-th.
    """

    job_id: str
    name: str
    array: str | None
    restarts: int
    in_step: bool
    n_tasks: int
    rank: int

    @property
    def target(self) -> str:
        """What names this job alone to SLURM's commands.

        One element of every array has the id of the whole array as its own, by which all elements would be requeued.
        """
        return self.array or self.job_id

    @property
    def label(self) -> str:
        return f"SLURM job {self.job_id}" + (f" ({self.array})" if self.array else "")


def slurm_job(environment: Mapping[str, str] | None = None) -> SlurmJob | None:
    """The batch job of ``environment`` (this process's if None); None outside SLURM and in interactive allocations."""
    env = os.environ if environment is None else environment
    job_id = env.get("SLURM_JOB_ID", "")
    name = env.get("SLURM_JOB_NAME", "")
    # A job submitted from within `srun --pty` inherits that variable, and is a batch job all the same.
    on_terminal = "SLURM_PTY_PORT" in env and env.get("ENVIRONMENT") != "BATCH"
    if not job_id.isdigit() or name in INTERACTIVE_NAMES or on_terminal:
        return None
    master, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return SlurmJob(
        job_id=job_id,
        name=name,
        array=f"{master}_{index}" if master and index else None,
        restarts=_number(env.get("SLURM_RESTART_COUNT"), 0),
        # The batch script itself has a rank, 0, and no step; its processes are not those that srun would start.
        in_step=env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in env,
        n_tasks=_number(env.get("SLURM_STEP_NUM_TASKS"), _number(env.get("SLURM_NTASKS"), 1)),
        rank=_number(env.get("SLURM_PROCID"), 0),
    )


def cluster_environment() -> ClusterEnvironment:
    """How the processes of a run find each other, from this process's environment.

    Processes of ``torchrun``, also where ``srun`` has started it: torchrun's. Processes that ``srun`` has started in a
    batch job: SLURM's, with Lightning's requeueing off. MPI, LSF: theirs. All else, interactive allocations and batch
    scripts without ``srun`` included: this process starts its own. Always definite, so that Lightning looks for none.

    Raises:
        UserError: SLURM's options are such that processes cannot be counted.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    job = slurm_job()
    if job is not None and job.in_step:
        try:
            return SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:
            raise UserError(f"{job.label}: {error}") from error
    for kind in (MPIEnvironment, LSFEnvironment):
        if kind.detect():
            return kind()
    return LightningEnvironment()


def is_first_process(environment: ClusterEnvironment) -> bool:
    """Whether this process is the first of its run: the one that writes, and keeps others out.

    Not by ``SLURM_PROCID``: where each of several processes that ``srun`` has started is a run of its own (in an
    interactive allocation), every one of them is a first.
    """
    if isinstance(environment, LightningEnvironment):  # its rank is not known yet; processes it starts have these set
        return environment.local_rank() == 0 and environment.node_rank() == 0
    return environment.global_rank() == 0


def check_tasks(environment: ClusterEnvironment, *, devices: int, num_nodes: int) -> str | None:
    """What is wrong with the number of processes that srun has started, as a message; None where they fit."""
    job = slurm_job()
    if not isinstance(environment, SLURMEnvironment) or job is None or job.n_tasks == devices * num_nodes:
        return None
    return (
        f"trainer.devices={devices} with trainer.num_nodes={num_nodes}: need {devices * num_nodes} processes, and srun "
        f"has started {job.n_tasks} in {job.label}; set --ntasks-per-node={devices} and --nodes={num_nodes}, or the "
        "trainer's options to what was started"
    )


@contextlib.contextmanager
def parting_at_the_end() -> Iterator[None]:
    """Take down the connections between a run's processes when it ends, or is stopped, by all of them.

    Lightning leaves gloo's threads running. Now and then one of them aborts a process whose interpreter is shutting
    down ("terminate called without an active exception"), and SLURM shows a finished job as FAILED. After a fault of
    one process, for which the others may still wait, nothing is done.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException:
        _part()
        raise
    else:
        _part()


def _part() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def should_requeue(job: SlurmJob | None, number: int, *, steps_made: int) -> bool:
    """Whether a run that signal ``number`` has stopped, before its end, goes back into the queue.

    Args:
        job: of this process; None: there is no queue.
        number: of the signal; Ctrl-C is a person's wish to stop.
        steps_made: optimizer steps since this start.
    """
    if job is None or number not in REQUEUE_SIGNALS:
        return False
    if steps_made == 0 and job.restarts >= STARTS_WITHOUT_A_STEP:
        log.warning("%s: not requeued, since %d starts made no step", job.label, job.restarts + 1)
        return False
    return True


def requeue(job: SlurmJob) -> bool:
    """Put ``job`` back into the queue; the next start goes on from its checkpoint.

    A job that SLURM is ending for another reason, such as ``scancel``, is left alone. Returns whether it was requeued,
    or SLURM has done so itself.
    """
    state = job_state(job.target)
    if state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        log.info("%s: is in the queue again", job.label)
        return True
    if state not in (None, "RUNNING", "PREEMPTED", "SUSPENDED"):
        log.info("%s: is %s, so it is not requeued", job.label, state)
        return False
    result = _ask(["scontrol", "requeue", job.target])
    if result is None or result.returncode != 0:
        reason = "scontrol was not found" if result is None else result.stderr.strip()
        log.warning("%s: could not be requeued: %s; submit it again, it goes on from its checkpoint", job.label, reason)
        return False
    log.info("%s: requeued; it goes on from its checkpoint", job.label)
    return True


def job_state(job_id: str) -> str | None:
    """State of a job as SLURM's controller names it; None where it cannot be asked or does not know the job."""
    result = _ask(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"])
    if result is None or result.returncode != 0:
        return None
    return result.stdout.split("\n")[0].strip() or None


def job_is_alive(job_id: str) -> bool | None:
    """Whether a job runs or may run again; None where SLURM cannot be asked."""
    result = _ask(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"])
    if result is None:
        return None
    if result.returncode != 0:
        return False if "Invalid job id" in result.stderr else None
    state = result.stdout.strip()
    return state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING")


def _ask(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _number(text: Any, default: int) -> int:
    return int(text) if text is not None and str(text).isdigit() else default
