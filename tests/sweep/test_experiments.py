"""The paper's comparisons as experiments: their grids, and what is kept equal over each."""

from __future__ import annotations

import itertools

import hydra
import pytest
from omegaconf import open_dict

from selmodel.cli import CONFIGS
from selmodel.config import register_resolvers
from selmodel.errors import UserError
from selmodel.training.setup import check_config

register_resolvers()
EXPERIMENTS = ("perplexity_vs_heads", "context_size", "model_size", "memory_loss")
SIZES = ("mini", "small", "paper")


def compose(*overrides: str):
    common = ("runs_root=/tmp", "run_dir=/tmp/run", "cache_dir=/tmp/cache")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", [*common, *overrides], return_hydra_config=True)


def without_hydra(cfg):
    cfg = cfg.copy()
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def grid(experiment: str) -> dict[str, list[str]]:
    params = compose(f"experiment={experiment}").hydra.sweeper.params
    return {name: str(values).split(",") for name, values in params.items()}


def corners(experiment: str) -> list[dict[str, str]]:
    """First and last value of every axis, in all combinations."""
    axes = {name: sorted({values[0], values[-1]}) for name, values in grid(experiment).items()}
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_corner_of_a_grid_passes_the_checks_with_the_same_tokens(name, size):
    tokens, validation, per_step = set(), set(), set()
    for values in corners(f"{name}/{size}"):
        cfg = compose(f"experiment={name}/{size}", *(f"{key}={value}" for key, value in values.items()))
        check_config(without_hydra(cfg))
        n = cfg.model.context_length
        per_step.add(cfg.data.batch_size * n)
        tokens.add(cfg.data.batch_size * n * cfg.trainer.max_steps)
        validation.add(cfg.data.validation_sequences * n)
        assert cfg.optim.schedule_steps == cfg.trainer.max_steps
    assert len(per_step) == len(tokens) == len(validation) == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_name_alone_means_the_mini_size(name):
    assert compose(f"experiment={name}").hydra.sweeper.params == compose(f"experiment={name}/mini").hydra.sweeper.params
    assert compose(f"experiment={name}").sweep.parallel == 2


@pytest.mark.parametrize("size", SIZES)
def test_the_grids(size):
    heads = grid(f"perplexity_vs_heads/{size}")
    assert heads["attention"] == ["standard", "selective"]
    assert len(heads["model.n_heads"]) >= 3
    assert "seed" in heads
    assert set(grid(f"context_size/{size}")) == {"attention", "model.context_length", "seed"}
    assert set(grid(f"model_size/{size}")) == {"attention", "model.depth", "seed"}
    assert grid(f"memory_loss/{size}")["attention.memory_loss.eps"][0] == "0"


def test_heads_change_and_nothing_else():
    few, many = (compose("experiment=perplexity_vs_heads", f"model.n_heads={n}") for n in (1, 8))
    differing = {key for key in few.model if few.model[key] != many.model[key]}
    assert differing == {"n_heads"}
    assert few.model.head_dim == 32
    assert few.model.d_model == 128


def test_mini_heads_are_two_million_tokens():
    cfg = compose("experiment=perplexity_vs_heads")
    assert cfg.data.batch_size * cfg.model.context_length * cfg.trainer.max_steps == 2_048_000


def test_a_context_that_does_not_divide_the_tokens_is_named():
    cfg = compose("experiment=context_size", "model.context_length=100")
    with pytest.raises(Exception, match=r"model\.context_length=100: must divide the 4,096 tokens") as error:
        _ = cfg.data.batch_size
    assert UserError.__name__ in str(error.value)
