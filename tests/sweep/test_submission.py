"""What is refused before anything is queued; fake commands stand for SLURM's."""

from __future__ import annotations

import json
import socket
import time

import filelock
import pytest
from omegaconf import OmegaConf

from selmodel.errors import UserError
from selmodel.sweep.grid import Job
from selmodel.sweep.submission import TIME_OPTION, check_submission, is_slurm, prepare, set_defaults

SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
LAUNCHER = {
    "_target_": SLURM, "timeout_min": 60, "nodes": 1, "tasks_per_node": 1, "partition": None,
    "additional_parameters": {}, "stderr_to_stdout": False,
}  # fmt: skip


def launcher(**changed):
    return OmegaConf.create(LAUNCHER | changed)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A login node: sbatch is there, sinfo knows two partitions."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", ""), ("sinfo", "low\\nhigh\\n")):
        (folder / name).write_text(f"#!/bin/sh\nprintf '{text}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
def one(tiny, tmp_path):
    """The configuration of a job, as it is composed for a submission."""
    return lambda *overrides: tiny(tmp_path / "sweep" / "job", *overrides)


def refused(tmp_path, options, configs, typed=(TIME_OPTION,)) -> str:
    jobs = [Job(f"job{i}", ()) for i in range(len(configs))]
    with pytest.raises(UserError) as error:
        check_submission(options, typed, tmp_path / "sweep", jobs, configs)
    return str(error.value)


def test_which_launchers_are_slurm():
    assert is_slurm(launcher())
    assert not is_slurm(OmegaConf.create({"_target_": "hydra_plugins.selmodel_sweep.ProcessLauncher"}))
    assert not is_slurm(OmegaConf.create({}))


def test_defaults_give_way_to_what_is_said():
    chosen = launcher(additional_parameters={"signal": "USR1@300", "mail-type": "END"})
    set_defaults(chosen)
    assert chosen.additional_parameters == {"signal": "USR1@300", "mail-type": "END", "open-mode": "append"}
    assert chosen.stderr_to_stdout


def test_a_good_submission_passes(cluster, one, tmp_path):
    check_submission(launcher(partition="high"), [TIME_OPTION], tmp_path / "sweep", [Job("job0", ())], [one()])


def test_a_wall_time_must_be_given(cluster, one, tmp_path):
    assert "hydra.launcher.timeout_min: not given" in refused(tmp_path, launcher(), [one()], typed=())
    assert "hydra.launcher.timeout_min=0" in refused(tmp_path, launcher(timeout_min=0), [one()])


def test_no_slurm_here(one, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    message = refused(tmp_path, launcher(partition="low"), [one()], typed=())
    assert "there is no SLURM on this machine" in message
    assert "timeout_min" in message


def test_an_unknown_partition(cluster, one, tmp_path):
    message = refused(tmp_path, launcher(partition="gpu"), [one()])
    assert "hydra.launcher.partition=gpu: no such partition (expected one of high, low)" in message


def test_faults_of_the_jobs_are_found_before_they_wait_in_a_queue(cluster, one, tmp_path):
    configs = [one("model.n_heads=0"), one(), one("optim.lr=0")]
    message = refused(tmp_path, launcher(), configs)
    assert message.startswith("nothing was submitted:")
    assert "job0: model.n_heads=0" in message
    assert "job1" not in message
    assert "job2: optim.lr=0" in message


@pytest.mark.parametrize(
    ("options", "overrides", "words"),
    [
        ({"tasks_per_node": 3}, ["trainer.devices=3"], "data.batch_size=8 and data.streams=8 on 3 devices"),
        ({"tasks_per_node": 2}, [], "trainer.devices=1 with hydra.launcher.tasks_per_node=2"),
        ({"nodes": 2}, [], "trainer.num_nodes=1 with hydra.launcher.nodes=2"),
    ],
)
def test_processes_devices_and_batches_must_fit(cluster, one, tmp_path, options, overrides, words):
    assert words in refused(tmp_path, launcher(**options), [one(*overrides)])


def test_devices_that_a_node_decides_are_not_compared(cluster, one, tmp_path):
    config = one("trainer.devices=auto")
    check_submission(launcher(tasks_per_node=2), [TIME_OPTION], tmp_path / "sweep", [Job("job0", ())], [config])


def test_a_run_that_another_job_trains_is_not_queued_again(cluster, one, tmp_path):
    run = tmp_path / "sweep" / "job0"
    run.mkdir(parents=True)
    note = {"host": "node7", "job_id": "41", "pid": 1, "renewed": time.time()}
    (run / ".owner.json").write_text(json.dumps(note))
    assert "job0: is being trained by another job (node7, SLURM job 41)" in refused(tmp_path, launcher(), [one()])
    (run / ".owner.json").write_text(json.dumps(note | {"renewed": 0.0}))
    check_submission(launcher(), [TIME_OPTION], tmp_path / "sweep", [Job("job0", ())], [one()])
    with filelock.FileLock(run / ".lock"):
        assert "job0: is being trained by another job" in refused(tmp_path, launcher(), [one()])
    assert socket.gethostname()


def test_what_jobs_share_is_made_once(one, caplog):
    with caplog.at_level("INFO", logger="selmodel"):
        prepare([one(), one("seed=1", "model.n_heads=1"), one("data.batch_size=4")])
    assert caplog.text.count("prepared: LocalSource, tokenizer of 400 pieces") == 1
    assert "is a folder of this machine alone" in caplog.text  # the tests' folders are
