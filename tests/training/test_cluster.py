"""SLURM's environments, and what goes back into the queue; fake commands stand for SLURM's."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
import warnings
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.environments import SLURMEnvironment

from selmodel.errors import UserError
from selmodel.training.cluster import (
    SlurmJob,
    check_tasks,
    cluster_environment,
    is_first_process,
    job_is_alive,
    job_state,
    parting_at_the_end,
    requeue,
    should_requeue,
    slurm_job,
)
from selmodel.training.interrupt import Interrupted, requeueing, stopping_outside_training
from selmodel.training.run import train
from selmodel.training.setup import build_trainer

BATCH = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "train.sbatch", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
BATCH |= {"SLURM_NTASKS_PER_NODE": "2", "ENVIRONMENT": "BATCH"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}

# name: (environment, in a batch job, how processes find each other)
ENVIRONMENTS = {
    "none": ({}, False, LightningEnvironment),
    "sbatch, without srun": (BATCH, True, LightningEnvironment),
    "sbatch, by srun": (STEP | {"SLURM_PROCID": "1"}, True, SLURMEnvironment),
    "array, by srun": (
        STEP | {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, True, SLURMEnvironment,
    ),
    "requeued": (STEP | {"SLURM_RESTART_COUNT": "2"}, True, SLURMEnvironment),
    "srun --pty bash": ({**STEP, "SLURM_JOB_NAME": "bash", "ENVIRONMENT": ""}, False, LightningEnvironment),
    "srun --pty, renamed": ({**STEP, "SLURM_PTY_PORT": "40123", "ENVIRONMENT": ""}, False, LightningEnvironment),
    # sbatch passes its caller's variables on
    "sbatch from within srun --pty": ({**STEP, "SLURM_PTY_PORT": "40123"}, True, SLURMEnvironment),
    "salloc": ({**BATCH, "SLURM_JOB_NAME": "interactive"}, False, LightningEnvironment),
    "srun inside salloc": ({**STEP, "SLURM_JOB_NAME": "interactive"}, False, LightningEnvironment),
    "srun alone": ({**STEP, "SLURM_JOB_NAME": "python"}, True, SLURMEnvironment),
    "leftovers of SLURM": ({"SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "4"}, False, LightningEnvironment),
    "damaged": ({"SLURM_JOB_ID": "", "SLURM_JOB_NAME": "x"}, False, LightningEnvironment),
    "torchrun in sbatch": (BATCH | {"TORCHELASTIC_RUN_ID": "1"}, True, TorchElasticEnvironment),
    "torchrun by srun": (STEP | {"TORCHELASTIC_RUN_ID": "1"}, True, TorchElasticEnvironment),
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """Makes this process's environment one of the above."""

    def use(variables: dict[str, str]) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("ENVIRONMENT", "RANK", "LOCAL_RANK"):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name, environment):
    variables, is_job, kind = ENVIRONMENTS[name]
    environment(variables)
    assert (slurm_job() is not None) == is_job
    chosen = cluster_environment()
    assert type(chosen) is kind
    if kind is SLURMEnvironment:
        assert chosen.auto_requeue is False


def test_tasks_that_lightning_cannot_count_are_an_error_with_the_way_out(environment):
    environment({name: value for name, value in STEP.items() if name != "SLURM_NTASKS_PER_NODE"})
    with pytest.raises(UserError, match=r"SLURM job 41: .*--ntasks-per-node=2"):
        cluster_environment()


