"""Waiting for the message that arrives first."""

import threading
import time
from collections.abc import Callable, Sequence

from meshwright.comm.transport.base import Arrival

LOOKS = 100
"""The number of times that a rank checks for messages without a pause, before it sleeps between two checks."""
POLL_S = 0.0002
"""Seconds between two checks."""
CHECK_S = 0.5
"""Seconds between two checks that the senders are still alive."""


class Watched:
    """A work that cannot report whether it is complete. At the first request, a thread starts to wait for it."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._error: RuntimeError | None = None
        self._thread: threading.Thread | None = None

    def has_come(self) -> bool:
        """Whether the work is complete, or has failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="waits for a message", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the work, and raise its error if it failed."""
        if self._thread is None:
            self._wait()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._wait()
        except RuntimeError as error:
            self._error = error


def wait_for_any(groups: Sequence[Sequence[Arrival]]) -> None:
    """Wait until all messages of any one of the groups have arrived.

    Raises:
        LostRankError: a sender has ended, or has sent nothing within the timeout.
    """
    begun, looks = time.monotonic(), 0
    due_s = CHECK_S
    awaited: list[Arrival] = []
    while not any(all(arrival.has_come() for arrival in group) for group in groups):
        looks += 1
        if looks <= LOOKS:
            continue
        if not awaited:
            awaited = [arrival for group in groups for arrival in group if not arrival.has_come()]
            for arrival in awaited:
                arrival.awaited(True)
        time.sleep(POLL_S)
        if (waited_s := time.monotonic() - begun) > due_s:
            due_s = waited_s + CHECK_S
            for arrival in [arrival for group in groups for arrival in group if not arrival.has_come()]:
                arrival.check(waited_s)
    for arrival in awaited:
        arrival.awaited(False)
