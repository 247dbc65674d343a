"""The data of a run on a synthetic task: endless batches that are a function of seed and step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning
import numpy as np
import torch

from selmodel.comparing import differences
from selmodel.data.tasks import Task, batch_of_examples
from selmodel.data.tokenizer import Tokenizer
from selmodel.data.validation import ValidationLoader, ValidationSet
from selmodel.errors import UserError

# Splits draw from different random numbers; lengths that are evaluated one by one have a split of their own.
TRAIN, VALIDATION, BY_LENGTH = 0, 1, 2


@dataclass(frozen=True)
class TaskOrder:
    """What defines the batches of a run, apart from the task."""

    seed: int
    batch_size: int
    min_length: int
    max_length: int
    context_length: int

    def check_world(self, world_size: int) -> None:
        """Raises UserError unless ``world_size`` devices can share the batches."""
        if self.batch_size % world_size:
            raise UserError(
                f"data.batch_size={self.batch_size} with {world_size} devices: the global batch must be a multiple of "
                f"the number of devices, such as {-(-self.batch_size // world_size) * world_size}"
            )


class TaskDataModule(lightning.LightningDataModule):
    """Examples of a ``Task``, in the place of ``DataModule``: same batches on any number of devices, exact resume.

    Row b of step s is a function of (seed, s, b) alone.

    Args:
        source: the task.
        tokenizer: the tokenizer of the run.
        context_length: of the model; nothing longer can be trained or evaluated.
        batch_size: examples per optimizer step, over all devices.
        min_length, max_length: lengths of training examples, drawn evenly; what a length is, the task says.
        lengths: those that accuracy is reported at after training, trained ones and longer ones.
        seed: of the examples.
        validation_sequences: examples of the validation set, of training lengths.
        validation_batch_size: of them per device and pass; None: batch_size.

    Raises:
        UserError: a value is out of range, or an example of one of the lengths does not fit into the context.
    """

    def __init__(
        self,
        source: Task | None,
        tokenizer: Tokenizer | None,
        *,
        context_length: int,
        batch_size: int,
        min_length: int = 2,
        max_length: int = 32,
        lengths: list | None = None,
        seed: int = 0,
        validation_sequences: int = 256,
        validation_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.lengths = [max_length] if lengths is None else list(lengths)
        if validation_batch_size is None:
            validation_batch_size = batch_size
        _check_numbers(
            {
                "batch_size": batch_size,
                "min_length": min_length,
                "max_length": max_length,
                "validation_sequences": validation_sequences,
                "validation_batch_size": validation_batch_size,
            },
            self.lengths,
        )
        if min_length > max_length:
            raise UserError(f"data.min_length={min_length}: expected at most data.max_length={max_length}")
        self.order = TaskOrder(seed, batch_size, min_length, max_length, context_length)
        self.source = source
        self.tokenizer = tokenizer
        self.validation_sequences = validation_sequences
        self.validation_batch_size = validation_batch_size
        self.step = 0
        if source is not None:
            longest = max([max_length, *self.lengths])
            if source.n_symbols(longest) > context_length:
                raise UserError(
                    f"model.context_length={context_length}: an example of length {longest} (data.max_length, "
                    f"data.lengths) has {source.n_symbols(longest)} tokens; expected a context of at least that, or "
                    "shorter lengths"
                )

    @property
    def rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    def examples(
        self, split: int, number: int, rows: range, lengths: list[int] | None = None, width: int | None = None
    ):
        """Tokens int64 [b, width + 1] and answers bool [b, width] of ``rows`` of batch ``number`` of a split.

        lengths: of each row; None: drawn from min_length to max_length. width: None: what max_length takes.
        """
        order = self.order
        randoms = [np.random.default_rng([order.seed, split, number, row]) for row in rows]
        if lengths is None:
            lengths = [int(random.integers(order.min_length, order.max_length + 1)) for random in randoms]
        width = self.source.n_symbols(order.max_length) if width is None else width
        return batch_of_examples(self.source, lengths, randoms, width)

    def train_dataloader(self) -> TaskLoader:
        """Endless batches from the first one not marked as trained."""
        return TaskLoader(self)

    def val_dataloader(self) -> ValidationLoader:
        """This rank's share of the validation set."""
        return ValidationLoader(
            self.validation_set, self.validation_batch_size, rank=self.rank, world_size=self.world_size
        )

    @property
    def validation_set(self) -> ValidationSet:
        """The same examples whatever the devices; they stand for no text, so their bytes are 0."""
        tokens, is_answer = self.examples(VALIDATION, 0, range(self.validation_sequences))
        return ValidationSet(
            tokens.astype(np.int32), np.zeros(is_answer.shape, np.int64), self.tokenizer.eos_id, is_answer
        )

    def mark_trained(self, batch: dict[str, Any]) -> None:
        """Records that an optimizer step has used ``batch``: a run resumed here begins with the next one."""
        self.step = int(batch["step"]) + 1

    def place_of(self, batch: dict[str, Any]) -> str:
        """Nothing beyond the number of the batch, which makes its examples."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """{"step": index of the next batch, "order": what defines the batches}."""
        return {"step": self.step, "order": self._order_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the last batch the state counts.

        Raises:
            UserError: the state belongs to other examples.
        """
        faults = differences(state_dict["order"], self._order_dict(), there="in the checkpoint", here="here")
        if faults:
            raise UserError(
                f"the checkpoint's examples differ ({'; '.join(faults)}). Resume with the values of the checkpoint, or "
                "start a new run."
            )
        self.step = int(state_dict["step"])

    def _order_dict(self) -> dict[str, Any]:
        order = self.order
        return {
            "data.seed": order.seed,
            "data.batch_size": order.batch_size,
            "data.min_length": order.min_length,
            "data.max_length": order.max_length,
            "task": self.source.describe()["fingerprint"],
        }

    def skipped(self) -> dict[str, int]:
        """Nothing is ever left out."""
        return {"rows": 0, "shards": 0}

    def protocol(self) -> dict[str, Any]:
        """What makes validation numbers comparable."""
        return {
            "source": self.source.describe()["fingerprint"],
            "tokenizer_hash": self.tokenizer.hash,
            "context_length": self.order.context_length,
            "min_length": self.order.min_length,
            "max_length": self.order.max_length,
            "validation_sequences": self.validation_sequences,
        }


class TaskLoader:
    """The endless training batches of one rank: "tokens" int64 [b, n + 1], "target_mask" bool [b, n], "step"."""

    def __init__(self, data: TaskDataModule) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data = self.data
        step = data.step
        rows = range(data.rank, data.order.batch_size, data.world_size)
        while True:
            tokens, is_answer = data.examples(TRAIN, step, rows)
            yield {"tokens": torch.from_numpy(tokens), "target_mask": torch.from_numpy(is_answer), "step": step}
            step += 1

    # As in TrainLoader: the place is the data module's.
    def place_of(self, batch: dict[str, Any]) -> str:
        """Nothing beyond the number of the batch, which makes its examples."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _check_numbers(options: dict[str, Any], lengths: list) -> None:
    numbers = list(options.items()) + [("lengths", value) for value in lengths]
    faults = [
        f"data.{name}={value!r}: expected a whole number of at least 1"
        for name, value in numbers
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if not lengths:
        faults.append("data.lengths=[]: expected at least one length")
    if faults:
        raise UserError("; ".join(faults))
