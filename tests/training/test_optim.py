import math

import pytest
import torch
from torch import nn

from selmodel.errors import UserError
from selmodel.training.optim import AdamW


def test_warmup_is_linear_and_reaches_the_peak():
    optim = AdamW(lr=2.0, warmup_steps=4, schedule_steps=100)
    assert [optim.lr_at(step) for step in (1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0]


def test_cosine_by_hand():
    # 10 steps of warm-up, then a half cosine from 1 to 0.1 over 100 steps: a quarter of the way in it stands at
    # 0.1 + 0.9 * (1 + cos(pi / 4)) / 2, half-way at 0.55, at the end and beyond at 0.1.
    optim = AdamW(lr=1.0, warmup_steps=10, schedule_steps=110, final_lr_ratio=0.1)
    assert optim.lr_at(35) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert optim.lr_at(60) == pytest.approx(0.55)
    assert optim.lr_at(110) == pytest.approx(0.1)
    assert optim.lr_at(500) == pytest.approx(0.1)


def test_warmup_stable_decay_by_hand():
    # The last fifth of 100 steps decays linearly from 1 to 0: step 80 is still 1, step 90 half, step 100 zero.
    optim = AdamW(lr=1.0, schedule="wsd", warmup_steps=10, schedule_steps=100, final_lr_ratio=0.0, decay_ratio=0.2)
    assert [optim.lr_at(step) for step in (5, 10, 50, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert optim.lr_at(90) == pytest.approx(0.5)
    assert optim.lr_at(100) == pytest.approx(0.0)


def test_warmup_is_a_tenth_unless_it_is_given():
    assert AdamW(schedule_steps=500).warmup_steps == 50
    assert AdamW(schedule_steps=5).warmup_steps == 0
    assert AdamW(schedule_steps=524288).warmup_steps == 1000


def test_constant_stays():
    optim = AdamW(lr=0.3, schedule="constant", warmup_steps=0, schedule_steps=10)
    assert {optim.lr_at(step) for step in (1, 5, 1000)} == {0.3}


def test_weight_decay_reaches_matrices_only():
    model = nn.Sequential(nn.Embedding(5, 4), nn.RMSNorm(4), nn.Linear(4, 3, bias=False))
    optimizer = AdamW(lr=0.1, weight_decay=0.5, schedule_steps=10).build(model)
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decayed[id(model[0].weight)] == 0.5
    assert decayed[id(model[2].weight)] == 0.5
    assert decayed[id(model[1].weight)] == 0.0
    assert len(decayed) == 3


def test_one_step_by_hand():
    # First AdamW step: both moments are bias-corrected to g and g^2, so the update is lr * sign(g) (eps = 0), after
    # the decay w * (1 - lr * wd): 1 * (1 - 0.1 * 0.5) - 0.1 = 0.85.
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = AdamW(lr=0.1, eps=0.0, weight_decay=0.5, schedule_steps=10).build(model)
    model.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.85, abs=1e-7)


def test_all_faults_are_named_at_once():
    with pytest.raises(UserError) as error:
        AdamW(lr=-1, betas=[0.9, 1.5], schedule="cosin", schedule_steps=10, warmup_steps=20, gradient_clip=0)
    for name in (
        "optim.lr=-1",
        "optim.betas",
        "optim.schedule=cosin",
        "optim.warmup_steps=20",
        "optim.gradient_clip=0",
    ):
        assert name in str(error.value)
