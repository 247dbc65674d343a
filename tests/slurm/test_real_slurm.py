"""The cluster's commands on a real SLURM, which is started for it on this machine. Part of ``make slurm-test``."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import TINY

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "slurm" / "cluster"))
from one_machine import OneMachineCluster, missing  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SELMODEL_SLURM_TEST" not in os.environ, reason="run by make slurm-test"),
]
if "SELMODEL_SLURM_TEST" in os.environ and missing():
    pytest.skip(f"no SLURM can be started here: {missing()}", allow_module_level=True)

WAIT = 150  # seconds
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Slurm:
    """Commands on the cluster."""

    def __init__(self, cluster: OneMachineCluster, folder: Path, options: list[str]) -> None:
        self.folder = folder
        self.options = options
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environment = inherited | cluster.environment | {
            "SELMODEL_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip

    def run(self, *command: str, check: bool = True) -> str:
        result = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=WAIT + 60, check=False
        )
        assert not check or result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout + result.stderr

    def sbatch(self, name: str, *options: str, slurm: tuple[str, ...] = ()) -> str:
        """Submit slurm/train.sbatch with a run directory of that name; returns the job's id."""
        output = self.run(
            "sbatch", "--parsable", f"--output={self.folder / name}.log", *slurm, "slurm/train.sbatch", *self.options,
            f"run_dir={self.folder / name}", *options,
        )  # fmt: skip
        return output.split()[-1]

    def job(self, job_id: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "-o", "show", "job", job_id)))

    def wait(self, job_id: str, *states: str) -> dict[str, str]:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            job = self.job(job_id)
            if job["JobState"] in states:
                return job
            if job["JobState"] in ENDED:
                break
            time.sleep(0.3)
        raise AssertionError(f"job {job_id} is {job['JobState']}, expected {states}\n{self.logs()}")

    def wait_for(self, what, description: str) -> None:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            if what():
                return
            time.sleep(0.1)
        raise AssertionError(f"{description} did not come\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def losses(self, name: str) -> dict[str, str]:
        with (self.folder / name / "train.csv").open(newline="") as file:
            return {row["step"]: row["train/loss"] for row in csv.DictReader(file)}

    def steps(self, path: Path) -> int:
        return max(0, path.read_text().count("\n") - 1) if path.exists() else 0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, corpus, cache_dir):
    folder = tmp_path_factory.mktemp("jobs")
    options = [option for option in TINY if not option.startswith("trainer=")]
    options += ["trainer=cpu", f"data.root={corpus}", f"cache_dir={cache_dir}", "sample=null"]
    options.remove("trainer.max_steps=12")
    # munge wants a path to its socket that every user may enter, which pytest's folders are not.
    with tempfile.TemporaryDirectory(prefix="slurm-") as root:
        Path(root).chmod(0o755)
        with OneMachineCluster(Path(root) / "cluster") as cluster:
            yield Slurm(cluster, folder, options)


def close(one: dict[str, str], other: dict[str, str]) -> None:
    assert one.keys() == other.keys()
    assert all(float(one[step]) == pytest.approx(float(other[step]), abs=1e-5) for step in one)


def test_one_task_two_tasks_and_two_nodes_give_the_same_losses(slurm):
    jobs = {"one": (), "two": ("--ntasks-per-node=2",), "nodes": ("--nodes=2",)}
    for name, options in jobs.items():
        job_id = slurm.sbatch(name, "trainer.max_steps=12", slurm=options)
        slurm.wait(job_id, "COMPLETED")
        assert json.loads((slurm.folder / name / "results.json").read_text())["step"] == 12
    log = (slurm.folder / "two.log").read_text()
    for words in ("== commit ", "SLURM_JOB_ID=", "exit status 0", "finished at step 12"):
        assert words in log
    assert log.count("finished at step 12") == 1  # one process speaks for all
    close(slurm.losses("one"), slurm.losses("two"))
    close(slurm.losses("one"), slurm.losses("nodes"))


