"""A thread that watches over this rank's waits: it finds out why a wait does not end, and ends one that never would.

    every 0.1 s       a sign of life; notes for whoever has asked
    waits > 0.2 s     compare the flight recorders of all ranks (``ir/hang.py``)
    mismatch, circle  seen twice in a row: this rank's waits end with an error that names the operations
    waits > 30 s      the report of the whole job goes to the log and beside the recorder's file, once a hang
    every 5 s         operations that only PyTorch's recorder knows are reported, if they last as long

As long as nobody waits, other ranks are not looked at.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.comm import pytorch_flight
from meshwright.comm.far_flights import FarFlights
from meshwright.comm.flights import Flights
from meshwright.comm.stacks import SignalledStacks, main_stack
from meshwright.comm.transport.connections import TcpConnection, connections, described
from meshwright.comm.transport.flight_recorder import FlightRecorder
from meshwright.comm.transport.progress import RankStreams
from meshwright.errors import RankError
from meshwright.ir.flight import Notes, Seen
from meshwright.ir.hang import Hang, explain

LOOK_S, SUSPECT_S, AGAIN_S = 0.1, 0.2, 0.5
"""Seconds between two signs of life, after which a wait is looked at, and between two looks at it."""
REPORT_S = 30.0
"""Seconds of a wait after which it is reported, or half of the time that ranks wait for each other if that is less."""
NOTES_S = 1.0
"""Seconds of a wait after which this rank notes where it is; and those that others have to answer."""
PYTORCH_S = 5.0
"""Seconds between two looks at PyTorch's recorder, while this rank waits for nothing that ours knows."""
REPORT = "hang.txt"
"""The file of the last report, beside the recorders' files."""
REMEDY = "all ranks must run the same operations in the same order, on tensors of the same shape"

log = logging.getLogger("meshwright")


