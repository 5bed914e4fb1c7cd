"""The trace: the work and memory of every rank over time, measured in a run or predicted by the simulator."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0)]
TraceSource = Literal["measured", "simulated", "emulated"]
COPY = "copy"
"""The stream of copies between host and device. A device may copy a batch while it still runs the step before."""


Interval = tuple[float, float]
"""The start and the end of an interval, in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as sorted intervals that neither overlap nor touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the lengths of intervals, in seconds."""
    return sum(end - start for start, end in intervals)


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of work of a rank, on one of the rank's streams (``compute``, ``communication``, ...).

    ``what`` names the work: an action of the schedule, or a collective with its label. ``bytes`` is the number of bytes
    moved during the span. ``flops`` is the number of FLOPs computed. Times are seconds on a clock that all ranks of the
    trace share.

    Raises:
        ValueError: the span ends before it starts, or a time is not finite.
    """

    rank: _Count
    stream: str
    what: str
    start_s: float
    end_s: float
    bytes: _Count = 0
    flops: float = 0.0

    def __post_init__(self) -> None:
        if not -math.inf < self.start_s <= self.end_s < math.inf:
            raise ValueError(f"span `{self.what}` lasts from {self.start_s} s to {self.end_s} s")

    @property
    def duration_s(self) -> float:
        """The seconds from start to end."""
        return self.end_s - self.start_s


class MemorySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes of memory that a rank held at the time ``time_s``."""

    rank: _Count
    time_s: float
    bytes: _Count


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Spans and memory samples of all ranks.

    ``source`` is ``measured`` (from a run), ``simulated`` (from the simulator) or ``emulated`` (from a run that waits
    for the predicted time instead of computing). ``plan`` is the digest of the plan that ran (``Plan.digest``); empty
    if there is no plan."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    source: TraceSource
    plan: str = ""
    spans: tuple[Span, ...] = ()
    memory: tuple[MemorySample, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with a span or a memory sample, in rising order."""
        return tuple(sorted({span.rank for span in self.spans} | {sample.rank for sample in self.memory}))

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of all streams, in the order of their first span."""
        return tuple(dict.fromkeys(span.stream for span in self.spans))

    @property
    def duration_s(self) -> float:
        """The seconds from ``start_s`` to the end of the last span; 0 without spans."""
        return max((span.end_s for span in self.spans), default=0.0) - self.start_s

    @property
    def start_s(self) -> float:
        """The start of the first span that is no copy; 0 without spans. Copies may begin before the step."""
        spans = [span for span in self.spans if span.stream != COPY] or self.spans
        return min((span.start_s for span in spans), default=0.0)

    def shifted(self, seconds: float) -> "Trace":
        """The trace with all times increased by ``seconds``, as on a clock that is ahead."""
        replace = msgspec.structs.replace
        return replace(
            self,
            spans=tuple(
                replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds) for span in self.spans
            ),
            memory=tuple(replace(sample, time_s=sample.time_s + seconds) for sample in self.memory),
        )

    def above(self, held_bytes: Mapping[int, int]) -> "Trace":
        """The trace with ``held_bytes`` of each rank (0 without an entry) subtracted from its memory samples.

        Samples stay at 0 or above; negative bytes add. If ``held_bytes`` is the memory of the process and its
        libraries, the result has only the model's memory, which can be compared with a prediction."""
        return msgspec.structs.replace(
            self,
            memory=tuple(
                msgspec.structs.replace(sample, bytes=max(0, sample.bytes - held_bytes.get(sample.rank, 0)))
                for sample in self.memory
            ),
        )

    def of_rank(self, rank: int) -> "Trace":
        """The spans and memory samples of one rank, on the same clock."""
        return msgspec.structs.replace(
            self,
            spans=tuple(span for span in self.spans if span.rank == rank),
            memory=tuple(sample for sample in self.memory if sample.rank == rank),
        )

    def busy_s(self, rank: int, stream: str) -> float:
        """The seconds for which a stream of the rank is busy; overlapping spans count once."""
        spans = (span for span in self.spans if span.rank == rank and span.stream == stream)
        return length(union((span.start_s, span.end_s) for span in spans))

    def peak_bytes(self, rank: int) -> int:
        """The largest memory sample of this rank; 0 without samples."""
        return max((sample.bytes for sample in self.memory if sample.rank == rank), default=0)


def merge(traces: Sequence[Trace]) -> Trace:
    """Join traces of different ranks, whose clocks agree; raises a ValueError if their sources or plans differ."""
    sources = {trace.source for trace in traces}
    if len(sources) != 1:
        raise ValueError(f"traces of {', '.join(sorted(sources)) or 'nothing'} cannot be merged")
    plans = {trace.plan for trace in traces}
    if len(plans) != 1:
        raise ValueError(f"traces of {len(plans)} different plans cannot be merged")
    return Trace(
        source=traces[0].source,
        plan=traces[0].plan,
        spans=tuple(span for trace in traces for span in trace.spans),
        memory=tuple(sample for trace in traces for sample in trace.memory),
    )
