"""Files of strangers are data: a checkpoint's configuration cannot run code, and cannot look at this machine."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from selmodel.attention import StandardAttention
from selmodel.cli import CONFIGS
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.sweep.status import _max_steps
from selmodel.training.checkpoint_file import read_checkpoint, write_checkpoint
from selmodel.training.loading import load_run
from selmodel.training.run import train
from selmodel.trust import COMPONENTS, stored_config

ROOT = CONFIGS.parent


class Mine(StandardAttention):
    """A user's own kind of attention."""


@pytest.fixture
def checkpoint(tmp_path, tiny):
    """Changes the configuration in a tiny run's checkpoint and returns its path."""
    train(tiny(tmp_path / "run", "trainer.max_steps=1", "sample=null"))
    path = tmp_path / "run" / "last.ckpt"

    def change(option, value):
        content = read_checkpoint(path)
        config = OmegaConf.create(content["selmodel"]["config"])
        OmegaConf.update(config, option, value, force_add=True)
        content["selmodel"]["config"] = OmegaConf.to_container(config, resolve=False)
        write_checkpoint(content, path)
        return path

    return change


def test_the_components_are_those_that_the_configurations_name():
    named = set()
    for group in ("attention", "model", "optim", "data"):
        for path in (CONFIGS / group).glob("*.yaml"):
            named |= set(re.findall(r"_target_: (\S+)", path.read_text()))
    assert named == COMPONENTS


@pytest.mark.parametrize(
    "option",
    [f"{node}._target_" for node in ("attention", "model", "optim", "data", "data.source", "optim.x")],
)
def test_no_component_of_a_checkpoint_can_run_code(checkpoint, tmp_path, option, monkeypatch):
    calls = []
    monkeypatch.setattr("os.system", calls.append)
    path = checkpoint(option, "os.system")
    with pytest.raises(UserError, match=rf"last\.ckpt: .*{re.escape(option)}=os\.system\. .*SELMODEL_TRUST=os"):
        load_run(path)
    assert not calls


def test_a_function_of_our_own_is_no_component_either(checkpoint):
    path = checkpoint("data._target_", "selmodel.data.caching.write_atomically")
    with pytest.raises(UserError, match=r"write_atomically\. Building it would run that code"):
        load_run(path)


@pytest.mark.parametrize("value", ["own", "own.kinds", " os , own.kinds.Mine "])
def test_what_the_user_trusts_by_name_is_built(checkpoint, monkeypatch, value):
    own = types.ModuleType("own")
    own.kinds = types.ModuleType("own.kinds")
    own.kinds.Mine = Mine
    monkeypatch.setitem(sys.modules, "own", own)
    monkeypatch.setitem(sys.modules, "own.kinds", own.kinds)
    path = checkpoint("attention._target_", "own.kinds.Mine")
    monkeypatch.setenv("SELMODEL_TRUST", "ow,own.kind")  # the beginning of a name is not the package
    with pytest.raises(UserError, match="SELMODEL_TRUST=own "):
        load_run(path)
    monkeypatch.setenv("SELMODEL_TRUST", value)
    with pytest.raises(UserError, match="is of another run"):  # it was built; its name is not that of the checkpoint
        load_run(path)


def test_references_are_text(checkpoint, monkeypatch):
    monkeypatch.setenv("CANARY", "seen")
    run = load_run(checkpoint("data.root", "${oc.env:CANARY}"))
    assert run.config.data.root == "${oc.env:CANARY}"
    assert stored_config({"a": ["x${b}"], "b": 1}, Path("f"))["a"] == ["x\\${b}"]


def test_the_state_of_a_sweep_follows_no_references(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "7")
    path = tmp_path / "config.yaml"
    path.write_text("trainer:\n  max_steps: ${oc.decode:${oc.env:CANARY}}\n")
    assert _max_steps(path) is None
    path.write_text("trainer:\n  max_steps: 7\n")
    assert _max_steps(path) == 7


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize("name", ["last.ckpt", "skipped/step-00000001.pt"])
def test_pickled_objects_are_not_made(tmp_path, name, capsys):
    from selmodel.training.replay import replay

    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    torch.save({"selmodel": {"format": 1}, "x": Evil()}, path)
    with pytest.raises(UserError, match="cannot be read"):
        (read_checkpoint if name == "last.ckpt" else replay)(path)
    assert "ran" not in capsys.readouterr().out


def test_every_reading_of_tensors_is_without_code():
    """A new ``torch.load`` must say weights_only=True, and nothing may unpickle or evaluate YAML tags."""
    for path in [
        *(ROOT / "selmodel").rglob("*.py"),
        *(ROOT / "hydra_plugins").rglob("*.py"),
        *(ROOT / "data").glob("*.py"),
    ]:
        text = path.read_text()
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", text):
            assert "weights_only=True" in call, f"{path}: {call}"
        assert not re.search(
            r"\b(pickle|joblib|dill|marshal)\.loads?\(|yaml\.(unsafe_)?load\(|allow_pickle=True", text
        ), path
        assert "shell=True" not in text, path
        assert "trust_remote_code=True" not in text, path


def test_a_tokenizer_in_a_checkpoint_is_data():
    with pytest.raises(UserError, match=r"tokenizer of kind 'os\.system'"):
        Tokenizer.from_state({"kind": "os.system", "file": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer.from_state({"kind": "sentencepiece", "file": torch.zeros(3, dtype=torch.uint8)})


def test_budgets_are_data(tmp_path):
    from selmodel.budgets import read_budgets
    from selmodel.model import Transformer

    model = Transformer(10, StandardAttention, depth=1, d_model=8, head_dim=4, context_length=8)
    path = tmp_path / "budgets.json"
    path.write_text(
        json.dumps({"format": "selmodel.budgets/1", "budgets": ["${oc.env:HOME}"], "rule": "x", "n_sinks": 1})
    )
    with pytest.raises(UserError, match="budgets"):
        read_budgets(str(path), model)
