"""replay=PATH: the batch of a skipped step, and what in it is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from selmodel.config import register_resolvers
from selmodel.errors import UserError
from selmodel.training import module as module_file
from selmodel.training import replay as replay_file
from selmodel.training.checkpoint_file import read_checkpoint
from selmodel.training.loading import load_run
from selmodel.training.replay import replay
from selmodel.training.run import train


@pytest.fixture
def skipped(tmp_path, tiny, monkeypatch):
    """A run that skipped its step 7, with checkpoints after 5 and 12 (last) and of step 5, 10 or 12 (best)."""
    real, made = module_file.loss_sum, {"step": 0}

    def loss_sum(*arguments):
        made["step"] += 1
        return real(*arguments) * (torch.nan if made["step"] == 7 else 1)

    with monkeypatch.context() as patched:
        patched.setattr(module_file, "loss_sum", loss_sum)
        train(tiny(tmp_path / "run", "attention=selective", "callbacks.checkpoint.every_n_steps=6"))
    return tmp_path / "run" / "skipped" / "step-00000007.pt"


def test_losses_and_gradients_are_those_of_the_batch_and_the_checkpoint_before_it(skipped, caplog):
    """By hand, from the checkpoint before the step."""
    run = load_run(skipped.parent.parent / "previous.ckpt")
    assert run.step == 6
    batch = torch.load(skipped, weights_only=True)
    with caplog.at_level("INFO"):
        (found,) = replay(skipped)
    tokens = batch["tokens"]
    logits = run.model(tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    # float32, sequence by sequence here and all in one there
    assert found.losses == pytest.approx(losses.mean(1).tolist(), rel=1e-5)
    losses.mean().backward()
    for name, parameter in run.model.named_parameters():
        assert found.norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-3)
    assert "step 7, global batch 6 of the data: 8 sequences of 32 tokens" in caplog.text
    assert "with previous.ckpt, step 6: the weights of that step" in caplog.text
    assert "in 32-true: all finite" in caplog.text
    assert repr(run.tokenizer.decode(tokens[0].tolist()))[1:30] in caplog.text


def test_sequences_and_gradients_that_are_not_finite_are_named(skipped, caplog, monkeypatch):
    real = replay_file.token_losses
    bad = torch.load(skipped, weights_only=True)["tokens"][3, 1:]

    def token_losses(logits, targets):
        return real(logits, targets) * (math.inf if torch.equal(targets[0], bad) else 1)

    monkeypatch.setattr(replay_file, "token_losses", token_losses)
    with caplog.at_level("INFO"):
        (found,) = replay(skipped)
    assert found.bad_sequences == [3]
    assert set(found.bad_parameters) == set(found.norms)
    assert f"losses of 1 of 8 sequences and the gradients of {len(found.norms)} of" in caplog.text
    first_row = next(line for line in caplog.messages if line.strip().startswith("3 "))
    assert "inf" in first_row


def test_a_mixed_precision_is_compared_with_float32(skipped, monkeypatch):
    monkeypatch.setattr(replay_file.TrainedRun, "precision", "bf16-mixed")
    mixed, whole = replay(skipped)
    assert (mixed.precision, whole.precision) == ("bf16-mixed", "32-true")
    assert mixed.losses != whole.losses
    assert mixed.losses == pytest.approx(whole.losses, rel=0.02)  # bfloat16 has 8 bits


def test_it_is_an_option_of_train_py_that_leaves_nothing_behind(skipped, tmp_path, tiny):
    register_resolvers()
    before = {path: path.stat().st_mtime_ns for path in skipped.parent.parent.rglob("*")}
    assert train(tiny(tmp_path / "other", f"replay={skipped}")) is None
    assert not (tmp_path / "other").exists()
    assert {path: path.stat().st_mtime_ns for path in skipped.parent.parent.rglob("*")} == before


def test_a_damaged_checkpoint_is_passed_over(skipped):
    run = skipped.parent.parent
    (run / "previous.ckpt").write_bytes(b"")
    steps = {read_checkpoint(run / name)["selmodel"]["step"] for name in ("last.ckpt", "best.ckpt")}
    assert replay_file._weights_before(run, 7).step == min(steps)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; expected a file RUN/skipped/step-N.pt"),
        (b"x", "cannot be read"),
        ({"a": 1}, "is no batch"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "step-00000001.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    with pytest.raises(UserError, match=message):
        replay(path)


def test_a_run_without_a_checkpoint_is_named(tmp_path):
    (tmp_path / "skipped").mkdir()
    path = tmp_path / "skipped" / "step-00000001.pt"
    torch.save({"tokens": torch.zeros(1, 3), "step": 0, "optimizer_step": 1}, path)
    with pytest.raises(UserError, match="has no whole checkpoint"):
        replay(path)
