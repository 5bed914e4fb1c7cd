"""Notes on opaque regions: their time, its share of the step, and what would be gained if they could be split."""

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
    """The calls of a region, or of equal regions of repeated blocks. ``seconds`` are of all calls in a step;
    ``split_s`` if the batch were split over all data-parallel ranks."""

    calls: list[OpaqueCall] = field(default_factory=list)
    axes: set[str] = field(default_factory=set)
    seconds: float = 0.0
    split_s: float = 0.0


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
        sizes = plan.sizes(divided.stage_of.get(operator.name, 0))
        nodes = lower.operator(operator, strategy, {axis: size for axis, size in sizes.items() if size > 1}).nodes
        cost = call.measured(operator.target == TARGETS[1])
        if operator.target == TARGETS[0]:
            region.calls.append(call)
        region.axes |= {axis for axis, letter in strategy.items() if letter and axis != TIME}
        region.seconds += costs.of(nodes).seconds * plan.microbatches
        region.split_s += cost.whole_s / ranks if cost is not None else 0.0
    return regions, ranks


def _split(region: _Region, plan: Plan) -> str:
    split = [axis for axis in plan.mesh.names if axis in region.axes]
    return " ".join(f"batch@{axis}" for axis in split) if split else "whole on each rank"


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
    if not region.axes and ranks > 1:
        gain = f"; {first.reason.partition(': ')[2] or first.reason}" if first.reason else ""
        if first.cost is not None:
            less = max(0.0, region.seconds - region.split_s)
            gain += f"; split by samples over {ranks} ranks, the step would take {less * 1e3:.3g} ms less"
    return f"opaque region, {times}{price}{gain}"
