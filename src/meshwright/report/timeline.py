"""The timeline of traces as plain data, which ``timeline.js`` draws: zoomed, pointed at, for one rank or all ranks."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.ir.trace import Span, Trace
from meshwright.report import svg
from meshwright.report.run_drawing import LANES, begun_at_zero, lane_of

TICKS = 10**9
"""Number of ticks in the whole duration. Times are whole numbers of ticks."""
KINDS = ("f", "b", "i", "w", "rest", "wait", "comm")
"""CSS classes of spans; a span has the index of its class."""


class TimelineLane(msgspec.Struct, frozen=True):
    """The spans of one stream, by start. Lists of equal length: starts and lengths in ticks, indices into ``names`` and
    ``KINDS``, and bytes moved (empty if no span moves any)."""

    stream: str
    height: int
    starts: list[int]
    lengths: list[int]
    names: list[int]
    kinds: list[int]
    bytes: list[int]


class TimelineRow(msgspec.Struct, frozen=True):
    """A row of the picture: its label, its rank, and the indices of its lanes, from top to bottom."""

    label: str
    rank: int
    lanes: list[int]


class TimelineView(msgspec.Struct, frozen=True):
    """A choice of rows, with a name."""

    name: str
    rows: list[TimelineRow]


class Timeline(msgspec.Struct, frozen=True):
    """The lanes of all spans, and views over them. ``duration_s`` is the duration in seconds."""

    label: str
    duration_s: float
    names: list[str]
    lanes: list[TimelineLane]
    views: list[TimelineView]
    kinds: tuple[str, ...] = KINDS
    ticks: int = TICKS


def stages_timeline(trace: Trace, ranks: Sequence[int] = ()) -> Timeline:
    """The timeline of a trace with one rank for each pipeline stage. ``ranks`` has the stage of every rank of the
    layout; if it is given, a second view shows all ranks, which do what their stage does."""
    shifted = begun_at_zero(trace)
    drawing = _Lanes(shifted.duration_s)
    of_stage = {stage: drawing.add(shifted, stage) for stage in shifted.ranks}
    rows = [
        TimelineRow(f"stage {stage}", ranks.index(stage) if ranks else stage, of_stage[stage])
        for stage in shifted.ranks
    ]
    views = [TimelineView("one rank of each stage", rows)]
    if len(ranks) > len(rows):
        each = [TimelineRow(f"rank {rank}", rank, of_stage[stage]) for rank, stage in enumerate(ranks)]
        views.append(TimelineView(f"all {len(ranks):,} ranks", each))
    label = f"timeline of {len(rows)} stage{'s' * (len(rows) > 1)}"
    return Timeline(label, shifted.duration_s, drawing.names, drawing.lanes, views)


def ranks_timeline(traces: Mapping[str, Trace]) -> Timeline:
    """The timeline of every rank of traces by name, such as predicted and measured. The traces of a rank stand one
    below the other, each from its own time 0."""
    drawn = {name: begun_at_zero(trace) for name, trace in traces.items()}
    drawing = _Lanes(max((trace.duration_s for trace in drawn.values()), default=0.0))
    of_rank: dict[int, list[TimelineRow]] = {}
    for name, trace in drawn.items():
        spans: dict[int, list[Span]] = {}
        for span in trace.spans:
            spans.setdefault(span.rank, []).append(span)
        for rank, own in spans.items():
            lanes = drawing.add(msgspec.structs.replace(trace, spans=tuple(own), memory=()), rank)
            of_rank.setdefault(rank, []).append(TimelineRow(f"rank {rank} {name}", rank, lanes))
    rows = [row for rank in sorted(of_rank) for row in of_rank[rank]]
    views = [TimelineView(f"all {len(of_rank):,} ranks", rows)]
    if len(drawn) > 1:
        views += [
            TimelineView(f"only {name}", [row for row in rows if row.label.endswith(f" {name}")]) for name in drawn
        ]
    label = f"timeline of {len(of_rank)} rank{'s' * (len(of_rank) != 1)}, {' over '.join(drawn)}"
    return Timeline(label, drawing.duration_s, drawing.names, drawing.lanes, views)


class _Lanes:
    """Collects lanes, and numbers the names of their spans."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self.lanes: list[TimelineLane] = []
        self._numbers: dict[str, int] = {}
        self._scale = TICKS / duration_s if duration_s else 0.0

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def add(self, trace: Trace, rank: int) -> list[int]:
        """Add the lanes of a rank, and return their indices."""
        by_stream: dict[str, list[Span]] = {}
        for span in trace.spans:
            if span.rank == rank:
                by_stream.setdefault(lane_of(span.stream), []).append(span)
        indices = []
        for stream, height, style in LANES:
            spans = sorted(by_stream.get(stream, ()), key=lambda span: span.start_s)
            if spans:
                indices.append(len(self.lanes))
                self.lanes.append(self._lane(spans, stream, height, style))
        return indices

    def _lane(self, spans: Sequence[Span], stream: str, height: int, style: str) -> TimelineLane:
        numbers, scale = self._numbers, self._scale
        kinds = [KINDS.index(svg.kind(span.what) if stream == "compute" else style) for span in spans]
        return TimelineLane(
            stream=stream,
            height=height,
            starts=[round(span.start_s * scale) for span in spans],
            lengths=[round((span.end_s - span.start_s) * scale) for span in spans],
            names=[numbers.setdefault(span.what, len(numbers)) for span in spans],
            kinds=kinds,
            bytes=[span.bytes for span in spans] if any(span.bytes for span in spans) else [],
        )
