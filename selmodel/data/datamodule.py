"""The data of a run: endless training batches with exact resume, and a fixed validation set."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
import torch.distributed as dist

from selmodel.data.documents import Documents, TextDocuments
from selmodel.data.loader import TrainLoader
from selmodel.data.stream import OPTIONS, Order, assignment
from selmodel.data.validation import ValidationLoader, ValidationSet, read_validation_set
from selmodel.errors import UserError

if TYPE_CHECKING:
    from selmodel.data.sources import Source
    from selmodel.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Validation holds logits [batch, query, vocabulary]; a larger batch wins no speed and costs memory.
VALIDATION_BATCH_SIZE = 32


class DataModule(lightning.LightningDataModule):
    """Streams a corpus in an exact, resumable order.

    One batch of the training loader is one optimizer step. The training code calls `mark_trained(batch)`
    after the step; `state_dict` holds what was marked, so batches fetched ahead and never trained on are not
    lost.

    Args:
        source: a `Source` of text, or a `TokenCache`, which brings its documents tokenized.
        tokenizer: the tokenizer of the run.
        context_length: targets per sequence; sequences hold one token more, the BOS.
        batch_size: sequences per optimizer step over all devices; a multiple or a divisor of `streams`.
        streams: number of virtual streams the corpus is cut into.
        seed: seed of the order of shards.
        workers: worker processes per device; 0 reads in the training process.
        prefetch: batches each worker makes ahead.
        document_mask: batches carry "document_ids", so that attention can keep documents apart.
        validation_sequences: size of the validation set.
        validation_batch_size: validation sequences per device and step; None takes batch_size, at most 32.
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None is the platform's
            default.

    Raises:
        UserError: a value is out of range, or batch_size and streams do not fit each other.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        batch_size: int,
        streams: int = 64,
        seed: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        document_mask: bool = False,
        validation_sequences: int = 512,
        validation_batch_size: int | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        super().__init__()
        self.order = Order(seed, streams, context_length, batch_size)
        if validation_batch_size is None:
            validation_batch_size = min(batch_size, VALIDATION_BATCH_SIZE)
        _check_at_least(0, workers=workers)
        _check_at_least(
            1,
            prefetch=prefetch,
            validation_sequences=validation_sequences,
            validation_batch_size=validation_batch_size,
        )
        self.source = source
        self.tokenizer = tokenizer
        self.workers = workers
        self.prefetch = prefetch
        self.document_mask = document_mask
        self.validation_sequences = validation_sequences
        self.validation_batch_size = validation_batch_size
        self.multiprocessing_context = multiprocessing_context
        self.step = 0
        self.states = np.zeros((streams, 4), dtype=np.int64)  # (epoch, shard, row, offset) of each stream
        self._documents: Documents | None = None
        self._validation_set: ValidationSet | None = None
        self._train_loader: TrainLoader | None = None

    @property
    def documents(self) -> Documents:
        """The corpus as tokens."""
        if self._documents is None:
            if hasattr(self.source, "documents"):
                self._documents = self.source.documents(self.tokenizer)
            else:
                self._documents = TextDocuments(self.source, self.tokenizer)
        return self._documents

    @property
    def validation_set(self) -> ValidationSet:
        """The fixed validation set; read on first use."""
        if self._validation_set is None:
            self._validation_set = read_validation_set(
                self.documents, self.order.context_length, self.validation_sequences
            )
        return self._validation_set

    def prepare_data(self) -> None:
        """The source's slow work, done once per machine."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Checks devices against batch and streams, and reads the validation set.

        Raises:
            UserError: the devices cannot share the batch, the splits overlap, or nothing is there to validate on.
        """
        self.order.check_world(self.world_size)
        both = set(self.documents.shards("train")) & set(self.documents.shards("validation"))
        if both:
            raise UserError(
                f"shard(s) in both the training and the validation split: {', '.join(sorted(both))}. "
                "Validate on files that training does not read."
            )
        _ = self.validation_set

    @property
    def rank(self) -> int:
        if self.trainer is not None:
            return self.trainer.global_rank
        return dist.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        if self.trainer is not None:
            return self.trainer.world_size
        return dist.get_world_size() if _distributed() else 1

    def train_dataloader(self) -> TrainLoader:
        """Endless batches from the first one not marked as trained; see `TrainLoader` for what they hold."""
        self._train_loader = TrainLoader(
            self.documents,
            self.order,
            rank=self.rank,
            world_size=self.world_size,
            start=lambda: (self.step, self.states),
            workers=self.workers,
            prefetch=self.prefetch,
            document_mask=self.document_mask,
            multiprocessing_context=self.multiprocessing_context,
        )
        return self._train_loader

    def val_dataloader(self) -> ValidationLoader:
        """This rank's share of the validation set; see `ValidationLoader` for what the batches hold."""
        return ValidationLoader(
            self.validation_set,
            self.validation_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            document_mask=self.document_mask,
        )

    def mark_trained(self, batch: dict[str, Any]) -> None:
        """Records that an optimizer step has used `batch`: a run resumed here begins with the next one."""
        state = batch["state"]
        self.states[state[:, 0]] = state[:, 1:]
        self.step = int(batch["step"]) + 1

    def place_of(self, batch: dict[str, Any]) -> str:
        """Where in the corpus the first sequence of a training batch ends, for messages."""
        stream, epoch, shard, row, _ = (int(value) for value in batch["state"][0])
        names = self.documents.shards("train")
        parts = assignment(stream, self.order.streams, len(names), self.order.seed, epoch)
        if shard >= len(parts):
            return f"epoch {epoch + 1}, stream {stream}, at the end of the epoch"
        return f"epoch {epoch + 1}, stream {stream}, about row {row} of {names[parts[shard][0]]}"

    def state_dict(self) -> dict[str, Any]:
        """Where all streams stand, gathered from all ranks: call it on every rank.

        Returns {"step": index of the next global batch, "streams": int64 [streams, 4] of (epoch, shard, row,
        offset), "order": the settings that define the order of tokens}, all of it loadable with weights_only.
        """
        states = self.states
        if _distributed():
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (self.step, self.states))
            steps = [step for step, _ in gathered]
            if len(set(steps)) > 1:
                raise RuntimeError(f"ranks disagree on the number of batches trained on: {steps}")
            # Rank r has moved streams r, r + world_size, ... and knows nothing new of the others.
            owner = np.arange(self.order.streams) % len(gathered)
            states = np.stack([states for _, states in gathered])[owner, np.arange(self.order.streams)]
        return {
            "step": self.step,
            "streams": torch.from_numpy(states.copy()),
            "order": self._order_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the last batch the state counts; on any number of devices and workers.

        Raises:
            UserError: the state belongs to another order of tokens.
        """
        ours, theirs = self._order_dict(), state_dict["order"]
        differences = [
            f"{name}: {theirs.get(name)!r} in the checkpoint, {ours.get(name)!r} here"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if differences:
            raise UserError(
                "the checkpoint's place in the data cannot be continued, because what defines the order of "
                f"tokens differs ({'; '.join(differences)}). Resume with the values of the checkpoint, or "
                "start a new run."
            )
        self.step = int(state_dict["step"])
        self.states = state_dict["streams"].cpu().numpy().astype(np.int64, copy=True)

    def _order_dict(self) -> dict[str, Any]:
        return {
            **{OPTIONS[name]: value for name, value in asdict(self.order).items()},
            "tokenizer hash": self.tokenizer.hash,
            "source fingerprint": self.source.describe()["fingerprint"],
        }

    def skipped(self) -> dict[str, int]:
        """What this rank left out so far with on_bad_shard="skip", all its processes together."""
        counts = self.documents.skipped
        if self._train_loader is not None:
            counts = counts + self._train_loader.skipped
        return {"rows": int(counts[0]), "shards": int(counts[1])}

    def protocol(self) -> dict[str, Any]:
        """What makes validation numbers comparable, as a plain dict.

        The corpus is named by its fingerprint alone: the same files in another folder, on a mirror or in a
        token cache are the same corpus.
        """
        return {
            "source": self.source.describe()["fingerprint"],
            "tokenizer_hash": self.tokenizer.hash,
            "context_length": self.order.context_length,
            "document_mask": self.document_mask,
            "validation_sequences": self.validation_set.n_sequences,
            "validation_tokens": self.validation_set.n_tokens,
            "validation_bytes": self.validation_set.n_bytes,
        }


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_at_least(least: int, **options: int) -> None:
    faults = [
        f"data.{name}={value!r}: expected an integer of at least {least}"
        for name, value in options.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < least
    ]
    if faults:
        raise UserError("; ".join(faults))