class Watchdog:
    """Watches over this rank's waits in the world. ``streams`` are this rank's streams, whose waits raise the verdict.
    ``end_waits`` ends waits in torch.distributed. ``timeout_s``: how long ranks wait for each other. ``is_gone`` tells
    whether a rank of another box is known to have ended.

    ``folder`` keeps the records; None: they are kept in memory as long as a process of this box lives.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        box: str,
        streams: RankStreams,
        timeout_s: float,
        end_waits: Callable[[], None],
        is_gone: Callable[[int], bool],
        folder: Path | None,
    ) -> None:
        rank, size = world.rank(), world.size()
        store: Any = world.get_group_store()
        path = folder / f"{rank}.flight" if folder is not None else None
        self.recorder = streams.recorder = FlightRecorder(rank, size, box, path)
        self._stacks = SignalledStacks(path.with_suffix(".stacks") if path is not None else None)
        self._rank, self._num_ranks, self._streams, self._folder = rank, size, streams, folder
        self._end_waits, self._is_gone = end_waits, is_gone
        self._report_s = min(REPORT_S, timeout_s / 2)
        self._flights = Flights(store.clone(), self.recorder, rank, size, box, self._stacks.descriptor, folder)
        self._store, self._far = store, None  # type: Any, FarFlights | None
        self._all_known = False
        self._connections: tuple[float, dict[str, TcpConnection]] = time.monotonic(), {}
        self._noted_s, self._answered = 0.0, 0
        self._before: tuple[object, ...] | None = None
        self._next_s = self._asked_s = 0.0
        self._is_reported = False
        self._pytorch_s, self._pytorch_place, self._is_pytorch_told = 0.0, "", False
        self._stopped = threading.Event()
        streams.explain = self.lines
        world_ref, dog = weakref.ref(world), weakref.ref(self)
        weakref.finalize(self, self._stopped.set)
        run = threading.Thread(target=_watch, args=(dog, world_ref, self._stopped), name="watchdog", daemon=True)
        run.start()

    def stop(self) -> None:
        """Watch no more, and handle the signal for stacks no more."""
        self._stopped.set()
        self._stacks.close()

    def lines(self) -> tuple[str, ...]:
        """The report of the whole job, if any rank waits for something."""
        if not self._all_known:
            self._flights.open()
        hang = explain(self._seen())
        return hang.lines if hang is not None else ()

    # --- the thread --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Give a sign of life, and look at this rank's wait if it lasts."""
        self.recorder.beat()
        if not self._all_known:
            self._all_known = self._flights.open()
            if self._flights.far and self._far is None:
                with suppress(RuntimeError):  # the store is gone
                    store, waiting = self._store.clone(), self._store.clone()
                    self._far = FarFlights(store, waiting, self._rank, self.recorder.read, self._notes)
        if self.recorder.asked != self._answered:
            self._answered = self.recorder.asked
            self.recorder.note(self._notes())
        now_s, since_s = time.monotonic(), self.recorder.waits_since()
        waited_s = now_s - since_s if since_s else 0.0
        if waited_s < SUSPECT_S:
            self._before, self._next_s, self._asked_s, self._is_reported = None, 0.0, 0.0, False
            if now_s - self._pytorch_s > PYTORCH_S:
                self._pytorch_s = now_s
                self._look_at_pytorch()
            return
        if waited_s > NOTES_S and now_s - self._noted_s > 2 * NOTES_S:
            self._noted_s = now_s
            self.recorder.note(self._notes())
        if now_s >= self._next_s:
            self._look_at_others(waited_s)
            took_s = time.monotonic() - now_s
            self._next_s = now_s + max(LOOK_S if self._before is not None else AGAIN_S, 20 * took_s)

    def _look_at_others(self, waited_s: float) -> None:
        seen = self._seen()
        for flight, _ in seen.values():
            if flight is not None and flight.verdict:  # of a rank that may have ended by now
                where, _, problem = flight.verdict.partition("\n")
                self._conclude(where, problem)
                return
        hang = explain(seen, SUSPECT_S / 2)
        if hang is None:
            self._before = None
            return
        if hang.is_certain and hang.state == self._before:
            self._conclude(hang.where, "\n     ".join((hang.problem, *hang.lines[1:])))
            self._keep(hang.lines)
        self._before = hang.state if hang.is_certain else None
        if waited_s > self._report_s - NOTES_S and not self._asked_s:
            self._asked_s = time.monotonic()
            self._flights.ask(hang.causes)
        if waited_s > self._report_s and not self._is_reported:
            self._is_reported = True
            self._report(hang)

    def _look_at_pytorch(self) -> None:
        """Report an operation that lasts, and of which only PyTorch's recorder knows: a call of the program's own, or
        one for which a device waits. It is seen twice: then the others have noted what they do."""
        oldest = next(iter(pytorch_flight.pending()), None)
        if oldest is None or time.time() - oldest.begun_s < self._report_s:
            self._pytorch_place = ""
        elif self._pytorch_place != oldest.place:
            self._pytorch_place = oldest.place
            self._is_pytorch_told = False
            self._flights.ask(range(self._num_ranks))
        elif not self._is_pytorch_told:
            self._is_pytorch_told = True
            seen = self._seen()
            first = min(rank for rank in seen if rank == self._rank or self._has(seen[rank], oldest.place))
            if first == self._rank:
                lines = tuple(pytorch_flight.report(oldest, self._rank, seen, time.time()))
                log.warning("%s", "\n".join(lines))
                self._keep(lines)

    @staticmethod
    def _has(seen: Seen, place: str) -> bool:
        lines = seen.flight.notes.pytorch if seen.flight is not None else ()
        return any(line.removeprefix(pytorch_flight.WHO).startswith(f"{place}:") for line in lines)

    def _seen(self) -> dict[int, Seen]:
        """The records of all ranks."""
        far: dict[int, Seen] = {}
        if self._far is not None:
            self._far.want(self._flights.far)
            far = {
                rank: Seen(seen.flight, "ended") if seen.condition == "silent" and self._is_gone(rank) else seen
                for rank, seen in self._far.seen().items()
            }
        return self._flights.seen(far)

    def _conclude(self, where: str, problem: str) -> None:
        """End this rank's waits with an error, because they would never end."""
        if self._streams.verdict is None:
            self._streams.verdict = RankError(problem, where=where, remedy=REMEDY)
            self.recorder.conclude(f"{where}\n{problem}")
            self._end_waits()

    def _report(self, hang: Hang) -> None:
        """Report a hang, on the first of the ranks that wait."""
        if self._rank != min((wait.rank for wait in hang.waits), default=self._rank):
            return
        silent = [
            rank for rank in hang.causes if self._flights.seen({})[rank].flight is None or not self._has_noted(rank)
        ]
        self._flights.signal(silent)  # it cannot run Python code, or has no time to
        if silent:
            time.sleep(LOOK_S)
        lines = list(hang.lines)
        for rank in silent:
            if stack := self._flights.stack(rank):
                lines.append(f"  rank {rank} is at" + "".join(f"\n      {line}" for line in stack))
        log.warning("%s", "\n".join(lines))
        self._keep(lines)

    def _has_noted(self, rank: int) -> bool:
        seen = self._flights.seen({}).get(rank)
        return seen is not None and seen.flight is not None and seen.flight.notes.time_s >= self._asked_s

    def _keep(self, lines: Iterable[str]) -> None:
        if self._folder is not None:
            with suppress(OSError):  # the disk is full
                (self._folder / REPORT).write_text("\n".join(lines) + "\n")

    def _notes(self) -> Notes:
        """What this rank says of itself."""
        then_s, before = self._connections
        now_s, now = time.monotonic(), connections()
        self._connections = now_s, now
        is_recent = now_s - then_s < 10 * NOTES_S  # else it is of an earlier wait
        links = described(before, now, now_s - then_s) if is_recent else described(now, now, 0.0)
        return Notes(time_s=now_s, stack=main_stack(), links=links, pytorch=tuple(map(str, pytorch_flight.pending())))


def _watch(dog: "weakref.ref[Watchdog]", world: "weakref.ref[dist.ProcessGroup]", stopped: threading.Event) -> None:
    """Look until the world is left, or the watchdog is dropped."""
    while not stopped.wait(LOOK_S):
        watchdog = dog()
        if watchdog is None or sys.is_finalizing():
            return
        if dist.group.WORLD is not world():
            watchdog.stop()
            return
        watchdog.look()
        del watchdog
