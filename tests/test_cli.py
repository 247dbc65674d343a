"""Typed mistakes: answered by name with a way out, before any training, without a traceback."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from selmodel import cli
from selmodel.evaluation.run import evaluate
from selmodel.training.run import train
from tests.conftest import TINY

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, corpus, cache_dir):
    """Runs a command line in this process; returns exit status and standard error."""

    def run(script: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        status = 0
        try:
            cli.main(train if script == "train.py" else evaluate, script.removesuffix(".py"))
        except SystemExit as error:
            status = error.code
        return status, capsys.readouterr().err

    return run


def shard(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "c4-train.00000-of-00001.json.gz").write_bytes(content)
    (folder / "c4-validation.00000-of-00001.json.gz").write_bytes(content)
    return folder


def broken_roots(tmp: Path) -> dict[str, Path]:
    line = json.dumps({"text": "some words " * 30}).encode() + b"\n"
    empty = tmp / "empty"
    empty.mkdir()
    return {
        "missing": tmp / "nowhere",
        "empty": empty,
        "not_gzip": shard(tmp / "not_gzip", line * 50),
        "no_text": shard(tmp / "no_text", gzip.compress(line * 3 + b'{"txt": "x"}\n' + line * 50)),
    }


MISTAKES = {
    "unknown group": (["modle.depth=3"], ["modle.depth", "did you mean model.depth?"]),
    "unknown option": (["model.dept=3"], ["model.dept", "did you mean model.depth?"]),
    "appended option": (["+optim.lrr=1"], ["optim.lrr", "did you mean lr?"]),
    "appended to the data": (["+data.batchsize=1"], ["data.batchsize", "did you mean batch_size?"]),
    "appended at the top": (["+sed=1"], ["sed", "did you mean seed?"]),
    "unknown choice": (["attention=selectve"], ["attention=selectve", "did you mean selective?", "standard"]),
    "unknown experiment": (["experiment=papr/base"], ["experiment=papr/base", "did you mean paper/base?"]),
    "no heads": (["model.n_heads=0"], ["model.n_heads=0", "at least 1"]),
    "short context": (["model.context_length=1"], ["model.context_length=1", "at least 2"]),
    "selection head": (["attention.selection_head=5", "model.n_heads=3"], ["attention.selection_head=5", "0..2"]),
    "learning rate": (["optim.lr=0"], ["optim.lr=0", "above 0"]),
    "not a number": (["optim.lr=fast"], ["optim.lr=fast"]),
    "steps": (["trainer.max_steps=0"], ["trainer.max_steps=0", "at least 1"]),
    "lightning's clipping": (["+trainer.gradient_clip_val=1"], ["trainer.gradient_clip_val", "optim.gradient_clip"]),
    "batch and streams": (["data.batch_size=10", "data.streams=64"], ["data.batch_size=10", "64"]),
    "no root": (["data.root=null"], ["data.root", "DIR"]),
    "missing root": (["data.root={missing}"], ["data.root={missing}"]),
    "empty folder": (["data.root={empty}"], ["{empty}", "c4-train"]),
    "not gzip": (["data.root={not_gzip}"], ["c4-train.00000-of-00001.json.gz", "gzip", "data.on_bad_shard=skip"]),
    "no text": (["data.root={no_text}"], ["c4-train.00000-of-00001.json.gz", "row 3", "text"]),
    "checkpoint": (["resume={missing}/last.ckpt"], ["resume={missing}/last.ckpt", "no such file"]),
    "unknown monitor": (["callbacks.checkpoint.monitor=val/los"], ["callbacks.checkpoint.monitor=val/los", "val/loss"]),
    "appended to a callback": (["+callbacks.progress.foo=1"], ["callbacks.progress.foo", "line_seconds"]),
    "a callback that is none": (["+callbacks.foo.bar=1"], ["callbacks.foo", "_target_"]),
    "an entry of the logger": (["+logger.tensorboard=1"], ["logger.tensorboard", "wandb"]),
    "appended to the sample": (["+sample.foo=1"], ["sample.foo"]),
    "sample out of range": (["sample.top_p=2", "sample.temperature=-1"], ["sample.top_p=2", "sample.temperature=-1"]),
    "flag": (["data.document_mask=abc"], ["data.document_mask=abc", "true or false"]),
    "compile": (["compile=abc"], ["compile=abc", "true or false"]),
    "seed": (["seed=99999999999999"], ["seed=99999999999999"]),
    "micro batch": (["micro_batch_tokens=0"], ["micro_batch_tokens=0"]),
    "micro batch of a fraction": (["micro_batch_tokens=64.5"], ["micro_batch_tokens=64.5", "whole number"]),
    "betas": (["optim.betas=[a,b]"], ["optim.betas"]),
    "one beta": (["optim.betas=0.9"], ["optim.betas"]),
    "epsilon": (["optim.eps=-1"], ["optim.eps=-1"]),
    "trainer option that would do nothing": (["+trainer.limit_val_batches=1"], ["trainer.limit_val_batches=1"]),
    "devices": (["trainer.devices=0"], ["trainer"]),
    "no group": (["logger=null"], ["group", "--help"]),
    "syntax": (["model.depth=[1"], ["model.depth=[1"]),
}


@pytest.mark.parametrize("name", MISTAKES, ids=lambda name: name.replace(" ", "_"))
def test_train_answers_typed_mistakes(name, run, tmp_path, corpus, cache_dir):
    arguments, expected = MISTAKES[name]
    roots = {key: str(path) for key, path in broken_roots(tmp_path).items()}
    status, errors = run(
        "train.py",
        "data=local",
        f"data.root={corpus}",
        f"cache_dir={tmp_path / 'cache' if 'data.root={' in arguments[0] else cache_dir}",
        "tokenizer.vocab_size=400",
        "model.depth=2",
        "trainer.max_steps=1",
        "trainer=cpu",
        f"run_dir={tmp_path / 'run'}",
        *(argument.format(**roots) for argument in arguments),
    )
    assert status == 2
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    for text in expected:
        assert text.format(**roots) in errors
    assert not (tmp_path / "run").exists()


def test_faults_are_reported_together(run, tmp_path):
    status, errors = run("train.py", "+optim.lrr=1", "+model.dpth=2", f"run_dir={tmp_path / 'run'}")
    assert status == 2
    assert "optim.lrr" in errors
    assert "model.dpth" in errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["checkpoint", "last.ckpt"]),
        (["checkpoint={tmp}/none.ckpt"], ["checkpoint={tmp}/none.ckpt: no such file"]),
        (["checkpoint={tmp}/text.ckpt"], ["checkpoint={tmp}/text.ckpt", "damaged or not a checkpoint"]),
        (["checkpoint={tmp}/text.ckpt", "suite=perplexty"], ["suite=perplexty", "did you mean perplexity?"]),
        (["chekpoint=a"], ["chekpoint", "did you mean checkpoint?"]),
    ],
)
def test_evaluate_answers_typed_mistakes(arguments, expected, run, tmp_path):
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    status, errors = run("evaluate.py", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert status == 2
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    for text in expected:
        assert text.format(tmp=tmp_path) in errors


@pytest.mark.slow
def test_the_commands_work_from_another_folder(tmp_path, corpus, cache_dir):
    """The real scripts in processes of their own: train, go on, evaluate to the last printed digit."""
    common = [
        "data=local", f"data.root={corpus}", f"cache_dir={cache_dir}", "tokenizer.vocab_size=400",
        "model.depth=2", "model.d_model=32", "model.head_dim=16", "model.context_length=32", "data.batch_size=8",
        "data.streams=8", "data.workers=1", "data.validation_sequences=10", "trainer=cpu", "sample.tokens=5",
    ]  # fmt: skip

    def run(script: str, *arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, str(ROOT / script), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    first = run("train.py", *common, "trainer.max_steps=3")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "finished at step 3" in first
    assert {p.name for p in run_dir.iterdir() if p.name != ".lock"} == {
        "best.ckpt", "config.yaml", "last.ckpt", "results.json", "train.csv", "train.log", "validation.csv",
    }  # fmt: skip
    assert "is finished" in run("train.py", *common, "trainer.max_steps=3")
    results = json.loads((run_dir / "results.json").read_text())
    printed = run("evaluate.py", f"checkpoint={run_dir}")
    assert json.loads((run_dir / "evaluation-last.json").read_text())["validation"] == results["validation"]
    assert f"{results['validation']['loss']:.4f}" in printed
    assert f"{results['validation']['bits_per_byte']:.4f}" in printed


def tiny_sweep(tmp_path, corpus, cache_dir, *arguments):
    options = {option.split("=")[0]: option for option in (*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}")}
    options |= {argument.split("=")[0]: argument for argument in arguments}  # Hydra refuses an option typed twice here
    return [sys.executable, str(ROOT / "train.py"), "-m", *options.values()]


@pytest.mark.slow
def test_a_sweep_trains_each_job_in_its_folder_and_one_failure_does_not_stop_it(tmp_path, corpus, cache_dir):
    command = tiny_sweep(
        tmp_path, corpus, cache_dir, "attention=standard,selective", "model.n_heads=0,1", "trainer.max_steps=2",
        "logger=wandb", "logger.wandb.mode=offline",
    )  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2
    assert "model.n_heads=0" in result.stderr
    assert "Traceback" not in result.stderr
    assert "2 of 4 jobs failed" in result.stderr
    (sweep,) = (tmp_path / "multirun").iterdir()
    assert len([path for path in sweep.iterdir() if path.is_dir()]) == 4
    runs = sorted(path.parent for path in sweep.glob("*/results.json"))
    assert [run.name for run in runs] == ["attention-selective+model.n_heads-1", "attention-standard+model.n_heads-1"]
    ids = set()
    for run in runs:
        assert json.loads((run / "results.json").read_text())["step"] == 2
        assert f"run_dir: {run}" in (run / "config.yaml").read_text()
        assert len(list((run / "wandb").glob("offline-run-*"))) == 1
        ids.add((run / "wandb_id").read_text())
    assert len(ids) == 2
    # Again: what is finished is left alone, what failed is tried again.
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.iterdir() if path.is_file()}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2
    assert result.stdout.count("finished before") == 2
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.iterdir() if path.is_file()} == before
    status = subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), "report=status", f"sweep={sweep}"],
        capture_output=True, text=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    assert "4 jobs, 2 finished, 2 failed" in status.stdout
    assert status.stdout.count("model.n_heads=0: expected an integer of at least 1") == 2


@pytest.mark.slow
def test_a_signal_stops_a_whole_sweep(tmp_path, corpus, cache_dir):
    command = tiny_sweep(tmp_path, corpus, cache_dir, "seed=0,1", "trainer.max_steps=2000")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not list(tmp_path.glob("multirun/*/*/train.csv")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "the same command goes on from there" in output
    assert "Error executing job" not in output
    assert len(list(tmp_path.glob("multirun/*/*/"))) == 1  # the other job never began
    assert len(list(tmp_path.glob("multirun/*/*/last.ckpt"))) == 1
    assert "1 stopped, 1 waiting" in output


def test_help_lists_what_can_be_chosen_and_nothing_else(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main(train, "train")
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert "data: c4, copy, docstrings, local, parity, tokens, variable_assignment" in lines
    assert any(line.startswith("experiment/perplexity_vs_heads: mini") for line in lines)
    assert not any(re.search(r"(^|[\s/])_", line) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention=standard,selectve"], "did you mean selective?"),
        (["data=docstrings"], "-m: nothing varies"),
        (["seed=0,1", "sweep.parallel=0"], "sweep.parallel=0: expected a whole number"),
        (["seed=0,1", "sweep.report=heads"], "sweep.report=heads: no such report"),
        (["data.workers=0,1"], "a sweep over data.workers: does not change what a run computes"),
        (["seed=0,1", "hydra/launcher=submitit"], "hydra/launcher"),
    ],
)
def test_a_sweep_that_is_refused_leaves_nothing(run, tmp_path, arguments, message):
    status, err = run("train.py", "-m", *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_task_whose_examples_do_not_fit_the_context(run):
    status, err = run("train.py", "data=variable_assignment", "model.context_length=64")
    assert status == 2
    assert "model.context_length=64: an example of length 128" in err
