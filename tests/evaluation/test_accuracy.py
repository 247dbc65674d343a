"""Accuracy by length: of a model that knows the answers, and in a run from its command to its file."""

from __future__ import annotations

import json

import pytest
import torch

from selmodel.data.task_data import TaskDataModule
from selmodel.data.tasks import Copy, TaskTokenizer
from selmodel.errors import UserError
from selmodel.evaluation.accuracy import LengthAccuracy, accuracy_by_length
from selmodel.evaluation.perplexity import ValidationSums
from selmodel.model import ModelOutput
from selmodel.training.run import train


class CopyingModel(torch.nn.Module):
    """Right on every symbol of a copy task, except that it does not know symbol ``unknown``."""

    context_length = 100

    def __init__(self, vocab_size: int, unknown: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.vocab_size, self.unknown = vocab_size, unknown

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        for row, text in enumerate(tokens.tolist()):
            mark = text.index(3)  # "|"
            for position in range(mark, len(text)):
                source = 1 + position - mark
                if source < mark and text[source] != self.unknown:
                    logits[row, position, text[source]] = 1.0
        return ModelOutput(logits, None)


def copy_data(n: int = 2) -> TaskDataModule:
    task = Copy(n)
    return TaskDataModule(task, TaskTokenizer().build(task), context_length=100, batch_size=4, max_length=6)


def test_a_model_that_knows_all_is_always_right():
    results = accuracy_by_length(CopyingModel(6, unknown=-1), copy_data(), [1, 5, 30], n_examples=20)
    assert results == [LengthAccuracy(n, 20 * n, 1.0, 1.0) for n in (1, 5, 30)]


def test_shares_are_counted_by_answer_and_by_example():
    data = copy_data()
    (one,) = accuracy_by_length(CopyingModel(6, unknown=4), data, [2], n_examples=50)
    tokens, _ = data.examples(2, 2, range(50), [2] * 50, 5)
    known = tokens[:, 1:3] != 4
    assert one == LengthAccuracy(2, 100, known.mean(), known.all(1).mean())
    assert 0 < one.whole < one.accuracy < 1


def test_lengths_beyond_the_context_are_refused():
    with pytest.raises(UserError, match="an example of length 50 has 101 tokens, more than the model's context of 100"):
        accuracy_by_length(CopyingModel(6, 4), copy_data(), [2, 50])


def test_validation_counts_right_answers_only_where_targets_count():
    sums = ValidationSums(3)
    losses = torch.zeros(1, 3)
    counted = torch.tensor([[True, True, False]])
    sums.update(losses, counted, None, torch.tensor([[True, False, True]]))
    assert sums.result().accuracy == 0.5
    plain = ValidationSums(3)
    plain.update(losses, counted, None)
    assert plain.result().accuracy is None


def test_a_task_is_trained_resumed_and_measured(tmp_path, cache_dir):
    from hydra import compose, initialize_config_dir

    from selmodel.cli import CONFIGS
    from selmodel.config import register_resolvers

    register_resolvers()

    def run(name: str, *overrides: str):
        options = [
            "data=parity", "model.depth=1", "model.d_model=32", "model.head_dim=16", "model.context_length=40",
            "data.batch_size=16", "data.max_length=6", "data.lengths=[4,20]", "data.validation_sequences=32",
            "optim.lr=1e-2", "trainer=cpu", "trainer.max_steps=20", "trainer.log_every_n_steps=1", "sample=null",
            "trainer.val_check_interval=10",
            f"runs_root={tmp_path}", f"run_dir={tmp_path / name}",
            f"cache_dir={cache_dir}", *overrides,
        ]  # fmt: skip
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return train(compose("train", options))

    whole = run("whole")
    assert whole.accuracy is not None
    assert whole.bytes == 0
    written = json.loads((tmp_path / "whole" / "accuracy.json").read_text())
    assert [one["length"] for one in written["accuracy"]] == [4, 20]
    assert written["step"] == 20
    assert (written["protocol"]["min_length"], written["protocol"]["max_length"]) == (2, 6)
    # the same run in two parts
    run("parts", "trainer.max_steps=8", "optim.schedule_steps=20")
    resumed = run("parts", "optim.schedule_steps=20")
    assert (resumed.loss, resumed.accuracy) == (whole.loss, whole.accuracy)
    losses = [(tmp_path / name / "train.csv").read_text().splitlines() for name in ("whole", "parts")]
    columns = [[line.split(",")[1] for line in lines[1:]] for lines in losses]
    assert columns[0] == columns[1]
    again = json.loads((tmp_path / "parts" / "accuracy.json").read_text())
    assert again == written


def test_the_suite_gives_what_the_end_of_training_gave(tmp_path, cache_dir):
    from hydra import compose, initialize_config_dir

    from selmodel.cli import CONFIGS
    from selmodel.config import register_resolvers
    from selmodel.evaluation.run import evaluate

    register_resolvers()
    run = tmp_path / "run"
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        train(
            compose(
                "train",
                [
                    "data=copy",
                    "model.depth=1",
                    "model.d_model=32",
                    "model.head_dim=16",
                    "model.context_length=41",
                    "data.batch_size=4",
                    "data.max_length=6",
                    "data.lengths=[4,20]",
                    "data.validation_sequences=8",
                    "trainer=cpu",
                    "trainer.max_steps=2",
                    "optim.warmup_steps=1",
                    "sample=null",
                    f"runs_root={tmp_path}",
                    f"run_dir={run}",
                    f"cache_dir={cache_dir}",
                ],
            )
        )
        written = json.loads((run / "accuracy.json").read_text())
        options = [f"checkpoint={run}", "suite=task_accuracy", "trainer=cpu"]
        evaluate(compose("evaluate", options))
        assert json.loads((run / "accuracy-last.json").read_text()) == written
        (other,) = evaluate(compose("evaluate", [*options, "lengths=[7]"]))
        assert other.length == 7
        for lengths, message in (("[]", "expected whole numbers"), ("[0]", "expected"), ("[21]", "has 43 tokens")):
            with pytest.raises(UserError, match=message):
                evaluate(compose("evaluate", [*options, f"lengths={lengths}"]))
