"""Find the best layout of a captured model: estimate all layouts in closed form, then simulate the fastest."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from meshwright.cost.closed_form import Predicted, predict_step
from meshwright.cost.occupancy import RankMemory, peak_memory
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.cost.program import step_work
from meshwright.cost.work import StepWork
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout, layout_text
from meshwright.ir.plan import Alternative, Plan, Prediction
from meshwright.ir.program import Lower
from meshwright.planner.candidates import axes_of, candidates
from meshwright.planner.checks import check_precision
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.time_limit import Progress, TimeIsOverError, TimeLimit
from meshwright.schedules.pipeline import schedule_of

PLAYED = 6
"""Number of layouts that are simulated. These are the layouts with the shortest closed-form estimates."""
ALIKE = 0.02
"""Relative accuracy of predicted step times. Of all layouts that are slower than the fastest by at most this fraction,
the planner takes the simplest."""
SHOWN = 8
"""Largest number of slower layouts that a plan lists. A plan lists at most half as many layouts that need too much
memory."""

RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""Kinds of recomputation, in the order of falling memory and rising time. The planner takes the first kind that fits in
memory."""


class _Option(msgspec.Struct, frozen=True):
    """A layout with its plan, its costs, and the memory of the rank that needs the most memory."""

    plan: Plan
    work: StepWork
    predicted: Predicted
    memory: RankMemory
    ask: Ask

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def name(self) -> str:
        return layout_text(self.layout)

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def rank(self) -> tuple[object, ...]:
        """Sort key: faster options come first; of equally fast options, the simpler come first."""
        return self.predicted.step_s, _complexity(self.layout)


