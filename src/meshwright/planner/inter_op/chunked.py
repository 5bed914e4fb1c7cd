"""Pipelines of unequal stages under schedules with several chunks for each rank.

They have the ranks of the fastest pipelines of unequal stages with one chunk. Layers are first divided so that all
ranks are equally busy, each with the prices of its own sizes and devices. Then borders are moved as long as the
simulated step becomes shorter.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text
from meshwright.planner.candidates import Space
from meshwright.planner.inter_op.balance import balanced, busiest
from meshwright.planner.inter_op.option import REFUSALS, Option, stage_layout
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.inter_op.recut import FAR, LEAST_GAIN, MOST_GAIN, moved
from meshwright.planner.inter_op.rounds import LONG, simulated_s
from meshwright.planner.inter_op.stage_homes import PlacedPipeline, StageHomes
from meshwright.planner.inter_op.stage_prices import Floats
from meshwright.planner.time_limit import TimeLimit

AKIN = 3
"""The number of fastest divisions of the ranks that get several chunks, and the number of layouts that are returned."""
MOST_SIMULATED = 5_000
"""The limit on the work of a search: the number of micro-batches that simulated stages compute."""


class ChunkedStages:
    """Finds the fastest pipelines of ``space`` with unequal stages and several chunks for each rank."""

    def __init__(self, homes: StageHomes, batch_size: int, space: Space, clock: TimeLimit) -> None:
        self.homes, self.batch_size, self.space, self.clock = homes, batch_size, space, clock
        self.simulated = 0

    def options(self, fastest: Sequence[Option]) -> list[Option]:
        """The ``AKIN`` fastest pipelines that take less time than the first of ``fastest`` by more than ``ALIKE``.

        ``fastest`` are known options, the fastest first. The pipelines have the ranks of the ``AKIN`` fastest of those
        with unequal stages.
        """
        best_s = self._clearly_less_s(fastest[0])
        most_s = MOST_GAIN * best_s
        every = [placed for layout in self._layouts(fastest) if (placed := self._placed(layout, most_s)) is not None]
        every = sorted((placed for placed in every if placed.step_s < most_s), key=lambda placed: placed.step_s)
        faster = [placed for placed in map(self._improved, every) if placed.step_s < best_s]
        return [self.homes.option(placed) for placed in sorted(faster, key=lambda placed: placed.step_s)[:AKIN]]

    def _clearly_less_s(self, best: Option) -> float:
        """The longest time of a step, in seconds, that counts as clearly shorter than the step of ``best``: shorter by
        ``ALIKE``."""
        return min(best.likely_s, simulated_s(best.layout, best.work, self.homes.cluster)) / (1 + ALIKE)

    def _layouts(self, fastest: Sequence[Option]) -> Iterator[Layout]:
        """Layouts with several chunks whose layers are priced. They have the sizes and the ZeRO stages of options."""
        shapes: dict[str, tuple[Layout, dict[int, None]]] = {}
        for layout in (option.layout for option in fastest if option.layout.stage_sizes):
            shape = self.space.least(Layout(pp=layout.pp, stage_sizes=layout.stage_sizes))
            shapes.setdefault(layout_text(shape), (shape, {}))[1][layout.zero] = None
        for shape, zeros in itertools.islice(shapes.values(), AKIN):
            for run in self.space.runs(shape, self.batch_size):
                if run.chunks > 1 and run.pipeline.num_stages <= len(self.homes.of_all.chain.layers):
                    for layout in (msgspec.structs.replace(run, zero=zero) for zero in zeros):
                        if all(self._is_priced(layout, rank) for rank in range(layout.pp)):
                            yield layout

    def _is_priced(self, layout: Layout, rank: int) -> bool:
        own = stage_layout(layout, rank, layout.recompute)
        divides = self.batch_size % (own.dp * own.microbatches) == 0
        return divides and self.homes.of(layout.mesh().stage_ranks(rank)).prices.knows(own)

    def _placed(self, layout: Layout, most_s: float) -> PlacedPipeline | None:
        """The pipeline of a layout whose ranks are equally busy. None if one of them is busy for more than ``most_s``,
        or if the pipeline does not fit in memory."""
        if self._ended:
            return None
        try:
            places, busy = self._busy(layout)
            stages = balanced(proportional(busy), places, busy)
            if busiest(stages, places, busy) > most_s:
                return None
            self._count(layout)
            return self.homes.lightest(layout, stages)
        except REFUSALS:
            return None

    def _busy(self, layout: Layout) -> tuple[list[int], list[Floats]]:
        """The pipeline rank of each stage, and the busy times of all layers on this rank, as ``balanced`` takes
        them."""
        mesh, kind = layout.mesh(), layout.recompute
        each = [
            self.homes.of(mesh.stage_ranks(rank)).busy_s(layout, self.homes.works(layout, rank, kind))
            for rank in range(layout.pp)
        ]
        places = list(map(layout.pipeline.rank_of, range(layout.pipeline.num_stages)))
        return places, [each[rank] for rank in places]

    def _improved(self, placed: PlacedPipeline) -> PlacedPipeline:
        """The pipeline after moves of borders by one layer, and by more layers where that does not help. Moves that
        keep a rank busy for longer than the step are not simulated."""
        layout, distances, (places, busy) = placed.layout, list(FAR), self._busy(placed.layout)
        while distances:
            others = []
            for stages in moved(placed.stages, distances[:1]):
                if self._ended:
                    return placed
                if busiest(stages, places, busy) < placed.step_s:
                    self._count(layout)
                    if (other := self.homes.placed(layout, stages, placed.recompute)) is not None:
                        others.append(other)
            best = min(others, key=lambda other: other.step_s, default=placed)
            if best.step_s < (1 - LEAST_GAIN) * placed.step_s:
                placed, distances = best, list(FAR)
            else:
                distances.pop(0)
        return placed

    @property
    def _ended(self) -> bool:
        return self.clock.over or self.simulated >= MOST_SIMULATED

    def _count(self, layout: Layout) -> None:
        """Count the micro-batches of a simulation."""
        self.simulated += layout.pipeline.num_stages * min(layout.microbatches, LONG * layout.pp)


def proportional(busy: Sequence[Floats]) -> list[int]:
    """The first layer of each stage if layers are divided in proportion to the speeds of the stages. ``busy`` is that
    of ``balanced``."""
    before = np.mean([seconds[0] / seconds[0, -1] for seconds in busy], axis=0)  # [i]: the part of layers 0 to i
    speeds = np.array([1 / seconds[0, -1] for seconds in busy])
    firsts, count = [0], len(before)
    for number, part in enumerate(np.cumsum(speeds)[:-1] / speeds.sum(), start=1):
        nearest = int(np.abs(before - part).argmin()) + 1
        firsts.append(min(max(nearest, firsts[-1] + 1), count - len(busy) + number))
    return firsts
