"""Decide whether ranks gather the factors of dense layers' gradients, beside codecs that the planner chooses."""

from collections.abc import Callable
from math import prod

import msgspec

from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.plan import Note, Plan
from meshwright.ir.program import Lower
from meshwright.planner.algorithms import in_a_box
from meshwright.planner.codecs import AUTO, FACTORS, GAIN, factored
from meshwright.planner.foretell import foretell


def better_by_factors(
    plan: Plan, gathering: Callable[[], Plan], graph: Graph, cluster: Cluster, lower: Lower, optimizer: OptimizerCost,
    room_bytes: float,
) -> Plan:  # fmt: skip
    """``plan``, whose codecs the planner chose, or the plan that ``gathering`` makes: there, ranks gather the operands
    of dense layers' weight gradients where that moves fewer bytes (``codecs.gather_factors``), and other gradients have
    codecs. The second one is taken if it fits in ``room_bytes`` and its step is shorter by more than ``GAIN``."""
    layout, mesh = plan.layout, plan.mesh
    axes = [axis for axis in DATA_AXES if mesh.has(axis) and mesh.size(axis) > 1]
    shared = all(in_a_box(mesh, axis, cluster) for axis in axes)
    if layout.codec != AUTO or layout.microbatches > 1 or shared:
        return plan
    if not factored(graph, prod(mesh.size(axis) for axis in axes)):
        return plan
    other = gathering()
    reduced, gathered = (foretell(lower, each, cluster, optimizer=optimizer) for each in (plan, other))
    seconds = reduced.played.step_s, gathered.played.step_s
    words = f"a step takes {seconds[1] * 1e3:.4g} ms if ranks gather the operands of dense layers' gradients"
    taken = seconds[1] < (1 - GAIN) * seconds[0] and gathered.peak.peak_bytes <= room_bytes
    reason = f"{words}, {seconds[0] * 1e3:.4g} ms if not"
    chosen = other if taken else plan
    note = Note(module="gradients", split=FACTORS if taken else f"no {FACTORS}", reason=reason)
    return msgspec.structs.replace(chosen, notes=(*chosen.notes, note))