def plan_auto(
    graph: Graph,
    world_size: int,
    cluster: Cluster,
    lower: Lower,
    *,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    pipelines: bool = True,
    offload: bool = False,
    seconds: float | None = None,
    progress: Progress = lambda what: None,
) -> Plan:
    """Find the fastest plan that fits in memory.

    The search varies dp, cp, ep, tp, pp, micro-batches, schedule, chunks, recomputation, ZeRO and sequence parallelism.
    For models with convolutions, it also varies mixed axes, which may split any factor of an operator.

    The planner estimates the layouts in closed form, and simulates the ``PLAYED`` fastest layouts. Of the simulated
    layouts within ``ALIKE`` of the fastest, it takes the simplest. Layouts that differ only in their number of
    micro-batches are estimated in rising order, until more micro-batches no longer make the step shorter. The search
    leaves out the schedule ``gpipe``, because ``1f1b`` takes as long with less memory. It keeps ``batch_statistics``
    global, because other values would change the results of training. The plan lists the next-best layouts, and why
    each was not taken (see ``Plan.explain``).

    ``lower`` makes the programs from which costs are computed. The other arguments are the same as in ``mw.plan``. When
    ``seconds`` have passed, the planner estimates no further layouts and makes the plan of the best layout so far.

    Raises:
        LayoutError: no layout that fits was found in time; ``seconds`` is not above 0; the devices do not support the
            step's precision; no layout divides the batch; or no layout fits in memory (the message names the layout
            that needs the least memory, and changes that would help).
    """
    check_precision(None, graph, cluster)
    clock = TimeLimit(seconds, progress)
    limit = memory_bytes or cluster.device.memory_bytes
    options: list[_Option] = []
    refused: list[str] = []
    offload = offload and cluster.device.kind != "cpu"  # a CPU's memory is the host's
    weigh = _Scales(graph, world_size, cluster, lower, optimizer, clips, offload, clock)
    layouts = [c for c in candidates(graph.batch_size, world_size, axes_of(graph)) if pipelines or c.pp == 1]
    weighed = len(layouts)
    falling: dict[str, list[float]] = {}
    for number, layout in enumerate(layouts):
        clock.say(f"{layout_text(layout)}, layout {number + 1} of {len(layouts)}")
        family = falling.setdefault(layout_text(msgspec.structs.replace(layout, microbatches=1)), [])
        if len(family) > 1 and family[-1] >= family[-2]:  # more micro-batches only make the step longer
            continue
        try:
            option = weigh.lightest_that_fits(layout, limit)
        except TimeIsOverError:
            options += weigh.begun
            weighed = number
            break
        except (LayoutError, PlanError, ScheduleError) as error:
            refused.append(f"{layout_text(layout)}: {error.problem}")
            continue
        options.append(option)
        if option.layout == layout and option.peak_bytes <= limit:
            family.append(option.predicted.step_s)
    fitting = sorted((option for option in options if option.peak_bytes <= limit), key=lambda option: option.rank)
    too_large = [option for option in options if option.peak_bytes > limit]
    if not fitting and weighed < len(layouts):
        raise LayoutError(
            f"no layout that fits was found in {seconds:g} s: {weighed} of {len(layouts)} were weighed",
            where="seconds",
            remedy="give more time, or a layout, such as Layout(dp=..., tp=..., zero=3)",
        )
    if not fitting:
        raise _nothing_fits(graph, too_large, refused, world_size, limit)
    step_s: dict[str, float] = {}
    for option in fitting[:PLAYED]:
        if step_s and clock.over:
            break
        clock.say(f"simulating {option.name}")
        step_s[option.name] = foretell(lower, option.plan, cluster, work=option.work).played.step_s
    near = (1 + ALIKE) * min(step_s.values())
    best = min(
        (option for option in fitting[:PLAYED] if step_s.get(option.name, math.inf) <= near),
        key=lambda option: (_complexity(option.layout), step_s[option.name]),
    )
    others = [option for option in fitting if option is not best]
    others.sort(key=lambda option: step_s.get(option.name, option.predicted.step_s))
    plan = weigh.explained(best, limit)
    prediction = Prediction(step_s=step_s[best.name], peak_memory_bytes=best.peak_bytes)
    if (plan.buckets, plan.gathers) != (best.plan.buckets, best.plan.gathers):
        prediction = foretell(lower, plan, cluster, optimizer=optimizer, clips=clips).prediction
    lost = [_alternative(option, best, step_s) for option in others[:SHOWN]]
    lost += [
        _too_large(option, limit)
        for option in sorted(too_large, key=lambda option: option.predicted.step_s)[: SHOWN // 2]
    ]
    if weighed < len(layouts) or len(step_s) < min(PLAYED, len(fitting)):
        note = clock.stopped(weighed, len(layouts), len(step_s))
        plan = msgspec.structs.replace(plan, notes=(note, *plan.notes))
    return msgspec.structs.replace(plan, alternatives=tuple(lost), prediction=prediction)


@dataclass
class _Scales:
    """Estimates the step time and memory of layouts. ``StepWork`` does not depend on the schedule. Layouts that differ
    only in their schedule therefore share one ``StepWork``."""

    graph: Graph
    world_size: int
    cluster: Cluster
    lower: Lower
    optimizer: OptimizerCost
    clips: bool
    offload: bool
    clock: TimeLimit
    begun: list[_Option] = field(default_factory=list)
    works: dict[tuple[object, ...], StepWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = Ask(explains=False, optimizer=self.optimizer, lower=self.lower, fits_buckets=False)

    def lightest_that_fits(self, layout: Layout, limit: float) -> _Option:
        """The layout itself if it fits in ``limit`` bytes; else its fastest variant with ZeRO, recomputation or offload
        that fits; else the variant that needs the least memory. After the call, ``begun`` has all options that were
        estimated for the layout."""
        options = []
        self.begun = []
        levels: tuple[Literal[0, 1, 2, 3], ...] = (0,) if layout.dp == 1 else (0, 1, 2, 3)
        for zero in levels:
            option = self._with_recomputation(msgspec.structs.replace(layout, zero=zero), limit)
            if option.layout == layout and option.ask is self._plain and option.peak_bytes <= limit:
                return option
            options.append(option)
        if self.offload and all(option.peak_bytes > limit for option in options):
            host = (msgspec.structs.replace(option.layout, offload="optimizer") for option in tuple(options))
            options += [self._with_recomputation(offloaded, limit) for offloaded in host]
        fitting = [option for option in options if option.peak_bytes <= limit]
        if not fitting:
            return min(options, key=lambda option: option.peak_bytes)
        return min(fitting, key=lambda option: option.rank)

    def _with_recomputation(self, layout: Layout, limit: float) -> _Option:
        """The layout with the least recomputation that fits in ``limit`` bytes, or with the most recomputation if none
        fits.

        If the layout needs more recomputation to fit, the planner also tries strategies that need less memory (see
        ``_careful``). Of the two options, the faster option that fits is taken.
        """
        option = self._weigh(layout, self._plain)
        if option.peak_bytes <= limit:
            return option
        careful = self._careful(layout, limit)
        for recompute in RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1 :]:
            if option.peak_bytes <= limit:
                break
            again = self._weigh(msgspec.structs.replace(layout, recompute=recompute), self._plain)
            if any(stage.recompute for stage in again.plan.stages):  # else there is nothing to recompute
                option = again
        ways = [way for way in (option, careful) if way is not None and way.peak_bytes <= limit]
        return min(ways, key=lambda way: way.predicted.step_s, default=option)

    def explained(self, option: _Option, limit: float) -> Plan:
        """The plan of an option, with the best bucket sizes and with notes on the costs of other strategies."""
        return self._plan(option.layout, replace(option.ask, explains=True, room_bytes=limit))

    def _plan(self, layout: Layout, ask: Ask) -> Plan:
        return plan_layout(self.graph, layout, world_size=self.world_size, cluster=self.cluster, ask=ask)

    def _careful(self, layout: Layout, limit: float) -> _Option | None:
        """The layout with strategies that the integer program chooses under a memory limit of ``limit`` bytes.

        The result is None if no strategies fit. It is also None for layouts whose strategies the integer program does
        not choose.
        """
        if layout.cp > 1 or layout.ep > 1 or layout.sequence_parallel or (layout.tp == 1 and not layout.mixed):
            return None  # explicit rules choose the strategies of these layouts
        try:
            option = self._weigh(layout, replace(self._plain, memory_bytes=limit))
        except (LayoutError, PlanError):
            return None
        return option if option.peak_bytes <= limit else None

    def _weigh(self, layout: Layout, ask: Ask) -> _Option:
        self.clock.check()
        plan = self._plan(layout, ask)
        key = (layout.dp, layout.tp, layout.pp, layout.chunks, layout.microbatches, layout.zero, layout.recompute,
               layout.cp, layout.context, layout.ep, layout.sequence_parallel, layout.mixed,
               layout.offload, ask.memory_bytes)  # fmt: skip
        if key not in self.works:
            programs = self.lower(plan)
            self.works[key] = step_work(programs, plan, self.cluster, optimizer=self.optimizer, clips=self.clips)
        work, schedule = self.works[key], schedule_of(plan)
        peaks = peak_memory(work, schedule)
        predicted = predict_step(work, schedule, plan.mesh, self.cluster)
        option = _Option(plan, work, predicted, max(peaks, key=lambda memory: memory.peak_bytes), ask)
        self.begun.append(option)
        return option


def _complexity(layout: Layout) -> tuple[int, bool, int, int, int, int]:
    sizes = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, *layout.mixed)
    axes = sum(size > 1 for size in sizes) + layout.sequence_parallel + (layout.context == "ring")
    return (
        axes,
        bool(layout.mixed),
        layout.chunks,
        layout.microbatches,
        layout.zero + (layout.offload != "none"),
        RECOMPUTE.index(layout.recompute),
    )


