"""Search pipelines of few ranks whose stages may all differ, in the order of lower bounds.

The dynamic program of ``stages`` minimizes a sum of two terms, which is not always the order of simulated steps. On few
ranks, all pipelines can be compared by simulation: a pipeline is grown stage by stage, always the one with the smallest
lower bound first, and a pipeline whose bound exceeds the shortest simulated step is never made. Bounds need no prices:
as long as a division of ranks is not priced, it counts as fast as if it communicated nothing and computed as
efficiently as the nearest known division.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost.closed_form import collective_s, pieces_s
from meshwright.cost.work import Communicate, Compute, Piece
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.layout import Layout, ZeroStage
from meshwright.ir.layout_text import layout_text
from meshwright.ir.pipeline import ScheduleName
from meshwright.ir.schedule import ActionKind
from meshwright.planner.candidates import divisors
from meshwright.planner.inter_op.assemble import is_sum
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import ALIKE, LEAST, Pipelines
from meshwright.planner.inter_op.rounds import LONG, fill_of, passes
from meshwright.planner.inter_op.stage_homes import REFUSED, Placed, StageHomes, of_sizes, stage_layout
from meshwright.planner.inter_op.works import LayerWorks
from meshwright.planner.time_limit import TimeLimit
from meshwright.schedules.pipeline import least_microbatches

MOST_RANKS = 8
"""The largest number of ranks for which pipelines are searched in this way."""
MOST_GROWN, MOST_SIMULATED, MOST_PRICED = 40_000, 5_000, 20_000
"""Limits on the work of a search: stages that are added, micro-batches that simulated stages compute, and operators of
layers that are priced. Small models stay below these limits."""
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
    def of(cls, microbatches: int, *schedules: ScheduleName) -> "_Run":
        """Pipelines with these schedules."""
        layout = Layout(pp=2, microbatches=microbatches, schedule=schedules[0])
        return cls(microbatches, schedules, min(fill_of(layout), microbatches), passes(layout))


class _Stage(NamedTuple):
    """A stage: its layers ``first`` to ``last`` (both included), its ranks, and their division."""

    first: int
    last: int
    ranks: range
    dp: int
    tp: int


class _Bounds(NamedTuple):
    """Lower bounds on seconds. [i] is the sum over all layers before i: of a micro-batch on the device (``before``) and
    of its launches on the host, of the update, and of the sums of gradients without their latency ``latency_s``. ``up``
    and ``down`` are the bytes that a rank sends after a layer, and before it."""

    before: _Floats
    launches: _Floats
    update: _Floats
    sums: _Floats
    latency_s: float
    up: _Floats
    down: _Floats


class _Node(NamedTuple):
    """The first stages of pipelines, or, with a ``layout``, a whole pipeline. ``filled_s`` are the seconds that later
    stages wait for these stages."""

    bound_s: float
    number: int
    run: _Run
    stages: tuple[_Stage, ...]
    filled_s: float
    layout: Layout | None = None
    priced: bool = False


class BestFirst:
    """Finds the pipelines with the shortest simulated steps.

    Stages have neighbouring ranks, any layers, and any dp and tp of at most ``most_tp``. ``most_ranks`` limits the
    ranks of a stage, ``zeros`` and ``schedules`` are the allowed ZeRO stages and schedules with one chunk.
    """

    def __init__(
        self, homes: StageHomes, batch_size: int, zeros: Sequence[ZeroStage], schedules: Sequence[ScheduleName],
        clock: TimeLimit, *, most_tp: float, most_ranks: int,
    ) -> None:  # fmt: skip
        self.homes, self.batch_size, self.zeros, self.clock = homes, batch_size, zeros, clock
        self.schedules, self.most_tp, self.most_ranks = schedules, most_tp, most_ranks
        self.chain, self.world_size = homes.of_all.chain, homes.world_size
        self.grown = self.simulated = self.priced = 0
        self._numbers = itertools.count()
        self._heap: list[_Node] = []
        self._bounds: dict[object, _Bounds] = {}
        self._rests: dict[_Run, _Floats] = {}
        self._links: dict[int, tuple[float, float]] = {}
        self._divides = homes.of_all.prices.optimizer.divides and max(zeros) > 0

    def options(self, best_s: float) -> list[Option]:
        """The ``SHOWN`` fastest layouts of ``pipelines``, the fastest first. Of layouts that differ only in their
        schedule and take equally long, the first is kept."""
        fastest: dict[str, Placed] = {}
        alike = set[tuple[str, str]]()
        for placed in sorted(self.pipelines(best_s), key=lambda placed: placed.step_s):
            same = layout_text(msgspec.structs.replace(placed.layout, schedule="1f1b")), f"{placed.step_s:.9g}"
            if layout_text(placed.layout) not in fastest and same not in alike:
                fastest[layout_text(placed.layout)] = placed
                alike.add(same)
        return [self.homes.option(placed) for placed in itertools.islice(fastest.values(), SHOWN)]

    def pipelines(self, best_s: float) -> Iterator[Placed]:
        """Yield the pipelines that fit in memory, in the order of their lower bounds. ``best_s`` is the step of the
        best known layout. Pipelines whose lower bound is longer by more than ``ALIKE``, or longer by as much than a
        pipeline before them, are left out: programs of the whole model decide between those that remain."""
        most_s = (1 + ALIKE) * best_s
        for run in self._runs():
            self._push(0.0, run, (), 0.0)
        while self._heap and self._heap[0].bound_s < most_s and not self._exhausted:
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
        done = self.grown > MOST_GROWN or self.simulated >= MOST_SIMULATED or self.priced >= MOST_PRICED
        return done or self.clock.over

    def _runs(self) -> Iterator[_Run]:
        """All numbers of micro-batches, with all groups of schedules."""
        for microbatches in divisors(self.batch_size):
            runs: dict[object, _Run] = {}
            for name in self.schedules:
                if microbatches >= least_microbatches(name, 2):
                    run = _Run.of(microbatches, name)
                    known = runs.get((run.fill, run.passes))
                    runs[run.fill, run.passes] = known._replace(schedules=(*known.schedules, name)) if known else run
            yield from runs.values()

    def _push(
        self, bound_s: float, run: _Run, stages: tuple[_Stage, ...], filled_s: float, layout: Layout | None = None,
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
                bounds = self._bounds_of(ranks, dp, tp, run)
                uniform = self._uniform((*((stage.dp, stage.tp) for stage in node.stages), (dp, tp)))
                for last in lasts:
                    self.grown += 1
                    placed = _Stage(first, last, ranks, dp, tp)
                    seconds = self._stage_s(bounds, placed, uniform=uniform)
                    once = self._once_s(bounds, placed, max(self.zeros) if self._divides else 0)
                    bound_s = max(node.bound_s, run.microbatches * seconds + max(once, node.filled_s))
                    if bound_s >= most_s:
                        continue
                    filled_s = node.filled_s + run.fill * (seconds + self._hidden_s(bounds, placed, uniform=uniform))
                    if left:
                        bound_s = max(bound_s, run.microbatches * rest[last + 1] / left + filled_s)
                        if bound_s < most_s:
                            self._push(bound_s, run, (*node.stages, placed), filled_s)
                    else:
                        self._finish(run, (*node.stages, placed))

    def _finish(self, run: _Run, stages: tuple[_Stage, ...]) -> None:
        """Add the whole pipelines of these stages: with all schedules, and with the first two stages of ZeRO. Others
        follow if these do not fit."""
        sizes = [(stage.dp, stage.tp) for stage in stages]
        several = max(dp for dp, _ in sizes) > 1
        for name in run.schedules:
            if run.microbatches < least_microbatches(name, len(stages)):
                continue
            layout = of_sizes(Layout(pp=len(stages), microbatches=run.microbatches, schedule=name), sizes)
            for zero in self.zeros[: 2 if several and self._divides else 1]:
                self._push_whole(run, stages, msgspec.structs.replace(layout, zero=zero), priced=False)

    def _push_whole(self, run: _Run, stages: tuple[_Stage, ...], layout: Layout, *, priced: bool) -> None:
        bound_s = self.bound_s(layout, [range(stage.first, stage.last + 1) for stage in stages])
        self._push(bound_s, run, stages, 0.0, layout, priced=priced)

    def bound_s(self, layout: Layout, stages: Sequence[range]) -> float:
        """A lower bound on the seconds of a step of a pipeline, whose stages have these layers."""
        run = _Run.of(layout.microbatches, layout.schedule)
        mesh, each = layout.mesh(), [layout.of_stage(number) for number in range(layout.pp)]
        uniform = self._uniform([(own.dp, own.feature_ranks) for own in each])
        bound_s = filled_s = 0.0
        for number, (own, layers) in enumerate(zip(each, stages, strict=True)):
            stage = _Stage(layers.start, layers.stop - 1, mesh.stage_ranks(number), own.dp, own.feature_ranks)
            zero = own.zero if own.dp > 1 else 0
            bounds = self._bounds_of(stage.ranks, stage.dp, stage.tp, run, zero)
            seconds, once = self._stage_s(bounds, stage, uniform=uniform), self._once_s(bounds, stage, zero)
            bound_s = max(bound_s, run.microbatches * seconds + max(once, filled_s))
            filled_s += run.fill * (seconds + self._hidden_s(bounds, stage, uniform=uniform))
        return bound_s

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
                self.priced += len(self.chain.graph.operators)
                self._bounds.clear()
            try:
                prices.of(own)
            except (LayoutError, PlanError):
                return
        self._push_whole(node.run, node.stages, layout, priced=True)

    def _simulate(self, node: _Node, layout: Layout) -> Placed | None:
        """A whole pipeline with its simulated step. If it fits only with recomputation, or not at all, the next ZeRO
        stage is added to the heap."""
        self.simulated += layout.pp * min(layout.microbatches, LONG * layout.pp)
        ranges = [range(stage.first, stage.last + 1) for stage in node.stages]
        try:
            placed = self.homes.lightest(layout, ranges)
        except REFUSED:
            return None
        plainly = placed is not None and set(placed.recompute) == {self.homes.of_all.kinds[0]}
        several = max(stage.dp for stage in node.stages) > 1
        more = [zero for zero in self.zeros if zero > layout.zero] if several and not plainly else []
        if more and not (layout.zero == 0 and self._divides):
            self._push_whole(node.run, node.stages, msgspec.structs.replace(layout, zero=more[0]), priced=False)
        return placed

    # --- bounds ------------------------------------------------------------------------------------------------------

    def _stage_s(self, bounds: _Bounds, stage: _Stage, *, uniform: bool) -> float:
        """A lower bound on the seconds of a stage for one micro-batch. On a CPU, its messages take its time."""
        seconds = max(float(each[stage.last + 1] - each[stage.first]) for each in (bounds.before, bounds.launches))
        if not self.homes.of_all.overlaps:
            seconds += self._send_s(bounds.up[stage.last], stage.ranks.stop, uniform=uniform)
            seconds += self._send_s(bounds.down[stage.first], stage.ranks.start, uniform=uniform)
        return seconds

    def _hidden_s(self, bounds: _Bounds, stage: _Stage, *, uniform: bool) -> float:
        """The seconds of the message after a stage, if the stage computes meanwhile."""
        overlaps = self.homes.of_all.overlaps
        return self._send_s(bounds.up[stage.last], stage.ranks.stop, uniform=uniform) if overlaps else 0.0

    def _uniform(self, sizes: Sequence[tuple[int, int]]) -> bool:
        """Whether messages may be those between equal stages on equal devices, which the cost model prices by the
        distance of their ranks, wherever these lie."""
        return self.homes.cluster.homogeneous and len(set(sizes)) == 1

    def _send_s(self, num_bytes: float, border: int, *, uniform: bool) -> float:
        """The least seconds of a message between the ranks before and from ``border`` on; if ``uniform``, between any
        two ranks."""
        if not num_bytes or not 0 < border < self.world_size:
            return 0.0
        borders = range(1, self.world_size) if uniform else (border,)
        return min(alpha_s + num_bytes * beta for alpha_s, beta in map(self._link, borders))

    def _link(self, border: int) -> tuple[float, float]:
        """Latency and seconds per byte of the links between the ranks before and from ``border`` on."""
        if border not in self._links:
            level = self.homes.cluster.level_of(border - 1, border)
            self._links[border] = level.alpha_s, level.shared_beta_s_per_byte(1) / level.ring_fraction(2)
        return self._links[border]

    def _once_s(self, bounds: _Bounds, stage: _Stage, zero: int) -> float:
        """A lower bound on the seconds of a stage after its last micro-batch: sums of gradients, if no kernels hide
        them, and the update."""
        update, sums = (float(each[stage.last + 1] - each[stage.first]) for each in (bounds.update, bounds.sums))
        return update / (stage.dp if zero else 1) + (sums + bounds.latency_s if sums else 0.0)

    def _rest(self, run: _Run) -> _Floats:
        """[i]: a lower bound on the device-seconds of the layers from i on, for one micro-batch."""
        if run not in self._rests:
            every = [
                len(ranks) * np.diff(self._bounds_of(ranks, dp, tp, run).before)
                for start in range(self.world_size)
                for ranks in (range(start, stop) for stop in range(start + 1, self.world_size + 1))
                if len(ranks) <= self.most_ranks
                for dp, tp in self._divisions(len(ranks), run.microbatches)
            ]
            least = np.min(every, axis=0) if every else np.full(len(self.chain.layers), math.inf)
            self._rests[run] = np.append(np.cumsum(least[::-1])[::-1], 0.0)
        return self._rests[run]

    def _bounds_of(self, ranks: range, dp: int, tp: int, run: _Run, zero: int = 0) -> _Bounds:
        home = self.homes.of(ranks)
        kinds = run.passes
        key = (id(home), dp, tp, run.microbatches, kinds, zero)
        if key not in self._bounds:
            kind = self.homes.of_all.kinds[0]
            plain = Layout(dp=dp, tp=tp, pp=2, microbatches=run.microbatches, recompute=kind)
            own = msgspec.structs.replace(plain, zero=zero)
            self._bounds[key] = self._bounded(home, own, kinds)
        return self._bounds[key]

    def _bounded(self, home: Pipelines, own: Layout, kinds: tuple[str, ...]) -> _Bounds:
        """Lower bounds for layers on the ranks of ``home``, divided as ``own`` says."""
        prices, numbers = home.prices, self.chain.numbers
        plain = msgspec.structs.replace(own, zero=0)
        known = prices.knows(plain)
        nearest = (prices.of(plain), 1.0) if known else prices.known_larger(plain)
        if nearest is not None:
            works, part = nearest
            each = np.array(prices.seconds(works, kinds, hidden=not home.overlaps, sums=False)) * part
        else:
            works, part = self._single(home, own)
            each = np.array([_computing_s(work.pieces, kinds) for work in works.works]) * part / own.feature_ranks
        each *= LEAST if own.microbatches == 1 and not known else 1.0
        update = np.array([
            sum(piece.device_s for piece in work.after if isinstance(piece, Compute)) for work in works.works
        ]) * _of_own_parameters(works)  # fmt: skip
        update *= 1 / own.feature_ranks if nearest is None else 1
        launches = np.array([_launches_s(work.pieces, kinds) for work in works.works])
        hidden = home.overlaps or prices.codecs is not None or not prices.knows(own)
        sums, latency_s = (np.zeros(len(update)), 0.0) if hidden else self._sums(home, prices.of(own))
        before, launches, update, sums = (
            np.append(0.0, np.cumsum(of_layers[numbers])) for of_layers in (each, launches, update, sums)
        )
        of_rank = part / works.mesh.sizes.get("dp", 1) / own.feature_ranks
        facts = [works.facts[number] for number in numbers]
        up, down = (
            np.array(sizes) * of_rank
            for sizes in ([fact.up_bytes for fact in facts], [fact.down_bytes for fact in facts])
        )
        return _Bounds(before, launches, update, sums, latency_s, up, down)

    def _sums(self, home: Pipelines, works: LayerWorks) -> tuple[_Floats, float]:
        """The seconds of the sums of gradients of each layer without latencies, and the least latency. Several layers
        share a bucket, and so its latency. Layers that share a parameter are left out, because its gradient may be
        summed with another layer."""
        seconds, latencies = np.zeros(len(works.works)), [0.0]
        for number, work in enumerate(works.works):
            pieces = [*work.pieces.get(ActionKind.REDUCE_GRAD.value, ()), *filter(is_sum, work.after)]
            every = [piece for piece in pieces if isinstance(piece, Communicate)]
            empty = [msgspec.structs.replace(piece, bytes=0) for piece in every]
            least_s, whole_s = (pieces_s(each, works.mesh, home.prices.network) for each in (empty, every))
            shares = any(number in shared.layers for shared in works.shared.values())
            seconds[number] = 0.0 if shares else max(0.0, whole_s - least_s)
            latencies += [collective_s(piece, works.mesh, home.prices.network) for piece in empty]
        return seconds, min(latencies[1:], default=0.0)

    def _single(self, home: Pipelines, own: Layout) -> tuple[LayerWorks, float]:
        """Works on a single rank, and the size of a micro-batch of ``own`` on a rank as a fraction of theirs."""
        parts = own.microbatches * own.dp
        alone = msgspec.structs.replace(own, dp=1, tp=1, zero=0, microbatches=max(2, parts))
        works, part = home.prices.larger(alone)
        return works, part * alone.microbatches / parts


def _of_own_parameters(works: LayerWorks) -> _Floats:
    """The fraction of each layer's trained bytes that no other layer reads."""
    own = np.array([fact.trained_bytes for fact in works.facts], dtype=float)
    whole = np.maximum(own, 1.0)
    for shared in works.shared.values():
        own[list(shared.layers)] -= shared.gradient_bytes
    return np.maximum(own, 0.0) / whole


def _computing_s(pieces: Mapping[str, Sequence[Piece]], kinds: Sequence[str]) -> float:
    """The seconds of kernels, without communication and launches."""
    return sum(piece.device_s for kind in kinds for piece in pieces.get(kind, ()) if isinstance(piece, Compute))


def _launches_s(pieces: Mapping[str, Sequence[Piece]], kinds: Sequence[str]) -> float:
    """The seconds in which the host launches kernels. They do not depend on the size of the micro-batch."""
    return sum(piece.launch_s for kind in kinds for piece in pieces.get(kind, ()) if isinstance(piece, Compute))
