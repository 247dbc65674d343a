"""``generate.py`` as it is typed: what reaches standard output, what standard error, and what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from selmodel import cli
from selmodel.attention import SelectiveAttention
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

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
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
    assert run(*arguments, "seed=1")[1] != out
    # What was generated in between, with another seed and from another prompt, leaves no trace.
    run(f"checkpoint={trained['selective']}", "prompt=other words", "tokens=20", "budgets=3")
    assert run(*arguments)[1] == out


def test_several_texts_of_one_command_line(run, trained):
    status, out, err = run("-m", f"checkpoint={trained['selective']}", "prompt=a, b", "seed=1,2", "tokens=6")
    assert status == 0
    assert len(out.split("\n")) == 3
    assert all(line.startswith("a, b") for line in out.split("\n")[:2])
    assert "HYDRA" in err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"the other\n", "the other"),
        (b"a\r\nb\r\n", "a\r\nb"),
        (b"the\n\n", "the\n"),
        ("\ufeffé\r".encode(), "\ufeffé\r"),
        (b"\n", ""),
    ],
)
def test_a_prompt_is_read_from_standard_input_as_it_is(run, trained, content, text):
    common = (f"checkpoint={trained['selective']}", "tokens=2")
    status, out, _ = run(*common, "prompt=-", stdin=content)
    assert (status, out) == run(*common, f"prompt={text}")[:2]
    assert status == 0
    assert out.startswith(text)


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "standard input is empty"), (b"ab\xff", "is not UTF-8 (byte 0xFF at 2)")]
)
def test_a_standard_input_that_is_no_text(run, trained, content, words):
    status, out, err = run(f"checkpoint={trained['selective']}", "prompt=-", stdin=content)
    assert (status, out) == (2, "")
    assert err.startswith("error: prompt=-")
    assert words in err


def test_a_prompt_as_long_as_the_context(run, trained):
    tokenizer = load_run(trained["selective"]).tokenizer
    prompt = "the people " * 20
    while len(tokenizer.encode(prompt)) > 31:  # and <BOS>
        prompt = prompt[:-1]
    status, out, err = run(f"checkpoint={trained['selective']}", f"prompt={prompt}")
    assert (status, out) == (0, f"{prompt}\n")
    assert "prompt       32 tokens\n" in err
    assert "new          0 tokens; ended by the context of 32 tokens" in err


def test_a_text_that_ends_at_once_has_its_figures(run, trained, monkeypatch):
    monkeypatch.setattr(run_module, "generate", lambda model, prompt, n_tokens, **options: prompt)
    status, out, err = run(f"checkpoint={trained['selective']}", "prompt=the")
    assert (status, out) == (0, "the\n")
    assert "tokens/s, with sampling the first new one" in err
    assert "new          0 tokens; ended by <EOS>" in err


def test_a_terminal_without_utf8(run, trained, monkeypatch):
    """The capture of the test gives way to an output that knows ASCII alone."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    status, _, err = run(f"checkpoint={trained['selective']}", "prompt=é \U0001f600", "tokens=1", "temperature=0")
    assert status == 0, err
    assert written.getvalue().startswith(rb"\xe9 \U0001f600")


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
    # By hand: 2 layers of 2 heads of 16 float32; 4 + 1 slots instead of 32 + 1, for keys and values; F and, under
    # budgets, an age of 4 bytes for each slot; 12 bytes of bookkeeping (an int64 and a float32).
    assert f"cache        {2 * (2 * 5 * 2 * 16 * 4 + 5 * 8 + 12):,} bytes" in err
    assert f"without budgets {2 * (2 * 33 * 2 * 16 * 4 + 33 * 4 + 12):,};" in err
    assert "memory factor 8.0 at the full context of 32" in err
    # from a search's file
    model = load_run(trained["selective"]).model
    content = {"format": "selmodel.budgets/1", "architecture": model.options(), "budgets": [4, 8], "rule": "selective"}
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps(content | {"n_sinks": 4}))
    assert "memory factor 5.3 at" in run(*common, f"budgets={file}")[2]
    file.write_text(json.dumps(content | {"n_sinks": 4, "architecture": model.options() | {"n_heads": 9}}))
    status, out, err = run(*common, f"budgets={file}")
    assert (status, out) == (2, "")
    assert "n_heads: 9 in the file" in err


