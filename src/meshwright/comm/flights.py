"""The flight recorders of all ranks, as one rank sees them.

the ranks of its box     their recorders' memory, which it maps while they live: it stays readable when they are gone
other ranks              what they answer through the store, when somebody asks (``far_flights.py``)
"""

import mmap
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.comm.stacks import demand, last_stack
from meshwright.comm.transport.flight_recorder import FlightRecorder, ask
from meshwright.comm.transport.process import Process
from meshwright.errors import FileFormatError
from meshwright.ir import flight
from meshwright.ir.flight import Condition, Flight, Seen
from meshwright.ir.hang import STALE_S

RECENT = 128
"""The newest events of each rank that are read."""


class _Opened(NamedTuple):
    """A rank of this box: the memory of its recorder, its process, and the descriptor of its stacks there."""

    memory: mmap.mmap
    process: Process | None
    stacks: int


class Flights:
    """The recorders of all ranks of the world. ``stacks`` is the descriptor of the file for this rank's stacks.
    ``folder`` keeps the recorders of this box; None: only memory does."""

    def __init__(
        self,
        store: Any,
        recorder: FlightRecorder,
        rank: int,
        num_ranks: int,
        box: str,
        stacks: int,
        folder: Path | None = None,
    ) -> None:
        self._store, self._recorder, self._rank, self._num_ranks, self._box = store, recorder, rank, num_ranks, box
        self._folder = folder
        self._opened: dict[int, _Opened] = {}
        self._near: dict[int, bool] = {rank: True}
        self._store.set(f"flight/{rank}", f"{os.getpid()} {recorder.descriptor} {stacks} {box}")

    @property
    def far(self) -> tuple[int, ...]:
        """The ranks of other boxes, as far as they are known."""
        return tuple(rank for rank, near in self._near.items() if not near)

    def open(self) -> bool:
        """Map the memory of the ranks of this box, as far as they have come. Returns whether all ranks are known."""
        with suppress(RuntimeError):  # the store is gone
            for rank in range(self._num_ranks):
                if rank not in self._near and self._store.check([f"flight/{rank}"]):
                    number, descriptor, stacks, box = self._store.get(f"flight/{rank}").decode().split(" ", 3)
                    self._near[rank] = box == self._box and self._map(rank, int(number), int(descriptor), int(stacks))
        return len(self._near) == self._num_ranks

    def seen(self, far: Mapping[int, Seen]) -> dict[int, Seen]:
        """What is seen of every rank. ``far`` has what ranks of other boxes have answered."""
        by_rank = {self._rank: Seen(self._recorder.read(RECENT), "runs")}
        for rank in range(self._num_ranks):
            if rank in self._opened:
                by_rank[rank] = self._look(self._opened[rank])
            elif rank != self._rank:
                by_rank[rank] = far.get(rank, Seen(None, "unknown"))
        return by_rank

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks of this box for notes."""
        for rank in ranks:
            if rank in self._opened:
                ask(self._opened[rank].memory)

    def signal(self, ranks: Iterable[int]) -> None:
        """Let ranks of this box write their stacks by a signal, if they have a handler for it."""
        for rank in ranks:
            opened = self._opened.get(rank)
            if opened is not None and opened.stacks >= 0 and opened.process and not opened.process.has_ended():
                demand(opened.process.number)

    def stack(self, rank: int) -> tuple[str, ...]:
        """The stack that a rank of this box has written after ``signal``; empty if there is none."""
        opened = self._opened.get(rank)
        if opened is None or opened.stacks < 0 or opened.process is None:
            return ()
        return last_stack(Path(f"/proc/{opened.process.number}/fd/{opened.stacks}"))

    def _map(self, rank: int, number: int, descriptor: int, stacks: int) -> bool:
        places = [f"/proc/{number}/fd/{descriptor}"]
        if self._folder is not None:  # the rank may be gone already
            places.append(f"{self._folder / f'{rank}.flight'}")
        for place in places:
            with suppress(OSError, ValueError, FileFormatError):
                own = os.open(place, os.O_RDWR)
                try:
                    memory = mmap.mmap(own, flight.SIZE)
                finally:
                    os.close(own)
                read = flight.read(memory, most=1)
                if (read.rank, read.process) == (rank, number):
                    process = None
                    with suppress(ProcessLookupError):
                        process = Process(number, by_descriptor=False)
                    self._opened[rank] = _Opened(memory, process, stacks)
                    return True
        return False

    def _look(self, opened: _Opened) -> Seen:
        read = flight.read(opened.memory, most=RECENT)
        return Seen(read, condition_of(read, opened.process))


def condition_of(read: Flight, process: Process | None) -> Condition:
    """The condition of a rank of this box."""
    if process is None or process.has_ended():
        return "ended"
    if process.is_stopped():
        return "stopped"
    return "runs" if time.monotonic() - read.beat_s < STALE_S else "silent"
