"""A job graph with its schedule, predicted and measured: what pictures and the page of a job graph show."""

from typing import Literal

import msgspec

SpanEnd = Literal["finished", "failed", "lost"]


class JobSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a vertex on a node. Times are seconds since the first vertex started."""

    vertex: str
    node: str
    start_s: float
    end_s: float
    end: SpanEnd = "finished"


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A vertex in the page. ``level`` is the number of vertices on the longest path to it. Seconds are None if they are
    not known. ``state`` says whether it ran, was reused from an earlier run, failed, or waits."""

    name: str
    work: str
    needs: str
    level: int
    predicted_s: float | None = None
    measured_s: float | None = None
    runs: int = 0
    state: Literal["finished", "reused", "failed", "waiting"] = "waiting"
    critical: bool = False


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job graph, its predicted schedule, and the measured one of a run if it has run.

    ``edges`` are (writer, output, reader). ``predicted_s`` and ``measured_s`` are makespans. ``bound_s`` is a time that
    no schedule on these nodes beats. ``notes`` are sentences.
    """

    name: str
    rows: tuple[JobRow, ...]
    edges: tuple[tuple[str, str, str], ...]
    nodes: dict[str, str]
    predicted: tuple[JobSpan, ...] = ()
    measured: tuple[JobSpan, ...] = ()
    predicted_s: float | None = None
    measured_s: float | None = None
    critical_s: float = 0.0
    bound_s: float = 0.0
    critical: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
