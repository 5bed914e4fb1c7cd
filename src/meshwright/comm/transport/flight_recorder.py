"""Writes a rank's flight recorder: what it communicates, in memory that other processes read (``ir/flight.py``).

Writing takes about a microsecond for each operation, and half of that for each wait.
"""

import ctypes
import itertools
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.comm.transport.segment import reserve
from meshwright.ir import flight
from meshwright.ir.flight import EVENT, Flight, Notes

log = logging.getLogger("meshwright")

_SECONDS = struct.Struct("=d")
_WAITS_AT, _DONE_AT = 8, 16
"""Byte offsets in an event."""


class FlightRecorder:
    """Records the operations of this rank. Threads may share it.

    ``path`` is the file that keeps the record; None: anonymous memory, which exists as long as a process of this
    machine has it open. A file that cannot be made is warned of, and replaced by such memory. ``descriptor`` is open as
    long as the recorder.
    """

    def __init__(self, rank: int, num_ranks: int, box: str, path: Path | None = None) -> None:
        self.descriptor = _file(path)
        self._memory = memory = mmap.mmap(self.descriptor, flight.SIZE)
        self._numbers = itertools.count(1)
        self._newest = ctypes.c_uint64.from_buffer(memory, flight.NEWEST_AT)
        self._asked = ctypes.c_uint64.from_buffer(memory, flight.ASKED_AT)
        self._groups: dict[str, int] = {}
        self._waiting: dict[int, float] = {}  # since when, by event
        self._write(flight.HOST, socket.gethostname())
        self._write(flight.BOX, box)
        offset_s = time.time() - time.monotonic()
        self.beat()
        flight.HEADER.pack_into(
            memory, 0, flight.MAGIC, flight.VERSION, rank, num_ranks, 0, os.getpid(), offset_s
        )  # fmt: skip

    # --- operations --------------------------------------------------------------------------------------------------

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """The index of a group of ranks, or of a channel, for ``begin``; the first call enters it."""
        index = self._groups.get(name)
        if index is None:
            index = self._groups[name] = min(len(self._groups), flight.GROUPS - 1)
            offset, text = flight.group_text(name, ranks)
            if index == flight.GROUPS - 1:  # further groups share the last entry, of which nothing is concluded
                offset, text = flight.group_text("others", ())
            at = flight.group_at(index) + offset
            self._memory[at : at + len(text)] = text
        return index

    def begin(self, group: int, sequence: int, what: bytes, num_bytes: int = 0, signature: int = 0) -> int:
        """Record that this rank begins operation ``sequence`` of a group. Returns the number of the event."""
        number = next(self._numbers)
        EVENT.pack_into(
            self._memory, flight.event_at(number), time.monotonic(), 0.0, 0.0, sequence, num_bytes, signature, group,
            min(len(what), flight.TEXT_BYTES), what, number,
        )  # fmt: skip
        self._newest.value = number
        struct.pack_into("=Q", self._memory, flight.group_at(group), sequence)
        return number

    def wait(self, number: int) -> None:
        """Record that this rank waits for an operation from now on. An event that was not recorded has the number 0."""
        if not number:
            return
        self._waiting[number] = now_s = time.monotonic()
        _SECONDS.pack_into(self._memory, flight.event_at(number) + _WAITS_AT, now_s)

    def go_on(self, number: int) -> None:
        """Record that this rank waits no more for an operation that is not done."""
        if self._waiting.pop(number, None) is not None:
            _SECONDS.pack_into(self._memory, flight.event_at(number) + _WAITS_AT, 0.0)

    def end(self, number: int) -> None:
        """Record that an operation is done."""
        self._finish(number, time.monotonic())

    def fail(self, number: int) -> None:
        """Record that this rank waits no more for an operation that has failed."""
        self._finish(number, -time.monotonic())

    def _finish(self, number: int, done_s: float) -> None:
        self._waiting.pop(number, None)
        if number and self._newest.value - number < flight.EVENTS:  # else a later event has its place
            _SECONDS.pack_into(self._memory, flight.event_at(number) + _DONE_AT, done_s)

    # --- signs of life -----------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Give a sign of life."""
        _SECONDS.pack_into(self._memory, flight.BEAT_AT, time.monotonic())

    @property
    def asked(self) -> int:
        """How often other processes have asked for notes."""
        return int(self._asked.value)

    def note(self, notes: Notes) -> None:
        """Write notes; lines that do not fit are left out."""
        room = flight.NOTES.stop - flight.NOTES.start - 1
        data = msgspec.json.encode(notes)
        while len(data) > room:
            parts = {name: getattr(notes, name) for name in ("stack", "links", "pytorch")}
            longest = max(parts, key=lambda name: len(parts[name]))
            notes = msgspec.structs.replace(notes, **{longest: parts[longest][: len(parts[longest]) // 2]})
            data = msgspec.json.encode(notes)
        begin = flight.NOTES.start
        self._memory[begin : begin + len(data) + 1] = data + b"\0"

    def leave(self, ending: str) -> None:
        """Record how this rank ends."""
        self._write(flight.ENDING, ending)
        _SECONDS.pack_into(self._memory, flight.ENDED_AT, time.monotonic())

    def conclude(self, verdict: str) -> None:
        """Record why this rank ends a wait, so that the other ranks end theirs, too."""
        self._write(flight.VERDICT, verdict)

    def read(self, most: int = flight.EVENTS) -> Flight:
        """What was recorded."""
        return flight.read(self._memory, most=most)

    def waits_since(self) -> float:
        """The time since which this rank waits for an operation, of several the earliest; 0 if it waits for none."""
        return min(list(self._waiting.values()), default=0.0)

    def close(self) -> None:
        """Close the file; what others have mapped stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()

    def _write(self, where: slice, text: str) -> None:
        data = text.encode()[: where.stop - where.start - 1].decode(errors="ignore").encode() + b"\0"
        self._memory[where.start : where.start + len(data)] = data


def _file(path: Path | None) -> int:
    """Make the file, and reserve its room: a disk that is full would otherwise end the process later."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # another process may still read an earlier record
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            os.posix_fallocate(descriptor, 0, flight.SIZE)
            return descriptor
        except OSError as error:
            log.warning("%s cannot be kept (%s): the flight recorder lives only as long as the ranks", path,
                        error.strerror)  # fmt: skip
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return reserve(flight.SIZE, "meshwright-flight", "flight recorder")


def ask(memory: mmap.mmap) -> None:
    """Ask the rank that writes this memory for notes. Its watchdog answers within a second, if it runs."""
    (asked,) = struct.unpack_from("=Q", memory, flight.ASKED_AT)
    struct.pack_into("=Q", memory, flight.ASKED_AT, asked + 1)