def _alternative(option: _Option, best: _Option, step_s: dict[str, float]) -> Alternative:
    """The ``Alternative`` for a layout that was not taken. Its reason names the part of the step that takes the most
    extra time."""
    loser, winner = option.predicted, best.predicted
    parts = {
        "computing": loser.compute_s - winner.compute_s,
        "communication": loser.communication_s - winner.communication_s,
        "waiting for other stages": loser.waiting_s - winner.waiting_s,
    }
    what, more = max(parts.items(), key=lambda item: item[1])
    seconds = step_s.get(option.name, loser.step_s)
    slower = seconds / step_s[best.name] - 1
    if slower <= ALIKE:
        why = f"{slower:+.1%}, which is within what can be foretold, and less simple"
    else:
        why = f"{slower:.1%} slower"
        if more > 0:
            why += f": {more * 1e3:.3g} ms more of {what}"
    return Alternative(layout=option.name, step_s=seconds, peak_memory_bytes=option.peak_bytes, why=why)


def _too_large(option: _Option, limit: float) -> Alternative:
    why = f"needs {_gib(option.peak_bytes)} GiB at {option.memory.action or 'its peak'}, of {_gib(limit)}"
    return Alternative(layout=option.name, step_s=option.predicted.step_s, peak_memory_bytes=option.peak_bytes, why=why)


def _nothing_fits(
    graph: Graph, too_large: list[_Option], refused: list[str], world_size: int, limit: float
) -> LayoutError:
    if not too_large:
        return LayoutError(
            f"no layout of {world_size} ranks divides the model and its batch of {graph.batch_size}: {refused[0]}"
            if refused
            else f"no layout of {world_size} ranks divides a global batch of {graph.batch_size}",
            where="plan",
            remedy=f"use a global batch that {world_size} divides, or other numbers of ranks",
        )
    least = min(too_large, key=lambda option: option.peak_bytes)
    changes = [f"give every rank {_gib(least.peak_bytes)} GiB"]
    if fewer := _smaller_batch(graph.batch_size, least, limit):
        changes.append(f"use a global batch of {fewer}")
    else:
        changes.append(f"use more ranks: {_gib(least.memory.held_bytes)} GiB are held the whole step")
    return LayoutError(
        f"no layout fits in {_gib(limit)} GiB; the smallest, {least.name}, needs {_gib(least.peak_bytes)} GiB a rank",
        where="memory",
        remedy=", or ".join(changes),
    )


def _smaller_batch(batch_size: int, option: _Option, limit: float) -> int:
    """The largest smaller batch with which the option's layout would fit in ``limit`` bytes; 0 if there is none. The
    memory of a micro-batch is assumed to be proportional to its number of samples."""
    parts = option.layout.dp * option.layout.microbatches
    samples, memory = batch_size // parts, option.memory
    shrinking = memory.saved_bytes + memory.workspace_bytes
    fewer = math.floor((limit - memory.held_bytes) * samples / shrinking) if shrinking else 0
    return fewer * parts if 1 <= fewer < samples else 0


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"
