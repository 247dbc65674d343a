"""``generate.py`` as it is typed: what reaches standard output, what standard error, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from selmodel import cli
from selmodel.inference import run as run_module
from selmodel.inference.run import generate_text
from selmodel.inference.text import TextStream
from selmodel.training.loading import load_run
from selmodel.training.run import train
from tests.conftest import TINY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, cache_dir) -> dict[str, Path]:
    """Tiny trained runs by attention."""
    import hydra

    from selmodel.config import register_resolvers

    register_resolvers()
    root = tmp_path_factory.mktemp("generate")
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        for attention in ("selective", "standard"):
            options = [
                *TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"runs_root={root}", "sample=null",
                f"run_dir={root / attention}", f"attention={attention}",
            ]  # fmt: skip
            train(hydra.compose("train", options))
    return {attention: root / attention for attention in ("selective", "standard")}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command line in this process; returns exit status, standard output and standard error."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = 0
        try:
            cli.main(generate_text, "generate", literal=("prompt",))
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


PROMPTS = [
    "the time",
    "",
    " two  spaces ",
    "a,b:(c)[d]{e}='f'",
    '"g"\\ ~!?*',
    "${oc.env:HOME} \\${x}$z ${",
    "line\nend\ttab",
    "é ü 你好 \U0001f600",
    "prompt=prompt=",
    "null",
    "12",
    "true",
    "[1,2]",
    "a,b",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_taken_as_it_is(run, trained, prompt):
    status, out, err = run(f"checkpoint={trained['selective']}", f"prompt={prompt}", "tokens=1", "temperature=0")
    assert status == 0, err
    assert out.startswith(prompt)


@pytest.mark.parametrize("text", [*PROMPTS, "\\" * 3 + "${a}", "$" * 5 + "{", "${${a}}"])
def test_literals_reach_the_task_unchanged(monkeypatch, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py", "prompt=first", "tokens=3", f"prompt={text}"])
    seen = []

    def task(cfg):
        seen.append((cfg.prompt, cfg.tokens))

    cli.main(task, "generate", literal=("prompt",))
    assert seen == [(text, 3)]


def test_standard_output_is_the_text_alone(run, trained):
    arguments = (f"checkpoint={trained['selective']}", "prompt=the people", "tokens=12")
    status, out, err = run(*arguments)
    assert status == 0
    assert out.startswith("the people")
    assert out.endswith("\n")
    assert "tokens/s" not in out
    for words in ("step 12", "prompt  ", "new  ", "tokens/s after the first", "ended by tokens=12", "cache  ", "bytes"):
        assert words in err
    assert run(*arguments)[1] == out
    assert run(*arguments, "seed=1")[1] != out


def test_a_prompt_is_read_from_standard_input(run, trained):
    common = (f"checkpoint={trained['selective']}", "tokens=5")
    assert run(*common, "prompt=-", stdin="the other\n")[1] == run(*common, "prompt=the other")[1]
    status, _, err = run(*common, "prompt=-")
    assert status == 2
    assert "standard input is empty" in err


@pytest.mark.parametrize("attention", ["selective", "standard"])
def test_greedy_with_budgets_of_the_context_is_greedy_without_a_cache(run, trained, attention):
    common = (f"checkpoint={trained[attention]}", "prompt=the", "tokens=100", "temperature=0")
    rule = ("rule=oldest",) if attention == "standard" else ()
    plain = run(*common, "cache=false")
    assert "cache        none" in plain[2]
    assert "ended by the context of 32 tokens" in plain[2]
    for budgets in ("32", "[32,40]"):
        pruned = run(*common, f"budgets={budgets}", *rule)
        assert pruned[:2] == plain[:2]


def test_budgets_take_less_memory_and_are_said(run, trained, tmp_path):
    common = (f"checkpoint={trained['selective']}", "prompt=the", "tokens=100", "temperature=0")
    status, _, err = run(*common, "budgets=4")
    assert status == 0
    assert "instead of" in err
    assert "hold 8.0 times fewer keys" in err
    # from a search's file
    model = load_run(trained["selective"]).model
    content = {"format": "selmodel.budgets/1", "architecture": model.options(), "budgets": [4, 8], "rule": "selective"}
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps(content | {"n_sinks": 4}))
    assert "hold 5.3 times fewer keys" in run(*common, f"budgets={file}")[2]
    file.write_text(json.dumps(content | {"n_sinks": 4, "architecture": model.options() | {"n_heads": 9}}))
    status, out, err = run(*common, f"budgets={file}")
    assert (status, out) == (2, "")
    assert "n_heads: 9 in the file" in err


MISTAKES = {
    "no checkpoint": (["prompt=a"], ["checkpoint: not given", "RUN/last.ckpt"]),
    "missing checkpoint": (["prompt=a", "checkpoint=/nowhere/x.ckpt"], ["/nowhere/x.ckpt", "no such file"]),
    "no prompt": (["checkpoint={selective}"], ["prompt: not given", "prompt=-"]),
    "long prompt": (["checkpoint={selective}", "prompt=" + "the people " * 30], ["prompt: has", "context is 32"]),
    "tokens": (["tokens=0"], ["tokens=0: must be at least 1"]),
    "not a number of tokens": (["tokens=many"], ["tokens=many: expected a whole number"]),
    "temperature": (["temperature=-0.5"], ["temperature=-0.5: must be 0"]),
    "top_p": (["top_p=1.5"], ["top_p=1.5: must be above 0 and at most 1"]),
    "top_k": (["top_k=0"], ["top_k=0: must be at least 1"]),
    "seed": (["seed=-1"], ["seed=-1: must be from 0"]),
    "several": (["tokens=0", "top_p=0", "seed=-1"], ["tokens=0", "top_p=0", "seed=-1"]),
    "dtype": (["dtype=float8"], ["dtype=float8: must be one of float32"]),
    "device": (["device=abacus"], ["device=abacus: cannot be used", "expected auto, cpu"]),
    "device not there": (["device=cuda:77"], ["device=cuda:77: cannot be used"]),
    "budgets without a cache": (["budgets=4", "cache=false"], ["budgets=4 with cache=false"]),
    "small budget": (["budgets=1"], ["budgets=1", "at least 2"]),
    "wrong length": (["budgets=[4,4,4]"], ["budgets=[4, 4, 4]", "model.n_layers=2"]),
    "not whole": (["budgets=2.5"], ["budgets=2.5"]),
    "no file": (["budgets=/nowhere.json"], ["budgets=/nowhere.json: cannot be read"]),
    "standard without a rule": (["checkpoint={standard}", "budgets=4"], ["rule", "standard"]),
    "unknown option": (["temprature=1"], ["temprature: no such option; did you mean temperature?"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_answered_before_anything_is_written(run, trained, case):
    arguments, words = MISTAKES[case]
    arguments = [argument.format(**trained) if "{" in argument else argument for argument in arguments]
    given = {argument.partition("=")[0] for argument in arguments}
    if case not in ("no checkpoint", "no prompt"):
        arguments = [
            *(f"checkpoint={trained['selective']}" for _ in range("checkpoint" not in given)),
            *("prompt=the" for _ in range("prompt" not in given)),
            *arguments,
        ]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_ctrl_c_ends_with_the_figures_so_far(run, trained, monkeypatch):
    class Stopping(TextStream):
        pushes = 0

        def push(self, *ids):
            Stopping.pushes += 1
            if Stopping.pushes == 5:  # the prompt is the first
                raise KeyboardInterrupt
            return super().push(*ids)

    monkeypatch.setattr(run_module, "TextStream", Stopping)
    status, out, err = run(f"checkpoint={trained['selective']}", "prompt=the", "tokens=20")
    assert status == 130
    assert out.startswith("the")
    assert "new          4 tokens" in err
    assert "ended by Ctrl-C" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_script_itself_and_a_reader_that_leaves(trained):
    command = [sys.executable, str(ROOT / "generate.py"), f"checkpoint={trained['selective']}", "tokens=25"]
    with subprocess.Popen([*command, "prompt="], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
