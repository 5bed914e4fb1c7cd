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
"""Longest time that a worker may take for a layout. A worker that takes longer is given up."""

Price = Callable[[Layout], bytes]
Solved = dict[tuple[object, ...], Chosen]
"""Solutions of the integer program, by everything that they depend on (``Ask.known``)."""


def num_workers() -> int:
    """The number of processes that can run beside this one. 0 where processes cannot be forked safely."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return 0
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1)


class PriceWorkers:
    """Forks of this process, which price layouts.

    A fork shares the memory of the model, so that a request is only a layout. The answer is the result of ``price``,
    a text of bytes. A worker answers with no bytes if ``price`` raises an error. The caller then calls ``price`` itself
    and gets the same error, so that results never depend on workers.

    ``price`` plans with ``ask``. Each request and each answer tells the other process the solutions of integer programs
    that it was not told yet, so that few programs are solved in several processes.
    """

    def __init__(self, price: Price, number: int, ask: Ask) -> None:
        self._plans_with = ask
        self._changed = Condition()
        self._wanted: dict[bytes, Layout] = {}
        self._begun: dict[bytes, Future[bytes]] = {}
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

    def want(self, layouts: Sequence[tuple[bytes, Layout]]) -> None:
        """Ask for the prices of these layouts, in this order. They replace layouts that were wanted before and that no
        worker has begun with."""
        with self._changed:
            self._wanted = {key: layout for key, layout in layouts if key not in self._begun}
            self._changed.notify_all()

    @property
    def waiting(self) -> bool:
        """Whether there are layouts that no worker has begun with."""
        return bool(self._wanted)

    def meanwhile(self, key: bytes) -> tuple[bytes, Layout] | None:
        """The next wanted layout, which then the caller has to price; None if no worker is still busy with the layout
        of ``key``, or if no other layout is wanted."""
        with self._changed:
            begun = self._begun.get(key)
            if begun is None or begun.done() or not self._wanted:
                return None
            other = next(iter(self._wanted))
            return other, self._wanted.pop(other)

    def take(self, key: bytes) -> bytes:
        """The answer of a worker that has begun with a layout. No bytes if no worker has begun, or it has failed."""
        with self._changed:
            self._wanted.pop(key, None)
            begun = self._begun.pop(key, None)
        return begun.result() if begun is not None else b""

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
            process.join()

    def _ask(self, worker: Connection) -> None:
        """The thread of a worker: sends wanted layouts, and waits for answers."""
        told = set(self._plans_with.known)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or not self._open)
                if not self._open:
                    worker.close()
                    return
                key = next(iter(self._wanted))
                layout = self._wanted.pop(key)
                answer = self._begun[key] = Future()
            found, lost = b"", True
            with suppress(OSError, EOFError):
                worker.send((layout, _news(self._plans_with, told)))
                if worker.poll(LONGEST_S):
                    (found, news), lost = worker.recv(), False
                    _learn(news, self._plans_with, told)
            answer.set_result(found)
            if lost:
                return


def _news(ask: Ask, told: set[tuple[object, ...]]) -> Solved:
    """The solutions that the other process was not told yet, without their problems."""
    news = {key: chosen.alone() for key, chosen in list((ask.learned | ask.known).items()) if key not in told}
    told.update(news)
    return news


def _learn(news: Solved, ask: Ask, told: set[tuple[object, ...]]) -> None:
    """Add the solutions of the other process."""
    told.update(news)
    ask.learned.update(news)


def _serve(price: Price, requests: Connection, others: Sequence[Connection], ask: Ask) -> None:
    """Price layouts until the other end of the connection is closed."""
    for connection in others:  # or this process would keep the connections of its siblings open
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, which then ends its workers
    gc.freeze()
    gc.enable()
    layout: Layout
    told = set(ask.known)
    while True:
        try:
            layout, news = requests.recv()
        except (EOFError, OSError):
            return
        _learn(news, ask, told)
        try:
            found = price(layout)
        except Exception:  # noqa: BLE001 - the caller meets the same error
            found = b""
        requests.send((found, _news(ask, told)))
