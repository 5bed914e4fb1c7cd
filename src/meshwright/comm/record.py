"""Records what a rank does and when. While a recorder is set, the code that does the work reports to the recorder."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from meshwright.ir.trace import COPY, MemorySample, Span, Trace, TraceSource

COMPUTE, COMMUNICATION, WAIT, DATA = "compute", "communication", "wait", "data"
"""The streams of a trace besides ``COPY``: computation, communication between ranks, waits of computation for
communication, and waits of the step for its data."""

SAMPLE_EVERY_S = 0.002


class DeviceOperation(Protocol):
    """An operation of torch.distributed that has been started."""

    def block_current_stream(self) -> None:
        """Let later work on the current stream of the device wait for the operation; the host goes on.

        After the first such wait on any stream, NCCL no longer keeps the operation's tensors. So the object that stands
        for the operation (``UnderWay``) must keep every input and temporary tensor until the kernels wait."""


class DeviceTimeline(Protocol):
    """The clock of a device that runs behind the host."""

    def mark(self) -> object:
        """Mark the end of the work that has been launched so far on the current stream."""

    def mark_end(self, lane: str, operations: Sequence[DeviceOperation]) -> object:
        """Mark the end of operations that have been started, without a wait of the current stream. Operations of the
        same ``lane`` run one after the other."""

    def times_s(self, marks: Sequence[object]) -> list[float]:
        """When the device reached these marks, on the host's clock (``time.perf_counter``). Waits for the device."""


class Reached(NamedTuple):
    """The time at which the device has reached all of these marks."""

    marks: tuple[object, ...]


Moment = float | Reached
"""A time of the host, or one of the device."""


class DeviceSpan(NamedTuple):
    """The begin and the end of operations on a device's stream for communication."""

    begins: Reached
    ends: Reached


class CollectiveTimes(NamedTuple):
    """When a collective was under way, and the intervals in which the rank did not compute because of it."""

    begins: Moment
    ends: Moment
    waits: tuple[tuple[Moment, Moment], ...]


