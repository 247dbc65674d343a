"""Batches of synthetic tasks: the same on any number of devices, resumable, and refused where they cannot be."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from selmodel.data.task_data import TaskDataModule
from selmodel.data.tasks import Copy, TaskTokenizer, VariableAssignment
from selmodel.errors import UserError

TASK = VariableAssignment(n_names=3, n_values=4, n_queries=2)


def data_module(task=TASK, rank=0, world_size=1, **options) -> TaskDataModule:
    defaults = {"context_length": 40, "batch_size": 6, "max_length": 10, "lengths": [5, 17], "validation_sequences": 7}
    data = TaskDataModule(task, TaskTokenizer().build(task), **(defaults | options))
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data


def first(data: TaskDataModule, n: int) -> list[dict]:
    return list(islice(data.train_dataloader(), n))


def test_batches_hold_answers_of_all_training_lengths():
    lengths = set()
    for batch in first(data_module(batch_size=40), 5):
        assert batch["tokens"].shape == (40, 1 + 26)  # 2 * 10 + 3 * 2
        assert batch["tokens"].dtype == torch.int64
        assert batch["target_mask"].sum(1).tolist() == [2] * 40
        lengths |= {(int((row != 2).sum()) - 1 - 6) // 2 for row in batch["tokens"]}
    assert lengths == set(range(2, 11))


def test_devices_share_the_same_batches():
    whole = first(data_module(), 3)
    parts = [first(data_module(rank=rank, world_size=3), 3) for rank in range(3)]
    for step, batch in enumerate(whole):
        for rank in range(3):
            assert torch.equal(batch["tokens"][rank::3], parts[rank][step]["tokens"])
            assert torch.equal(batch["target_mask"][rank::3], parts[rank][step]["target_mask"])


def test_resumed_batches_are_the_next_ones():
    expected = first(data_module(), 5)
    data = data_module()
    for batch in first(data, 3):
        data.mark_trained(batch)
    resumed = data_module()
    resumed.load_state_dict(data.state_dict())
    for batch, wanted in zip(first(resumed, 2), expected[3:], strict=True):
        assert batch["step"] == wanted["step"]
        assert torch.equal(batch["tokens"], wanted["tokens"])


def test_validation_is_apart_from_training_and_the_same_for_all_devices():
    data = data_module()
    whole = torch.cat([batch["tokens"] for batch in data.val_dataloader()])
    assert len(whole) == 7
    assert not torch.equal(whole[:6], first(data, 1)[0]["tokens"])
    parts = [torch.cat([b["tokens"] for b in data_module(rank=r, world_size=2).val_dataloader()]) for r in range(2)]
    assert torch.equal(parts[0], whole[0::2])
    assert torch.equal(parts[1][:3], whole[1::2])
    masks = torch.cat([batch["target_mask"] for batch in data.val_dataloader()])
    assert masks.sum(1).tolist() == [2] * 7


@pytest.mark.parametrize("changed", [{"seed": 1}, {"batch_size": 3}, {"max_length": 9}, {"min_length": 1}])
def test_a_state_of_other_examples_is_refused(changed):
    (name,) = changed
    with pytest.raises(UserError, match=f"data.{name}: .* in the checkpoint"):
        data_module(**changed).load_state_dict(data_module().state_dict())


def test_a_state_of_another_task_is_refused():
    with pytest.raises(UserError, match="task: "):
        data_module(Copy(4)).load_state_dict(data_module(Copy(5)).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [5, 18]}, "model.context_length=40: an example of length 18 .* has 42 tokens"),
        ({"max_length": 18, "lengths": [2]}, "an example of length 18"),
        ({"min_length": 11}, "data.min_length=11: expected at most data.max_length=10"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"lengths": []}, r"data.lengths=\[\]"),
        ({"lengths": [4, 0]}, "data.lengths=0"),
        ({"lengths": [1.5]}, "data.lengths=1.5"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        data_module(**options)


def test_devices_that_cannot_share_a_batch():
    with pytest.raises(UserError, match=r"data.batch_size=6 with 4 devices: .* such as 8"):
        data_module().order.check_world(4)
