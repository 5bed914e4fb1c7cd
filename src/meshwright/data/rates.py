"""Rates of work that several threads do at once."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Rate:
    """An amount of work and the time in which at least one thread was at it; ``each_s`` is the mean time of a piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = self._pieces = self.amount = 0
        self._since = self.busy_s = self._sum_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """A piece of work is done inside the ``with`` block."""
        begun = time.perf_counter()
        with self._lock:
            if self._running == 0:
                self._since = begun
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                now = time.perf_counter()
                self._running -= 1
                self._pieces += 1
                self._sum_s += now - begun
                if self._running == 0:
                    self.busy_s += now - self._since

    def count(self, amount: int) -> None:
        """Add to the amount of work that was done."""
        with self._lock:
            self.amount += amount

    @property
    def per_s(self) -> float:
        """The amount per second; 0 before any work."""
        return self.amount / self.busy_s if self.busy_s else 0.0

    @property
    def each_s(self) -> float:
        """The mean seconds of a piece of work; 0 before any."""
        return self._sum_s / self._pieces if self._pieces else 0.0
