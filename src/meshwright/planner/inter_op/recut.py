"""Improve the cut of an option: move the borders of stages as long as the step becomes shorter.

The dynamic program of stages judges a cut by its slowest stage and by the sum of all stages. With few micro-batches,
this is inaccurate: the order of actions decides when a rank waits. So other cuts are tried, by the closed form of the
step, with the work of layers.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from meshwright.cost.closed_form import Predicted
from meshwright.cost.occupancy import RankMemory, peak_memory
from meshwright.cost.work import StepWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import Layout
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import periods
from meshwright.planner.inter_op.works import LayerWorks

MOST_GAIN = 1.1
"""A new cut is assumed to make a step at most this many times as fast. (The most seen is 1.15, for slow layouts.)"""
MOST_PASSES = 16
"""The largest product of stages and micro-batches for which other cuts are tried. Beyond it, the dynamic program is
accurate enough, because steps are long, and many predictions would take long."""
FAR = (1, 2, 4)
"""The numbers of layers by which a border is moved."""
LEAST_GAIN = 1e-3
"""The smallest relative gain for which a border is moved."""


_Timed = tuple[Predicted, StepWork, Sequence[range]]
"""The closed form of a step, its work, and the layers of its stages."""


@dataclass(frozen=True)
class Recut:
    """Improves the cut of an option. ``works`` has, for each stage, the work of the layers on the devices of this
    stage. ``limits`` has the memory of each pipeline rank."""

    pipelines: Pipelines
    cluster: Cluster
    option: Option
    works: Sequence[LayerWorks]
    limits: Sequence[float]

    @property
    def before(self) -> list[range]:
        """The layers of each stage before the cut is changed."""
        return self.pipelines.chain.stages_of(self.option.firsts)

    def at(self, stages: Sequence[range]) -> Option | None:
        """The option with these stages; None if it does not fit in memory."""
        fitting = self._fitting([self._timed(stages)])
        return self._option_of(*fitting) if fitting is not None else None

    def best(self, stages: Sequence[range]) -> Option | None:
        """The best option that can be reached from these stages. Each round makes the single move that
        shortens the step the most. None if these stages do not fit in memory, and no single move makes them fit."""
        best = self._fitting([self._timed(stages)])
        while len(stages) * self.option.layout.microbatches <= MOST_PASSES:
            fastest = self._fitting(sorted(map(self._timed, moved(stages)), key=lambda each: each[0].step_s))
            if fastest is None:
                break
            if best is not None and fastest[0].step_s > (1 - LEAST_GAIN) * best[0].step_s:
                break
            best, stages = fastest, fastest[2]
        return self._option_of(*best) if best is not None else None

    def _timed(self, stages: Sequence[range]) -> _Timed:
        layout = self.option.layout
        work = self.pipelines.assembled(layout, stages, self.works)
        return self.pipelines.predicted(layout, work, self.cluster), work, stages

    def _fitting(self, candidates: Iterable[_Timed]) -> _Timed | None:
        """The first of several cuts that fits in memory."""
        for timed in candidates:
            memory = self._memory(timed[1])
            if all(rank.peak_bytes <= limit for rank, limit in zip(memory, self.limits, strict=True)):
                return timed
        return None

    def _memory(self, work: StepWork) -> tuple[RankMemory, ...]:
        return peak_memory(work, periods(self.option.layout)[0])

    def _option_of(self, predicted: Predicted, work: StepWork, stages: Sequence[range]) -> Option:
        return msgspec.structs.replace(
            self.option,
            firsts=self.pipelines.chain.firsts_of(stages),
            work=work,
            predicted=predicted,
            step_s=predicted.step_s,
            memory=max(self._memory(work), key=lambda rank: rank.peak_bytes),
        )


def moved(stages: Sequence[range], far: Sequence[int] = FAR) -> Iterator[list[range]]:
    """All cuts in which one border, or two neighbouring borders together, are moved by some layers up or down.

    For a distance of one layer:

    0 1 2 | 3 4 | 5      becomes      0 1 | 2 3 4 | 5      0 1 2 3 | 4 | 5      0 1 2 | 3 | 4 5      0 1 | 2 3 | 4 5
    """
    firsts = [stage.start for stage in stages]
    for together, distance in itertools.product((1, 2), far):
        for number, way in itertools.product(range(1, len(stages) - together + 1), (-distance, distance)):
            ends = [*firsts, stages[-1].stop]
            for border in range(number, number + together):
                ends[border] += way
            if all(first < end for first, end in itertools.pairwise(ends)):
                yield [range(first, end) for first, end in itertools.pairwise(ends)]


def may_recut(layout: Layout, memory_bytes: float | None = None) -> bool:
    """Whether other cuts of a layout are tried. Strategies that were chosen under a memory limit (``memory_bytes``)
    differ from those of the priced layers, so their cuts are not."""
    few = layout.pp * layout.chunks * layout.microbatches <= MOST_PASSES
    return layout.pp > 1 and not layout.stage_sizes and memory_bytes is None and few


def recut(option: Option, pipelines: Pipelines) -> Option:
    """The option with the best borders of stages that were found."""
    layout = option.layout
    works = list(map(pipelines.prices.of, option.stage_layouts))
    anew = Recut(pipelines, pipelines.cluster, option, works, [pipelines.limit_bytes] * layout.pp)
    return anew.best(anew.before) or option
