"""One writer for a run's directory, also where machines share it."""

from __future__ import annotations

import json
import socket
import time

import filelock
import pytest

from selmodel.errors import UserError
from selmodel.training import ownership
from selmodel.training.ownership import NOTE, is_alive, only_writer, read_note


def leave_note(run_dir, **content):
    run_dir.mkdir(exist_ok=True)
    note = {"host": "elsewhere", "pid": 12, "job_id": None, "renewed": time.time()} | content
    (run_dir / NOTE).write_text(json.dumps(note))


def test_the_writer_leaves_a_note_and_takes_it_away(tmp_path):
    run_dir = tmp_path / "run"
    with only_writer(run_dir):
        note = read_note(run_dir)
        assert note["host"] == socket.gethostname()
        assert time.time() - note["renewed"] < 5
        (run_dir / "config.yaml").write_text("")
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "config.yaml"]


def test_where_nothing_was_begun_nothing_is_left(tmp_path):
    with pytest.raises(RuntimeError), only_writer(tmp_path / "run"):
        raise RuntimeError
    assert list((tmp_path / "run").iterdir()) == []


def test_a_second_writer_of_this_machine_learns_of_the_first(tmp_path):
    run_dir = tmp_path / "run"
    leave_note(run_dir, host="here", job_id="41")
    with (
        filelock.FileLock(run_dir / ".lock"),
        pytest.raises(UserError, match=r"another process is training there \(here, process 12, SLURM job 41\)"),
        only_writer(run_dir),
    ):
        pass
    assert (run_dir / NOTE).exists()


def test_another_machine_bars_the_way_while_it_renews_its_note(tmp_path):
    leave_note(tmp_path / "run")
    with (
        pytest.raises(UserError, match=r"another machine is training there \(elsewhere, process 12\).*remove"),
        only_writer(tmp_path / "run"),
    ):
        pass
    assert read_note(tmp_path / "run")["host"] == "elsewhere"


def test_a_note_that_is_not_renewed_is_no_bar(tmp_path):
    leave_note(tmp_path / "run", renewed=time.time() - 3600)
    with only_writer(tmp_path / "run"):
        assert read_note(tmp_path / "run")["host"] == socket.gethostname()


@pytest.mark.parametrize(
    ("answer", "renewed", "alive"),
    [(True, 0.0, True), (False, 1e12, False), (None, 1e12, True), (None, 0.0, False)],
)
def test_where_slurm_can_be_asked_it_decides(monkeypatch, answer, renewed, alive):
    monkeypatch.setattr(ownership, "job_is_alive", lambda job_id: answer)
    assert is_alive({"job_id": "41", "renewed": renewed}) == alive


def test_a_job_requeued_to_another_node_is_not_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    leave_note(tmp_path / "run", job_id="41")
    with only_writer(tmp_path / "run"):
        pass


def test_a_note_of_this_machine_without_a_lock_is_of_a_process_that_is_gone(tmp_path):
    leave_note(tmp_path / "run", host=socket.gethostname())
    with only_writer(tmp_path / "run"):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"host": 1}'])
def test_damaged_notes(tmp_path, text):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / NOTE).write_text(text)
    with only_writer(run_dir):
        pass


def test_the_note_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "RENEWED_EVERY", 0.01)
    with only_writer(tmp_path / "run"):
        first = read_note(tmp_path / "run")["renewed"]
        deadline = time.monotonic() + 5
        while read_note(tmp_path / "run").get("renewed", first) == first and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_note(tmp_path / "run")["renewed"] > first


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), only_writer(tmp_path / "file" / "run"):
        pass
