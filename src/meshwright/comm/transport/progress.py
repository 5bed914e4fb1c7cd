"""Keeps the streams of a rank moving while it waits, whatever it waits for.

rank 0 waits for rank 2 ──▶ rank 2 waits for rank 1 ──▶ rank 1 waits for rank 0,
whose message stands in the queue of the stream 0 ─▶ 1 until there is room: a rank that moved
only the stream that it waits for would keep all three waiting for ever.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import MeshwrightError

T = TypeVar("T")

POLL_S = 0.0005
"""How often streams are moved beside a call of torch.distributed or MPI."""


class Progress:
    """The streams of one rank: of each, what puts and takes as much as can be without waiting, and says whether more is
    to be done soon. ``blocked`` are those whose messages wait for room.

    A lane calls ``move`` before it sleeps. Other calls sleep where Python does not run: ``during`` moves the streams
    beside them, in a thread that lives as long as the call, and only where a message waits for room.
    """

    def __init__(self) -> None:
        self.streams: list[Callable[[], bool]] = []
        self.blocked: set[object] = set()
        self._moves = threading.Lock()
        self._mover: threading.Thread | None = None

    def move(self) -> bool:
        """Move every stream, unless another thread does so now; whether to do it again soon."""
        more = False
        if self._moves.acquire(blocking=False):
            try:
                for move in self.streams:
                    more |= move()
            finally:
                self._moves.release()
        return more

    def during(self, call: Callable[[], T]) -> T:
        """What the call returns, which sends and receives through no stream."""
        if not self.blocked or self._mover is not None:
            return call()
        over = threading.Event()
        self._mover = threading.Thread(target=self._move_until, args=(over,), name="moves streams", daemon=True)
        self._mover.start()
        try:
            return call()
        finally:
            over.set()
            self._mover.join()
            self._mover = None

    def _move_until(self, over: threading.Event) -> None:
        try:
            while self.blocked and not over.wait(POLL_S):
                self.move()
        except MeshwrightError:
            return  # the message stays in its lane, and whoever waits for it meets the error
