"""The training step: one batch is one optimizer step, whatever it is cut into."""

from __future__ import annotations

import csv
import gzip
import json
import math
import shutil

import pytest
import torch

from selmodel.attention import selection
from selmodel.data.token_cache_writer import build_token_cache
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.module import LanguageModel
from selmodel.training.optim import AdamW
from selmodel.training.run import train
from selmodel.training.setup import build_data, build_model, build_trainer


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Recorder(LanguageModel):
    """Keeps the gradient of each step before it is clipped."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.gradients = []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(
            lambda *_: self.gradients.append([p.grad.clone() for p in self.model.parameters()])
        )
        return optimizer


def gradients(cfg, micro_batch_tokens, mask=None, steps=1):
    tokenizer, data = build_data(cfg)
    model = build_model(cfg, tokenizer).double()
    module = Recorder(model, AdamW(schedule_steps=10, gradient_clip=None), micro_batch_tokens=micro_batch_tokens)
    if mask is not None:
        module.on_after_batch_transfer = lambda batch, index: batch | ({"target_mask": mask} if "step" in batch else {})
    cfg.trainer.max_steps = steps
    trainer = build_trainer(cfg, callbacks=[], loggers=[])
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == steps
    return module.gradients


@pytest.mark.parametrize("attention", ["standard", "selective"])
@pytest.mark.parametrize("ragged", [False, True])
def test_accumulated_gradient_is_that_of_the_joint_batch(tmp_path, tiny, attention, ragged):
    """Every target that counts has the same weight: 8 rows in passes of 3, 3 and 2, with 1 to 32 targets each."""
    mask = None
    if ragged:
        lengths = torch.tensor([1, 32, 5, 17, 2, 9, 30, 3])
        mask = torch.arange(32)[None] < lengths[:, None]
    cfg = tiny(tmp_path / "run", f"attention={attention}", "attention.qk_norm=false")
    (whole,) = gradients(cfg, None, mask)
    (parts,) = gradients(cfg, 3 * 32, mask)
    assert any(gradient.abs().max() > 1e-4 for gradient in whole)
    for one, other in zip(whole, parts, strict=True):
        # float64: the order of a sum over 8 rows changes the last bits only
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)


def test_the_objective_is_the_mean_over_targets_plus_the_weighted_memory_loss(tmp_path, tiny):
    """The gradient of the step against one computed from the definition, apart from the training code."""
    cfg = tiny(tmp_path / "run", "attention.memory_loss.eps=0.3", "attention.memory_loss.tau=0.5")
    (accumulated,) = gradients(cfg, 2 * 32)

    tokenizer, data = build_data(cfg)
    model = build_model(cfg, tokenizer).double()
    data.setup("fit")
    tokens = next(iter(data.train_dataloader()))["tokens"]
    output = model(tokens[:, :-1])
    cross_entropy = -output.logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    # eps * sum over layers of max over positions of M / (n_layers * n), mean over the batch
    memory = output.memory.amax(-1).sum(0) / (output.memory.shape[0] * output.memory.shape[2])
    (cross_entropy + 0.3 * memory.mean()).backward()
    for one, parameter in zip(accumulated, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=1e-9)  # memory is summed in float32 steps
    assert selection.memory_loss(output.memory).item() == pytest.approx(memory.mean().item())


def test_what_is_logged(tmp_path, tiny):
    train(tiny(tmp_path / "run", "attention=selective", "attention.memory_loss.eps=0.1", "trainer.max_steps=4"))
    table = rows(tmp_path / "run" / "train.csv")
    assert [int(row["step"]) for row in table] == [1, 2, 3, 4]
    row = {key: float(value) for key, value in table[-1].items()}
    assert row["train/perplexity"] == pytest.approx(math.exp(row["train/loss"]))
    assert row["train/tokens"] == 4 * 8 * 32
    assert row["train/grad_norm"] > 0
    assert 0 < row["train/memory_loss"] <= 1
    assert row["throughput/tokens_per_second"] > 0
    parts = sum(row[f"throughput/{part}_seconds"] for part in ("data", "forward_backward", "optimizer"))
    assert parts == pytest.approx(row["throughput/step_seconds"])
    assert row["throughput/peak_memory_gib"] > 0.01
    for layer in range(2):
        assert row[f"selection/mean_F/layer_{layer}"] >= 0
        assert 0 <= row[f"selection/share_F_above_1/layer_{layer}"] <= 1
        assert 0 < row[f"selection/memory_share/layer_{layer}"] <= 1
    validation = rows(tmp_path / "run" / "validation.csv")[-1]
    assert int(validation["step"]) == 4
    assert float(validation["val/perplexity"]) == pytest.approx(math.exp(float(validation["val/loss"])))


def test_logging_more_often_changes_no_number(tmp_path, tiny):
    train(tiny(tmp_path / "each", "trainer.log_every_n_steps=1", "trainer.max_steps=6"))
    train(tiny(tmp_path / "some", "trainer.log_every_n_steps=3", "trainer.max_steps=6"))
    each, some = (
        {row["step"]: row["train/loss"] for row in rows(tmp_path / run / "train.csv")} for run in ("each", "some")
    )
    assert list(some) == ["1", "3", "6"]
    assert {step: each[step] for step in some} == some


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path, tiny):
    losses = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny(tmp_path / name, f"seed={seed}", "trainer.max_steps=3"))
        losses[name] = [row["train/loss"] for row in rows(tmp_path / name / "train.csv")]
    assert losses["a"] == losses["b"]
    assert losses["a"][0] != losses["c"][0]


def test_training_learns(tmp_path, tiny):
    result = train(tiny(tmp_path / "run", "trainer.max_steps=40", "trainer.val_check_interval=40"))
    first = float(rows(tmp_path / "run" / "train.csv")[0]["train/loss"])
    assert first == pytest.approx(math.log(400), abs=0.2)  # uniform over the vocabulary at the start
    assert result.loss < first - 0.5


@pytest.mark.parametrize("attention", ["standard", "selective"])
def test_mixed_precision_keeps_float32_weights_and_moments(tmp_path, tiny, attention):
    result = train(tiny(tmp_path / "run", f"attention={attention}", "trainer.precision=bf16-mixed"))
    assert math.isfinite(result.loss)
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}
    for state in checkpoint["optimizer_states"][0]["state"].values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_checkpoints_hold_the_run_in_plain_containers(tmp_path, tiny):
    train(tiny(tmp_path / "run", "trainer.max_steps=5"))
    for name in ("last.ckpt", "best.ckpt"):
        checkpoint = torch.load(tmp_path / "run" / name, weights_only=True)
        assert checkpoint["selmodel"]["config"]["model"]["depth"] == 2
        assert checkpoint["selmodel"]["architecture"]["n_layers"] == 2
        assert checkpoint["selmodel"]["tokenizer"]["hash"]
        assert checkpoint["selmodel"]["step"] == 5
        assert checkpoint["DataModule"]["step"] == 5
        assert len(checkpoint["optimizer_states"]) == 1
        assert set(checkpoint["random"][0]) >= {"python", "numpy", "torch"}
    assert not list((tmp_path / "run").glob("*.tmp"))  # no temporary file stays


def test_the_corpus_read_is_recorded_and_skips_are_counted(tmp_path, tiny, corpus):
    shutil.copytree(corpus, tmp_path / "corpus")
    first = sorted((tmp_path / "corpus" / "en").glob("c4-train*"))[0]
    content = gzip.decompress(first.read_bytes()).splitlines(keepends=True)
    first.write_bytes(gzip.compress(b"".join([content[0], b"not json\n", *content[1:]])))
    overrides = (f"data.root={tmp_path / 'corpus'}", "data.on_bad_shard=skip", "trainer.max_steps=40")
    train(tiny(tmp_path / "run", *overrides))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["skipped_this_start"]["rows"] >= 1
    assert results["data"]["fingerprint"] == results["protocol"]["source"]
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    assert checkpoint["selmodel"]["data"] == results["data"]


def test_wandb_offline_gets_the_same_figures(tmp_path, tiny, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    train(tiny(tmp_path / "run", "logger=wandb", "logger.wandb.name=tiny", "trainer.max_steps=2"))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert (tmp_path / "run" / "wandb_id").read_text()
    assert len(rows(tmp_path / "run" / "train.csv")) == 2


ATTENTION = '''
import torch
from selmodel.attention import Attention

class Average(Attention):
    """Every query takes the plain mean of the values so far."""

    def attend(self, q, k, v, document_ids):
        counts = torch.arange(1, v.shape[2] + 1, device=v.device, dtype=v.dtype)
        return v.cumsum(2) / counts[:, None], None
'''


def test_a_further_kind_of_attention_is_one_file_and_one_yaml(tmp_path, tiny, monkeypatch):
    (tmp_path / "average_attention.py").write_text(ATTENTION)
    (tmp_path / "configs" / "attention").mkdir(parents=True)
    (tmp_path / "configs" / "attention" / "average.yaml").write_text(
        "_target_: average_attention.Average\n_partial_: true\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = train(tiny(tmp_path / "run", f"hydra.searchpath=[file://{tmp_path / 'configs'}]", "attention=average"))
    assert math.isfinite(result.loss)
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    assert checkpoint["selmodel"]["architecture"]["attention"]["kind"] == "Average"


@pytest.mark.slow
def test_a_token_cache_gives_the_run_of_the_text(tmp_path, tiny, corpus):
    """The same losses to the last bit, and a run begun on the text goes on from the cache."""
    cfg = tiny(tmp_path / "text")
    train(cfg)
    tokenizer, data = build_data(cfg)
    build_token_cache(data.source, tokenizer, tmp_path / "cache")
    cached = ("data=tokens", f"data.root={tmp_path / 'cache'}")
    train(tiny(tmp_path / "tokens", *cached))
    train(tiny(tmp_path / "both", "trainer.max_steps=5", "optim.schedule_steps=12"))
    train(tiny(tmp_path / "both", *cached))
    text, tokens, both = (
        [row["train/loss"] for row in rows(tmp_path / run / "train.csv")] for run in ("text", "tokens", "both")
    )
    assert text == tokens == both
    results = [json.loads((tmp_path / run / "results.json").read_text()) for run in ("text", "tokens")]
    assert results[0]["protocol"] == results[1]["protocol"]
    assert results[0]["validation"] == results[1]["validation"]


def test_document_masking_changes_the_run_and_is_recorded(tmp_path, tiny):
    train(tiny(tmp_path / "packed", "trainer.max_steps=6"))
    train(tiny(tmp_path / "masked", "trainer.max_steps=6", "data.document_mask=true"))
    packed, masked = ([row["train/loss"] for row in rows(tmp_path / run / "train.csv")] for run in ("packed", "masked"))
    assert packed != masked
    assert json.loads((tmp_path / "masked" / "results.json").read_text())["protocol"]["document_mask"] is True
