"""Files appear whole, and one process makes what others wait for."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from selmodel.data.caching import one_process, write_atomically
from selmodel.errors import UserError


def test_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "f"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"deep/f: cannot be written .No space left"):
        write_atomically(path, b"new content")
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["f"]


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(tmp_path / "f" / "g", b"")
    with pytest.raises(UserError, match="cannot be written"), one_process(tmp_path / "f" / "g", "it"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser writes everywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(tmp_path / "f", b"")


def test_the_second_waits_for_the_first_and_says_so(tmp_path, caplog):
    caplog.set_level("INFO", "selmodel")
    order = []
    inside, go = threading.Event(), threading.Event()

    def first():
        with one_process(tmp_path / "f", "the thing"):
            inside.set()
            go.wait(10)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    threading.Timer(0.2, go.set).start()
    with one_process(tmp_path / "f", "the thing"):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting for another process to make the thing" in caplog.text


def test_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), one_process(tmp_path / "f", "it"):
        1 / 0  # noqa: B018
    with one_process(tmp_path / "f", "it"):
        pass
