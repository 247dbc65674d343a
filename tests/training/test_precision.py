"""Accumulation and precision: what a step counts as, and weights that keep moving."""

from __future__ import annotations

import csv

import pytest
import torch

from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.optim import AdamW
from selmodel.training.run import train
from selmodel.training.setup import check_config


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class One(torch.nn.Module):
    """A weight of 1 whose gradient is always 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1))

    def forward(self):
        return (torch.ones(1, 1, dtype=self.weight.dtype) @ self.weight).sum()


def moved(model, *, autocast):
    optim = AdamW(lr=6e-4, weight_decay=0.0, schedule="constant", warmup_steps=0, schedule_steps=100)
    optimizer = optim.build(model)
    for group in optimizer.param_groups:
        group["lr"] = 6e-4
    for _ in range(100):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 1 - model.weight.item()


def test_a_weight_of_one_moves_by_a_hundred_small_steps():
    """Adam moves by the rate at each step. Products in bfloat16 change nothing, for the weight is in float32."""
    assert moved(One(), autocast=False) == pytest.approx(0.06, rel=1e-3)
    assert moved(One(), autocast=True) == pytest.approx(0.06, rel=1e-3)
    # What is refused below, and why: a step of 6e-4 is less than half the distance of bfloat16 numbers below 1.
    assert moved(One().bfloat16(), autocast=False) == 0


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_in_half_precision_are_refused(tiny, tmp_path, precision):
    with pytest.raises(UserError, match=rf"trainer\.precision={precision}: weights in half .* bf16-mixed"):
        check_config(tiny(tmp_path / "run", f"trainer.precision={precision}"))


def test_every_weight_moves_in_mixed_precision(tiny, tmp_path):
    train(tiny(tmp_path / "run", "trainer.precision=bf16-mixed", "optim.weight_decay=0", "trainer.max_steps=3"))
    content = read_checkpoint(tmp_path / "run" / "last.ckpt")
    cfg = tiny(tmp_path / "run")
    from selmodel.training.setup import build_data, build_model

    before = build_model(cfg, build_data(cfg)[0]).state_dict()
    for name, weight in before.items():
        after = content["state_dict"][f"model.{name}"]
        assert after.dtype == torch.float32
        assert not torch.equal(after, weight), name


@pytest.mark.parametrize("rows_of_a_pass", [8, 4, 3, 1])
def test_steps_validations_and_rates_count_optimizer_steps_whatever_the_passes(
    tiny, tmp_path, rows_of_a_pass, monkeypatch
):
    """8 sequences in passes of 8, 4, 3 (the last one short) or 1: the same run."""
    passes = []
    forward = Transformer.forward

    def counted(self, tokens, *arguments, **options):
        if self.training and torch.is_grad_enabled():
            passes.append(len(tokens))
        return forward(self, tokens, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", counted)
    options = ("trainer.max_steps=10", f"micro_batch_tokens={32 * rows_of_a_pass}", "attention=standard")
    train(tiny(tmp_path / "run", *options))
    whole, rest = divmod(8, rows_of_a_pass)
    assert passes == ([rows_of_a_pass] * whole + [rest] * (rest > 0)) * 10
    train(tiny(tmp_path / "joint", *options[::2], "micro_batch_tokens=null"))
    found, expected = (rows(tmp_path / name / "train.csv") for name in ("run", "joint"))
    assert [row["step"] for row in rows(tmp_path / "run" / "validation.csv")] == ["5", "10"]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours["step"], ours["train/lr"], ours["train/tokens"]) == (
            theirs["step"], theirs["train/lr"], theirs["train/tokens"],
        )  # fmt: skip
        # float32 sums in another order, grown over ten steps at a high rate
        assert float(ours["train/loss"]) == pytest.approx(float(theirs["train/loss"]), rel=2e-4)
