"""Notes between ranks that are no collective: for threads that work beside the steps, whose order is not the steps'."""

import pickle
import time
from typing import Any

import torch.distributed as dist

from meshwright.comm.attendance import Attendance
from meshwright.comm.transport.base import late, timeout_of

PIECE_BYTES = 4 * 2**20
"""torch's store takes no value of more than 8 MiB."""
LOOK_EVERY_S, CHECK_EVERY_S = 0.02, 0.5
"""How often a reader looks for a note, and whether the rank that is to leave it is gone."""


class Board:
    """Where ranks leave notes for each other, in the store through which they met; alone, nobody reads it.

    It has a connection of its own, so that a reader who waits keeps no step waiting. Make it outside of the thread
    that uses it. ``attendance`` says who is gone.
    """

    def __init__(self, attendance: Attendance | None = None) -> None:
        self._store: Any = None
        self._attendance = attendance
        world = dist.group.WORLD
        if world is not None and world.size() > 1:
            self._timeout_s = timeout_of(world).total_seconds()
            self._store = world.get_group_store().clone()  # type: ignore[attr-defined]

    def post(self, key: str, note: Any) -> None:
        """Leave a note, once under a key."""
        if self._store is None:
            return
        data = pickle.dumps(note)
        starts = range(0, len(data), PIECE_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"board/{key}/{number}", data[start : start + PIECE_BYTES])
        self._store.set(f"board/{key}", str(len(starts)))  # last: whoever sees it may read the pieces

    def read(self, key: str, rank: int) -> Any:
        """Wait for the note that ``rank`` leaves under a key.

        Raises:
            LostRankError: that rank is gone, or it did not come within the time that ranks wait for each other.
        """
        # Looks, rather than one long wait inside of the store: a thread that sleeps here lets the process end.
        deadline, look = time.monotonic() + self._timeout_s, time.monotonic()
        while not self._store.check([f"board/{key}"]):
            if self._attendance is not None and time.monotonic() > look + CHECK_EVERY_S:
                if self._attendance.is_gone(rank) and not self._store.check([f"board/{key}"]):
                    self._attendance.check(rank)
                look = time.monotonic()
            if time.monotonic() > deadline:
                raise late(rank, f"it has left no note {key!r} for {self._timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        num_pieces = int(self._store.get(f"board/{key}"))
        return pickle.loads(b"".join(self._store.get(f"board/{key}/{number}") for number in range(num_pieces)))

    def remove(self, key: str) -> None:
        """Take a note away that everybody has read (nothing if there is none)."""
        if self._store is None or not self._store.check([f"board/{key}"]):
            return
        for number in range(int(self._store.get(f"board/{key}"))):
            self._store.delete_key(f"board/{key}/{number}")
        self._store.delete_key(f"board/{key}")
