"""Finds which ranks of the world are gone, and why, from the notes that they leave and from their processes.

A rank may end by an exception, by ``sys.exit`` (even with 0) or by a signal. If other ranks still communicate, they
raise an error. The ended rank's note, in the store of the process group, says why the rank ended, or which other rank
it has lost. If the ended rank could not leave a note, the ranks of its box (the ranks that may share memory with it)
see that its process is gone, and leave the note for the ranks of other boxes.
"""

import os
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from meshwright.comm.transport.base import Trouble, timeout_of
from meshwright.comm.transport.flight_recorder import FlightRecorder
from meshwright.comm.transport.process import Process, box
from meshwright.comm.transport.shared_memory import ENDED, SharedMemory
from meshwright.errors import LostRankError

NOTE_S = 2.0
"""After a rank has lost a connection, it waits this many seconds for a note that names the lost rank."""
LOOK_S = 0.02
LEFT = "it has left the program"


class Attendance:
    """Tells one rank of the world which other ranks are gone, and why. ``lanes`` are this rank's channels of shared
    memory to other ranks. ``recorder``, if set, records how this rank ends."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._rank, self._others = world.rank(), [rank for rank in range(world.size()) if rank != world.rank()]
        self.timeout_s = timeout_of(world).total_seconds()
        # a separate connection, because another thread that waits may block the group's
        self._store: Any = world.get_group_store().clone()  # type: ignore[attr-defined]
        self._box = box()
        self._processes: dict[int, Process | None] = {}
        self.lanes: list[SharedMemory] = []
        self.recorder: FlightRecorder | None = None
        self._store.set(f"attendance/{self._rank}", f"{os.getpid()} {self._box}")

    def is_first(self, name: str) -> bool:
        """Whether this is the first call by any rank of the world with this name."""
        return bool(self._store.add(f"first/{name}", 1) == 1)

    # --- others ------------------------------------------------------------------------------------------------------

    def is_gone(self, rank: int) -> bool:
        """Whether a rank is gone: it has left a note, or its process has ended."""
        return self._note(rank) is not None or self._has_ended(rank)

    def blame(self, rank: int) -> Trouble:
        """Return why a rank is gone: the trouble in its note, or, without a note, that its process has ended."""
        return self._note(rank) or Trouble(f"rank {rank}", ENDED)

    def check(self, rank: int) -> None:
        """Raise an error if ``rank`` is gone. Call this before this rank waits for ``rank``.

        Raises:
            LostRankError: ``rank`` is gone.
        """
        if self.is_gone(rank):
            where, problem = self.blame(rank)
            raise LostRankError(f"{problem}, and this rank waits for rank {rank}", where=where)

    def culprit(self) -> Trouble | None:
        """Find the rank that caused a lost connection, and why; None if no rank is gone after ``NOTE_S`` seconds."""
        deadline = time.monotonic() + NOTE_S
        while True:
            troubles = [self.blame(rank) for rank in self._others if self.is_gone(rank)]
            if troubles:  # a rank that only left may have finished
                return min(troubles, key=lambda trouble: (trouble.problem == LEFT, trouble.problem != ENDED))
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_S)

    def all_gone(self, wait_s: float) -> bool:
        """Wait until all other ranks are gone. Returns False if some remain after ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        left = self._others
        while left := [rank for rank in left if not self.is_gone(rank)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def _note(self, rank: int) -> Trouble | None:
        note = self._read(f"attendance/{rank}/gone")
        return Trouble(*note.split("\n", 1)) if note else None

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended; False if the rank is in another box."""
        if rank not in self._processes:
            number, _, at = self._read(f"attendance/{rank}").partition(" ")
            if not number:
                return False
            try:
                self._processes[rank] = Process(int(number)) if at == self._box else None
            except ProcessLookupError:
                return self._tell(rank)
        process = self._processes[rank]
        return process is not None and process.has_ended() and self._tell(rank)

    def _tell(self, rank: int) -> bool:
        """Leave a note for a rank whose process has ended. Always returns True."""
        self._leave(rank, Trouble(f"rank {rank}", ENDED))
        return True

    def _read(self, key: str) -> str:
        """The value of a key in the store; empty if the key has no value or the store does not answer."""
        with suppress(RuntimeError):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return ""

    # --- this rank ---------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Leave a note that this rank no longer communicates. ``error`` is the error with which it failed, or None."""
        note = Trouble(f"rank {self._rank}", LEFT)
        if isinstance(error, LostRankError) and error.where.startswith("rank "):
            note = Trouble(error.where, f"rank {self._rank} has given up because of it")
        elif error is not None:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            note = Trouble(f"rank {self._rank}", f"it has failed with {text}")
        self._leave(self._rank, note)
        if self.recorder is not None:
            self.recorder.leave(
                note.problem if note.where == f"rank {self._rank}" else f"{note.problem} ({note.where})"
            )
        for lane in self.lanes:
            lane.leave()

    def _leave(self, rank: int, note: Trouble) -> None:
        key = f"attendance/{rank}/gone"
        with suppress(RuntimeError):  # the rank that kept the store may have ended
            if not self._store.check([key]):
                self._store.set(key, "\n".join(note))
