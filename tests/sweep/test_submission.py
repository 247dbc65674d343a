"""What is refused before anything is queued; fake commands stand for SLURM's."""

from __future__ import annotations

import json
import socket
import time

import filelock
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from selmodel.cli import explain
from selmodel.errors import UserError
from selmodel.sweep import submission
from selmodel.sweep.grid import Job
from selmodel.sweep.submission import (
    TIME_OPTION,
    check_submission,
    is_slurm,
    prepare,
    queued_jobs,
    set_defaults,
    still_to_submit,
)

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


def submitted(folder, job_id: str) -> None:
    """What submitit leaves of a job, but for what is in it."""
    (folder / job_id).mkdir(parents=True)
    (folder / job_id / f"{job_id}_submitted.pkl").write_text("")


def test_what_is_finished_or_in_the_queue_is_not_queued_again(cluster, one, tmp_path, monkeypatch, caplog):
    sweep = tmp_path / "sweep"
    jobs = [Job(name, ()) for name in ("finished", "longer", "queued", "gone", "single", "new")]
    configs = [one(), one("trainer.max_steps=24"), *(one() for _ in jobs[2:])]
    for name in ("finished", "longer"):
        (sweep / name).mkdir(parents=True)
        (sweep / name / "results.json").write_text('{"step": 12}')  # of a sweep that ended at 12
    names = {"41_0": "queued", "41_1": "gone", "52": "single"}
    for job_id in names:
        submitted(sweep / ".submitit", job_id)
    (sweep / ".submitit" / "41").mkdir()  # an array has a folder of its own
    monkeypatch.setattr(submission, "_submitted_name", lambda folder, job_id: names[job_id])
    (cluster / "squeue").write_text("#!/bin/sh\nprintf '41_0\\n52_N/A\\n99_3\\n'\n")
    (cluster / "squeue").chmod(0o755)
    with caplog.at_level("INFO", logger="selmodel"):
        left = still_to_submit(launcher(), sweep, jobs, configs)
    assert [jobs[place].name for place in left] == ["longer", "gone", "new"]
    for line in ("finished: finished before", "queued: is running or in the queue already, as SLURM job 41_0"):
        assert line in caplog.text


def test_where_the_queue_cannot_be_asked_nothing_is_held_back(cluster, tmp_path, monkeypatch):
    submitted(tmp_path, "41_0")
    assert queued_jobs(tmp_path) == {}  # no squeue
    assert queued_jobs(tmp_path / "nowhere") == {}


def test_names_are_read_from_what_submitit_leaves(cluster, tmp_path):
    utils = pytest.importorskip("submitit.core.utils")
    (cluster / "squeue").write_text("#!/bin/sh\nprintf '41_0\\n41_1\\n'\n")
    (cluster / "squeue").chmod(0o755)
    for index in (0, 1):
        (tmp_path / f"41_{index}").mkdir()
    overrides = ["seed=3", "hydra.sweep.subdir=seed-3"]
    utils.DelayedSubmission(print, overrides, "hydra.sweep.dir").dump(tmp_path / "41_0" / "41_0_submitted.pkl")
    (tmp_path / "41_1" / "41_1_submitted.pkl").write_bytes(b"damaged")
    assert queued_jobs(tmp_path) == {"seed-3": "41_0"}


def test_jobs_are_followed_to_the_end_and_crashes_leave_their_reason(cluster, tmp_path, monkeypatch):
    folder, sweep = tmp_path / "sweep" / ".submitit", tmp_path / "sweep"
    states = {"41_0": "COMPLETED", "41_1": "FAILED", "41_2": "CANCELLED", "41_3": "NODE_FAIL", "41_4": "FAILED"}
    for job_id in states:
        submitted(folder, job_id)
    (folder / "41_1" / "41_1_0_log.out").write_text("step 3\n\nsrun: error: n1: task 0: Exited with exit code 17\n\n")
    (sweep / "job-41_4").mkdir()
    (sweep / "job-41_4" / "error.txt").write_text("its own words")
    asked = iter([{"a": "41_0", "b": "7"}, {"b": "7"}])  # 7 is another submission's
    monkeypatch.setattr(submission, "queued_jobs", lambda folder: next(asked))
    monkeypatch.setattr(submission, "POLLED_EVERY", 0.0)
    monkeypatch.setattr(submission, "job_state", states.get)
    monkeypatch.setattr(submission, "_submitted_name", lambda folder, job_id: f"job-{job_id}")
    submission.follow_to_the_end(folder, set(states), sweep)
    assert next(asked, None) is None  # it waited
    errors = {path.parent.name: path.read_text() for path in sweep.glob("job-*/error.txt")}
    assert errors == {
        "job-41_1": "SLURM job 41_1: FAILED: srun: error: n1: task 0: Exited with exit code 17\nstep 3\n",
        "job-41_3": "SLURM job 41_3: NODE_FAIL: it has written nothing\n",
        "job-41_4": "its own words",
    }


def test_without_submitit_the_way_to_it_is_named(monkeypatch):
    error = HydraException("In 'hydra/config': Could not find 'hydra/launcher/submitit_slurm'")
    monkeypatch.setattr("selmodel.cli.importlib.util.find_spec", lambda name: None)
    assert explain(error).endswith("pip install -e '.[cluster]'")
    monkeypatch.setattr("selmodel.cli.importlib.util.find_spec", lambda name: name)
    assert "pip install" not in explain(error)


def test_folders_of_one_machine_are_told_from_names_that_begin_alike(one, caplog):
    with caplog.at_level("WARNING", logger="selmodel"):
        submission.warn_of_local_folders({"data.root": "/tmp/c4", "cache_dir": "/tmpfs_of_all/x", "run_dir": "/runs/y"})
    assert "data.root=/tmp/c4: is a folder of this machine alone on most clusters" in caplog.text
    assert "/tmpfs_of_all" not in caplog.text
    assert "/runs" not in caplog.text


def test_what_jobs_share_is_made_once(one, caplog):
    with caplog.at_level("INFO", logger="selmodel"):
        prepare([one(), one("seed=1", "model.n_heads=1"), one("data.batch_size=4")])
    assert caplog.text.count("prepared: LocalSource, tokenizer of 400 pieces") == 1
    assert "is a folder of this machine alone" in caplog.text  # the tests' folders are