MISTAKES = {
    "no checkpoint": (["prompt=a"], ["checkpoint: not given", "RUN/last.ckpt"]),
    "missing checkpoint": (["prompt=a", "checkpoint=/nowhere/x.ckpt"], ["/nowhere/x.ckpt", "no such file"]),
    "no prompt": (["checkpoint={selective}"], ["prompt: not given", "prompt=-"]),
    "long prompt": (
        ["checkpoint={selective}", "prompt=" + "the people " * 30],
        ["prompt: has", "context is 32", "shorter"],
    ),
    "tokens": (["tokens=0"], ["tokens=0: must be at least 1"]),
    "not a number of tokens": (["tokens=many"], ["tokens=many: expected a whole number"]),
    "temperature": (["temperature=-0.5"], ["temperature=-0.5: must be 0"]),
    "top_p": (["top_p=1.5"], ["top_p=1.5: must be above 0 and at most 1"]),
    "top_k": (["top_k=0"], ["top_k=0: must be at least 1"]),
    "seed": (["seed=-1"], ["seed=-1: must be from 0"]),
    "several": (["tokens=0", "top_p=0", "seed=-1"], ["tokens=0", "top_p=0", "seed=-1"]),
    "dtype": (["dtype=float8"], ["dtype=float8: must be one of float32"]),
    "device": (["device=abacus"], ["device=abacus: no such device", "expected auto, cpu"]),
    "device without values": (["device=meta"], ["device=meta: no such device", "cpu, cuda or cuda:N"]),
    "second cpu": (["device=cpu:1"], ["device=cpu:1: no such device"]),
    "device not there": (["device=cuda:77"], ["device=cuda:77: cannot be used"]),
    "budgets without a cache": (["budgets=4", "cache=false"], ["budgets=4 with cache=false"]),
    "small budget": (["budgets=1"], ["budgets=1", "at least 2"]),
    "wrong length": (["budgets=[4,4,4]"], ["budgets=[4, 4, 4]", "model.n_layers=2"]),
    "not whole": (["budgets=2.5"], ["budgets=2.5"]),
    "no file": (["budgets=/nowhere.json"], ["budgets=/nowhere.json: cannot be read"]),
    "standard without a rule": (["checkpoint={standard}", "budgets=4"], ["rule", "standard"]),
    "rule without budgets": (["rule=oldest"], ["rule=oldest without budgets"]),
    "sinks of another rule": (["n_sinks=2", "budgets=4"], ["n_sinks=2: belongs to rule=oldest"]),
    "sinks without budgets": (["n_sinks=2"], ["n_sinks=2: belongs to rule=oldest"]),
    "checkpoints": (["checkpoint=[a,b]"], ["checkpoint=['a', 'b']: expected a file, or the folder of a run"]),
    "bytes that are no text": (["prompt=ab\udcff"], ["prompt: is not UTF-8 at character 2"]),
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


def interrupted(monkeypatch, push: int) -> None:
    """Ctrl-C comes while the text of a token, counted from the prompt as the first, is made."""

    class Stopping(TextStream):
        pushes = 0

        def push(self, *ids):
            Stopping.pushes += 1
            if Stopping.pushes == push:
                signal.raise_signal(signal.SIGINT)
            return super().push(*ids)

    monkeypatch.setattr(run_module, "TextStream", Stopping)


def test_ctrl_c_ends_with_the_figures_so_far(run, trained, monkeypatch):
    interrupted(monkeypatch, 5)
    status, out, err = run(f"checkpoint={trained['selective']}", "prompt=the", "tokens=20")
    assert status == 130
    assert out.startswith("the")
    assert out.endswith("\n")
    assert "new          4 tokens" in err
    assert "ended by Ctrl-C" in err
    assert "Traceback" not in err


def test_ctrl_c_before_the_first_token(run, trained, monkeypatch):
    arguments = (f"checkpoint={trained['selective']}", "prompt=the", "tokens=20")
    with monkeypatch.context() as patch:
        interrupted(patch, 1)
        status, out, err = run(*arguments)
        assert (status, out) == (130, "\n")
        assert "new          0 tokens; ended by Ctrl-C" in err
        assert "tokens/s" not in err
    monkeypatch.setattr(run_module, "load_run", lambda checkpoint: signal.raise_signal(signal.SIGINT))
    status, out, err = run(*arguments)
    assert (status, out) == (130, "")
    assert "stopped by Ctrl-C" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("last", ["the prompt", "the end"])
def test_a_reader_that_leaves(run, trained, monkeypatch, last):
    """Before the first word, and before the line end: both times Python must not fail on what it could not write."""
    reading, writing = os.pipe()
    if last == "the end":
        monkeypatch.setattr(run_module.TextStream, "flush", lambda self: os.close(reading) or "")
    else:
        os.close(reading)
    with os.fdopen(writing, "w") as output:  # closing it flushes it, as at the end of a process
        monkeypatch.setattr(sys, "stdout", output)
        status, _, err = run(f"checkpoint={trained['selective']}", "prompt=the", "tokens=4")
        monkeypatch.undo()
    assert status == 0
    assert "ended by the reader of the text" in err
    assert "Traceback" not in err


def test_budgets_for_attention_without_a_cache_are_refused(run, trained, monkeypatch):
    monkeypatch.setattr(SelectiveAttention, "supports_cache", False)
    common = (f"checkpoint={trained['selective']}", "prompt=the", "tokens=4")
    assert "cache        none" in run(*common)[2]
    status, out, err = run(*common, "budgets=4")
    assert (status, out) == (2, "")
    assert "does not support a cache" in err


def test_a_model_that_has_diverged(run, trained, monkeypatch):
    def diverged(checkpoint):
        loaded = load_run(checkpoint)
        loaded.model.norm.weight.data.fill_(float("nan"))
        return loaded

    monkeypatch.setattr(run_module, "load_run", diverged)
    status, out, err = run(f"checkpoint={trained['selective']}", "prompt=the", "tokens=4")
    assert (status, out) == (2, "the\n")
    assert "logits after 2 tokens are not finite" in err


@pytest.mark.slow
def test_the_script_itself(trained):
    command = [sys.executable, str(ROOT / "generate.py"), f"checkpoint={trained['selective']}", "tokens=25"]
    with subprocess.Popen([*command, "prompt=a"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert "ended by the reader of the text" in err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
