"""The journal of a job graph's run directory: a line for each start and end, written before anything depends on it."""

import os
from pathlib import Path

import msgspec

from meshwright.errors import FileFormatError
from meshwright.jobs.store import Stored


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="opened"):
    """A scheduler began to run the graph."""

    time_s: float
    carrier: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="started"):
    """A unit was started for the ``attempt``-th time in this directory."""

    time_s: float
    unit: str
    attempt: int
    node: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="finished"):
    """A vertex has finished. ``key`` is a digest of its definition, its code and its inputs."""

    time_s: float
    vertex: str
    attempt: int
    key: str
    start_s: float
    end_s: float
    node: str
    outputs: dict[str, Stored]


class Reused(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="reused"):
    """The outputs of a vertex are again those with which it finished before under this key."""

    time_s: float
    vertex: str
    key: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="failed"):
    """A unit has failed, or (``lost``) its worker died."""

    time_s: float
    unit: str
    attempt: int
    vertex: str
    problem: str
    lost: bool
    start_s: float
    end_s: float
    node: str


class Published(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="published"):
    """A directory is published at ``path`` from here on: later runs may replace what is there."""

    time_s: float
    vertex: str
    output: str
    path: str


Event = Opened | Started | Finished | Reused | Failed | Published


class Journal:
    """Appends events to ``journal.jsonl``, and reads those of earlier runs."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal.jsonl"
        self.events = self._read()
        self._file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def write(self, *events: Event) -> None:
        """Append events at once; they are on the disk when this returns."""
        os.write(self._file, b"".join(msgspec.json.encode(event) + b"\n" for event in events))
        os.fsync(self._file)
        self.events += events

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self) -> list[Event]:
        """The events of earlier runs. A last line that a killed scheduler has left unfinished is cut off."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self.path, len(whole))
        return list(read_events(whole, str(self.path)))


def read_events(data: bytes, where: str) -> tuple[Event, ...]:
    """The events of a journal's lines. Raise a FileFormatError that names the line if there is another one."""
    events = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            events.append(msgspec.json.decode(line, type=Event))
        except msgspec.MsgspecError as error:
            raise FileFormatError(
                f"is no event: {error}",
                where=f"{where}, line {number}",
                remedy="choose another directory, or remove it",
            ) from None
    return tuple(events)
