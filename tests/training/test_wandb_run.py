"""Which wandb run a directory has, under which tags, and what of its configuration leaves the machine."""

from __future__ import annotations

import pytest

from selmodel.config import plain
from selmodel.errors import UserError
from selmodel.privacy import HIDDEN, public, without_secrets
from selmodel.training.wandb_run import known_id, resolve_mode, run_id, sweep_name, tags_of


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# -- mode -----------------------------------------------------------------------------------------------------


def test_without_a_key_auto_is_offline_and_online_is_refused(tmp_path, monkeypatch):
    assert resolve_mode("auto") == "offline"
    with pytest.raises(UserError, match=r"logger\.wandb\.mode=online: no key found"):
        resolve_mode("online")
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="WANDB_MODE=online: no key found"):
        resolve_mode("auto")


@pytest.mark.parametrize("place", ["variable", "home", "netrc"])
def test_with_a_key_auto_is_online(tmp_path, monkeypatch, place):
    if place == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    else:
        path = tmp_path / "home" / ".netrc" if place == "home" else tmp_path / "other"
        path.parent.mkdir(exist_ok=True)
        monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
        path.write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
        path.chmod(0o600)
        if place == "netrc":
            monkeypatch.setenv("NETRC", str(path))
    assert resolve_mode("auto") == "online"
    assert resolve_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org/")
    assert resolve_mode("auto") == ("online" if place == "variable" else "offline")  # a key for another server


def test_the_environment_decides_what_auto_leaves_open(monkeypatch):
    for value, mode in (("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")):
        monkeypatch.setenv("WANDB_MODE", value)
        assert resolve_mode("auto") == mode
        assert resolve_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(UserError, match="WANDB_MODE=of: must be one of online, offline, disabled"):
        resolve_mode("auto")
    with pytest.raises(UserError, match=r"logger\.wandb\.mode=onlin: must be one of auto"):
        resolve_mode("onlin")


# -- identity -------------------------------------------------------------------------------------------------


def test_an_id_is_made_once_for_each_directory(tmp_path, caplog):
    assert known_id(tmp_path / "run") is None
    first = run_id(tmp_path / "run")
    assert run_id(tmp_path / "run") == known_id(tmp_path / "run") == first
    assert run_id(tmp_path / "other") != first
    (tmp_path / "run" / "wandb_id").write_text("not an id/\n")
    assert run_id(tmp_path / "run") not in (first, "not an id/")
    assert "does not hold the id" in caplog.text


def test_the_group_is_the_folder_of_the_sweep(tmp_path):
    job = tmp_path / "heads" / "model.n_heads-4"
    job.mkdir(parents=True)
    assert sweep_name(job) is None
    assert sweep_name(job, multirun=True) == "heads"
    (job.parent / "sweep.json").write_text("{}")
    assert sweep_name(job) == "heads"


def test_tags_are_the_overrides_that_change_what_is_computed():
    overrides = [
        "attention=selective", "model.n_heads=2", "model.n_heads=4", "+experiment=mini", "run_dir=/x/y", "logger=wandb",
        "logger.wandb.mode=offline", "trainer.devices=2", "trainer.max_steps=5", "data.root=/a/b/c4", "resume=auto",
    ]  # fmt: skip
    assert tags_of(overrides) == [
        "attention=selective", "model.n_heads=4", "experiment=mini", "trainer.max_steps=5", "data.root=c4",
    ]  # fmt: skip
    assert tags_of([]) == []


def test_a_long_tag_is_cut_and_stays_its_own():
    long = "data.source.pattern=" + "x" * 60
    (first,), (second,) = tags_of([long + "1"]), tags_of([long + "2"])
    assert len(first) == len(second) == 64
    assert first != second
    assert first.startswith("data.source.pattern=xxx")
    assert tags_of(["data.pattern=" + "x" * 51]) == ["data.pattern=" + "x" * 51]  # 64 exactly


# -- secrets --------------------------------------------------------------------------------------------------


def test_no_secret_leaves_by_name_by_value_or_in_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("MY_PASSWORD", "short")  # too short to look for inside other values
    config = {
        "data": {"token": "abc", "hf_token": None, "root": "https://me:pw@mirror.example/c4?sig=abc&x=1", "workers": 2},
        "callbacks": [{"api_key": 7, "secret": ["a", "b"], "note": "uses hf_0123456789 here", "wish": "a short one"}],
        "cache": f"{tmp_path}/home/.cache", "other": f"{tmp_path}/homely",
    }  # fmt: skip
    assert public(config) == {
        "data": {"token": "***", "hf_token": None, "root": "https://***@mirror.example/c4?***", "workers": 2},
        "callbacks": [{"api_key": "***", "secret": ["***", "***"], "note": "uses *** here", "wish": "a short one"}],
        "cache": "~/.cache", "other": f"{tmp_path}/homely",
    }  # fmt: skip
    assert without_secrets("+data.hf_token=abc") == "+data.hf_token=***"
    assert tags_of(["+data.password=abc", "data.root=https://u:p@h/c4"]) == ["data.password=***", "data.root=c4"]


def test_no_option_of_a_run_is_taken_for_a_secret(tmp_path, tiny):
    config = plain(tiny(tmp_path / "run"))
    assert public(config) == config
    assert HIDDEN not in str(public({"eos_token": "</s>", "micro_batch_tokens": 5, "live_keys": "auto"}))
