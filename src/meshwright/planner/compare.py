"""Answer questions about one layout of a captured model: why it was not chosen, and what would make it fit."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import msgspec

from meshwright.cost.closed_form import predict_step
from meshwright.cost.occupancy import box_of, num_peers, room_of
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.cost.work import Communicate, Piece, StepWork
from meshwright.errors import ClusterError, MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan import Alternative, Plan
from meshwright.ir.program import Lower
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.planner.candidates import Only, divisors
from meshwright.planner.codecs import AUTO
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import REFUSALS, Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.reasons import alternative, needs_memory, smaller_batch
from meshwright.planner.remedy import Change
from meshwright.schedules.pipeline import schedule_of

MOST_CHANGES = 5
"""The largest number of changes of a layout that are suggested if it does not fit."""
MOST_LARGER = 2
"""The largest number of layouts with more devices that are suggested."""
_IMPOSSIBLE = (*REFUSALS, ClusterError)
"""Errors of a layout that the model, the schedule or the number of devices does not allow."""


def why_not(
    graph: Graph,
    layout: Layout,
    best: Plan,
    cluster: Cluster,
    lower: Lower,
    *,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
) -> Alternative:
    """The reason why ``layout`` was not chosen instead of the plan ``best``: it is impossible, needs too much memory,
    or is slower. Both layouts are planned, lowered and simulated for the whole model, with the same number of ranks."""
    try:
        resolved = layout.resolved(best.mesh.world_size)
        if best.layout.codec == AUTO and not layout.codec:
            resolved = msgspec.structs.replace(resolved, codec=AUTO)
        limit = memory_bytes or _room_bytes(cluster, resolved)
        ask = Ask(explains=False, optimizer=optimizer, lower=lower, room_bytes=limit)
        plan = plan_layout(graph, resolved, world_size=best.mesh.world_size, cluster=cluster, ask=ask)
        asked = _option_of(plan, cluster, lower, optimizer, clips)
    except _IMPOSSIBLE as error:
        why = f"not possible: {error.problem}; {error.remedy}"
        return Alternative(layout=layout_text(layout), step_s=0.0, peak_memory_bytes=0, why=why)
    if asked.peak_bytes > limit:
        return needs_memory(asked, limit)
    if (plan.layout, plan.firsts) == (best.layout, best.firsts):
        return Alternative(
            layout=asked.name, step_s=asked.step_s, peak_memory_bytes=asked.peak_bytes, why="it is the plan's layout"
        )
    return alternative(asked, _option_of(best, cluster, lower, optimizer, clips), searched=bool(best.alternatives))


def _room_bytes(cluster: Cluster, layout: Layout) -> float:
    """The memory, in bytes, for live tensors on a rank of the layout."""
    return room_of(cluster, range(layout.num_ranks), num_peers(layout.mesh().sizes, box_of(cluster)))


def _option_of(plan: Plan, cluster: Cluster, lower: Lower, optimizer: OptimizerCost, clips: bool) -> Option:
    foretold = foretell(lower, plan, cluster, optimizer=optimizer, clips=clips)
    return Option(
        layout=plan.layout,
        firsts=plan.firsts,
        recompute=(),
        work=foretold.work,
        predicted=predict_step(foretold.work, schedule_of(plan), plan.mesh, cluster),
        step_s=foretold.played.step_s,
        memory=foretold.peak,
    )


class SearchCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a search that may divide only operators (``intra``), only make stages (``inter``), or do both.

    Seconds and bytes are per step, on the busiest rank. ``waiting_s`` is the time in which this rank neither computes
    nor communicates. ``problem`` says why no plan exists; the other fields are then 0."""

    only: Only
    layout: str = ""
    step_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    waiting_s: float = 0.0
    communicated_bytes: int = 0
    peak_memory_bytes: int = 0
    problem: str = ""


class SearchComparison(msgspec.Struct, frozen=True):
    """The plans of several searches for one model."""

    searches: tuple[SearchCosts, ...]


