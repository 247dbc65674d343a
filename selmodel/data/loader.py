"""Training batches of one device: the same whatever the number of worker processes."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from selmodel.data.documents import Documents
from selmodel.data.packing import document_ids
from selmodel.data.sharing import WAITING_CHARS, ShardGroup
from selmodel.data.stream import Order, Stream, StreamState, assignment
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
        owner = self._owners(workers)
        groups = self._groups(np.flatnonzero(owner == worker))
        streams: dict[int, Stream] = {}
        step = self.step
        skipped = self.documents.skipped
        # Row j of a rank's batch is row rank + j * world_size of the global batch.
        global_rows = np.arange(self.rank, order.batch_size, self.world_size)
        while True:
            touched = (step * order.batch_size + global_rows) % order.streams
            rows = np.flatnonzero(owner[touched] == worker)
            touched = touched[rows].tolist()
            tokens = np.empty((len(rows), order.context_length + 1), dtype=np.int32)
            tokens[:, 0] = self.documents.bos_id
            for row, index in enumerate(touched):
                if index not in streams:
                    state = StreamState(*self.states[index])
                    group = groups.get(index)
                    streams[index] = Stream(self.documents, index, order.streams, order.seed, state, group)
                streams[index].fill(tokens[row, 1:])
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

    def _owners(self, workers: int) -> np.ndarray:
        """The worker that makes each stream, -1 for streams of other ranks: int64 [streams]."""
        streams, shards = np.arange(self.order.streams), len(self.documents.shards("train"))
        turn = streams // self.world_size
        if shards < self.order.streams and shards % (self.world_size * workers) == 0:
            # Streams that share a shard stay together, so that it is unpacked once.
            turn = streams % shards // self.world_size
        return np.where(streams % self.world_size == self.rank, turn % workers, -1)

    def _groups(self, mine: np.ndarray) -> dict[int, ShardGroup]:
        """The group of each stream of this worker, if all that share its shard are here."""
        order, shards = self.order, len(self.documents.shards("train"))

        def share(stream: int, epoch: int) -> tuple[int, int]:
            ((_, first, step),) = assignment(stream, order.streams, shards, order.seed, epoch)
            return first, step

        groups = {}
        for place in range(shards if shards < order.streams else 0):
            members = range(place, order.streams, shards)
            if len(members) > 1 and np.isin(members, mine).all():
                begin = {stream: (int(self.states[stream, 0]), int(self.states[stream, 2])) for stream in members}
                groups.update(dict.fromkeys(members, ShardGroup(begin, share, WAITING_CHARS // shards)))
        return groups


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

    `around_wait` makes the context in which it waits for a batch; a trainer that wants to know sets it.
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
        self.around_wait: Callable[[], AbstractContextManager] = nullcontext
        self.skipped = np.zeros(2, dtype=np.int64)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step, states = self.start()
        pieces = Pieces(self.documents, self.order, self.rank, self.world_size, step, np.array(states))
        if self.workers == 0:
            return self._batches(iter(pieces), step)
        # Loader iterators that are garbage here must not be collected in a forked worker, where they would set about
        # ending workers of this process. So nothing is collected until the worker has set aside what it inherited.
        collecting = gc.isenabled()
        gc.disable()
        others = set(multiprocessing.active_children())
        try:
            source = iter(self._worker_loader(pieces))
        finally:
            if collecting:
                gc.enable()
        _leave_dead_workers_to_the_wait()
        processes = [process for process in multiprocessing.active_children() if process not in others]
        _end_at_exit(processes)
        return self._batches(source, step, processes)

    def _worker_loader(self, pieces: Pieces) -> DataLoader:
        return DataLoader(
            pieces,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            # Arrays travel through the pipe as they are: tensors would need /dev/shm, which containers keep
            # small.
            collate_fn=_unchanged,
            worker_init_fn=_start_worker,
            # The loader draws a seed for its workers; its own generator keeps it from the global one.
            generator=torch.Generator(),
            multiprocessing_context=self.multiprocessing_context,
        )

    def _batches(
        self, source: Iterator[dict[str, Any]], step: int, processes: Sequence[BaseProcess] = ()
    ) -> Iterator[dict[str, Any]]:
        try:
            while True:
                with self.around_wait():
                    pieces = [self._next(source, processes) for _ in range(max(self.workers, 1))]
                    for piece in pieces:
                        if "error" in piece:
                            raise piece["error"]
                for worker, piece in enumerate(pieces):
                    if (piece["step"], piece["worker"]) != (step, worker):
                        raise RuntimeError(
                            f"worker pieces out of turn: expected step {step} of worker {worker}, got step "
                            f"{piece['step']} of worker {piece['worker']}"
                        )
                if self.workers:  # without workers, the count of this process has it
                    self.skipped = sum(piece["skipped"] for piece in pieces)
                yield self._join(pieces)
                step += 1
        finally:
            # Ends the workers now, rather than when the last traceback that holds this frame is gone.
            _wake(processes)
            del source
            _end(processes)

    def _next(self, source: Iterator[dict[str, Any]], processes: Sequence[BaseProcess]) -> dict[str, Any]:
        try:
            return next(source)
        except RuntimeError as error:
            dead = [process for process in processes if process.exitcode not in (None, 0)]
            if not dead:
                raise
            ends = ", ".join(f"process {process.pid} by {_end_of(process.exitcode)}" for process in dead)
            raise UserError(
                f"data: of the data.workers={self.workers} processes that read the data, ended were {ends}. If memory "
                "was short, lower data.workers or data.prefetch; the same command goes on"
            ) from error

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


def _leave_dead_workers_to_the_wait() -> None:
    """Undo PyTorch's handler for the death of a worker, which raises in the middle of whatever is at work then.

    The wait for the next batch notices it too, within seconds, and there the state of training is whole.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _wake(processes: Sequence[BaseProcess]) -> None:
    """Let workers go on that someone has stopped: they would not end when they are asked to."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)


def _end(processes: Sequence[BaseProcess]) -> None:
    """End workers that have not ended by themselves."""
    for process in processes:
        if process.is_alive():
            process.kill()


def _end_at_exit(processes: Sequence[BaseProcess]) -> None:
    """At the exit of this process, before multiprocessing waits for its children, without a limit."""
    atexit.register(_end, processes)


def _end_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


# Asks a worker to print its stack on standard error; None on systems without signals for such uses (macOS).
STACK_SIGNAL = signal.SIGRTMIN + 1 if hasattr(signal, "SIGRTMIN") else None

# What a cluster or a terminal sends to every process of a job to say that it should stop.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _start_worker(worker: int) -> None:
    """Sets up a worker process; `worker` is its number."""
    # What a forked worker inherited stays out of its garbage collection.
    gc.freeze()
    gc.enable()
    # A worker that stopped at such a signal would take the training process down before it has saved its state. So
    # only the training process decides: a worker stops when that says so, or is gone.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else signal.SIG_DFL)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, all_threads=True)
    if not hasattr(signal, "sigwaitinfo"):  # macOS: any SIGTERM ends a worker there
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    """Ends this process at a SIGTERM of its parent, and at no other's."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _unchanged(piece: dict[str, Any]) -> dict[str, Any]:
    return piece
