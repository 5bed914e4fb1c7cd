"""All uniform layouts of a model on a cluster, simulated: what ``benchmarks.uniform`` compares "auto" with."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import ZEROING, step_work
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait, without_launches
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES, Layout, Recompute, ZeroStage
from meshwright.ir.pipeline import SCHEDULES, V_SHAPED
from meshwright.ir.placement import is_split
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import ActionKind
from meshwright.lower.plans import PlanLowering
from meshwright.planner.candidates import MOST_CHUNKS, axes_of, divisors
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.option import REFUSALS
from meshwright.planner.inter_op.piece_codecs import is_reduction
from meshwright.schedules.pipeline import least_microbatches

FINALISTS, NEAR = 48, 1.08
"""At most ``FINALISTS`` layouts are planned again, with the best bucket sizes, and as graphs where graphs are faster.
They are the layouts whose steps, without waits for the host, take at most ``NEAR`` times as long as the shortest step
so far."""
FIRST_ASKED = 6
"""The number of layouts that are planned again early, before layouts with ZeRO and recomputation are simulated."""
CONTROLS = 6
"""Layouts that were left out, and are simulated all the same, to test that they may be left out."""


def divisions(graph: Graph, num_devices: int) -> Iterator[Layout]:
    """All ways to divide the devices over pp, dp, cp, ep and tp, with and without sequence parallelism."""
    axes = axes_of(graph)
    for pp in divisors(num_devices):
        for cp in divisors(num_devices // pp) if axes.attention else (1,):
            for tp in divisors(num_devices // pp // cp):
                dp = num_devices // pp // cp // tp
                sequence = (False, True) if tp > 1 and axes.sequences else (False,)
                contexts: tuple[Literal["gather", "ring"], ...] = ("gather", "ring") if cp > 1 else ("gather",)
                for ep, between, context in itertools.product(divisors(math.gcd(dp, axes.experts)), sequence, contexts):
                    yield Layout(dp=dp, cp=cp, ep=ep, tp=tp, pp=pp, sequence_parallel=between, context=context)


Group = tuple[Layout, ...]
"""Layouts that differ in their schedules only, so that they have the same programs."""


def groups(division: Layout, microbatches: int) -> Iterator[Group]:
    """The layouts that have this division of the devices and this number of micro-batches, in groups."""
    run = msgspec.structs.replace(division, microbatches=microbatches)
    if run.pp == 1:
        yield (run,)
        return
    for chunks in range(1, MOST_CHUNKS + 1):
        for names in (
            tuple(name for name in SCHEDULES if name not in ("interleaved", *V_SHAPED)) if chunks == 1 else (),
            V_SHAPED if chunks == 2 else (),
            ("interleaved",) if chunks > 1 and microbatches % run.pp == 0 else (),
        ):
            group = tuple(
                msgspec.structs.replace(run, schedule=name, chunks=chunks)
                for name in names if microbatches >= least_microbatches(name, run.pp)
            )  # fmt: skip
            if group:
                yield group


def every_layout(graph: Graph, num_devices: int) -> Iterator[Layout]:
    """All uniform layouts whose batch divides."""
    for division in divisions(graph, num_devices):
        for microbatches in divisors(graph.batch_size // division.dp) if graph.batch_size % division.dp == 0 else ():
            for group, zero, kind in itertools.product(groups(division, microbatches), ZERO_STAGES, RECOMPUTE):
                for layout in group if division.dp > 1 or not zero else ():
                    yield msgspec.structs.replace(layout, zero=zero, recompute=kind)


@dataclass(frozen=True)
class UniformStep:
    """A uniform layout with its simulated step. ``free_s``: the step if no device waited for its host; a step whose
    phases are graphs takes about as long."""

    layout: Layout
    step_s: float
    fits: bool
    free_s: float


@dataclass
class Uniform:
    """All uniform layouts of a model on a cluster.

    A layout is left out only if it cannot be the fastest that fits:

    - One micro-batch passes all stages one after the other, and no kernel is faster on a part of its work than by this
      part. So a step takes at least ``pp / microbatches`` times, and at least once, the seconds of all kernels on one
      device, divided by the number of devices.
    - Without stages, more micro-batches only save memory: they are simulated only if fewer do not fit.
    - Recomputation only adds work: it is simulated only where the layout does not fit without it, and not if the
      layout takes too long without it.
    - ZeRO adds work, too. It saves nothing but parts of the update, of the sums of gradients and of adding them up. So
      no ZeRO stage is faster than the step without all these.

    Bounds count no waits for the host: a layout may be launched as graphs where a similar layout is not.

    ``counts`` has the number of layouts that were simulated, refused and left out. ``without`` are layouts that were
    left out.
    """

    graph: Graph
    cluster: Cluster
    counts: Counter[str] = field(default_factory=Counter)
    steps: list[UniformStep] = field(default_factory=list)
    without: list[Layout] = field(default_factory=list)
    asked: dict[str, UniformStep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lower = PlanLowering(self.graph)
        self.ask = Ask(explains=False, fits_buckets=False, lower=self.lower)
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Group, ZeroStage, int]] = []

    @property
    def best_s(self) -> float:
        """The shortest step so far that fits."""
        known = (*self.steps, *self.asked.values())
        return min((step.step_s for step in known if step.fits), default=math.inf)

    def run(self) -> None:
        """Simulate all layouts that can be the fastest."""
        whole_s, batch = self._whole_s() / self.cluster.num_devices, self.graph.batch_size
        for division in divisions(self.graph, self.cluster.num_devices):
            fits = False
            for microbatches in divisors(batch // division.dp) if batch % division.dp == 0 else ():
                for group in groups(division, microbatches):
                    if whole_s * max(1.0, division.pp / microbatches) >= self.best_s or (division.pp == 1 and fits):
                        self._leave_out(group, 0, 0)
                        for zero in self._zeros(group):
                            self._leave_out(group, zero, 0)
                    else:
                        fits = self._without_zero(group)
        for step in self._freest()[:FIRST_ASKED]:  # a short step, early: more is left out
            self.as_asked(step.layout)
        while self._heap:
            bound_s, _, group, zero, kind = heapq.heappop(self._heap)
            if bound_s >= NEAR * self.best_s:  # bounds have usual bucket sizes, and the shortest step the best
                self._leave_out(group, zero, kind)
                continue
            simulated = self._simulate(group, zero, RECOMPUTE[kind])
            if simulated is None:
                self.counts["left out"] += len(group) * (len(RECOMPUTE) - kind - 1)
            else:
                self._recompute(group, simulated[0], bound_s, zero, kind)

    def best(self) -> UniformStep:
        """The fastest layout, with the best bucket sizes, and as graphs where they are faster."""
        for number, step in enumerate(self._freest()):
            last = number >= FINALISTS or step.free_s > NEAR * self.best_s
            if last and any(asked.fits for asked in self.asked.values()):
                break
            self.as_asked(step.layout)
        return min((step for step in self.asked.values() if step.fits), key=lambda step: step.step_s)

    def _freest(self) -> list[UniformStep]:
        """The layouts that fit; first those whose steps would be the shortest without waits for the host."""
        return sorted((step for step in self.steps if step.fits), key=lambda step: step.free_s)

    def as_asked(self, layout: Layout) -> UniformStep:
        """A layout as ``mw.plan`` plans it for a user, with the best bucket sizes, and as graphs where they are
        faster."""
        if (name := str(layout)) not in self.asked:
            plan = self._plan(layout, replace(self.ask, fits_buckets=True))
            prediction = foretell(self.lower, plan, self.cluster)
            seconds = prediction.played.step_s
            self.asked[name] = UniformStep(layout, seconds, prediction.fits(), seconds)
        return self.asked[name]

    def better_controls(self) -> tuple[int, int]:
        """How many of some layouts that were left out, drawn at random, fit and are faster; and how many there are."""
        drawn = random.Random(0).sample(self.without, min(CONTROLS, len(self.without)))
        steps, best_s = list[UniformStep](), self.best_s
        for layout in drawn:
            try:
                steps.append(self.as_asked(layout))
            except REFUSALS:
                continue
        return sum(step.fits and step.step_s < best_s for step in steps), len(steps)

    def _plan(self, layout: Layout, ask: Ask) -> Plan:
        return plan_layout(self.graph, layout, world_size=layout.num_ranks, cluster=self.cluster, ask=ask)

    def _whole_s(self) -> float:
        """Seconds of all kernels of forward and backward on the first device, which is the fastest, if it never waits
        for its host."""
        plan = self._plan(Layout(), self.ask)
        (stage,) = step_work(self.lower(plan), plan, self.cluster).stages
        return sum(piece.device_s for kind in "FB" for piece in stage.pieces[kind] if isinstance(piece, Compute))

    def _zeros(self, group: Group) -> tuple[ZeroStage, ...]:
        return ZERO_STAGES[1:] if group[0].dp > 1 else ()

    def _without_zero(self, group: Group) -> bool:
        """Simulate a group, and note what may be faster, or fit. Returns whether all fit. A refused layout is refused
        with ZeRO and with recomputation, too."""
        simulated = self._simulate(group, 0, "none")
        steps = simulated[0] if simulated else []
        variants = len(RECOMPUTE) * (1 + len(self._zeros(group)))
        self.counts["refused"] += (len(group) - len(steps)) * (variants - 1)
        if simulated is None:
            return False
        _, plan, work = simulated
        group = tuple(step.layout for step in steps)
        self._recompute(group, steps, 0.0, 0, 0)
        if self._zeros(group):
            lighter = StepWork(tuple(map(_unsummed, work.stages)), work.heap_factor)
            bound_s = min(self._played(plan, layout, lighter).free_s for layout in group)
            for zero in self._zeros(group):
                self._put(bound_s - self._adding_s(plan), group, zero, 0)
        return all(step.fits for step in steps)

    def _recompute(
        self, group: Group, steps: Sequence[UniformStep], bound_s: float, zero: ZeroStage, kind: int
    ) -> None:
        """Note the layouts of a group that do not fit: they may fit with the next kind of recomputation. ``steps`` are
        those with this ``kind``. No kind is faster than the same layout without recomputation."""
        lacking = {step.layout.schedule: step for step in steps if not step.fits}
        left = tuple(layout for layout in group if layout.schedule in lacking)
        if left:
            least_s = min(step.free_s for step in lacking.values()) if kind == 0 else 0.0
            self._put(max(bound_s, least_s), left, zero, kind + 1)
        self.counts["left out"] += (len(group) - len(left)) * (len(RECOMPUTE) - kind - 1)

    def _put(self, bound_s: float, group: Group, zero: ZeroStage, kind: int) -> None:
        if kind < len(RECOMPUTE):
            heapq.heappush(self._heap, (bound_s, next(self._numbers), group, zero, kind))

    def _leave_out(self, group: Group, zero: ZeroStage, kind: int) -> None:
        self.counts["left out"] += len(group) * (len(RECOMPUTE) - kind)
        self.without += [msgspec.structs.replace(layout, zero=zero, recompute=RECOMPUTE[kind]) for layout in group]

    def _simulate(
        self, group: Group, zero: ZeroStage, recompute: Recompute
    ) -> tuple[list[UniformStep], Plan, StepWork] | None:
        """The steps of those layouts of a group that are not refused: a group has one plan but for the schedule. None:
        all layouts are refused."""
        own = [msgspec.structs.replace(layout, zero=zero, recompute=recompute) for layout in group]
        steps: list[UniformStep] = []
        with suppress(*REFUSALS):
            plan = self._plan(own[0], self.ask)
            work = step_work(self.lower(plan), plan, self.cluster, optimizer=ADAMW)
            for layout in own:
                with suppress(*REFUSALS):  # a message-driven schedule has no collectives over tp
                    steps.append(self._played(plan, layout, work))
        self.counts["refused"] += len(group) - len(steps)
        self.counts["simulated"] += len(steps)
        self.steps += steps
        return (steps, plan, work) if steps else None

    def _played(self, plan: Plan, layout: Layout, work: StepWork) -> UniformStep:
        schedule = layout.schedule if layout.pp > 1 else "none"
        plan = msgspec.structs.replace(plan, schedule=schedule)
        prediction = foretell(self.lower, plan, self.cluster, work=work)
        free = foretell(self.lower, plan, self.cluster, work=without_launches(work))
        return UniformStep(layout, prediction.played.step_s, prediction.fits(), free.played.step_s)

    def _adding_s(self, plan: Plan) -> float:
        """At least the seconds in which a rank adds the gradients of all micro-batches but the first to the sum: each
        reads two numbers and writes one."""
        if plan.microbatches == 1:
            return 0.0
        held = [0.0] * plan.pipeline.num_ranks
        for number, stage in enumerate(plan.stages):
            for name, placements in stage.storage.items():
                parts = math.prod(plan.mesh.size(axis) for axis, placed in placements.items() if is_split(placed))
                held[plan.pipeline.rank_of(number)] += self.graph.tensors[name].num_bytes / parts
        slowest = min(
            self.cluster.device_of(rank).memory_bandwidth_bytes_per_s for rank in range(self.cluster.num_devices)
        )
        return 2 * 3 * plan.microbatches * max(held) / slowest  # twice: no kernel reaches the whole bandwidth


def _unsummed(stage: StageWork) -> StageWork:
    """The work of a stage without sums of gradients, without setting gradients to zero, and without the update."""

    def left(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if not is_reduction(piece) and piece.what != ZEROING)

    reduces = ActionKind.REDUCE_GRAD.value
    pieces = {kind: () if kind == reduces else left(each) for kind, each in stage.pieces.items()}
    started = {piece.what for each in pieces.values() for piece in each if isinstance(piece, Communicate)}
    pieces = {
        kind: tuple(piece for piece in each if not isinstance(piece, Wait) or piece.what in started)
        for kind, each in pieces.items()
    }
    return msgspec.structs.replace(stage, pieces=pieces, before=left(stage.before), after=())