def search_costs(
    only: Only, plan: Plan, cluster: Cluster, lower: Lower, optimizer: OptimizerCost, clips: bool
) -> SearchCosts:
    """The costs of the plan that a search with ``only`` found."""
    option = _option_of(plan, cluster, lower, optimizer, clips)
    predicted = option.predicted
    return SearchCosts(
        only=only,
        layout=option.name,
        step_s=option.step_s,
        compute_s=predicted.compute_s,
        communication_s=predicted.communication_s,
        waiting_s=predicted.waiting_s,
        communicated_bytes=_communicated_bytes(option.work, schedule_of(plan)),
        peak_memory_bytes=option.peak_bytes,
    )


def _communicated_bytes(work: StepWork, schedule: Schedule) -> int:
    """The largest number of bytes that any rank sends in collectives and messages."""
    totals = []
    for actions in schedule.ranks:
        total = 0
        for action in actions:
            stage = work.stages[action.stage]
            if action.kind is ActionKind.SEND_F:
                total += stage.sent_up_bytes
            elif action.kind is ActionKind.SEND_B:
                total += stage.sent_down_bytes
            total += _bytes_of(stage.pieces.get(action.kind.value, ()))
        for number in {action.stage for action in actions}:
            total += _bytes_of((*work.stages[number].before, *work.stages[number].after))
        totals.append(total)
    return max(totals)


def _bytes_of(pieces: Iterable[Piece]) -> int:
    return sum(piece.bytes for piece in pieces if isinstance(piece, Communicate))


def changes_that_fit(
    graph: Graph,
    layout: Layout,
    cluster: Cluster,
    lowering: Callable[[Graph], Lower],
    *,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    graph_of: Callable[[int], Graph] | None = None,
) -> tuple[Change, ...]:
    """Single changes that make ``layout`` fit in memory: up to ``MOST_CHANGES`` of the layout, up to ``MOST_LARGER``
    with more devices, and a smaller batch. The change with the least device time for a sample comes first. Empty if no
    single change is enough.

    Prices of layers select the changes (decision 0040). The returned layouts were lowered and simulated for the whole
    model. More devices are tried if the cluster has them or is open-ended. ``graph_of`` captures the step with another
    batch size; without it, no smaller batch is tried."""
    limit = memory_bytes or _room_bytes(cluster, layout)
    tries = _Tries(graph, cluster, lowering, limit, optimizer, clips)
    changes = list(islice(tries.fitting(_single_changes(layout, graph.batch_size, cluster)), MOST_CHANGES))
    changes += islice(tries.fitting(_more_devices(layout, graph.batch_size)), MOST_LARGER)
    if graph_of is not None and (smaller := tries.smaller_batch(layout, graph_of)) is not None:
        changes.append(smaller)
    return tuple(sorted(changes, key=lambda change: (change.sample_device_s, change.step_s)))