def test_what_is_known_of_a_job(environment):
    environment(STEP | {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"})
    job = slurm_job()
    assert (job.job_id, job.array, job.restarts, job.n_tasks, job.rank) == ("41", "40_3", 2, 2, 0)
    assert job.label == "SLURM job 41 (40_3)"


def test_trainers_take_what_was_decided(environment, tiny, tmp_path):
    environment(STEP | {"SLURM_JOB_NAME": "bash"})
    trainer = build_trainer(tiny(tmp_path / "run", "trainer.devices=2"), callbacks=[], loggers=[])
    assert isinstance(trainer.strategy.cluster_environment, LightningEnvironment)
    environment(STEP)
    trainer = build_trainer(tiny(tmp_path / "run", "trainer.devices=2"), callbacks=[], loggers=[])
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    assert trainer.strategy.cluster_environment.auto_requeue is False


@pytest.mark.parametrize(("tasks", "fits"), [("2", True), ("4", False), ("1", False)])
def test_processes_must_be_as_many_as_devices(environment, tiny, tmp_path, tasks, fits):
    environment(STEP | {"SLURM_STEP_NUM_TASKS": tasks})
    fault = check_tasks(cluster_environment(), devices=2, num_nodes=1)
    assert (fault is None) == fits
    if not fits:
        assert f"has started {tasks} in SLURM job 41" in fault
        with pytest.raises(UserError, match=r"trainer\.devices=2 with trainer\.num_nodes=1: need 2 processes"):
            build_trainer(tiny(tmp_path / "run", "trainer.devices=2"), callbacks=[], loggers=[])


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),  # a process that a run has started
        (STEP | {"SLURM_PROCID": "0"}, True),
        (STEP | {"SLURM_PROCID": "1"}, False),
        # Four times the same command in an interactive allocation: each would be a run, and three are turned away.
        (STEP | {"SLURM_JOB_NAME": "interactive", "SLURM_PROCID": "3"}, True),
        (STEP | {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "SLURM_PROCID": "0"}, False),
        (STEP | {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "SLURM_PROCID": "0"}, True),
    ],
)
def test_which_process_writes(environment, monkeypatch, variables, first):
    environment(variables)
    assert is_first_process(cluster_environment()) == first


