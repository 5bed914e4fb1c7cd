"""Keeps all streams (queues of messages to and from another rank) moving while the rank waits for anything.

Without this module, ranks could wait for each other in a circle:

    rank 0 waits for rank 2 ──▶ rank 2 waits for rank 1 ──▶ rank 1 waits for rank 0

Rank 0's message to rank 1 waits in a queue until the stream 0 ─▶ 1 has room. If every rank moved only the stream that
it waits for, all three ranks would wait for ever.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import MeshwrightError

T = TypeVar("T")

POLL_S = 0.0005
"""Seconds between two moves of the streams while a call of torch.distributed or MPI waits."""


class RankStreams:
    """The streams of one rank. Each entry of ``streams`` is a function that puts and takes messages without waiting,
    and returns whether it has more to do soon. ``blocked`` holds the streams whose messages wait for room.

    A lane calls ``move`` before it sleeps. Calls of torch.distributed or MPI sleep outside Python. During such a call,
    ``during`` moves the streams in a thread while a message waits for room.
    """

    def __init__(self) -> None:
        self.streams: list[Callable[[], bool]] = []
        self.blocked: set[object] = set()
        self._moves = threading.Lock()
        self._mover: threading.Thread | None = None

    def move(self) -> bool:
        """Send and receive what is possible now on every stream, unless another thread does so already. Return whether
        a stream has more to do soon."""
        more = False
        if self._moves.acquire(blocking=False):
            try:
                for move in self.streams:
                    more |= move()
            finally:
                self._moves.release()
        return more

    def during(self, call: Callable[[], T]) -> T:
        """Run ``call`` and return its result. Keep the streams moving meanwhile. ``call`` must not use a stream
        itself."""
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
            return  # the message stays in its lane; the wait for it raises the error