@dataclass
class _Tries:
    """Estimates, plans and simulates layouts of a model, and tells which of them fit in ``limit`` bytes."""

    graph: Graph
    cluster: Cluster
    lowering: Callable[[Graph], Lower]
    limit: float
    optimizer: OptimizerCost
    clips: bool

    def __post_init__(self) -> None:
        self._lower = self.lowering(self.graph)
        self._pipelines: dict[int, Pipelines] = {}

    def fitting(self, wanted: Iterable[tuple[str, Layout]]) -> Iterator[Change]:
        """Yield the changes that fit, the fastest by their estimates first."""
        estimates: list[tuple[float, str, Layout]] = []
        for text, changed in wanted:
            with suppress(*_IMPOSSIBLE):
                option = self.estimated(changed)
                if option.peak_bytes <= self.limit:
                    estimates.append((option.step_s, text, changed))
        for _, text, changed in sorted(estimates, key=lambda estimate: estimate[0]):
            if (change := self._real(text, changed, self.graph, self._lower)) is not None:
                yield change

    def smaller_batch(self, layout: Layout, graph_of: Callable[[int], Graph]) -> Change | None:
        """The largest smaller batch with which ``layout`` fits by its estimate, or if it does not fit then, half of it
        or less; None if no batch that the layout divides is small enough."""
        size, parts = 0, _shares(layout) * layout.microbatches
        with suppress(*_IMPOSSIBLE):
            size = smaller_batch(self.graph.batch_size, self.estimated(layout), self.limit)
        while size:
            with suppress(MeshwrightError):
                graph = graph_of(size)
                if (change := self._real(f"batch_size = {size}", layout, graph, self.lowering(graph))) is not None:
                    return change
            size = size // parts // 2 * parts
        return None

    def estimated(self, layout: Layout) -> Option:
        """The estimate of a layout from prices of layers, on as many devices as it has ranks."""
        count = layout.num_ranks
        if count not in self._pipelines:
            part = self._part(count)
            chain = chain_of(self.graph, part, count)
            prices = LayerPrices(chain, part, self.lowering(chain.graph), self.optimizer, self.clips, count)
            self._pipelines[count] = Pipelines(prices, self.limit)
        return self._pipelines[count].option(msgspec.structs.replace(layout, recompute="none"), (layout.recompute,))

    def _part(self, count: int) -> Cluster:
        return self.cluster if count <= self.cluster.num_devices else self.cluster.resized(count)

    def _real(self, text: str, layout: Layout, graph: Graph, lower: Lower) -> Change | None:
        """The change, lowered and simulated; None if it is impossible or does not fit after all."""
        ask = Ask(explains=False, optimizer=self.optimizer, lower=lower, room_bytes=self.limit)
        count = layout.num_ranks
        with suppress(*_IMPOSSIBLE):
            part = self._part(count)
            plan = plan_layout(graph, layout, world_size=count, cluster=part, ask=ask)
            real = _option_of(plan, part, lower, self.optimizer, self.clips)
            if real.peak_bytes <= self.limit:
                each_s = count * real.step_s / graph.batch_size
                return Change(text=text, step_s=real.step_s, peak_bytes=real.peak_bytes, sample_device_s=each_s)
        return None


def _shares(layout: Layout) -> int:
    """The number of equal parts into which the ranks of the layout divide a micro-batch."""
    sizes = [layout.of_stage(index).dp for index in range(layout.pp)] if layout.stage_sizes else [layout.data_ranks]
    return math.lcm(*sizes)


def _single_changes(layout: Layout, batch_size: int, cluster: Cluster) -> Iterator[tuple[str, Layout]]:
    """Yield all single changes of the layout that may save memory and keep the devices and the batch, in the form in
    which a user would write them, each with the resulting layout."""
    shares = _shares(layout)
    wanted: list[dict[str, object]] = [
        {"microbatches": m}
        for m in (divisors(batch_size // shares) if batch_size % shares == 0 else ())
        if m > layout.microbatches
    ]
    wanted += [{"recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1 :]]
    if shares > 1:
        alike = {"stage_zero": ()} if layout.stage_zero else {}  # all stages as much as the stage with the most
        least = layout.zero if alike else max(layout.zero, 0) + 1
        wanted += [{"zero": level, **alike} for level in range(least, 4)]
    if layout.offload == "none" and cluster.device.kind != "cpu":
        wanted.append({"offload": "optimizer"})
    if layout.pp > 1 and layout.schedule == "gpipe":
        wanted.append({"schedule": "1f1b"})
    for factor in (2, 4, 8):
        wanted += [
            {axis: getattr(layout, axis) * factor, "dp": layout.dp // factor}
            for axis in (("pp",) if isinstance(layout.tp, tuple) else ("tp", "pp", "cp"))
            if layout.dp % factor == 0 and not layout.stage_sizes and not (axis == "pp" and layout.stage_zero)
        ]
    for fields in wanted:
        yield _words(fields), msgspec.structs.replace(layout, **fields)


def _more_devices(layout: Layout, batch_size: int) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts with one axis two or four times as large, each with its text."""
    if layout.stage_sizes:
        return
    for factor in (2, 4):
        for axis in ("dp", "pp") if isinstance(layout.tp, tuple) else ("dp", "tp", "pp"):
            if axis == "pp" and layout.stage_zero:
                continue
            if axis != "dp" or batch_size % (layout.data_ranks * factor * layout.microbatches) == 0:
                fields = {axis: getattr(layout, axis) * factor}
                yield f"{_words(fields)} ({layout.num_ranks * factor} ranks)", msgspec.structs.replace(layout, **fields)


def _words(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields.items())
