"""Reading a shard once for all the streams that share it.

With fewer shards than streams, several streams take the rows of one shard in turns. Each could unpack the whole
shard to get at its rows; where one process has all of them, it unpacks the shard once and hands the rows out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

Rows = Iterator[tuple[int, str]]

# Characters of text that may wait in one process for streams that lag behind.
WAITING_CHARS = 1 << 25
# Epochs by which a stream may lag behind while text still waits for it.
EPOCHS_AHEAD = 4


class SharedRows:
    """One pass over a shard for several readers: reader q takes the rows with row % step == q.

    The reader in front moves the pass on; what it meets for the others waits for them. When too much waits, the
    reader furthest behind is sent to read on its own, so memory stays bounded.

    starts: first row of each reader. step: number of shares the rows are dealt into. limit: characters that may wait.
    """

    def __init__(self, starts: Mapping[int, int], step: int, limit: int) -> None:
        self.starts = dict(starts)
        self.step = step
        self.limit = limit
        self._waiting: dict[int, deque[tuple[int, str]]] = {reader: deque() for reader in starts}
        self._chars = dict.fromkeys(starts, 0)
        self._total = 0  # sum of the above
        self._pass: Rows | None = None
        self._fault: Exception | None = None

    def rows(self, reader: int, read: Callable[[int, int], Rows]) -> Rows:
        """(row, text) of one reader; `read(start, step)` opens the shard."""
        if self._pass is None:
            self._pass = read(min(self.starts.values()), 1)
        row = self.starts[reader]
        while True:
            waiting = self._waiting.get(reader)
            if waiting is None:  # sent away
                yield from read(row, self.step)
                return
            if not waiting:
                if self._advance():
                    continue
                return
            found, text = waiting.popleft()
            self._chars[reader] -= len(text)
            self._total -= len(text)
            row = found + self.step
            yield found, text

    def send_away(self, reader: int) -> None:
        """Keeps nothing more for a reader, who will read on its own."""
        self._waiting.pop(reader, None)
        self._total -= self._chars.pop(reader, 0)

    def _advance(self) -> bool:
        """Moves the pass on by a row; False at the end of the shard."""
        if self._fault is not None:
            raise self._fault
        try:
            found = next(self._pass, None)
        except Exception as error:
            self._fault = error  # the pass is over for the other readers too, but not because the shard is
            raise
        if found is None:
            return False
        row, text = found
        reader = row % self.step
        if reader in self._waiting and row >= self.starts[reader]:
            self._waiting[reader].append(found)
            self._chars[reader] += len(text)
            self._total += len(text)
            if self._total > self.limit and len(self._waiting) > 1:
                self.send_away(max(self._chars, key=self._chars.__getitem__))
        return True


class ShardGroup:
    """The streams of one process that share a shard, the same streams in every epoch.

    states: (epoch, row) at which each stream begins. share: gives (first row, step) of a stream in an epoch.
    limit: characters that may wait in each pass.
    """

    def __init__(
        self, states: Mapping[int, tuple[int, int]], share: Callable[[int, int], tuple[int, int]], limit: int
    ) -> None:
        self.states = dict(states)
        self.share = share
        self.limit = limit
        self._passes: dict[int, tuple[SharedRows, dict[int, int]]] = {}  # with the readers that have not asked yet
        self._newest = -1

    def rows_of(self, stream: int, epoch: int) -> SharedRows | None:
        """The pass over the shard of that epoch, or None for a stream to read on its own; asked for once per epoch.

        A stream with a very long document is left behind by others that go through a small corpus again and again:
        nothing waits for it in epochs it is far from.
        """
        if epoch <= self._newest - EPOCHS_AHEAD:
            return None
        if epoch not in self._passes:
            self._passes[epoch] = self._begin(epoch)
            self._newest = max(self._newest, epoch)
            for old in [old for old in self._passes if old <= self._newest - EPOCHS_AHEAD]:
                shared, missing = self._passes.pop(old)
                for reader in missing.values():
                    shared.send_away(reader)
        shared, missing = self._passes[epoch]
        missing.pop(stream, None)
        if not missing:  # those who have it keep it
            del self._passes[epoch]
        return shared

    def _begin(self, epoch: int) -> tuple[SharedRows, dict[int, int]]:
        """A pass over the shard of that epoch, and the reader that each stream will be in it."""
        starts, step, readers = {}, 1, {}
        for stream, (begins, row) in self.states.items():
            if begins <= epoch:
                first, step = self.share(stream, epoch)
                start = first if begins < epoch else row + (first - row) % step
                readers[stream] = start % step
                starts[start % step] = start
        return SharedRows(starts, step, self.limit), readers
