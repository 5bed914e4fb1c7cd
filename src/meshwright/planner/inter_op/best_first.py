"""Search pipelines of few ranks whose stages may all differ, in the order of lower bounds.

The dynamic program of ``stages`` minimizes a sum of two terms, which is not always the order of simulated steps. On few
ranks, all pipelines can be compared by simulation: a pipeline is grown stage by stage, always the one with the smallest
lower bound first. Pipelines are left out if their bound exceeds the shortest simulated step by more than ``ALIKE``.
Bounds need few prices: those of one rank, wherever it lies (``stage_bounds``).
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.pipeline import ScheduleName
from meshwright.planner.candidates import Space, divisors
from meshwright.planner.inter_op.option import REFUSALS, Option, stage_layout
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.inter_op.rounds import LONG, fill_of, passes
from meshwright.planner.inter_op.stage_bounds import PipelineBound, PlacedStage, StageBounds
from meshwright.planner.inter_op.stage_homes import PlacedPipeline, StageHomes, of_sizes
from meshwright.planner.time_limit import TimeIsOverError, TimeLimit
from meshwright.schedules.pipeline import least_microbatches

MOST_RANKS = 8
"""The largest number of ranks for which pipelines are searched in this way."""
MOST_MICROBATCHES = 64
"""The largest number of micro-batches for which stages with different numbers of ranks are considered."""
MOST_GROWN, MOST_SIMULATED, MOST_PRICED = 15_000, 2_500, 2_500
"""Limits on the work of a search: stages that are added, micro-batches that simulated stages compute, and operators of
layers that are priced for whole pipelines. Prices for bounds do not count: there is one layout for each kind of place.
Small models stay below these limits."""
SHOWN = 8
"""The number of layouts that a search returns."""

_Floats = NDArray[np.float64]


class _Run(NamedTuple):
    """Pipelines with equal bounds: the number of micro-batches, and schedules that fill equally."""

    microbatches: int
    schedules: tuple[ScheduleName, ...]
    fill: float
    passes: tuple[str, ...]

    @classmethod
    def of(cls, microbatches: int, schedule: ScheduleName) -> "_Run":
        """Pipelines with this schedule."""
        layout = Layout(pp=2, microbatches=microbatches, schedule=schedule)
        return cls(microbatches, (schedule,), fill_of(layout), passes(layout))


class _Node(NamedTuple):
    """The first stages of pipelines, or, with a ``layout``, a whole pipeline. ``filled_s`` are the seconds that later
    stages wait for these stages."""

    bound_s: float
    number: int
    run: _Run
    stages: tuple[PlacedStage, ...]
    filled_s: float
    layout: Layout | None = None
    priced: bool = False


class BestFirst:
    """Finds the pipelines with the shortest simulated steps.

    Stages have neighbouring ranks, any layers, and any dp and tp of at most ``most_tp``. ``most_ranks`` limits the
    ranks of a stage. Of ``space``, the schedules must have one chunk. ``stopped``: the search ended at a limit on its
    work, or at the time limit, before it had compared all pipelines that could be the fastest.
    """

    def __init__(
        self, homes: StageHomes, batch_size: int, space: Space, clock: TimeLimit, *, most_tp: float, most_ranks: int,
    ) -> None:  # fmt: skip
        self.homes, self.batch_size, self.space, self.clock = homes, batch_size, space, clock
        self.zeros, self.most_tp, self.most_ranks = space.zero, most_tp, most_ranks
        self.chain, self.world_size = homes.of_all.chain, homes.world_size
        self.bounds = StageBounds(homes, space)
        self.grown = self.simulated = self.priced = 0
        self.stopped = False
        self._numbers = itertools.count()
        self._heap: list[_Node] = []
        self._rests: dict[_Run, _Floats] = {}
        self._divides = homes.of_all.prices.optimizer.divides and max(self.zeros) > 0

    def options(self, best_s: float) -> list[Option]:
        """The ``SHOWN`` fastest layouts of ``pipelines``, the fastest first. Of layouts that differ only in their
        schedule and take equally long, the first is kept."""
        fastest: dict[str, PlacedPipeline] = {}
        alike = set[tuple[str, str]]()
        for placed in sorted(self.pipelines(best_s), key=lambda placed: placed.step_s):
            same = layout_text(msgspec.structs.replace(placed.layout, schedule="1f1b")), f"{placed.step_s:.9g}"
            if layout_text(placed.layout) not in fastest and same not in alike:
                fastest[layout_text(placed.layout)] = placed
                alike.add(same)
        return [self.homes.option(placed) for placed in itertools.islice(fastest.values(), SHOWN)]

    def pipelines(self, best_s: float) -> Iterator[PlacedPipeline]:
        """Yield the pipelines that fit in memory, in the order of their lower bounds. ``best_s`` is the step of the
        best known layout. The search ends when all bounds are longer than the shortest step by more than ``ALIKE``:
        programs of the whole model decide between the pipelines before."""
        try:
            yield from self._by_bounds((1 + ALIKE) * best_s)
        except TimeIsOverError:
            self.stopped = True

    def _by_bounds(self, most_s: float) -> Iterator[PlacedPipeline]:
        for run in self._runs():
            self._push(run.microbatches * self._rest(run)[0] / self.world_size, run, (), 0.0)
        while self._heap and self._heap[0].bound_s < most_s:
            self.clock.check()
            if self._exhausted:
                self.stopped = True
                return
            node = heapq.heappop(self._heap)
            if node.layout is None:
                self._grow(node, most_s)
            elif not node.priced:
                self._price(node, node.layout)
            elif (placed := self._simulate(node, node.layout)) is not None:
                yield placed
                most_s = min(most_s, (1 + ALIKE) * placed.step_s)

    @property
    def _exhausted(self) -> bool:
        return self.grown >= MOST_GROWN or self.simulated >= MOST_SIMULATED or self.priced >= MOST_PRICED

    def _runs(self) -> Iterator[_Run]:
        """All numbers of micro-batches, with all groups of schedules."""
        every = divisors(self.batch_size)
        for microbatches in (number for number in every if self.space.fewest <= number <= MOST_MICROBATCHES):
            runs: dict[object, _Run] = {}
            for name in self.space.schedules:
                if microbatches >= least_microbatches(name, 2):
                    run = _Run.of(microbatches, name)
                    known = runs.get((run.fill, run.passes))
                    runs[run.fill, run.passes] = known._replace(schedules=(*known.schedules, name)) if known else run
            yield from runs.values()

    def _push(
        self, bound_s: float, run: _Run, stages: tuple[PlacedStage, ...], filled_s: float, layout: Layout | None = None,
        *, priced: bool = False,
    ) -> None:  # fmt: skip
        heapq.heappush(self._heap, _Node(bound_s, next(self._numbers), run, stages, filled_s, layout, priced))

    # --- growing -----------------------------------------------------------------------------------------------------

    def _grow(self, node: _Node, most_s: float) -> None:
        """Add one more stage in all ways."""
        run, count = node.run, len(self.chain.layers)
        first = node.stages[-1].last + 1 if node.stages else 0
        start = node.stages[-1].ranks.stop if node.stages else 0
        rest, names = self._rest(run), run.schedules
        ends_here = len(node.stages) > 0
        goes_on = any(run.microbatches >= least_microbatches(name, len(node.stages) + 2) for name in names)
        for ranks in (range(start, stop) for stop in range(start + 1, self.world_size + 1)):
            left = self.world_size - ranks.stop
            if len(ranks) > self.most_ranks or (not left and not ends_here) or (left and not goes_on):
                continue
            lasts = range(first, count - 1) if left else range(count - 1, count)
            for dp, tp in self._divisions(len(ranks), run.microbatches):
                self.clock.check()
                bounds = self.bounds.of(ranks, dp, tp, run.microbatches, run.passes)
                uniform = self.bounds.uniform((*((stage.dp, stage.tp) for stage in node.stages), (dp, tp)))
                for last in lasts:
                    self.grown += 1
                    placed = PlacedStage(first, last, ranks, dp, tp)
                    after = self.bounds.followed(
                        PipelineBound(node.bound_s, node.filled_s), bounds, placed, run.microbatches, run.fill,
                        max(self.zeros) if self._divides else 0, uniform=uniform, sums=not self._divides,
                    )  # fmt: skip
                    bound_s = after.step_s
                    if left:
                        bound_s = max(bound_s, run.microbatches * rest[last + 1] / left + after.filled_s)
                    if bound_s >= most_s:
                        continue
                    if left:
                        self._push(bound_s, run, (*node.stages, placed), after.filled_s)
                    else:
                        self._finish(run, (*node.stages, placed))

    def _finish(self, run: _Run, stages: tuple[PlacedStage, ...]) -> None:
        """Add the whole pipelines of these stages: with all schedules, and with the first two stages of ZeRO. Others
        follow if these do not fit. On equal stages, ``gpipe`` takes as long as ``1f1b``."""
        sizes = [(stage.dp, stage.tp) for stage in stages]
        several, shape = max(dp for dp, _ in sizes) > 1, of_sizes(self.space.least(Layout()), sizes)
        for name in run.schedules if self.space.holds_stages(shape) else ():
            if run.microbatches < least_microbatches(name, len(stages)) or (name == "gpipe" and not shape.stage_sizes):
                continue
            layout = msgspec.structs.replace(shape, microbatches=run.microbatches, schedule=name)
            for zero in self._of_all if several else self.zeros[:1]:
                self._push_whole(run, stages, msgspec.structs.replace(layout, zero=zero), priced=False)

    def _push_whole(self, run: _Run, stages: tuple[PlacedStage, ...], layout: Layout, *, priced: bool) -> None:
        bound_s = self.bound_s(layout, [range(stage.first, stage.last + 1) for stage in stages])
        self._push(bound_s, run, stages, 0.0, layout, priced=priced)

    def bound_s(self, layout: Layout, stages: Sequence[range]) -> float:
        """A lower bound on the seconds of a step of a pipeline, whose stages have these layers, and at most the ZeRO
        stage of the layout."""
        run = _Run.of(layout.microbatches, layout.schedule)
        mesh, each = layout.mesh(), [layout.of_stage(number) for number in range(layout.pp)]
        uniform = self.bounds.uniform([(own.dp, own.feature_ranks) for own in each])
        bound = PipelineBound()
        for number, (own, layers) in enumerate(zip(each, stages, strict=True)):
            stage = PlacedStage(layers.start, layers.stop - 1, mesh.stage_ranks(number), own.dp, own.feature_ranks)
            zero = own.zero if own.dp > 1 else 0
            bounds = self.bounds.of(stage.ranks, stage.dp, stage.tp, run.microbatches, run.passes, zero)
            bound = self.bounds.followed(
                bound, bounds, stage, run.microbatches, run.fill, zero, uniform=uniform, sums=own.zero in self._of_all
            )  # fmt: skip
        return bound.step_s

    @property
    def _of_all(self) -> tuple[int, ...]:
        """The ZeRO stages that all stages of a pipeline have together: the first, and the next if it divides updates.
        Larger ZeRO stages save memory, and only stages whose memory needs them have them."""
        return self.zeros[: 2 if self._divides else 1]

    def _divisions(self, ranks: int, microbatches: int) -> Iterator[tuple[int, int]]:
        for dp in divisors(ranks):
            if self.batch_size % (dp * microbatches) == 0 and ranks // dp <= self.most_tp:
                yield dp, ranks // dp

    # --- whole pipelines ---------------------------------------------------------------------------------------------

    def _price(self, node: _Node, layout: Layout) -> None:
        """Price all stages of a pipeline, and return it to the heap with its exact bound."""
        for number, stage in enumerate(node.stages):
            own, prices = stage_layout(layout, number, self.homes.of_all.kinds[0]), self.homes.of(stage.ranks).prices
            if not prices.knows(own):
                self.clock.check()
                self.bounds.clear()
            try:
                with self._counted():
                    prices.of(own)
            except REFUSALS:
                return
        self._push_whole(node.run, node.stages, layout, priced=True)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the operators that are priced meanwhile."""
        before = self.homes.num_lowered
        try:
            yield
        finally:
            self.priced += (self.homes.num_lowered - before) * len(self.chain.graph.operators)

    def _simulate(self, node: _Node, layout: Layout) -> PlacedPipeline | None:
        """A whole pipeline with its simulated step. If it fits only with recomputation, or not at all, the next ZeRO
        stage is added to the heap."""
        self.simulated += layout.pp * min(layout.microbatches, LONG * layout.pp)
        ranges = [range(stage.first, stage.last + 1) for stage in node.stages]
        try:
            with self._counted():
                placed = self.homes.lightest(layout, ranges, self._of_all[-1])
        except REFUSALS:
            return None
        plainly = placed is not None and set(placed.recompute) == {self.homes.of_all.kinds[0]}
        several = max(stage.dp for stage in node.stages) > 1
        more = [zero for zero in self.zeros if zero > layout.zero] if several and not plainly else []
        if more and not (layout.zero == 0 and self._divides):
            self._push_whole(node.run, node.stages, msgspec.structs.replace(layout, zero=more[0]), priced=False)
        return placed

    def _rest(self, run: _Run) -> _Floats:
        """[i]: a lower bound on the device-seconds of the layers from i on, for one micro-batch."""
        if run not in self._rests:
            every, starts = [], range(self.world_size)
            for ranks in (range(start, stop + 1) for start in starts for stop in starts[start:]):
                for dp, tp in self._divisions(len(ranks), run.microbatches) if len(ranks) <= self.most_ranks else ():
                    self.clock.check()
                    bounds = self.bounds.of(ranks, dp, tp, run.microbatches, run.passes)
                    every.append(len(ranks) * np.diff(bounds.before))
            least = np.min(every, axis=0)
            self._rests[run] = np.append(np.cumsum(least[::-1])[::-1], 0.0)
        return self._rests[run]
