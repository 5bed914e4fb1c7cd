"""Which ranks of the world are gone, and why: by the notes that they leave when they end, and by their processes.

A rank that ends while others still communicate is an error to these, however it ends: by an exception, by ``sys.exit``
(be it with 0), by a signal. Its note says why, or which other rank it has lost; where it could leave none, ranks of
its box see that its process is gone, and leave one in its place for ranks of other boxes.
"""

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.transport.base import Trouble, timeout_of
from meshwright.comm.transport.process import Process, box
from meshwright.comm.transport.shared_memory import ENDED, SharedMemory
from meshwright.errors import LostRankError

NOTE_S = 2.0
"""How long a rank that has lost a connection waits for a note on whose it was."""
LOOK_S = 0.02
LEFT = "it has left the program"
_TAG = 2
"""Of torch.distributed: apart from messages."""


class Attendance:
    """Of one rank of the world. ``lanes`` are those through which it shares memory with others."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._rank, self._others = world.rank(), [rank for rank in range(world.size()) if rank != world.rank()]
        self.timeout_s = timeout_of(world).total_seconds()
        # a connection of its own: others may wait in the group's
        self._store: Any = world.get_group_store().clone()  # type: ignore[attr-defined]
        self._box = box()
        self._processes: dict[int, Process | None] = {}
        self.lanes: list[SharedMemory] = []
        self._store.set(f"attendance/{self._rank}", f"{os.getpid()} {self._box}")

    def is_first(self, name: str) -> bool:
        """Whether no rank of the world has asked this before, by that name."""
        return bool(self._store.add(f"first/{name}", 1) == 1)

    # --- others ------------------------------------------------------------------------------------------------------

    def is_gone(self, rank: int) -> bool:
        """Whether a rank has left or ended."""
        return self._note(rank) is not None or self._has_ended(rank)

    def blame(self, rank: int) -> Trouble:
        """What ended a rank that is gone: the trouble that its note names, or that its process has ended."""
        return self._note(rank) or Trouble(f"rank {rank}", ENDED)

    def check(self, rank: int) -> None:
        """Before this rank waits for another one.

        Raises:
            LostRankError: that one is gone.
        """
        if self.is_gone(rank):
            where, problem = self.blame(rank)
            raise LostRankError(f"{problem}, and this rank waits for rank {rank}", where=where)

    def culprit(self) -> Trouble | None:
        """The rank that caused a lost connection, if that is seen within ``NOTE_S`` seconds; else None."""
        deadline = time.monotonic() + NOTE_S
        while True:
            troubles = [self.blame(rank) for rank in self._others if self.is_gone(rank)]
            if troubles:  # who has only left may have been done
                return min(troubles, key=lambda one: (one.problem == LEFT, one.problem != ENDED))
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_S)

    def all_gone(self, wait_s: float) -> bool:
        """Wait until no other rank is there; whether that has come to pass in time."""
        deadline = time.monotonic() + wait_s
        left = self._others
        while left := [rank for rank in left if not self.is_gone(rank)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def _note(self, rank: int) -> Trouble | None:
        found = self._read(f"attendance/{rank}/gone")
        return Trouble(*found.split("\n", 1)) if found else None

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank is gone, where it can be seen from here."""
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
        """Leave a note in place of a rank that could not."""
        self._leave(rank, Trouble(f"rank {rank}", ENDED))
        return True

    def _read(self, key: str) -> str:
        """What stands there, if anything does and the store answers."""
        with suppress(RuntimeError):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return ""

    # --- this rank ---------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Say that this rank will communicate no more, because of an error or not."""
        note = Trouble(f"rank {self._rank}", LEFT)
        if isinstance(error, LostRankError) and error.where.startswith("rank "):
            note = Trouble(error.where, f"rank {self._rank} has given up because of it")
        elif error is not None:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            note = Trouble(f"rank {self._rank}", f"it has failed with {said}")
        self._leave(self._rank, note)
        for lane in self.lanes:
            lane.leave()

    def _leave(self, rank: int, note: Trouble) -> None:
        key = f"attendance/{rank}/gone"
        with suppress(RuntimeError):  # who kept the store may be gone
            if not self._store.check([key]):
                self._store.set(key, "\n".join(note))


def close(group: dist.ProcessGroup, *peers: int) -> None:
    """Close this rank's connections to these ranks of a group (or to all), which may wait on them."""
    for peer in (peers or range(group.size())) if dist.get_backend(group) == "gloo" else ():
        if peer != group.rank():
            with suppress(RuntimeError):  # a receive that has no time is how torch.distributed lets one do it
                group.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
