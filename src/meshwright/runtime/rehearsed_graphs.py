"""Graphs of a device that is not there: a capture notes what a device would refuse, and a replay notes what it would
start."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from meshwright.runtime.cuda_graphs import Graphs, KernelGraph
from meshwright.runtime.rehearsal import Rehearsal
from meshwright.schedules.rendezvous import Awaited, StartedOperation

T = TypeVar("T")


class RehearsedGraphs(Graphs):
    """Stands in for ``CudaGraphs``. Refused within a capture are: waits of the host, copies on another stream, messages
    to other ranks, and collectives that another phase ends."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self._rehearsal = rehearsal

    def prepare(self) -> None:
        """Nothing: no memory is kept for other uses."""

    def pool(self) -> Any:
        """A new pool, whose bytes count as held."""
        return self._rehearsal.memory.pool()

    def capture(self, work: Callable[[], T], pool: Any) -> tuple[KernelGraph, T]:
        """Run ``work``, and note what a device would refuse."""
        rehearsal = self._rehearsal
        with rehearsal.capturing(pool) as stream:
            result = work()
        begun = {entry.number: entry for entry in stream if isinstance(entry, StartedOperation)}
        for entry in stream:
            if isinstance(entry, Awaited) and begun.pop(entry.number, None) is None:
                rehearsal.note("error", "a graph waits for a collective that began outside of it")
        for left in begun.values():
            rehearsal.note("error", f"a graph ends before {left.label}")
        return _Rehearsed(rehearsal, stream), result


class _Rehearsed:
    def __init__(self, rehearsal: Rehearsal, stream: list[StartedOperation | Awaited]) -> None:
        self._rehearsal, self._stream = rehearsal, stream

    def replay(self) -> None:
        numbers: dict[int, int] = {}
        for entry in self._stream:
            if isinstance(entry, StartedOperation):
                numbers[entry.number] = self._rehearsal.number()
            self._rehearsal.started(msgspec.structs.replace(entry, number=numbers.get(entry.number, entry.number)))
