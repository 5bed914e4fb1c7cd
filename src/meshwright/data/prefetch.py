"""Fetches samples ahead, in the order of use, with threads and a bound on the bytes that wait.

accesses ──threads: fetch and decode──▶ staging (bounded) ──one thread: collate, pin──▶ one batch ──▶ take
"""

import atexit
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.schedules.samples import Indices

MANY = 2**62
"""More samples than can be missing."""


class Ahead(NamedTuple):
    """A batch that was assembled ahead: its samples by number, and its values, or the error that replaces it."""

    samples: Indices
    batch: Any
    error: Exception | None = None


class Prefetcher:
    """Fetches the samples of batches ahead.

    A thread takes the next sample in the order of use, when staging has room for one more of the largest size seen so
    far; the samples of the batch that is assembled next always have room. A batch leaves staging when it is assembled.
    One assembled batch waits.

    Args:
        batches: the samples of each batch, in order.
        fetch: returns a sample and its size in bytes; may raise.
        assemble: makes a batch of samples and errors.
        threads: the number of threads that fetch.
        staging_bytes: upper limit on the bytes of samples that wait.
        slot_bytes: the size of a sample, until a larger one is seen.
    """

    def __init__(
        self,
        batches: Iterator[Indices],
        fetch: Callable[[int], tuple[Any, int]],
        assemble: Callable[[Indices, list[Any]], Any],
        threads: int,
        staging_bytes: int,
        slot_bytes: int,
    ) -> None:
        self._batches, self._fetch, self._assemble = batches, fetch, assemble
        self._limit = staging_bytes
        lock = threading.Lock()
        self._room, self._arrival = threading.Condition(lock), threading.Condition(lock)
        self._planned: list[Indices] = []
        self._done: dict[int, tuple[Any, int]] = {}
        self._next = self._first = self._within = self._urgent = self._missing = 0
        self._held = self.most_held = 0
        self._slot = slot_bytes
        self._exhausted = self._closed = False
        self._ready: queue.Queue[Ahead | None] = queue.Queue(maxsize=1)
        self._head: Ahead | None = None
        work = [self._work] * threads + [self._collate]
        self._threads = started_alone(work)
        atexit.register(self.close)  # a thread that runs an operator while Python ends would abort the process

    def peek(self) -> Ahead | None:
        """The next batch, which stays; None after the last. Waits until it is assembled."""
        if self._head is None:
            self._head = self._ready.get()
        return self._head

    def pop(self) -> None:
        """Drop the batch that ``peek`` returned."""
        self._head = None

    def close(self) -> None:
        """Stop all threads. A fetch under way ends first."""
        atexit.unregister(self.close)
        with self._room:
            self._closed = True
            self._room.notify_all()
            self._arrival.notify_all()
        while any(thread.is_alive() for thread in self._threads):
            with suppress(queue.Empty):
                self._ready.get(timeout=0.01)  # the thread that assembles may wait for room there
        self._done.clear()

    # --- the threads that fetch --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            number, sample, reserved = taken
            try:
                value, size = self._fetch(sample)
            except Exception as error:  # noqa: BLE001 - the loop that needs the sample raises it
                value, size = error, 0
            with self._room:
                self._held += size - reserved
                self._slot = max(self._slot, size)
                self.most_held = max(self.most_held, self._held)
                self._done[number] = value, size
                if size < reserved:
                    self._room.notify_all()
                if self._first <= number < self._urgent:
                    self._missing -= 1
                    if self._missing == 0:
                        self._arrival.notify()

    def _take(self) -> tuple[int, int, int] | None:
        """The next sample in the order of use, with its place and the bytes reserved for it; None at the end."""
        with self._room:
            while not self._closed and not self._has_room():
                self._room.wait()
            if self._closed:
                return None
            while not self._exhausted and (not self._planned or self._within == len(self._planned[-1])):
                batch = next(self._batches, None)
                self._exhausted = batch is None
                if batch is not None:
                    self._planned.append(batch)
                    self._within = 0
                self._arrival.notify()
            if self._exhausted:
                return None
            sample = int(self._planned[-1][self._within])
            self._within += 1
            number, self._next = self._next, self._next + 1
            self._held += self._slot
            self.most_held = max(self.most_held, self._held)
            return number, sample, self._slot

    def _has_room(self) -> bool:
        return self._next < self._urgent or self._held + self._slot <= self._limit

    # --- the thread that assembles -----------------------------------------------------------------------------------

    def _collate(self) -> None:
        while not self._closed:
            index = self._next_planned()
            if index is None:
                break
            values = self._wait_for(len(index))
            if values is None:
                break
            try:
                ahead = Ahead(index, self._assemble(index, values))
            except Exception as error:  # noqa: BLE001 - the loop that needs the batch raises it
                ahead = Ahead(index, None, error)
            del values
            self._release(len(index))
            self._ready.put(ahead)
        if not self._closed:
            self._ready.put(None)

    def _next_planned(self) -> Indices | None:
        with self._room:
            if not self._planned:  # a thread plans the next batch when it may take a sample
                self._urgent, self._missing = self._first + 1, MANY
                self._room.notify_all()
            while not self._planned and not self._exhausted and not self._closed:
                self._arrival.wait()
            if not self._planned or self._closed:
                return None
            index = self._planned[0]
            self._urgent = self._first + len(index)
            self._missing = sum(number not in self._done for number in range(self._first, self._urgent))
            self._room.notify_all()
            return index

    def _wait_for(self, count: int) -> list[Any] | None:
        with self._arrival:
            while self._missing and not self._closed:
                self._arrival.wait()
            numbers = range(self._first, self._first + count)
            return None if self._closed else [self._done[number][0] for number in numbers]

    def _release(self, count: int) -> None:
        with self._room:
            for number in range(self._first, self._first + count):
                self._held -= self._done.pop(number)[1]
            self._first += count
            if len(self._planned) > 1:
                del self._planned[0]
            else:  # the batch in which samples are taken now: it is complete
                self._planned, self._within = [], 0
            self._room.notify_all()


def started_alone(work: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """Start threads in which an operator of torch uses one core. Else each of them would have helpers of its own, which
    wait for each other and for the training step. Other threads keep their number."""
    number = torch.get_num_threads()
    begin = threading.Barrier(len(work) + 1)

    def run(each: Callable[[], None]) -> None:
        torch.get_num_threads()  # a thread takes the number of the process at its first use of torch: now, not later
        torch.set_num_threads(1)
        begin.wait()
        each()

    threads = [threading.Thread(target=run, args=(each,), name="prefetch", daemon=True) for each in work]
    for thread in threads:
        thread.start()
    begin.wait()
    torch.set_num_threads(number)
    return threads


def num_bytes(value: Any) -> int:
    """The bytes of the tensors, arrays and texts in a sample."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return len(value) if isinstance(value, str | bytes | bytearray) else 8


def pinned(value: Any) -> Any:
    """The value with its tensors in pinned memory, from which a GPU copies without waiting."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {key: pinned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(pinned, value))
    return value
