"""Jobs as processes: a small script stands for train.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from selmodel.errors import UserError
from selmodel.sweep.grid import Job
from selmodel.sweep.processes import ProcessPool, check_parallel, explanation, quoted, share_of_machine
from selmodel.sweep.status import job_status
from selmodel.training.interrupt import Interrupted

# Behaves as its option says, writes what a run would, and notes each start.
SCRIPT = r"""
import json, os, pathlib, signal, sys, time
options = dict(argument.split("=", 1) for argument in sys.argv[1:])
run = pathlib.Path(options["run_dir"][1:-1])
with open(run.parent / "starts.txt", "a") as file:
    file.write(f"{run.name} {time.time()} {os.environ.get('OMP_NUM_THREADS')}\n")
behave = options["behave"]
(run / "config.yaml").write_text("trainer:\n  max_steps: 5\n")
print("step 1/5, loss 2.0", flush=True)
print("a line that is not for the terminal", flush=True)
if behave == "fail":
    print("error: behave=fail: expected ok\n       or something else", file=sys.stderr)
    sys.exit(2)
if behave == "crash":
    raise RuntimeError("out of luck")
if behave == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if behave == "slow":
    def stop(number, frame):
        (run / "last.ckpt").write_text("")
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    (run / "ready").write_text("")
    time.sleep(30)
time.sleep(float(options.get("seconds", 0)))
(run / "results.json").write_text(json.dumps({"step": 5, "validation": {"loss": 1.0}}))
print("finished", os.environ.get("OMP_NUM_THREADS"), end="", flush=True)
"""


@pytest.fixture
def pool(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    sweep = tmp_path / "a sweep, in a folder = 1"
    sweep.mkdir()

    def make(parallel: int = 1) -> ProcessPool:
        return ProcessPool(sweep, parallel, [sys.executable, str(script)])

    return make


def jobs(*behaviours: str, **options: object) -> list[Job]:
    extra = tuple(f"{name}={value}" for name, value in options.items())
    return [Job(f"{i}-{behave}", (f"behave={behave}", *extra)) for i, behave in enumerate(behaviours)]


def states(pool: ProcessPool, listed: list[Job]) -> list[str]:
    return [job_status(pool.directory / job.name, job).state for job in listed]


def starts(pool: ProcessPool) -> list[list[str]]:
    return [line.split() for line in (pool.directory / "starts.txt").read_text().splitlines()]


@pytest.mark.parametrize("parallel", [1, 3])
def test_failures_stop_no_other_job_and_are_explained(pool, parallel, capsys):
    one, listed = pool(parallel), jobs("ok", "fail", "crash", "kill", "ok")
    one.run(listed)
    assert states(one, listed) == ["finished", "failed", "failed", "failed", "finished"]
    errors = [job_status(one.directory / job.name, job).error for job in listed]
    assert errors[1] == "behave=fail: expected ok\nor something else"
    assert errors[2].startswith("exit status 1: RuntimeError: out of luck\n")
    assert errors[3] == "killed by SIGKILL (out of memory?)"
    shown = capsys.readouterr().out
    assert "step 1/5" in shown
    assert "not for the terminal" not in shown
    output = (one.directory / "2-crash" / "output.log").read_text()
    assert "not for the terminal" in output
    assert "Traceback" in output


def test_a_second_start_does_what_is_left(pool):
    one, listed = pool(), jobs("ok", "fail", "ok")
    one.run(listed)
    assert len(starts(one)) == 3
    repaired = [listed[0], Job("1-fail", ("behave=ok",)), listed[2]]
    one.run(repaired)
    assert [line[0] for line in starts(one)[3:]] == ["1-fail"]
    assert states(one, repaired) == ["finished"] * 3
    assert not (one.directory / "1-fail" / "error.txt").exists()


def test_jobs_run_at_once_on_shares_of_the_threads(pool):
    one, listed = pool(2), jobs("ok", "ok", seconds=0.6)
    one.run(listed)
    (_, first, threads), (_, second, _) = starts(one)
    assert abs(float(first) - float(second)) < 0.5
    assert threads == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_one_at_a_time_otherwise(pool):
    one, listed = pool(1), jobs("ok", "ok", seconds=0.4)
    one.run(listed)
    (_, first, _), (_, second, _) = starts(one)
    assert float(second) - float(first) >= 0.4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_jobs_and_begins_no_other(pool, number):
    one, listed = pool(2), jobs("slow", "slow", "ok")

    def send():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(list(one.directory.glob("*/ready"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(Interrupted) as stopped:
        one.run(listed)
    thread.join()
    assert stopped.value.signal == number
    assert states(one, listed) == ["stopped", "stopped", "waiting"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "after finished job 0" in str(stopped.value)


def test_a_job_that_another_process_trains_is_left_alone(pool):
    import filelock

    one, listed = pool(), jobs("ok")
    (one.directory / "0-ok").mkdir()
    with filelock.FileLock(one.directory / "0-ok" / ".lock"):
        one.run(listed)
        assert not (one.directory / "starts.txt").exists()
    one.run(listed)
    assert states(one, listed) == ["finished"]


def test_explanations():
    assert explanation(-9, []) == "killed by SIGKILL (out of memory?)"
    assert explanation(-11, ["x"]) == "killed by SIGSEGV"
    assert explanation(2, ["noise", "error: a=1: bad", "       and more"]) == "a=1: bad\nand more"
    assert explanation(1, []) == "exit status 1: nothing was written"
    assert explanation(1, ["Traceback", "", "ValueError: x", ""]) == "exit status 1: ValueError: x\nTraceback"


def test_shares(monkeypatch):
    assert share_of_machine(0, 1) == {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    share = share_of_machine(1, 2)
    assert share["OMP_NUM_THREADS"] == "4"
    assert share["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert "CUDA_VISIBLE_DEVICES" not in share_of_machine(0, 5)
    assert share_of_machine(0, 100)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True, None])
def test_parallel_out_of_range(value):
    with pytest.raises(UserError, match=f"sweep.parallel={value}: expected a whole number of at least 1"):
        check_parallel(value)


@pytest.mark.parametrize("text", ["/a b/c", "it's", "a\\b", "a\\'b", "a\\", "a,b=c{d}", "/x/é"])
def test_quoted_paths_reach_hydra_unchanged(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"run_dir={quoted(text)}"])
    assert override.value() == text
