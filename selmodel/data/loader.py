"""Training batches of one device: the same whatever the number of worker processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from selmodel.data.documents import Documents
from selmodel.data.packing import document_ids
from selmodel.data.stream import Order, Stream, StreamState
from selmodel.errors import UserError


class Pieces(IterableDataset):
    """Per global step, the part of a rank's batch that this worker's streams make.

    PyTorch's loader takes whole items from one worker after the other. So a worker's item is not a batch but
    a piece of one, and `TrainLoader` joins the pieces of all workers: the batch does not depend on who made
    what.

    Yields dicts: "rows" int64 [k], which rows of the rank's batch, ascending (k may be 0); "tokens" int32
    [k, context_length + 1]; "state" int64 [m, 5] rows (stream, epoch, shard, row, offset) after the piece;
    "step"; "worker"; "skipped" int64 [2], by what `Documents.skipped` has grown. A `UserError` is yielded as
    {"error": ...}, because the loader would bury its message in a traceback.
    """

    def __init__(
        self, documents: Documents, order: Order, rank: int, world_size: int, step: int, states: np.ndarray
    ) -> None:
        self.documents = documents
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.step = step
        self.states = states

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            yield from self._pieces(worker, workers)
        except UserError as error:
            yield {"error": error}

    def _pieces(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        order = self.order
        streams: dict[int, Stream] = {}
        step = self.step
        skipped = self.documents.skipped
        while True:
            rows, tokens, touched = self._layout(step, worker, workers)
            for row, index in enumerate(touched):
                if index not in streams:
                    state = StreamState(*self.states[index])
                    streams[index] = Stream(self.documents, index, order.streams, order.seed, state)
                streams[index].fill(tokens[row, 1:])
            tokens[:, 0] = self.documents.bos_id
            state = [(index, *streams[index].state) for index in dict.fromkeys(touched)]
            yield {
                "rows": rows,
                "tokens": tokens,
                "state": np.asarray(state, dtype=np.int64).reshape(-1, 5),
                "step": step,
                "worker": worker,
                "skipped": self.documents.skipped - skipped,
            }
            step += 1

    def _layout(self, step: int, worker: int, workers: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Rows of the rank's batch this worker makes, room for their tokens, and the stream of each."""
        rows = np.arange(self.order.batch_size // self.world_size)
        # Row j of a rank's batch is row rank + j * world_size of the global batch.
        streams = (step * self.order.batch_size + self.rank + rows * self.world_size) % self.order.streams
        # A rank's streams are rank, rank + world_size, ...: workers take them in turn.
        mine = streams // self.world_size % workers == worker
        tokens = np.empty((int(mine.sum()), self.order.context_length + 1), dtype=np.int32)
        return rows[mine], tokens, streams[mine].tolist()


class TrainLoader:
    """The endless training batches of one rank.

    Each batch is a dict: "tokens" int64 tensor [batch_size / world_size, context_length + 1]; "document_ids"
    int32 tensor of that shape if `document_mask`; "step" the index of the global batch; "state" int64 array
    [k, 5] of rows (stream, epoch, shard, row, offset), where each stream of this batch stands after it.

    Args:
        documents: the corpus.
        order: what defines the batches.
        rank, world_size: which rows of each global batch to make: those b with b % world_size == rank.
        start: called when an iteration begins; gives (step, states int64 [streams, 4]) to begin at. A call,
            so that a state loaded after the loader was built still counts.
        workers: worker processes; 0 makes the batches in this process.
        prefetch: batches each worker makes ahead.
        document_mask: add "document_ids".
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None is the platform's
            default.

    `skipped` int64 [2] is what the workers of this iteration left out as unreadable: rows, rests of shards.
    """

    def __init__(
        self,
        documents: Documents,
        order: Order,
        *,
        rank: int = 0,
        world_size: int = 1,
        start: Callable[[], tuple[int, np.ndarray]],
        workers: int = 0,
        prefetch: int = 2,
        document_mask: bool = False,
        multiprocessing_context: str | None = None,
    ) -> None:
        order.check_world(world_size)
        self.documents = documents
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self.workers = workers
        self.prefetch = prefetch
        self.document_mask = document_mask
        self.multiprocessing_context = multiprocessing_context
        self.skipped = np.zeros(2, dtype=np.int64)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step, states = self.start()
        pieces = Pieces(self.documents, self.order, self.rank, self.world_size, step, np.array(states))
        source = iter(pieces) if self.workers == 0 else iter(self._worker_loader(pieces))
        return self._batches(source, step)

    def _worker_loader(self, pieces: Pieces) -> DataLoader:
        # An iterator of earlier workers that is garbage by now must not reach the forked workers: collected there,
        # it would tell the workers of this process to stop.
        gc.collect()
        return DataLoader(
            pieces,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            # Arrays travel through the pipe as they are: tensors would need /dev/shm, which containers keep
            # small.
            collate_fn=_unchanged,
            worker_init_fn=_keep_inherited,
            # The loader draws a seed for its workers; its own generator keeps it from the global one.
            generator=torch.Generator(),
            multiprocessing_context=self.multiprocessing_context,
        )

    def _batches(self, source: Iterator[dict[str, Any]], step: int) -> Iterator[dict[str, Any]]:
        while True:
            pieces = []
            for worker in range(max(self.workers, 1)):
                piece = next(source)
                if "error" in piece:
                    raise piece["error"]
                if (piece["step"], piece["worker"]) != (step, worker):
                    raise RuntimeError(
                        f"worker pieces out of turn: expected step {step} of worker {worker}, got step "
                        f"{piece['step']} of worker {piece['worker']}"
                    )
                pieces.append(piece)
            if self.workers:  # without workers, the count of this process has it
                self.skipped = sum(piece["skipped"] for piece in pieces)
            yield self._join(pieces)
            step += 1

    def _join(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        shape = (self.order.batch_size // self.world_size, self.order.context_length + 1)
        tokens = np.empty(shape, dtype=np.int64)
        for piece in pieces:
            tokens[piece["rows"]] = piece["tokens"]
        state = np.concatenate([piece["state"] for piece in pieces])
        batch = {
            "tokens": torch.from_numpy(tokens),
            "step": pieces[0]["step"],
            "state": state[np.argsort(state[:, 0])],
        }
        if self.document_mask:
            batch["document_ids"] = torch.from_numpy(document_ids(tokens, self.documents.eos_id))
        return batch

    # Trainers ask loaders for a state and warn when they have none. The state is the data module's, which
    # keeps what was trained on and not what was handed out, so there is nothing to keep here.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _keep_inherited(worker: int) -> None:
    """Takes what a forked worker inherited out of its garbage collection, for the same reason."""
    gc.freeze()


def _unchanged(piece: dict[str, Any]) -> dict[str, Any]:
    return piece
