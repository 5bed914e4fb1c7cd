"""Notes of what a rank does and when, taken by whoever does it while somebody records."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from meshwright.ir.trace import MemorySample, Span, Trace, TraceSource

COMPUTE, COMMUNICATION, WAIT = "compute", "communication", "wait"
"""Streams: computing, what is under way between ranks, and how long computing stood still for that."""

SAMPLE_EVERY_S = 0.002


class Recorder:
    """Spans and memory samples of one rank, since ``clear``; a note costs less than a microsecond.

    ``axes`` says which a process group (by name) is; ``memory`` tells the bytes that the rank holds now.
    """

    def __init__(self, axes: Mapping[str, str] | None = None, memory: Callable[[], int] | None = None) -> None:
        self._axes, self._memory = axes or {}, memory
        self._spans: list[tuple[str, object, float, float, int]] = []
        self._samples: list[tuple[float, int]] = []

    def clear(self) -> None:
        """Forget all notes."""
        self._spans.clear()
        self._samples.clear()

    def span(self, stream: str, what: object, start_s: float, end_s: float, num_bytes: int = 0) -> None:
        """Something that was done; ``what`` becomes text only where it is read."""
        self._spans.append((stream, what, start_s, end_s, num_bytes))

    def collective(self, what: str, group: str, times: tuple[float, float, float, float], num_bytes: int) -> None:
        """A collective of ``num_bytes``: when starting it began and was done, when waiting for it began and was done.

        It is under way from the first to the last; both calls keep the rank from computing.
        """
        name = f"{what} {self._axes.get(group, 'world')}"
        begun, started, waiting, done = times
        self._spans.append((COMMUNICATION, name, begun, done, num_bytes))
        self._spans.append((WAIT, name, begun, started, 0))
        if waiting > started:
            self._spans.append((WAIT, name, waiting, done, 0))

    def sample(self) -> None:
        """The memory that is held now, unless that was asked for just before (asking costs about 10 µs)."""
        now_s = time.perf_counter()
        if self._memory is not None and (not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S):
            self._samples.append((now_s, self._memory()))

    def trace(self, rank: int, source: TraceSource = "measured") -> Trace:
        """All notes, as those of rank number ``rank``, on its own clock (``time.perf_counter``)."""
        return Trace(
            source=source,
            spans=tuple(
                Span(rank, stream, str(what), start_s, end_s, size)
                for stream, what, start_s, end_s, size in self._spans
            ),
            memory=tuple(MemorySample(rank, time_s, size) for time_s, size in self._samples),
        )


_CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def current() -> Recorder | None:
    """Whoever records what this thread does, if anybody."""
    return _CURRENT.get()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Let what is done inside be noted (or, None, not)."""
    token = _CURRENT.set(recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


_PLACE: ContextVar[object] = ContextVar("place", default=None)


def place() -> object:
    """Where in a schedule this thread is, if anywhere; it becomes text only where it is read."""
    return _PLACE.get()


def be_at(where: object) -> None:
    """Say where in a schedule this thread is: collectives are named by it in errors."""
    _PLACE.set(where)


@contextmanager
def blocking(what: str, group: str, num_bytes: int) -> Iterator[None]:
    """Note a collective that is over when it returns."""
    begun = time.perf_counter()
    yield
    if (recorder := current()) is not None:
        done = time.perf_counter()
        recorder.collective(what, group, (begun, done, done, done), num_bytes)
