"""Records what a rank does and when. While a recorder is set, the code that does the work reports to the recorder."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from meshwright.ir.trace import MemorySample, Span, Trace, TraceSource

COMPUTE, COMMUNICATION, WAIT, DATA = "compute", "communication", "wait", "data"
"""The streams of a trace: computation, communication between ranks, waits of computation for communication, and waits
of the step for its data."""

SAMPLE_EVERY_S = 0.002


class SpanRecorder:
    """Collects the spans and memory samples of one rank since ``clear``. Recording a span takes under 1 µs.

    ``axes`` maps the name of a process group to its axis. ``memory`` returns the bytes that the rank holds now.
    """

    def __init__(self, axes: Mapping[str, str] | None = None, memory: Callable[[], int] | None = None) -> None:
        self._axes, self._memory = axes or {}, memory
        self._spans: list[tuple[str, object, float, float, int]] = []
        self._samples: list[tuple[float, int]] = []
        self._data: tuple[str, object, float, float, int] | None = None

    def clear(self) -> None:
        """Discard all spans and samples."""
        self._spans.clear()
        self._samples.clear()
        if self._data is not None:
            self._spans.append(self._data)
            self._data = None

    def waited_for_data(self, start_s: float, end_s: float) -> None:
        """Record that the step that comes next waited for its data. Its ``clear`` keeps this span."""
        self._data = (DATA, "waiting for data", start_s, end_s, 0)

    def span(self, stream: str, what: object, start_s: float, end_s: float, num_bytes: int = 0) -> None:
        """Record work that was done. ``what`` describes the work; it becomes text only when the trace is made."""
        self._spans.append((stream, what, start_s, end_s, num_bytes))

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

    def sample(self) -> None:
        """Record the memory held now (in about 10 µs), unless the last sample is younger than ``SAMPLE_EVERY_S``."""
        now_s = time.perf_counter()
        if self._memory is not None and (not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S):
            self._samples.append((now_s, self._memory()))

    def trace(self, rank: int, source: TraceSource = "measured") -> Trace:
        """The trace of rank ``rank``: all spans and samples, on the rank's own clock (``time.perf_counter``)."""
        return Trace(
            source=source,
            spans=tuple(
                Span(rank, stream, str(what), start_s, end_s, size)
                for stream, what, start_s, end_s, size in self._spans
            ),
            memory=tuple(MemorySample(rank, time_s, size) for time_s, size in self._samples),
        )


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
