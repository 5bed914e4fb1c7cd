"""Let ranks gather the factors of dense layers' gradients, and decide whether they should."""

from collections.abc import Callable, Mapping
from math import prod

import msgspec

from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.plan import Note, Plan, Strategy
from meshwright.ir.program import Lower
from meshwright.planner.algorithms import in_a_box
from meshwright.planner.codecs import AUTO, FACTORS, GAIN
from meshwright.planner.foretell import foretell

_TURNS = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default", "aten._to_copy.default")
"""Operators between the matrix product of a dense layer's gradient and the gradient itself."""


def better_by_factors(
    plan: Plan, gathering: Callable[[], Plan], graph: Graph, cluster: Cluster, lower: Lower, optimizer: OptimizerCost,
    room_bytes: float,
) -> Plan:  # fmt: skip
    """Choose between two plans. In ``plan``, the planner has chosen codecs. In the plan that ``gathering`` makes, ranks
    gather the operands of dense layers' weight gradients where that moves fewer bytes (``gather_factors``), and other
    gradients have codecs. The second plan is taken if it fits in ``room_bytes`` and its step is shorter by more than
    ``GAIN``."""
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


def factored(graph: Graph, num_ranks: int) -> list[str]:
    """The operators that compute dense layers' weight gradients and whose operands have fewer bytes than the sum over
    ranks. A rank receives (P-1) B (n+m) elements of operands, against 2 (P-1)/P n m of a sum, for B rows on each of P
    ranks (Xie et al. 2016, Sufficient Factor Broadcasting)."""
    producers, names = graph.producers(), []
    for entry in graph.gradients if num_ranks > 1 else ():
        operator = producers.get(entry.gradient or "")
        while operator is not None and operator.target in _TURNS:
            operator = producers.get(operator.inputs[0])
        if operator is None or operator.target != "aten.mm.default":
            continue
        gradient = prod(graph.tensors[operator.outputs[0]].shape)
        operands = sum(prod(graph.tensors[name].shape) for name in operator.inputs)  # B P (n + m)
        if operands < 2 * gradient:
            names.append(operator.name)
    return names


def gather_factors(graph: Graph, strategies: dict[str, Strategy], sizes: Mapping[str, int]) -> None:
    """Let ranks gather the operands of dense layers' weight gradients where that moves fewer bytes than reducing the
    gradients (``factored``). The operator then runs with the whole batch on every rank."""
    axes = [axis for axis in DATA_AXES if axis in sizes]
    for name in factored(graph, prod(sizes[axis] for axis in axes)):
        for axis in axes:
            strategies[name].pop(axis, None)
