"""Runs the collectives of a group one after the other, in the order in which the program starts them.

A thread that waits for a collective runs it itself, after the collectives before it: nothing is handed to another
thread, which would take longer than a short collective. A collective that is started without a wait is run by the
group's worker thread, unless a thread that waits is faster. So collectives complete while a program computes.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.process_group.links import GroupConnections
from meshwright.comm.process_group.work import GroupError, GroupWork
from meshwright.comm.transport.progress import RankStreams
from meshwright.errors import LostRankError


class InOrder:
    """The collectives of one group. Threads may share it; all ranks must start collectives in the same order."""

    def __init__(self, links: GroupConnections, name: str) -> None:
        self.links, self.name = links, name
        self._process = os.getpid()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._works: deque[CollectiveWork] = deque()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False

    def check(self, what: str) -> None:
        """Raise an error if this process may not use the group.

        Raises:
            GroupError: the group has been destroyed, or belongs to the process of which this is a fork.
        """
        if self._closed:
            raise GroupError(f"{what} after the group was destroyed", where=self.name, remedy="make a new group")
        if os.getpid() != self._process:
            raise GroupError(
                f"{what} in process {os.getpid()}, a fork of process {self._process}, which made the group",
                where=self.name,
                remedy="start processes by spawn, and make the group in each of them",
            )

    def start(self, work: "CollectiveWork", *, handed_over: bool) -> None:
        """Start a collective. ``handed_over``: the program goes on before the collective is complete."""
        self.check(work.what)
        self._works.append(work)
        if handed_over:
            self.hand_over()

    def hand_over(self) -> None:
        """Let the worker thread run what has been started."""
        with self._lock:
            if self._worker is None:
                run = threading.Thread(target=self._run_worker, name=f"collectives of {self.name}", daemon=True)
                self._worker = run
                run.start()
        self._tokens.put(True)

    def run_until(self, work: "CollectiveWork") -> None:
        """Return when ``work`` is complete; run it, and the collectives before it, unless another thread does."""
        while not work.done:
            self._run_first(unless=work)

    def close(self) -> None:
        """Run what has been started, then refuse all further collectives."""
        if os.getpid() == self._process:
            while self._run_first():
                pass
        self._closed = True
        self._tokens.put(False)

    def abort(self) -> None:
        """Let all that has been started fail, and refuse all further collectives."""
        self._closed = True
        self._tokens.put(False)
        self.links.abort()
        while self._run_first():
            pass

    def _run_first(self, unless: "CollectiveWork | None" = None) -> bool:
        """Run the collective that was started first; not if ``unless`` is complete. False: there was none to run."""
        first = None
        try:
            with self._turn:
                if (unless is not None and unless.done) or not self._works:
                    return False
                first = self._works.popleft()
                first.run(self.links)
        finally:  # also if a signal interrupts the collective
            if first is not None:
                first.announce()
        return True

    def _run_worker(self) -> None:
        while self._tokens.get():
            while self._run_first():
                pass


class CollectiveWork(GroupWork):
    """A collective that has been started. ``steps`` runs it: it gets the group's connections."""

    def __init__(
        self, what: str, steps: Callable[[GroupConnections], object], value: Any, in_order: InOrder, timeout_s: float
    ) -> None:
        super().__init__(what, value)
        self._steps: Callable[[GroupConnections], object] | None = steps
        self.record: tuple[RankStreams, int] | None = None  # where it is recorded, and the number of the event
        self._in_order, self._timeout_s = in_order, timeout_s

    def run(self, links: GroupConnections) -> None:
        """Run the collective, and mark it."""
        steps, self._steps = self._steps, None
        assert steps is not None, "a collective runs once"
        failure: BaseException | None = GroupError("it was interrupted", where=self.what)
        streams, event = self.record or (None, 0)
        recorder = streams.recorder if streams is not None else None
        if recorder is not None:
            recorder.wait(event)
        try:
            links.set_timeout(self._timeout_s)
            with torch.inference_mode():  # else tensors made in inference mode could not be written
                steps(links)
            failure = None
        except Exception as error:  # noqa: BLE001 - whoever waits for the collective raises it
            failure = error
            if streams is not None and isinstance(error, LostRankError):
                failure = streams.explained(error)
        finally:
            if recorder is not None:
                (recorder.end if failure is None else recorder.fail)(event)
            self.mark(failure)

    def _run(self) -> None:
        self._in_order.run_until(self)

    def _hand_over(self) -> None:
        self._in_order.hand_over()