def test_torchruns_processes_are_not_counted_as_sruns(environment):
    environment(STEP | {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert check_tasks(cluster_environment(), devices=8, num_nodes=1) is None


def test_no_word_of_srun_on_a_machine_that_merely_has_it(environment, tiny, tmp_path, monkeypatch):
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environment({})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(tiny(tmp_path / "run", "trainer.max_steps=1"))
    assert said  # of other things
    assert not [str(one.message) for one in said if "srun" in str(one.message)]


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize(("error", "parted"), [(None, True), (Interrupted(15, 3), True), (ValueError(), False)])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_connections_do_not_outlive_a_run(tmp_path, error, parted):
    """A thread of gloo's that is there when the interpreter shuts down now and then aborts the process."""
    before = threads()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        of_gloo = threads() - before
        assert of_gloo
        with contextlib.suppress(ValueError, Interrupted), parting_at_the_end():
            if error is not None:
                raise error
        assert torch.distributed.is_initialized() != parted
        assert of_gloo & threads() == (set() if parted else of_gloo)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


JOB = SlurmJob("41", "train", None, restarts=0, in_step=True, n_tasks=1, rank=0)
LATE = SlurmJob("41", "train", None, restarts=3, in_step=True, n_tasks=1, rank=0)


@pytest.mark.parametrize(
    ("job", "number", "steps", "expected"),
    [
        (JOB, signal.SIGTERM, 5, True),
        (JOB, signal.SIGUSR1, 5, True),
        (JOB, signal.SIGUSR2, 5, True),
        (JOB, signal.SIGINT, 5, False),
        (None, signal.SIGTERM, 5, False),
        (JOB, signal.SIGTERM, 0, True),
        (LATE, signal.SIGTERM, 0, False),
        (LATE, signal.SIGTERM, 1, True),
    ],
)
def test_what_is_requeued(job, number, steps, expected):
    assert should_requeue(job, number, steps_made=steps) == expected


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Fake squeue and scontrol: answers as told, and notes what was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    asked = tmp_path / "asked.txt"

    def answer(*, state: str = "RUNNING", squeue: int = 0, scontrol: int = 0, message: str = "") -> None:
        for name, code, output in (("squeue", squeue, state), ("scontrol", scontrol, "")):
            script = folder / name
            script.write_text(
                f"#!/bin/sh\necho {name} \"$@\" >> '{asked}'\nprintf '%s' '{output}'\nprintf '%s' '{message}' >&2\n"
                f"exit {code}\n"
            )
            script.chmod(script.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    answer.asked = lambda: asked.read_text().splitlines() if asked.exists() else []
    answer.remove = lambda: [path.unlink() for path in folder.iterdir()]
    return answer


def test_a_running_job_is_requeued_by_its_own_id(slurm):
    slurm()
    assert requeue(JOB)
    assert slurm.asked()[-1] == "scontrol requeue 41"


def test_of_an_array_one_element_is_asked_for_and_requeued(slurm):
    """The element whose own id is that of the whole array must not take the others with it."""
    slurm()
    assert requeue(SlurmJob("40", "train", "40_3", restarts=0, in_step=True, n_tasks=1, rank=0))
    assert [line.split()[-1] for line in slurm.asked()] == ["--format=%T", "40_3"]
    assert "--jobs=40_3" in slurm.asked()[0]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "FAILED", "COMPLETED", "TIMEOUT"])
def test_a_job_that_slurm_ends_for_another_reason_is_left_alone(slurm, state):
    slurm(state=state)
    assert not requeue(JOB)
    assert not any(line.startswith("scontrol") for line in slurm.asked())


def test_a_job_that_slurm_has_requeued_itself_is_left_alone(slurm):
    slurm(state="PENDING")
    assert requeue(JOB)
    assert not any(line.startswith("scontrol") for line in slurm.asked())


def test_a_refusal_and_a_missing_command_are_said(slurm, caplog, monkeypatch):
    slurm(scontrol=1, message="Requested operation is presently disabled")
    assert not requeue(JOB)
    assert "presently disabled; submit it again" in caplog.text
    monkeypatch.setenv("PATH", "/nowhere")
    assert not requeue(JOB)
    assert "scontrol was not found" in caplog.text


def test_states(slurm, monkeypatch):
    slurm(state="RUNNING\n")
    assert (job_state("41"), job_is_alive("41")) == ("RUNNING", True)
    slurm(state="COMPLETED\n")
    assert job_is_alive("41") is False
    slurm(state="", squeue=1, message="slurm_load_jobs error: Invalid job id specified")
    assert (job_state("41"), job_is_alive("41")) == (None, False)
    slurm(state="", squeue=1, message="Unable to contact slurm controller")
    assert job_is_alive("41") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert (job_state("41"), job_is_alive("41")) == (None, None)


def test_a_stopped_run_goes_back_into_the_queue_and_a_finished_one_does_not(slurm, environment):
    slurm()
    environment(STEP)
    with pytest.raises(Interrupted), requeueing():
        raise Interrupted(signal.SIGUSR1, 10, steps_made=4)
    assert slurm.asked()[-1] == "scontrol requeue 41"
    before = len(slurm.asked())
    environment(STEP | {"SLURM_PROCID": "1"})  # the first process does it, for all
    with pytest.raises(Interrupted), requeueing():
        raise Interrupted(signal.SIGUSR1, 10, steps_made=4)
    environment(STEP)
    with requeueing():
        pass
    with pytest.raises(ValueError, match="a fault"), requeueing():
        raise ValueError("a fault")
    environment(STEP | {"SLURM_JOB_NAME": "bash"})
    with pytest.raises(Interrupted), requeueing():
        raise Interrupted(signal.SIGTERM, 10, steps_made=4)
    assert len(slurm.asked()) == before


def test_further_signals_of_the_cluster_do_not_cut_a_stop_short(slurm, environment):
    """A preemption sends SIGUSR1 and SIGTERM; the second may come while a logger uploads, or scontrol is asked."""
    slurm()
    environment(STEP | {"SLURM_RESTART_COUNT": "9"})
    cleaned_up = []

    def stop() -> None:
        try:
            raise Interrupted(signal.SIGUSR1, 10, steps_made=4)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            cleaned_up.append(True)

    with pytest.raises(Interrupted, match="SIGUSR1 after step 10"), requeueing(), stopping_outside_training():
        stop()
    assert cleaned_up
    assert slurm.asked()[-1] == "scontrol requeue 41"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_outside_of_training_stops_at_once(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped by {number.name} outside of training"), stopping_outside_training():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