def test_a_job_pushed_out_resumes_and_ends_as_if_undisturbed(slurm):
    common = ("trainer.max_steps=120", "callbacks.checkpoint.every_n_steps=0", "trainer.val_check_interval=50")
    slow = "+callbacks.slow._target_=tests.slurm.crash.Slow"
    pushed = slurm.sbatch("pushed", *common, slow, slurm=("--exclusive",))
    slurm.wait_for(lambda: slurm.steps(slurm.folder / "pushed" / "train.csv") > 10, "the tenth step")
    urgent = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null",
                       "--wrap=sleep 2").split()[-1]  # fmt: skip
    slurm.wait(urgent, "COMPLETED")
    job = slurm.wait(pushed, "COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED"
    assert int(job["Restarts"]) >= 1
    log = (slurm.folder / "pushed.log").read_text()
    assert "resuming from" in log
    assert "stopping after this step" in log
    undisturbed = slurm.sbatch("undisturbed", *common)
    slurm.wait(undisturbed, "COMPLETED")
    assert slurm.losses("pushed") == slurm.losses("undisturbed")  # to the last bit
    results = [json.loads((slurm.folder / name / "results.json").read_text()) for name in ("pushed", "undisturbed")]
    assert results[0]["validation"] == results[1]["validation"]


def test_a_warning_signal_saves_and_requeues_and_scancel_does_not(slurm):
    slow = "+callbacks.slow._target_=tests.slurm.crash.Slow"
    # Submitted as from within `srun --pty`, whose variable is passed on.
    warned = slurm.sbatch("warned", "trainer.max_steps=60", slow, slurm=("--export=ALL,SLURM_PTY_PORT=40123",))
    slurm.wait_for(lambda: slurm.steps(slurm.folder / "warned" / "train.csv") > 5, "the fifth step")
    second = slurm.sbatch("warned", "trainer.max_steps=60", slurm=(f"--output={slurm.folder / 'second.log'}",))
    slurm.wait(second, "FAILED")
    assert f"process is training there ({socket.gethostname()}, " in (slurm.folder / "second.log").read_text()
    assert f"SLURM job {warned})" in (slurm.folder / "second.log").read_text()
    slurm.run("scancel", "--signal=USR1", warned)
    slurm.wait_for(lambda: int(slurm.job(warned)["Restarts"]) >= 1, "the requeueing")
    assert (slurm.folder / "warned" / "last.ckpt").exists()
    slurm.wait(warned, "COMPLETED")
    assert "requeued; it goes on from its checkpoint" in (slurm.folder / "warned.log").read_text()
    assert json.loads((slurm.folder / "warned" / "results.json").read_text())["step"] == 60

    cancelled = slurm.sbatch("cancelled", "trainer.max_steps=1000", slow)
    slurm.wait_for(lambda: slurm.steps(slurm.folder / "cancelled" / "train.csv") > 5, "the fifth step")
    slurm.run("scancel", cancelled)
    job = slurm.wait(cancelled, "CANCELLED")
    time.sleep(3)
    job = slurm.job(cancelled)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert (slurm.folder / "cancelled" / "last.ckpt").exists()


def test_a_crash_is_a_failure(slurm):
    job_id = slurm.sbatch("crashed", "trainer.max_steps=12", "+callbacks.crash._target_=tests.slurm.crash.Crash")
    job = slurm.wait(job_id, "FAILED", "COMPLETED", "CANCELLED")
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] == "17:0"
    assert job["Restarts"] == "0"
    bad = slurm.sbatch("bad", "model.n_heads=0")
    job = slurm.wait(bad, "FAILED")
    assert job["ExitCode"] == "2:0"
    assert "model.n_heads=0: expected an integer of at least 1" in (slurm.folder / "bad.log").read_text()


def sweep(slurm, name: str, *options: str) -> list[str]:
    return [
        sys.executable, "train.py", "-m", *slurm.options, "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=5", f"sweep.root={slurm.folder}", f"sweep.name={name}", *options,
    ]  # fmt: skip


def test_a_sweep_of_four_jobs_through_the_launcher_with_one_that_crashes(slurm):
    command = sweep(slurm, "heads", "attention=standard,selective", "model.n_heads=1,2", "trainer.max_steps=12")
    output = slurm.run(*command)
    assert "4 jobs, 4 finished" in output
    output = slurm.run(*command)
    assert output.count("finished before") == 4
    assert "jobs for SLURM" not in output  # nothing was queued
    crashing = sweep(
        slurm, "crashing", "attention=standard,selective", "trainer.max_steps=12",
        "+callbacks.crash._target_=tests.slurm.crash.Crash",
    )  # fmt: skip
    output = slurm.run(*crashing, check=False)
    assert "2 jobs, 2 failed" in output
    assert output.count("FAILED: srun: error: ") == 4  # with the table, and as the command's error
    assert "Exited with exit code 17" in output
    assert "Traceback" not in output
    refused = slurm.run(*sweep(slurm, "heads", "seed=0,1", "hydra.launcher.partition=nowhere"), check=False)
    assert "hydra.launcher.partition=nowhere: no such partition (expected one of high, low)" in refused


def test_a_job_of_a_sweep_pushed_out_resumes(slurm):
    options = ("seed=0,1", "trainer.max_steps=160", "+callbacks.slow._target_=tests.slurm.crash.Slow")
    process = subprocess.Popen(
        sweep(slurm, "pushed_sweep", *options), cwd=ROOT, env=slurm.environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    folders = [slurm.folder / "pushed_sweep" / f"seed-{seed}" for seed in (0, 1)]
    slurm.wait_for(lambda: all(slurm.steps(run / "train.csv") > 5 for run in folders), "the fifth steps")
    again = slurm.run(*sweep(slurm, "pushed_sweep", *options))
    assert again.count("is running or in the queue already, as SLURM job") == 2
    urgent = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null",
                       "--wrap=sleep 2").split()[-1]  # fmt: skip
    slurm.wait(urgent, "COMPLETED")
    output, _ = process.communicate(timeout=WAIT + 60)
    assert process.returncode == 0, output
    assert "2 jobs, 2 finished" in output
    logs = "\n".join(path.read_text() for path in (slurm.folder / "pushed_sweep" / ".submitit").rglob("*.out"))
    assert logs.count("resuming from") >= 2
    for run in folders:
        with (run / "train.csv").open(newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        assert steps == list(range(1, 161))  # none lost, none twice
