"""Answer questions about one layout of a captured model: why it was not chosen, and what would make it fit."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import msgspec

from meshwright.cost.closed_form import predict_step
from meshwright.cost.occupancy import box_of, num_peers, room_of
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.cost.work import Communicate, Piece, StepWork
from meshwright.errors import ClusterError
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
from meshwright.planner.finalists import REFUSALS
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.reasons import alternative, needs_memory
from meshwright.planner.remedy import Change
from meshwright.schedules.pipeline import schedule_of

MOST_CHANGES = 5
"""The largest number of changes that are suggested for a layout that does not fit."""
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
    every = []
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
        every.append(total)
    return max(every)


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
) -> tuple[Change, ...]:
    """Up to ``MOST_CHANGES`` single changes that make ``layout`` fit in memory, the fastest first. Empty if no single
    change is enough. Prices of layers select the changes (decision 0040). The returned layouts were lowered and
    simulated for the whole model."""
    limit = memory_bytes or _room_bytes(cluster, layout)
    chain, lower = chain_of(graph, cluster, layout.num_ranks), lowering(graph)
    prices = LayerPrices(chain, cluster, lowering(chain.graph), optimizer, clips, layout.num_ranks)
    pipelines = Pipelines(prices, limit)
    estimates: list[tuple[float, str, Layout]] = []
    for text, changed in _single_changes(layout, graph.batch_size, cluster):
        with suppress(*_IMPOSSIBLE):
            option = _estimated(pipelines, changed)
            if option.peak_bytes <= limit:
                estimates.append((option.step_s, text, changed))
    found: list[Change] = []
    ask = Ask(explains=False, optimizer=optimizer, lower=lower, room_bytes=limit)
    for _, text, changed in sorted(estimates, key=lambda estimate: estimate[0]):
        with suppress(*_IMPOSSIBLE):
            plan = plan_layout(graph, changed, world_size=changed.num_ranks, cluster=cluster, ask=ask)
            real = _option_of(plan, cluster, lower, optimizer, clips)
            if real.peak_bytes <= limit:
                found.append(Change(text=text, step_s=real.step_s, peak_bytes=real.peak_bytes))
        if len(found) == MOST_CHANGES:
            break
    return tuple(sorted(found, key=lambda change: change.step_s))


def _estimated(pipelines: Pipelines, layout: Layout) -> Option:
    return pipelines.option(msgspec.structs.replace(layout, recompute="none"), (layout.recompute,))


def _single_changes(layout: Layout, batch_size: int, cluster: Cluster) -> Iterator[tuple[str, Layout]]:
    """Yield all single changes that may save memory, in the form in which a user would write them, each with the
    resulting layout."""
    sizes = [layout.of_stage(index).dp for index in range(layout.pp)] if layout.stage_sizes else [layout.data_ranks]
    shares = math.lcm(*sizes)
    wanted: list[dict[str, object]] = [
        {"microbatches": m}
        for m in (divisors(batch_size // shares) if batch_size % shares == 0 else ())
        if m > layout.microbatches
    ]
    wanted += [{"recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1 :]]
    if max(sizes) > 1:
        wanted += [{"zero": level} for level in range(max(layout.zero, 0) + 1, 4)]
    if layout.offload == "none" and cluster.device.kind != "cpu":
        wanted.append({"offload": "optimizer"})
    if layout.pp > 1 and layout.schedule == "gpipe":
        wanted.append({"schedule": "1f1b"})
    for factor in (2, 4, 8):
        wanted += [
            {axis: getattr(layout, axis) * factor, "dp": layout.dp // factor}
            for axis in (("pp",) if isinstance(layout.tp, tuple) else ("tp", "pp", "cp"))
            if layout.dp % factor == 0 and not layout.stage_sizes
        ]
    for factor in (2, 4):
        if batch_size % (layout.data_ranks * factor * layout.microbatches) == 0 and not layout.stage_sizes:
            wanted.append({"dp": layout.dp * factor})
    for fields in wanted:
        text = ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields.items())
        if set(fields) == {"dp"}:
            text += f" ({layout.num_ranks * (int(str(fields['dp'])) // layout.dp)} ranks)"
        yield text, msgspec.structs.replace(layout, **fields)
