"""Every configuration composes, and says what the code says."""

from __future__ import annotations

import inspect

import hydra
import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from selmodel.cli import CONFIGS, group_choices
from selmodel.config import check_options, register_resolvers
from selmodel.training.setup import check_config

register_resolvers()


def compose(name: str, *overrides: str):
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose(name, [*overrides])


def standing(*overrides: str):
    """The training configuration without what only a running command knows."""
    return compose("train", "runs_root=/tmp", "run_dir=/tmp/run", "cache_dir=/tmp/cache", *overrides)


@pytest.mark.parametrize("experiment", group_choices("experiment"))
@pytest.mark.parametrize("attention", ["standard", "selective"])
def test_every_experiment_composes_and_passes_the_checks(experiment, attention, tmp_path):
    if "memory_loss" in experiment and attention == "standard":
        pytest.skip("the memory loss is of selective attention")
    cfg = standing(f"experiment={experiment}", f"attention={attention}")
    if cfg.data.get("root", "") is None:
        cfg.data.root = str(tmp_path)
    check_config(cfg)


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (group, choice)
        for group in ("attention", "data", "tokenizer", "optim", "trainer")
        for choice in group_choices(group)
    ],
)
def test_every_choice_of_a_group_composes(group, choice):
    cfg = standing(f"{group}={choice}")
    OmegaConf.resolve(cfg)


# Where the configuration differs from the constructor on purpose.
DIFFERENT = {
    "data.workers": "one worker reads ahead of training; a library user gets none unless asked",
    "data.batch_size": "no default in the constructor",
    "data.context_length": "no default in the constructor",
    "optim.schedule_steps": "the trainer's steps",
    "attention.memory_loss": "spelled out so that eps and tau can be set",
}


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=standard"],
        ["attention=selective"],
        ["data=local"],
        ["data=docstrings"],
        ["data=tokens"],
        ["tokenizer=huggingface"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_defaults_are_the_same_in_configuration_and_constructor(overrides):
    """The files list every option for reading; this keeps them from drifting away from the code."""
    cfg = standing(*overrides)
    for path in ("attention", "model", "data", "data.source", "tokenizer", "optim"):
        node = OmegaConf.select(cfg, path)
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        for key in node:
            name = f"{path}.{key}"
            if str(key).startswith("_") or key not in parameters or name in DIFFERENT:
                continue
            default = parameters[key].default
            if default is inspect.Parameter.empty:
                continue
            if OmegaConf.is_interpolation(node, key):
                continue
            value = OmegaConf.to_container(node[key]) if OmegaConf.is_config(node[key]) else node[key]
            assert (list(default) if isinstance(default, tuple) else default) == value, name


@pytest.mark.parametrize("overrides", [["attention=standard"], ["attention=selective"], ["data=local"]], ids=str)
def test_every_option_of_a_component_is_listed(overrides):
    """An option that is not in the file cannot be set without a plus sign, and nobody finds it."""
    filled_in = {
        "vocab_size",
        "attention",
        "tokenizer",
        "source",
        "d_model",
        "n_heads",
        "head_dim",
        "n_kv_heads",
        "self",
    }
    cfg = standing(*overrides)
    for path in ("attention", "model", "data", "tokenizer", "optim"):
        node = OmegaConf.select(cfg, path)
        parameters = set(inspect.signature(get_object(node["_target_"])).parameters)
        missing = parameters - set(node) - (filled_in if path in ("attention", "data") else {"vocab_size", "attention"})
        assert not missing, f"{path}: {missing}"


def test_options_of_evaluate_are_known():
    from selmodel.evaluation.run import EVALUATE_KEYS

    check_options(compose("evaluate"), EVALUATE_KEYS)
