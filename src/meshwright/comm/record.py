"""Records what a rank does and when. While a recorder is set, the code that does the work reports to the recorder."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from meshwright.ir.trace import MemorySample, Span, Trace, TraceSource

COMPUTE, COMMUNICATION, WAIT, DATA = "compute", "communication", "wait", "data"
"""The streams of a trace: computation, communication between ranks, waits of computation for communication, and waits
of the step for its data."""

SAMPLE_EVERY_S = 0.002


class DeviceTimeline(Protocol):
    """The clock of a device that runs behind the host."""

    def mark(self) -> object:
        """Mark the end of the work that has been launched so far."""

    def times_s(self, marks: Sequence[object]) -> list[float]:
        """When the device reached these marks, on the host's clock (``time.perf_counter``). Waits for the device."""


class SpanRecorder:
    """Collects the spans and memory samples of one rank since ``clear``. Recording a span takes under 1 µs on a CPU.

    ``axes`` maps the name of a process group to its axis. ``memory`` returns the bytes that the rank holds now. With a
    ``timeline``, the trace has the times at which the device ran what the host had launched:

        host     launch F0 | launch F1 |                 a mark at the end of each span
        device             | F0                | F1      its time there

    A host time between two marks becomes a device time between the times of the marks, in proportion.
    """

    def __init__(
        self,
        axes: Mapping[str, str] | None = None,
        memory: Callable[[], int] | None = None,
        timeline: DeviceTimeline | None = None,
    ) -> None:
        self._axes, self._memory, self._timeline = axes or {}, memory, timeline
        self._marks: list[tuple[float, object]] = []
        self._spans: list[tuple[str, object, float, float, int]] = []
        self._samples: list[tuple[float, int]] = []
        self._data: tuple[str, object, float, float, int] | None = None

    def clear(self) -> None:
        """Discard all spans and samples."""
        self._spans.clear()
        self._samples.clear()
        self._marks.clear()
        self.mark()
        if self._data is not None:
            self._spans.append(self._data)
            self._data = None

    def mark(self) -> None:
        """Mark the work that has been launched so far, if the device runs behind the host."""
        if self._timeline is not None:
            self._marks.append((time.perf_counter(), self._timeline.mark()))

    def waited_for_data(self, start_s: float, end_s: float) -> None:
        """Record that the step that comes next waited for its data. Its ``clear`` keeps this span."""
        self._data = (DATA, "waiting for data", start_s, end_s, 0)

    def span(self, stream: str, what: object, start_s: float, end_s: float, num_bytes: int = 0) -> None:
        """Record work that was done. ``what`` describes the work; it becomes text only when the trace is made."""
        self._spans.append((stream, what, start_s, end_s, num_bytes))
        self.mark()

    def collective(self, what: str, group: str, times: tuple[float, float, float, float], num_bytes: int) -> None:
        """Record a collective of ``num_bytes``. ``times``: begin and end of the start call, begin and end of the wait
        call.

        The collective is under way from the first time to the last. During both calls the rank does not compute.
        """
        name = f"{what} {self._axes.get(group, 'world')}"
        begun, started, waiting, done = times
        self._spans.append((COMMUNICATION, name, begun, done, num_bytes))
        self._spans.append((WAIT, name, begun, started, 0))
        if waiting > started:
            self._spans.append((WAIT, name, waiting, done, 0))
        self.mark()

    def sample(self) -> None:
        """Record the memory held now (in about 10 µs), unless the last sample is younger than ``SAMPLE_EVERY_S``."""
        now_s = time.perf_counter()
        if self._memory is not None and (not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S):
            self._samples.append((now_s, self._memory()))

    def trace(self, rank: int, source: TraceSource = "measured") -> Trace:
        """The trace of rank ``rank``: all spans and samples, on the rank's own clock (``time.perf_counter``)."""
        at = self._on_device()
        return Trace(
            source=source,
            spans=tuple(
                Span(rank, stream, str(what), at(start_s), at(end_s), size)
                if stream != DATA
                else Span(rank, stream, str(what), start_s, end_s, size)
                for stream, what, start_s, end_s, size in self._spans
            ),
            memory=tuple(MemorySample(rank, at(time_s), size) for time_s, size in self._samples),
        )

    def _on_device(self) -> Callable[[float], float]:
        """A function from the time at which the host launched work to the time at which the device reached it."""
        if self._timeline is None or not self._marks:
            return lambda host_s: host_s
        hosts = [host_s for host_s, _ in self._marks]
        there = self._timeline.times_s([mark for _, mark in self._marks])

        def at(host_s: float) -> float:
            index = bisect_left(hosts, host_s)
            if index in (0, len(hosts)):  # outside of all marks: as far from the nearest as on the host
                nearest = min(index, len(hosts) - 1)
                return there[nearest] + host_s - hosts[nearest]
            before, after = hosts[index - 1], hosts[index]
            share = (host_s - before) / (after - before) if after > before else 1.0
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
def blocking(what: str, group: str, num_bytes: int) -> Iterator[None]:
    """Record a collective that starts and ends inside the ``with`` block."""
    begun = time.perf_counter()
    yield
    if (recorder := current()) is not None:
        done = time.perf_counter()
        recorder.collective(what, group, (begun, done, done, done), num_bytes)
