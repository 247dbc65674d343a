"""Secrets: refused where they are typed, absent from everything a run writes, and never part of a shell's line."""

from __future__ import annotations

import base64
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from selmodel.cli import CONFIGS
from selmodel.config import check_options
from selmodel.data.transfer import fetch
from selmodel.errors import UserError
from selmodel.privacy import secret_faults
from selmodel.training.setup import check_config

ROOT = CONFIGS.parent
CANARY = "canary-5f3e9b1c7d"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"data": {"mirror": f"https://user:{CANARY}@host/c4"}}, "data.mirror"),
        ({"data": {"mirror": f"https://{CANARY}@host/c4"}}, "data.mirror"),
        ({"data": {"mirror": f"https://host/c4?access_token={CANARY}"}}, "data.mirror"),
        ({"data": {"mirror": f"https://host/c4?x=1&X-Amz-Signature={CANARY}"}}, "data.mirror"),
        ({"callbacks": {"mine": {"api_key": CANARY}}}, "callbacks.mine.api_key"),
        ({"callbacks": {"mine": {"hf_token": CANARY}}}, "callbacks.mine.hf_token"),
        ({"logger": {"wandb": {"tags": ["a", f"https://u:{CANARY}@h"]}}}, "logger.wandb.tags"),
        ({"a": {"password": CANARY}}, "a.password"),
        ({"data": {"root": "/x/${oc.env:HF_TOKEN}"}}, "data.root"),
    ],
)
def test_a_secret_among_the_options_is_refused_without_repeating_it(options, name):
    (fault,) = secret_faults(options)
    assert fault.startswith(f"{name}: ")
    assert CANARY not in fault
    assert "environment variable" in fault or "netrc" in fault


def test_the_value_of_a_secret_variable_is_refused_wherever_it_is_typed(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", CANARY)
    (fault,) = secret_faults({"data": {"root": f"/data/{CANARY}/x"}})
    assert fault.startswith("data.root: holds the value of a secret environment variable")
    assert CANARY not in fault


@pytest.mark.parametrize(
    "options",
    [
        {
            "tokenizer": {"name": "gpt2", "bos_token": "<s>"},
            "micro_batch_tokens": 5,
            "attention": {"live_keys": "auto"},
        },
        {"data": {"mirror": "https://host:8080/c4/en"}},
        {"sample": {"prompt": "write to me@host or https://a:b@c"}, "prompt": "https://a:b@c", "text": "https://a:b@c"},
        {"password": None, "token": ""},
        {"data": {"root": "${oc.env:HOME}/data"}},
    ],
)
def test_what_is_no_secret_is_not_refused(options):
    assert secret_faults(options) == []


def test_all_commands_check_their_options(tiny, tmp_path):
    with pytest.raises(UserError, match=r"data\.root: the address holds a login") as error:
        check_config(tiny(tmp_path / "run", f"data.root=https://user:{CANARY}@host/c4"))
    assert CANARY not in str(error.value)
    cfg = tiny(tmp_path / "run")
    cfg.data.root = f"https://user:{CANARY}@host"
    with pytest.raises(UserError, match=r"data\.root: the address"):
        check_options(cfg)


def test_a_refused_secret_stands_in_no_file_and_on_no_screen(tmp_path):
    """As it is typed, run by train.py and evaluate.py; the command line is the user's own."""
    for script in ("train.py", "evaluate.py"):
        done = subprocess.run(
            [
                sys.executable, str(ROOT / script), f"data.{'root' if script[0] == 't' else 'mirror'}=https://u:{CANARY}@h/c",
                *(["data=local", f"runs_root={tmp_path}/runs"] if script[0] == "t" else ["checkpoint=x"]),
            ],
            cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 2
        assert "holds a login" in done.stderr
        assert CANARY not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert CANARY not in str(path)
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()


def test_secrets_of_the_environment_stand_in_nothing_a_run_writes(tmp_path, tiny, monkeypatch, caplog, capfd):
    """Planted where tools look for keys; then a run with offline wandb, and an evaluation and an export of it."""
    import hydra

    from selmodel.evaluation.run import evaluate
    from selmodel.training.run import train

    for variable in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, CANARY.replace("-", "") * 3)
    canary = (CANARY.replace("-", "") * 3).encode()
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    with caplog.at_level("DEBUG"):
        train(tiny(run, "logger=wandb", "trainer.max_steps=3", "attention=selective"))
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            for options in (["suite=perplexity"], [f"export={tmp_path / 'model'}"]):
                evaluate(
                    hydra.compose("evaluate", [f"checkpoint={run}", "trainer=cpu", f"cache_dir={tmp_path}", *options])
                )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert any(path.name == "model.safetensors" for path in files)
    for path in files:
        assert canary not in path.read_bytes(), path
    output = capfd.readouterr()
    assert canary.decode() not in caplog.text + output.out + output.err


def test_a_login_is_taken_from_netrc_and_never_from_the_address(tmp_path, monkeypatch):
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/file"
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        assert fetch(address) == b"ok"
        netrc = tmp_path / "netrc"
        netrc.write_text(f"machine 127.0.0.1 login me password {CANARY}\nmachine other login x password y\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        assert fetch(address) == b"ok"
        assert fetch(address, headers={"Authorization": "Bearer mine"}) == b"ok"
    finally:
        server.shutdown()
        server.server_close()
    assert seen == [None, "Basic " + base64.b64encode(f"me:{CANARY}".encode()).decode(), "Bearer mine"]


def test_options_reach_a_job_as_they_were_typed_and_never_a_shell(tmp_path):
    """slurm/train.sbatch with hostile values: a stand-in for srun writes down its arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    srun = tools / "srun"
    srun.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'seen')!r}, 'w').write('\\0'.join(sys.argv[1:]))\n"
    )
    srun.chmod(0o755)
    hostile = [
        "sample.prompt=$(touch ran)", "data.root=`touch ran`", "a=b; touch ran", "run_dir=x y\nz", "q='\"", "g=*",
        "&& touch ran", "${HOME}", "trainer.devices=7",
    ]  # fmt: skip
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "3",
        "SELMODEL_SITE": "/nowhere", "SELMODEL_PYTHON": "python", "WANDB_API_KEY": CANARY,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / "train.sbatch"), *hostile],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    arguments = (tmp_path / "seen").read_text().split("\0")
    assert arguments[-len(hostile) :] == hostile
    assert not list(tmp_path.rglob("ran"))
    assert not (Path(ROOT) / "ran").exists()
    assert CANARY not in done.stdout + done.stderr
