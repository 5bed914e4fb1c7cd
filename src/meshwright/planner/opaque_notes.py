"""Notes on opaque regions: their time, its share of the step, and the time that a split by samples would save."""

from dataclasses import dataclass, field
from math import prod

import msgspec

from meshwright.cost.node_costs import NodeCosts
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import DATA_AXES, TIME
from meshwright.ir.opaque import TARGETS, OpaqueCall, call_of
from meshwright.ir.plan import Note, Plan, starred
from meshwright.ir.program import Lower
from meshwright.ir.stages import cut
from meshwright.planner.foretell import foretell


@dataclass
class _Region:
    """The calls of a region, or of equal regions of repeated blocks. ``stages_s`` are the seconds of a step
    on each pipeline rank, ``saved_s`` those that a split of the batch over all data-parallel ranks would save."""

    calls: list[OpaqueCall] = field(default_factory=list)
    axes: set[str] = field(default_factory=set)
    stages_s: dict[int, float] = field(default_factory=dict)
    saved_s: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The seconds on the rank that spends the most."""
        return max(self.stages_s.values())


def with_region_notes(
    plan: Plan, graph: Graph, cluster: Cluster, lower: Lower, optimizer: OptimizerCost = ADAMW, clips: bool = False
) -> Plan:
    """The plan with a note on each of its opaque regions. Repeated blocks share a note."""
    if not any(operator.target in TARGETS for operator in graph.operators):
        return plan
    regions, ranks = _regions(plan, graph, cluster, lower)
    step_s = 0.0  # unknown: the mesh is larger than the cluster
    if plan.mesh.world_size <= cluster.num_devices:
        step_s = foretell(lower, plan, cluster, optimizer=optimizer, clips=clips).played.step_s
    notes = tuple(
        Note(module=name, split=_split(region, plan), reason=_reason(region, ranks, step_s, cluster))
        for name, region in regions.items()
    )
    others = (note for note in plan.notes if note.module not in regions)
    return msgspec.structs.replace(plan, notes=(*others, *notes))


def _regions(plan: Plan, graph: Graph, cluster: Cluster, lower: Lower) -> tuple[dict[str, _Region], int]:
    divided = cut(graph, plan.firsts)
    strategies, costs = plan.strategies(graph, divided), NodeCosts(plan.mesh, cluster)
    ranks = prod(size for axis, size in plan.mesh.sizes.items() if axis in DATA_AXES)
    regions: dict[str, _Region] = {}
    for operator in graph.operators:
        if operator.target not in TARGETS:
            continue
        call, strategy = call_of(operator.arguments), strategies[operator.name]
        region = regions.setdefault(starred(call.region), _Region())
        stage = divided.stage_of.get(operator.name, 0)
        sizes, rank = plan.sizes(stage), plan.pipeline.rank_of(stage)
        nodes = lower.operator(operator, strategy, {axis: size for axis, size in sizes.items() if size > 1}).nodes
        cost = call.measured(operator.target == TARGETS[1])
        if operator.target == TARGETS[0]:
            region.calls.append(call)
        region.axes |= {axis for axis, letter in strategy.items() if letter}
        seconds = costs.of(nodes).seconds * plan.microbatches
        region.stages_s[rank] = region.stages_s.get(rank, 0.0) + seconds
        less = max(0.0, seconds - cost.whole_s / ranks) if cost is not None else 0.0
        region.saved_s[rank] = region.saved_s.get(rank, 0.0) + less
    return regions, ranks


def _split(region: _Region, plan: Plan) -> str:
    split = [f"batch@{axis}" for axis in plan.mesh.names if axis in region.axes]
    split += [f"{plan.microbatches} micro-batches"] if TIME in region.axes else []
    return " ".join(split) or "whole on each rank"


def _reason(region: _Region, ranks: int, step_s: float, cluster: Cluster) -> str:
    first = region.calls[0]
    times = f"{len(region.calls)} times, " if len(region.calls) > 1 else ""
    if first.cost is None:
        price = "its time is not known: it was not run on an example batch"
    else:
        price = f"takes {region.seconds * 1e3:.3g} ms"
        price += f", {region.seconds / step_s:.0%} of the step" if step_s else ""
        if cluster.device.kind != "cpu":
            price += f" (measured on {first.cost.device}, not on {cluster.device.name})"
    gain = ""
    if not region.axes - {TIME} and ranks > 1:
        gain = f"; {first.reason.partition(': ')[2] or first.reason}" if first.reason else ""
        if first.cost is not None:
            less = max(region.saved_s.values()) * 1e3
            gain += f"; split by samples over {ranks} ranks, the step would take {less:.3g} ms less"
    return f"opaque region, {times}{price}{gain}"
