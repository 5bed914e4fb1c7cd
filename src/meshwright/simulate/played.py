"""A simulated step: the timeline of each class of ranks."""

from collections.abc import Iterable
from operator import itemgetter

from meshwright.ir.mesh import Mesh
from meshwright.ir.trace import MemorySample, Span, Trace
from meshwright.simulate.blocks import RanBlock
from meshwright.simulate.fold import Classes
from meshwright.simulate.spans import PlayedSpan


class RankTimeline:
    """The step of one rank. ``parts`` has its spans, with blocks in place of their spans. An entry of ``memory`` is
    (time, bytes that are held from this time on)."""

    def __init__(self, held_bytes: int) -> None:
        self.parts: list[PlayedSpan | RanBlock] = []
        self.memory: list[tuple[float, int]] = [(0.0, held_bytes)]
        self.end_s = 0.0
        self.waits_for = ""

    @property
    def spans(self) -> list[PlayedSpan]:
        """All spans."""
        parts = ([part] if isinstance(part, tuple) else part.spans() for part in self.parts)
        return [span for spans in parts for span in spans]


class PlayedStep:
    """A simulated step. ``classes.of`` maps a rank to the index of its timeline."""

    def __init__(self, mesh: Mesh, folded: Classes, timelines: tuple[RankTimeline, ...]) -> None:
        self.mesh, self.classes, self.timelines = mesh, folded, timelines

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step until the last rank ends."""
        return max(timeline.end_s for timeline in self.timelines)

    @property
    def halted(self) -> dict[int, str]:
        """Maps each rank that waits for ever, because another rank has died, to the name of the action that it waits
        for."""
        waits = {rank: self.timelines[class_id].waits_for for rank, class_id in enumerate(self.classes.of)}
        return {rank: waits_for for rank, waits_for in waits.items() if waits_for}

    def peak_bytes(self, rank: int) -> int:
        """The largest number of bytes that the rank holds at any time."""
        return max(size for _, size in self.timelines[self.classes.of[rank]].memory)

    def trace(self, ranks: Iterable[int] | None = None) -> Trace:
        """The trace of ``ranks`` (default: all). Raises a LayoutError if a rank is outside the mesh."""
        spans: list[Span] = []
        memory: list[MemorySample] = []
        known: dict[int, list[tuple[str, str, float, float, int, float]]] = {}
        for rank in range(self.mesh.world_size) if ranks is None else ranks:
            self.mesh.coordinates(rank)
            class_id = self.classes.of[rank]
            if class_id not in known:
                each = sorted(self.timelines[class_id].spans, key=itemgetter(2, 3))
                known[class_id] = [
                    (stream, str(what), start, end, size, flops) for stream, what, start, end, size, flops in each
                ]
            spans += [Span(rank, *span) for span in known[class_id]]
            memory += [MemorySample(rank, time_s, size) for time_s, size in self.timelines[class_id].memory]
        return Trace(source="simulated", spans=tuple(spans), memory=tuple(memory))
