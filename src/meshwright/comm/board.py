"""Notes from rank to rank without collectives: for background threads, which do not run in the order of the steps."""

import time
from typing import Any

import torch.distributed as dist

from meshwright.comm.attendance import Attendance
from meshwright.comm.notes import from_bytes, to_bytes
from meshwright.comm.transport.base import late, timeout_of

PIECE_BYTES = 4 * 2**20
"""Largest size in bytes of one value of a note in the store; torch's store refuses values over 8 MiB."""
LOOK_EVERY_S, CHECK_EVERY_S = 0.02, 0.5
"""A waiting reader looks for its note every ``LOOK_EVERY_S`` seconds. Every ``CHECK_EVERY_S`` seconds it checks that
the rank that posts the note still runs."""


class Board:
    """Notes between ranks, in the store of the process group. In a world of one rank, ``post`` does nothing.

    The board has its own connection to the store, so a waiting reader delays no step. Make the board outside the thread
    that uses it. ``attendance`` tells which ranks are gone.
    """

    def __init__(self, attendance: Attendance | None = None) -> None:
        self._store: Any = None
        self._attendance = attendance
        world = dist.group.WORLD
        if world is not None and world.size() > 1:
            self._timeout_s = timeout_of(world).total_seconds()
            self._store = world.get_group_store().clone()  # type: ignore[attr-defined]

    def post(self, key: str, note: Any) -> None:
        """Leave a note under a key; use each key once."""
        if self._store is None:
            return
        data = to_bytes(note)
        starts = range(0, len(data), PIECE_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"board/{key}/{number}", data[start : start + PIECE_BYTES])
        self._store.set(f"board/{key}", str(len(starts)))  # last: a reader that sees this key may read the pieces

    def read(self, key: str, rank: int) -> Any:
        """Wait for the note of ``rank`` under a key, and return it.

        Raises:
            LostRankError: the rank is gone, or the note did not come within the group's timeout.
            RankError: the store holds something else than a note.
        """
        # Short checks instead of one long wait in the store: a thread that sleeps here lets the process end.
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
        return from_bytes(b"".join(self._store.get(f"board/{key}/{number}") for number in range(num_pieces)))

    def remove(self, key: str) -> None:
        """Delete a note that all its readers have read; no effect if there is no such note."""
        if self._store is None or not self._store.check([f"board/{key}"]):
            return
        for number in range(int(self._store.get(f"board/{key}"))):
            self._store.delete_key(f"board/{key}/{number}")
        self._store.delete_key(f"board/{key}")
