"""Runs triton_cases.py in the interpreter, in a process that has TRITON_INTERPRET=1 from its start, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(interpret: bool, select: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    result = subprocess.run(
        [*command, str(CASES), "-k", select], env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


GROUPS = ("equals_eager", "bad_numbers", "dead_keys or auto_equals_off", "deterministic or operators or compiles")
THE_REST = " and ".join(f"not ({group})" for group in GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("select", [*GROUPS, THE_REST], ids=[*GROUPS, "the rest"])
def test_in_the_interpreter(select):
    run_cases(True, select)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu():
    run_cases(False, "test")