class SpanRecorder:
    """Collects the spans and memory samples of one rank since ``clear``. Recording a span takes under 1 µs on a CPU.

    ``axes`` maps the name of a process group to its axis. ``memory`` returns the bytes that the rank holds now. With a
    ``timeline``, the trace has the times at which the device ran what the host had launched:

        host            launch F0 | start a | launch F1 | wait a |   a mark at the end of each span
        kernels                   | F0          | F1 . . |  wait |   its time there
        communication                           | a              |   marks where it may begin, and at its end

    A host time between two marks of the kernels becomes a device time between the times of the marks, in proportion.
    A collective begins on the device when the kernels that were launched before it have ended, and the collective
    before it in the same group. Copies, and the ends of collectives and messages, have marks on streams of their own.
    """

    def __init__(
        self,
        axes: Mapping[str, str] | None = None,
        memory: Callable[[], int] | None = None,
        timeline: DeviceTimeline | None = None,
    ) -> None:
        self._axes, self._memory, self._timeline = axes or {}, memory, timeline
        self._marks: list[tuple[float, object]] = []  # of the kernels: when they were launched, and the mark
        self._lanes: dict[str, object] = {}  # the last mark of each lane
        self._messages: list[DeviceSpan] = []
        self._spans: list[tuple[str, object, Moment, Moment, int]] = []
        self._samples: list[tuple[float, int]] = []
        self._data: tuple[float, float] | None = None  # the wait for data of the step that comes next
        self._waited: tuple[float, float] | None = None  # and that of this step

    def clear(self) -> None:
        """Discard all spans and samples."""
        for kept in (self._spans, self._samples, self._marks, self._messages):
            kept.clear()
        self._lanes.clear()
        self.mark()
        self._waited, self._data = self._data, None

    def moment(self, host_s: float) -> Moment:
        """The host's time ``host_s``, which is now. If the device runs behind the host: the end of the kernels that
        have been launched so far."""
        if self._timeline is None:
            return host_s
        mark = self._timeline.mark()
        self._marks.append((host_s, mark))
        return Reached((mark,))

    def mark(self) -> None:
        """Mark the work that has been launched so far, if the device runs behind the host."""
        if self._timeline is not None:
            self.moment(time.perf_counter())

    def started(self, lane: str, operations: Iterable[DeviceOperation]) -> DeviceSpan | None:
        """Note operations that have just been started on the device's stream for the communication of ``lane``. None if
        the device does not run behind the host, or there are no operations."""
        if self._timeline is None or not (under_way := list(operations)):
            return None
        launched = self.moment(time.perf_counter())
        assert isinstance(launched, Reached)
        before = (self._lanes[lane],) if lane in self._lanes else ()
        end = self._lanes[lane] = self._timeline.mark_end(lane, under_way)
        return DeviceSpan(Reached((*launched.marks, *before)), Reached((end,)))

    def message(self, lane: str, operation: DeviceOperation) -> None:
        """Note a message that has just been started. The span that is recorded next names it."""
        if (span := self.started(lane, (operation,))) is not None:
            self._messages.append(span)

    @contextmanager
    def copy(self, what: str, num_bytes: int) -> Iterator[None]:
        """Record copies that are started inside the block, on the current stream of a device that runs behind the
        host."""
        if self._timeline is None:
            yield
            return
        begins = self._timeline.mark()
        yield
        self._spans.append((COPY, what, Reached((begins,)), Reached((self._timeline.mark(),)), num_bytes))

    def waited_for_data(self, start_s: float, end_s: float) -> None:
        """Record that the step that comes next waited for its data. Its ``clear`` keeps this span."""
        self._data = start_s, end_s

    def span(self, stream: str, what: object, start: Moment, end: Moment, num_bytes: int = 0) -> None:
        """Record work that was done. ``what`` describes the work; it becomes text only when the trace is made. Messages
        that were started since the span before become a span of communication with the same description."""
        if self._messages:
            ends = tuple(mark for message in self._messages for mark in message.ends.marks)
            self._spans.append((COMMUNICATION, what, self._messages[0].begins, Reached(ends), num_bytes))
        if stream != COMMUNICATION or not self._messages:
            self._spans.append((stream, what, start, end, num_bytes))
        self._messages.clear()
        self.mark()

    def collective(self, what: str, group: str, times: CollectiveTimes, num_bytes: int) -> None:
        """Record a collective of ``num_bytes``."""
        name = f"{what} {self._axes.get(group, 'world')}"
        self._spans.append((COMMUNICATION, name, times.begins, times.ends, num_bytes))
        self._spans += [(WAIT, name, start, end, 0) for start, end in times.waits]

    def sample(self) -> None:
        """Record the memory held now (in about 10 µs), unless the last sample is younger than ``SAMPLE_EVERY_S``."""
        now_s = time.perf_counter()
        if self._memory is not None and (not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S):
            self._samples.append((now_s, self._memory()))

    def trace(self, rank: int, source: TraceSource = "measured") -> Trace:
        """The trace of rank ``rank``: all spans and samples, on the rank's own clock (``time.perf_counter``)."""
        at = self._on_device()
        spans = [Span(rank, DATA, "waiting for data", *self._waited)] if self._waited is not None else []
        for stream, what, start, end, size in self._spans:
            start_s, end_s = at(start), at(end)
            spans.append(Span(rank, stream, str(what), start_s, max(start_s, end_s), size))  # clocks of devices round
        memory = tuple(MemorySample(rank, at(time_s), size) for time_s, size in self._samples)
        return Trace(source=source, spans=tuple(spans), memory=memory)

    def _on_device(self) -> Callable[[Moment], float]:
        """A function from a moment to its time: that at which the device reached the work that the host launched."""
        marks = [mark for _, mark in self._marks]
        moments = (moment for _, _, start, end, _ in self._spans for moment in (start, end))
        marks += [mark for moment in moments if isinstance(moment, Reached) for mark in moment.marks]
        times = self._timeline.times_s(marks) if self._timeline is not None else []
        reached = {id(mark): time_s for mark, time_s in zip(marks, times, strict=True)}
        hosts, there = [host_s for host_s, _ in self._marks], times[: len(self._marks)]

        def at(moment: Moment) -> float:
            if isinstance(moment, Reached):
                return max(reached[id(mark)] for mark in moment.marks)
            if not hosts:
                return moment
            index = bisect_left(hosts, moment)
            if index in (0, len(hosts)):  # outside of all marks: as far from the nearest as on the host
                nearest = min(index, len(hosts) - 1)
                return there[nearest] + moment - hosts[nearest]
            before, after = hosts[index - 1], hosts[index]
            share = (moment - before) / (after - before) if after > before else 1.0
            return there[index - 1] + share * (there[index] - there[index - 1])

        return at


_CURRENT: ContextVar[SpanRecorder | None] = ContextVar("recorder", default=None)


def current() -> SpanRecorder | None:
    """The recorder of this thread, or None."""
    return _CURRENT.get()


@contextmanager
def recording(recorder: SpanRecorder | None) -> Iterator[None]:
    """Record the work inside the block with ``recorder``; with None, record nothing."""
    token = _CURRENT.set(recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


_PLACE: ContextVar[object] = ContextVar("place", default=None)


def place() -> object:
    """The place in the schedule where this thread is, or None. Errors convert the place to text."""
    return _PLACE.get()


def be_at(where: object) -> None:
    """Set the place in the schedule where this thread is. Errors about a collective name this place."""
    _PLACE.set(where)


@contextmanager
def blocking(what: str, group: str, num_bytes: int, *, computes: bool = False) -> Iterator[None]:
    """Record a collective that starts and ends inside the ``with`` block. ``computes``: the rank computes meanwhile, so
    that it does not count as waiting."""
    recorder, begun = current(), time.perf_counter()
    begins = recorder.moment(begun) if recorder is not None else begun
    yield
    if recorder is not None:
        ends = recorder.moment(time.perf_counter())
        waits = () if computes else ((begins, ends),)
        recorder.collective(what, group, CollectiveTimes(begins, ends, waits), num_bytes)


@contextmanager
def copying(what: str, num_bytes: int) -> Iterator[None]:
    """Record copies between host and device that start inside the ``with`` block, on the device's current stream."""
    if (recorder := current()) is None:
        yield
        return
    with recorder.copy(what, num_bytes):
        yield
