"""The engine that keeps everything of a rank moving while the rank waits for anything: streams, and the collectives of
all groups.

Without this module, ranks could wait for each other in a circle:

    rank 0 waits for rank 2 ──▶ rank 2 waits for rank 1 ──▶ rank 1 waits for rank 0

Rank 0's message to rank 1 waits in a queue until the stream 0 ─▶ 1 has room. If every rank moved only what it waits
for, all three ranks would wait for ever. The same holds for messages that have come and are not taken, and for
collectives that have been started and wait for their next message.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from meshwright.comm.transport.flight_recorder import FlightRecorder
from meshwright.errors import LostRankError, MeshwrightError, RankError

T = TypeVar("T")

SOON_S, LATER_S = 0.0005, 0.005
"""Seconds until everything is moved again: after something has moved, and while something waits for other ranks."""
QUIET_S = 3600.0
"""Seconds until the next move if nothing is under way."""


class Movable(Protocol):
    """A stream, or the collectives of a group."""

    def move(self) -> bool:
        """Put and take what is possible without waiting. Returns whether anything was moved."""
        ...

    @property
    def is_under_way(self) -> bool:
        """Whether messages wait for room, or are expected."""
        ...


class RankStreams:
    """The streams and collectives of one rank.

    A lane of shared memory calls ``move`` before it sleeps. Calls of torch.distributed or MPI sleep outside Python.
    During such a call, ``moving`` moves everything in a thread while anything is under way.

    ``recorder`` records the operations of this rank; None: nothing is recorded. ``sources`` maps the labels of
    operators to their source lines. ``verdict`` is an error that ends all waits of this rank, because they would never
    end. ``explain`` returns the lines of a report about this rank's wait.
    """

    def __init__(self) -> None:
        self.recorder: FlightRecorder | None = None
        self.sources: dict[str, str] = {}
        self.verdict: RankError | None = None
        self.explain: Callable[[], tuple[str, ...]] | None = None
        self._all: list[weakref.ref[Movable]] = []
        self._moves = threading.Lock()
        self._mover: threading.Thread | None = None

    def add(self, movable: Movable) -> None:
        """Move ``movable``, too, as long as it exists."""
        self._all = [each for each in self._all if each() is not None] + [weakref.ref(movable)]

    def move(self) -> float:
        """Put and take what is possible now, unless another thread does so already. Returns the seconds after which to
        move again.

        Raises:
            RankError: the ranks wait for each other in vain.
        """
        if self.verdict is not None:
            raise self.verdict
        if not self._moves.acquire(blocking=False):
            return LATER_S
        moved = under_way = False
        try:
            for each in self._all:
                if (movable := each()) is not None:
                    moved |= movable.move()
                    under_way |= movable.is_under_way
        finally:
            self._moves.release()
        return SOON_S if moved else LATER_S if under_way else QUIET_S

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Keep everything moving within this context."""
        if self._mover is not None or not any(
            (each := reference()) is not None and each.is_under_way for reference in self._all
        ):
            yield
            return
        over = threading.Event()
        self._mover = threading.Thread(target=self._move_until, args=(over,), name="moves streams", daemon=True)
        self._mover.start()
        try:
            yield
        finally:
            over.set()
            self._mover.join()
            self._mover = None

    def during(self, call: Callable[[], T]) -> T:
        """Run ``call`` and return its result. Keep everything moving meanwhile."""
        with self.moving():
            return call()

    def _move_until(self, over: threading.Event) -> None:
        try:
            while not over.wait(min(self.move(), LATER_S)):
                pass
        except MeshwrightError:
            return  # the message stays in its lane; the wait for it raises the error

    # --- what is recorded --------------------------------------------------------------------------------------------

    def explained(self, error: LostRankError) -> RankError:
        """The verdict, if there is one; else the error, extended by a report of all ranks."""
        if self.verdict is not None:
            return self.verdict
        lines = self.explain() if self.explain is not None else ()
        if not lines:
            return error
        return type(error)("\n     ".join((error.problem, *lines)), where=error.where, remedy=error.remedy)
