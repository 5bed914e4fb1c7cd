"""Flight recorders of ranks in other boxes, through the store. As long as nobody asks, nothing is sent.

    asks       round 0 ──▶ the store           a rank that waits asks all others, once a second
    answers    each rank, whose thread waits at the store for the next round, posts what its recorder holds

A rank that does not answer gives no sign of life: it is stopped, its host is gone, or nothing reaches it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from meshwright.ir.flight import Flight, Notes, Seen
from meshwright.ir.hang import STALE_S

EVERY_S, LOOK_S = 1.0, 0.05
"""Seconds between two rounds, and between two looks for answers."""
EVENTS = 32
"""The newest events that an answer holds."""
_FOREVER = timedelta(days=10000)


class FarFlights:
    """What ranks in other boxes answer. ``store`` and ``waiting`` are connections that nobody else uses; ``read``
    returns this rank's own record. The threads end with the program, or when the store is gone."""

    def __init__(
        self, store: Any, waiting: Any, rank: int, read: Callable[[], Flight], notes: Callable[[], Notes]
    ) -> None:
        self._store, self._waiting, self._rank, self._read, self._notes = store, waiting, rank, read, notes
        self._round = 0
        self._wanted = threading.Event()
        self._ranks: tuple[int, ...] = ()
        self._answers: dict[int, tuple[float, Seen]] = {}
        self._asked_s = 0.0
        for run in (self._answer, self._ask):
            threading.Thread(target=run, name=f"flights: {run.__name__}", daemon=True).start()

    def want(self, ranks: tuple[int, ...]) -> None:
        """Ask these ranks, in the background."""
        self._ranks = ranks
        self._wanted.set()

    def seen(self) -> dict[int, Seen]:
        """What is known of the ranks that were asked. Ranks that have not answered lately are silent."""
        now_s = time.monotonic()
        by_rank = {}
        for rank in self._ranks:
            at_s, seen = self._answers.get(rank, (0.0, Seen(None, "unknown")))
            if self._asked_s and now_s - max(at_s, self._asked_s) > STALE_S:
                seen = Seen(seen.flight, "silent")
            by_rank[rank] = seen
        return by_rank

    def _ask(self) -> None:
        with suppress(RuntimeError):
            while self._wanted.wait():
                self._wanted.clear()
                if not self._asked_s:
                    self._asked_s = time.monotonic()
                number = self._round
                self._store.set(f"flights/{number}", "asked")
                end_s, left = time.monotonic() + EVERY_S, set(self._ranks)
                while (wait_s := end_s - time.monotonic()) > 0:
                    time.sleep(min(wait_s, LOOK_S if left else wait_s))
                    left -= {rank for rank in left if self._takes_answer(number, rank)}

    def _takes_answer(self, number: int, rank: int) -> bool:
        """Take a rank's answer of a round, if it has come."""
        key = f"flights/{number}/{rank}"
        if not self._store.check([key]):
            return False
        with suppress(msgspec.MsgspecError):
            read = msgspec.json.decode(self._store.get(key), type=Flight)
            self._answers[rank] = time.monotonic(), Seen(read, "ended" if read.ended_s else "runs")
        return True

    def _answer(self) -> None:
        with suppress(RuntimeError):
            while True:
                self._waiting.wait([f"flights/{self._round}"], _FOREVER)
                answer = msgspec.structs.replace(self._read(), notes=self._notes())
                self._waiting.set(f"flights/{self._round}/{self._rank}", msgspec.json.encode(answer).decode())
                if self._round:
                    self._waiting.delete_key(f"flights/{self._round - 1}/{self._rank}")
                self._round += 1
