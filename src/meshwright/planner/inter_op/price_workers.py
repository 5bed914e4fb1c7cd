"""Processes that price layouts before the search asks for them."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Condition, Thread

from meshwright.ir.layout import Layout
from meshwright.planner.explicit import Ask
from meshwright.planner.intra_op.assign import Chosen

MOST_WORKERS = 8
"""Largest number of processes that price layouts."""
LONGEST_S = 60.0
"""The longest time that a worker may take for a layout, in seconds. A worker that takes longer is stopped."""

Group = list[tuple[bytes, Layout]]
"""Layouts that are priced together, because they differ in recomputation only, each with its key."""
Price = Callable[[Sequence[Layout]], list[bytes]]
Solved = dict[tuple[object, ...], Chosen]
"""Maps all data that a solution of the integer program depends on to the solution (``Ask.known``)."""


def num_workers() -> int:
    """The number of processes that can run in addition to this process. 0 if processes cannot be forked safely."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return 0
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1)


class PriceWorkers:
    """Forked copies of this process, which price layouts.

    A fork shares the memory of the model, so a request consists only of a group of layouts. The answer has the bytes
    that ``price`` returns for each layout. If ``price`` raises an error, the answer is empty. The caller then calls
    ``price`` itself and gets the same error, so that results never depend on workers.

    ``price`` plans with ``ask``. With each request and answer, the processes exchange solutions of integer programs
    that are new to the other, so that few programs are solved twice.
    """

    def __init__(self, price: Price, number: int, ask: Ask) -> None:
        self._plans_with = ask
        self._changed = Condition()
        self._wanted: dict[bytes, Group] = {}  # each group under the keys of all its layouts
        self._begun: dict[bytes, Future[dict[bytes, bytes]]] = {}
        self._open = True
        context, others = multiprocessing.get_context("fork"), []
        self._processes = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            others.append(ours)
            process = context.Process(target=_serve, args=(price, theirs, tuple(others), ask), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
        for connection in others:  # no threads run while processes are forked
            Thread(target=self._ask, args=(connection,), daemon=True).start()

    def want(self, groups: Sequence[Group]) -> None:
        """Request the prices of these layouts, in this order. They replace earlier requests that no worker has started
        yet."""
        with self._changed:
            rest = [[(key, layout) for key, layout in group if key not in self._begun] for group in groups]
            self._wanted = {key: group for group in rest for key, _ in group}
            self._changed.notify_all()

    def claim(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of the layouts that no worker has started. After this call, no worker will start them."""
        with self._changed:
            for key in keys:
                self._drop(key)
            return [key for key in keys if key not in self._begun]

    @property
    def waiting(self) -> bool:
        """Whether there are layouts that no worker has started."""
        return bool(self._wanted)

    def meanwhile(self, key: bytes) -> Group | None:
        """The next requested layouts, which the caller must now price itself. None if no worker is busy with the layout
        of ``key``, or if there are no other requests."""
        with self._changed:
            begun = self._begun.get(key)
            if begun is None or begun.done() or not self._wanted:
                return None
            return self._drop(next(iter(self._wanted)))

    def take(self, key: bytes) -> bytes:
        """The answer of the worker that has started a layout. Empty if no worker has started it, or the worker has
        failed."""
        with self._changed:
            self._drop(key)
            begun = self._begun.pop(key, None)
        return begun.result().get(key, b"") if begun is not None else b""

    def _drop(self, key: bytes) -> Group:
        """Remove the group of a key from the requested groups, and return it."""
        group = self._wanted.get(key, [])
        for member, _ in group:
            del self._wanted[member]
        return group

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
            process.join()

    def _ask(self, worker: Connection) -> None:
        """The thread for a worker: it sends requested layouts and waits for answers."""
        told = set(self._plans_with.known)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or not self._open)
                if not self._open:
                    worker.close()
                    return
                group, answer = self._drop(next(iter(self._wanted))), Future[dict[bytes, bytes]]()
                self._begun |= dict.fromkeys((key for key, _ in group), answer)
            found, lost = list[bytes](), True
            with suppress(OSError, EOFError):
                worker.send(([layout for _, layout in group], _news(self._plans_with, told)))
                if worker.poll(LONGEST_S):
                    (found, news), lost = worker.recv(), False
                    _learn(news, self._plans_with, told)
            answer.set_result(dict(zip((key for key, _ in group), found, strict=False)))
            if lost:
                return


def _news(ask: Ask, told: set[tuple[object, ...]]) -> Solved:
    """The solutions that are new to the other process, without their problems."""
    news = {key: chosen.alone() for key, chosen in list((ask.learned | ask.known).items()) if key not in told}
    told.update(news)
    return news


def _learn(news: Solved, ask: Ask, told: set[tuple[object, ...]]) -> None:
    """Add the solutions that the other process sent."""
    told.update(news)
    ask.learned.update(news)


def _serve(price: Price, requests: Connection, others: Sequence[Connection], ask: Ask) -> None:
    """Price layouts until the other end of the connection is closed."""
    for connection in others:  # otherwise this process would keep the connections of its siblings open
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the caller, which then ends its workers
    gc.freeze()
    gc.enable()
    layouts: list[Layout]
    told = set(ask.known)
    while True:
        try:
            layouts, news = requests.recv()
        except (EOFError, OSError):
            return
        _learn(news, ask, told)
        try:
            found = price(layouts)
        except Exception:  # noqa: BLE001 - the caller meets the same error
            found = []
        requests.send((found, _news(ask, told)))
