"""Simulates how samples are fetched ahead of training steps, and how long each step waits for its samples."""

import heapq
import itertools
import math
from collections.abc import Sequence

import msgspec

from meshwright.schedules.samples import FILES, OWN_DISK, PEER


class FeedRates(msgspec.Struct, frozen=True, kw_only=True):
    """How fast samples come.

    ``file_bytes_per_s`` is the rate of the file system for all ranks together; ``file_s`` is the latency of a read,
    which reads share no part of. ``disk_bytes_per_s`` and ``peer_bytes_per_s`` are the rates of a thread from the local
    disk and from another rank. ``prepare_s`` is the time in which a thread decodes a sample."""

    file_bytes_per_s: float
    file_s: float = 0.0
    disk_bytes_per_s: float = math.inf
    peer_bytes_per_s: float = math.inf
    prepare_s: float = 0.0


class Fetches(msgspec.Struct, frozen=True, kw_only=True):
    """The fetches of a rank in the order of use: bytes and class of each sample (``schedules.samples.CLASSES``), and
    the number of samples in each batch."""

    sizes: Sequence[int]
    classes: Sequence[int]
    batches: Sequence[int]


class FeedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that each rank waits for the data of each step [rank][step], the end of the last step, and the largest
    number of bytes that a rank has staged."""

    waits: list[list[float]]
    end_s: float
    staged_bytes: int

    @property
    def waited_s(self) -> float:
        """Seconds that a rank waits for data, over all steps: the mean over ranks."""
        return sum(map(sum, self.waits)) / max(1, len(self.waits))

    @property
    def slowest_waits(self) -> list[float]:
        """For each step, the seconds of the rank that waits longest."""
        return [max(waits) for waits in zip(*self.waits, strict=True)]


def simulate_feed(
    ranks: Sequence[Fetches], step_s: float, rates: FeedRates, *, threads: int, staging_bytes: float = math.inf
) -> FeedTimes:
    """Simulate ranks that train in step with each other.

    Threads of each rank fetch in the order of use, while samples that are staged fit ``staging_bytes``. One batch is
    assembled ahead, and leaves staging then. Reads of the file system share its rate one after the other. A step begins
    when every rank has its batch, and takes ``step_s``.

    Raises:
        ValueError: the ranks have different numbers of batches.
    """
    if len({len(rank.batches) for rank in ranks}) > 1:
        raise ValueError("ranks in step with each other have equal numbers of batches")
    return _Feed(ranks, step_s, rates, threads, staging_bytes).play()


class _Rank:
    """The threads and the staging memory of a rank over time."""

    def __init__(self, fetches: Fetches, threads: int, staging_bytes: float) -> None:
        self.fetches, self._limit = fetches, staging_bytes
        self.free = [0.0] * threads
        self.next = 0
        self.released: list[float] = []
        self.ready: list[float] = []
        self.held = self.most_held = 0
        self._ends = list(itertools.accumulate(fetches.batches))
        self._freed = 0
        self._room_s = self._last_s = 0.0

    @property
    def batch(self) -> int:
        """The batch of the next sample."""
        return len(self.ready)

    def start(self) -> float | None:
        """When the next fetch can start; None if no sample is left, or if it depends on a step that is not played."""
        sizes = self.fetches.sizes
        if self.next == len(sizes):
            return None
        while self.held + sizes[self.next] > self._limit and self._freed < self.batch:
            if self._freed == len(self.released):
                return None
            begin = self._ends[self._freed - 1] if self._freed else 0
            self.held -= sum(sizes[begin : self._ends[self._freed]])
            self._room_s = max(self._room_s, self.released[self._freed])
            self._freed += 1
        return max(self.free[0], self._room_s)

    def fetched(self, done_s: float) -> bool:
        """The next sample has come; whether its batch is complete."""
        heapq.heapreplace(self.free, done_s)
        self.held += self.fetches.sizes[self.next]
        self.most_held = max(self.most_held, self.held)
        self._last_s = max(self._last_s, done_s)
        self.next += 1
        if self.next < self._ends[self.batch]:
            return False
        self.ready.append(self._last_s)
        return True


class _Feed:
    def __init__(
        self, ranks: Sequence[Fetches], step_s: float, rates: FeedRates, threads: int, staging_bytes: float
    ) -> None:
        self._ranks = [_Rank(fetches, threads, staging_bytes) for fetches in ranks]
        self._step_s, self._rates = step_s, rates
        self._files_s = 0.0
        self._begun: list[float] = []
        self._waits: list[list[float]] = [[] for _ in ranks]

    def play(self) -> FeedTimes:
        while True:
            starts = [(start, place) for place, rank in enumerate(self._ranks) if (start := rank.start()) is not None]
            if not starts:
                break
            start, place = min(starts)
            rank = self._ranks[place]
            if rank.fetched(self._done(rank, start)):
                self._release(rank)
                self._step()
        end_s = self._begun[-1] + self._step_s if self._begun else 0.0
        return FeedTimes(waits=self._waits, end_s=end_s, staged_bytes=max(rank.most_held for rank in self._ranks))

    def _done(self, rank: _Rank, start: float) -> float:
        """When a fetch that starts now is done, decoding included."""
        rates, size, kind = self._rates, rank.fetches.sizes[rank.next], rank.fetches.classes[rank.next]
        if kind == FILES:
            self._files_s = max(start, self._files_s) + size / rates.file_bytes_per_s
            start = self._files_s + rates.file_s
        elif kind == PEER:
            start += size / rates.peer_bytes_per_s
        elif kind == OWN_DISK:
            start += size / rates.disk_bytes_per_s
        return start + rates.prepare_s

    def _release(self, rank: _Rank) -> None:
        """Assemble batches, each when its samples are there and the batch before it was taken."""
        while (number := len(rank.released)) < len(rank.ready) and number <= len(self._begun):
            taken_s = self._begun[number - 1] if number else 0.0
            rank.released.append(max(rank.ready[number], taken_s))

    def _step(self) -> None:
        """Play the steps for which all ranks have their batches."""
        while all(len(rank.released) > len(self._begun) for rank in self._ranks):
            number = len(self._begun)
            idle_s = self._begun[-1] + self._step_s if self._begun else 0.0
            for rank, waits in zip(self._ranks, self._waits, strict=True):
                waits.append(max(0.0, rank.released[number] - idle_s))
            self._begun.append(max(idle_s, *(rank.released[number] for rank in self._ranks)))
            for rank in self._ranks:
                self._release(rank)
