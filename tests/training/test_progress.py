"""What a person sees while training: sparse plain lines where no terminal is, and nothing but figures in them."""

from __future__ import annotations

import re

import pytest

from selmodel.errors import UserError
from selmodel.training import progress
from selmodel.training.progress import Progress, _duration
from selmodel.training.run import train


def said(caplog):
    return [message for message in caplog.messages if re.match(r"step \d+[/:]", message)]


def test_without_a_terminal_lines_are_sparse(tmp_path, tiny, caplog, monkeypatch):
    """By a clock that each step takes a second: of 12 steps the ones 5 seconds apart, and the last."""
    now = iter(range(10_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    with caplog.at_level("INFO"):
        train(tiny(tmp_path / "run", "callbacks.progress.line_seconds=100", "trainer.val_check_interval=6"))
    lines = said(caplog)
    assert [line for line in lines if "validation" in line] == lines[:1] + lines[-1:]
    assert re.fullmatch(r"step 6: validation loss \d\.\d{4}, perplexity [\d.]+, bits per byte \d\.\d{4}", lines[0])
    assert re.fullmatch(r"step 12/12, loss \d\.\d{4}, val \d\.\d{4}, [\d,]+ tokens/s", lines[1])
    assert len(lines) == 3


def test_a_line_tells_what_is_left(tmp_path, tiny, caplog):
    with caplog.at_level("INFO"):
        train(tiny(tmp_path / "run", "callbacks.progress.line_seconds=0", "trainer.max_steps=3"))
    lines = [line for line in said(caplog) if line.startswith(("step 1/", "step 2/"))]
    assert len(lines) == 2
    assert all(re.search(r"tokens/s, \d+s left$", line) for line in lines)


def test_a_week_gives_a_log_that_can_be_read():
    """At the default, no more than a line in ten seconds: 60,480 lines a week, and not one for each of its steps."""
    assert Progress().line_seconds == 10.0


@pytest.mark.parametrize(("seconds", "text"), [(41.4, "41s"), (200, "3m20s"), (3599.6, "1h00m"), (7380, "2h03m")])
def test_durations(seconds, text):
    assert _duration(seconds) == text


@pytest.mark.parametrize("options", [{"bar": "maybe"}, {"line_seconds": -1.0}, {"line_seconds": float("nan")}])
def test_bad_options(options):
    with pytest.raises(UserError, match=r"callbacks\.progress\."):
        Progress(**options)
