"""The memory of a rank's flight recorder. Other processes read it, also when the rank is gone.

    header    the rank, its process and host, its last sign of life, how it ended
    notes     what the rank has said of itself when somebody asked: its stack, its connections, PyTorch's own recorder
    groups    the groups and channels of the rank, and how many operations it has begun in each
    events    its last 1,000 operations, each with its times

The times are those of the host's monotonic clock. A rank that ends leaves the memory as it is, so everything that was
written is there.
"""

import itertools
import re
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.errors import FileFormatError

EVENTS, GROUPS = 1000, 256
"""The numbers of events and groups that the memory holds."""
MAGIC, VERSION = b"MWFLIGHT", 1
HEADER = struct.Struct("=8sIIIIQd")
"""Magic, version, rank, number of ranks, unused, process id, seconds to add to the monotonic clock for the time of day.
"""
BEAT_AT, NEWEST_AT, ASKED_AT, ENDED_AT = 64, 72, 80, 88
"""Byte offsets of the time of the last sign of life, the number of the newest event, how often others have asked for
notes, and the time of the end (0: the rank has not said that it ends)."""
HOST, BOX, ENDING, VERDICT = slice(128, 256), slice(256, 512), slice(512, 1024), slice(1024, 4096)
NOTES = slice(4096, 4096 + 32768)
_GROUPS_AT, GROUP_BYTES = NOTES.stop, 1024
_GROUP_TEXT_AT = 16
_EVENTS_AT, EVENT_BYTES = _GROUPS_AT + GROUPS * GROUP_BYTES, 256
EVENT = struct.Struct("=dddQQIHH192sQ")
"""Begun, waits since, done, number in the group, bytes, signature, group, length of the text, text, and the number of
the event. It comes last: an event that was only half written still has its predecessor's number."""
TEXT_BYTES = 192
SIZE = _EVENTS_AT + EVENTS * EVENT_BYTES
"""Bytes of the memory."""
_RANGE = re.compile(r"(\d+)(?::(\d+):(\d+))?")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An operation: a collective of a group, or a message of a channel.

    ``sequence`` counts the operations of the group. ``waits_s`` is the time since which the rank waits for it (0: it
    does not). ``done_s`` is 0 until the operation is
    done, and negative if it has failed. Ranks that take part in one operation have equal
    ``signature`` values (0: unknown)."""

    number: int
    group: str
    sequence: int
    what: str
    num_bytes: int = 0
    signature: int = 0
    begun_s: float = 0.0
    waits_s: float = 0.0
    done_s: float = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether the rank waits for it now."""
        return self.waits_s > 0 and not self.done_s


class FlightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of ranks, or a channel from one rank to another. ``begun`` counts the operations that this rank has
    begun. ``ranks`` is empty if there are too many to write down."""

    name: str
    ranks: tuple[int, ...]
    begun: int = 0


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself: where its main thread is, its connections, and what PyTorch's recorder says."""

    time_s: float = 0.0
    stack: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    pytorch: tuple[str, ...] = ()


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank's recorder holds. ``now_s`` is the time on the rank's host when it was read. ``verdict`` is the
    report because of which the rank has ended a wait; empty if it has ended none."""

    rank: int
    num_ranks: int
    process: int
    host: str
    box: str
    now_s: float
    day_s: float
    beat_s: float
    ended_s: float = 0.0
    ending: str = ""
    verdict: str = ""
    groups: dict[str, FlightGroup] = {}
    events: tuple[Event, ...] = ()
    notes: Notes = Notes()

    @property
    def awaited(self) -> tuple[Event, ...]:
        """The operations for which the rank waits."""
        return tuple(event for event in self.events if event.is_awaited)

    @property
    def moved_s(self) -> float:
        """When the rank last began, waited for, or finished an operation."""
        return max((max(each.begun_s, each.waits_s, abs(each.done_s)) for each in self.events), default=0.0)

    @property
    def last(self) -> Event | None:
        """The operation that was done last."""
        return max((event for event in self.events if event.done_s > 0), key=lambda event: event.done_s, default=None)


Condition = Literal["runs", "stopped", "ended", "silent", "unknown"]
"""Whether a rank's process runs, was stopped by a signal, or has ended. ``silent``: it gives no sign of life.
``unknown``: nothing of it can be seen from here."""


class Seen(NamedTuple):
    """A rank as another process sees it: its recorder, if it can be read, and the condition of its process."""

    flight: Flight | None
    condition: Condition


def read(memory: Any, now_s: float | None = None, most: int = EVENTS) -> Flight:
    """Read a recorder's memory: all groups, and at most the newest ``most`` events.

    Raises:
        FileFormatError: it is not the memory of a recorder, or of another version.
    """
    if len(memory) < SIZE:
        raise FileFormatError("not the memory of a flight recorder", where="flight", remedy="name a run's directory")
    magic, version, rank, num_ranks, _, process, day_s = HEADER.unpack_from(memory, 0)
    if (magic, version) != (MAGIC, VERSION):
        raise FileFormatError(
            f"version {version} of a flight recorder" if magic == MAGIC else "not the memory of a flight recorder",
            where="flight",
            remedy=f"this Meshwright reads version {VERSION}",
        )
    groups = list(_groups(memory))
    names = [group.name for group in groups]
    beat_s, ended_s = _number(memory, BEAT_AT), _number(memory, ENDED_AT)
    return Flight(
        rank=rank, num_ranks=num_ranks, process=process, host=_text(memory[HOST]), box=_text(memory[BOX]),
        now_s=time.monotonic() if now_s is None else now_s, day_s=day_s, beat_s=beat_s, ended_s=ended_s,
        ending=_text(memory[ENDING]), verdict=_text(memory[VERDICT]), groups={group.name: group for group in groups},
        events=tuple(_events(memory, names, most)), notes=_notes(memory),
    )  # fmt: skip


def _number(memory: Any, at: int) -> float:
    return float(struct.unpack_from("=d", memory, at)[0])


def _text(data: Any) -> str:
    return bytes(data).split(b"\0")[0].decode(errors="replace")


def _notes(memory: Any) -> Notes:
    try:
        return msgspec.json.decode(_text(memory[NOTES]) or "{}", type=Notes)
    except msgspec.MsgspecError:  # the rank is writing them now
        return Notes()


def _groups(memory: Any) -> Iterable[FlightGroup]:
    for index in range(GROUPS):
        at = _GROUPS_AT + index * GROUP_BYTES
        text = _text(memory[at + _GROUP_TEXT_AT : at + GROUP_BYTES])
        if not text:
            return
        name, _, ranks = text.partition("\n")
        (begun,) = struct.unpack_from("=Q", memory, at)
        yield FlightGroup(name=name, ranks=ranks_of(ranks), begun=begun)


def _events(memory: Any, names: Sequence[str], most: int) -> Iterable[Event]:
    (newest,) = struct.unpack_from("=Q", memory, NEWEST_AT)
    for number in range(max(1, newest - min(most, EVENTS) + 1), newest + 1):
        begun_s, waits_s, done_s, sequence, num_bytes, signature, group, length, text, stamp = EVENT.unpack_from(
            memory, event_at(number)
        )
        if stamp == number and group < len(names):  # else a later event has taken its place meanwhile
            yield Event(
                number=number, group=names[group], sequence=sequence, what=text[:length].decode(errors="replace"),
                num_bytes=num_bytes, signature=signature, begun_s=begun_s, waits_s=waits_s, done_s=done_s,
            )  # fmt: skip


def event_at(number: int) -> int:
    """The offset of an event."""
    return _EVENTS_AT + number % EVENTS * EVENT_BYTES


def group_at(index: int) -> int:
    """The offset of a group: its number of begun operations."""
    return _GROUPS_AT + index * GROUP_BYTES


def group_text(name: str, ranks: Sequence[int]) -> tuple[int, bytes]:
    """The offset of a group's text after the group, and the text itself. Ranks that do not fit are left out."""
    text, room = f"{name}\n{ranks_text(ranks)}".encode(), GROUP_BYTES - _GROUP_TEXT_AT - 1
    return _GROUP_TEXT_AT, (text if len(text) <= room else f"{name}\n".encode()[:room])


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a text: ``0 1 5``, or ``0:8:2`` (from, up to, step) where they are regular."""
    parts, left = [], list(ranks)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        wanted = range(left[0], left[-1] + 1, step) if step > 0 else range(0)
        num = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, wanted, strict=False)))
        if num > 2:
            parts.append(f"{left[0]}:{left[0] + num * step}:{step}")
            del left[:num]
        else:
            parts.append(f"{left.pop(0)}")
    return " ".join(parts)


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks of such a text."""
    ranks: list[int] = []
    for part in text.split():
        match = _RANGE.fullmatch(part)
        if match is not None:
            first, stop, step = match.groups()
            ranks += range(int(first), int(stop), int(step)) if stop else [int(first)]
    return tuple(ranks)
