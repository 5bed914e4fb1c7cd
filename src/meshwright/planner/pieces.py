"""Choose the matrix products that run in pieces, while their operand is gathered or their result is scattered, and the
number of pieces.

More pieces travel earlier, but each has its own start, and smaller products are less efficient (``cost/pieces.py``).
The host also has more kernels to launch, and cannot launch them as a graph.
Products of the same module in repeated blocks, and in the same direction, have the same number of pieces.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from meshwright.cost.pieces import PieceCosts
from meshwright.ir import units
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.kernel import Kernel
from meshwright.ir.operator_algorithm import in_pieces
from meshwright.ir.part import stage_cluster
from meshwright.ir.plan import Note, Plan, starred
from meshwright.ir.program import Collective, Lower, Node, Phase

CHUNKS = (1, 2, 4, 8)
"""The numbers of pieces that are considered for the rows of one rank."""
LEAST_GAIN = 0.05
"""Products in pieces must be faster than in plain form by this fraction of the plain time."""
_STEPS = 8
"""The most nodes between a collective and its product: views, and copies of rows into their order."""
_PRODUCTS = ("aten.mm.", "aten.addmm.")
_PASSING = (
    "aten.view.", "aten._unsafe_view.", "aten.reshape.", "aten.transpose.int", "aten.cat.", "aten.select.",
    "aten.slice.", "aten.stack.", "aten.constant_pad_nd.", "aten._to_copy.",
)  # fmt: skip
"""Operators between a collective and its product: they put rows into another order or dtype."""


class Pair(NamedTuple):
    """A matrix product, and the collective that brings its rows or takes them."""

    operator: str
    backward: bool
    product: Kernel
    collective: Collective

    @property
    def rows(self) -> float:
        """The rows of the product."""
        return self.product.product.m if self.product.product is not None else 0

    @property
    def group(self) -> tuple[str, bool]:
        """The products that have the same number of pieces."""
        return starred(self.operator.rpartition(":")[0]), self.backward


def with_pieces(
    lower: Lower, plan: Plan, graph: Graph, cluster: Cluster, stages: Collection[int] | None = None
) -> Plan:
    """The plan, in which products run in pieces where that is faster on the cluster. ``stages``: the numbers of the
    stages whose products are considered; None: all stages."""
    if all(size < 2 for axis, size in plan.mesh.sizes.items() if axis not in ("dp", "pp")):
        return plan
    phases = _phases(lower, plan, stages)
    costs = {
        stage: PieceCosts(plan.mesh, stage_cluster(cluster, plan.mesh, plan.pipeline.rank_of(stage)))
        for stage in {stage for stage, _ in phases}
    }
    groups = defaultdict[tuple[str, bool], list[tuple[Pair, PieceCosts]]](list)
    for stage, phase in phases:
        for pair in pairs(phase):
            if costs[stage].hides(pair.collective):
                groups[pair.group].append((pair, costs[stage]))
    chosen = {group: best for group, members in groups.items() if (best := _fastest(members)) is not None}
    if not chosen:
        return plan
    divided = _divided(plan, graph, {group: pieces for group, (pieces, _) in chosen.items()})
    # Shifts cannot be part of a graph of kernels, so the host launches each kernel of the pieces. In plain form, graphs
    # can launch the kernels.
    before = sum(costs[stage].played_s(phase.nodes) for stage, phase in phases)
    after = sum(costs[stage].launched_s(phase.nodes) for stage, phase in _phases(lower, divided, stages))
    if after >= before:
        return plan
    notes = [
        Note(module=f"{module}{' (backward)' * backward}", split=in_pieces(pieces), reason=reason)
        for (module, backward), (pieces, reason) in chosen.items()
    ]
    return msgspec.structs.replace(divided, notes=(*divided.notes, *notes))


def _phases(lower: Lower, plan: Plan, stages: Collection[int] | None) -> list[tuple[int, Phase]]:
    """All phases, each with the number of its stage."""
    programs = lower(plan) if stages is None else lower.variants([plan], stages)[0]
    return [(program.stage, phase) for program in programs for phase in program.phases]


def pairs(phase: Phase) -> Iterator[Pair]:
    """The products of a phase whose rows an all-gather brings, or whose result a reduce-scatter takes. Of the products
    that read the same rows, the first counts: the others read rows that have arrived."""
    makers = {value.name: node for node in phase.nodes for value in node.outputs}
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in phase.nodes:
        for name in node.inputs:
            readers[name].append(node)
    starts = {node.name: node.starts for node in phase.nodes if node.starts is not None}
    taken = set()
    for node in phase.nodes:
        product = next((kernel for kernel in node.kernels if kernel.product is not None), None)
        if product is None or not node.target.startswith(_PRODUCTS):
            continue
        wait = _gather_of(node, makers, starts)
        if wait is not None and wait not in taken:
            taken.add(wait)
            yield Pair(node.operator, node.backward, product, starts[wait])
        elif wait is None and (scatter := _scatter_of(node, readers)) is not None:
            yield Pair(node.operator, node.backward, product, scatter)


def _gather_of(product: Node, makers: Mapping[str, Node], starts: Mapping[str, Collective]) -> str | None:
    """The name of the node that starts the all-gather of a product's left operand."""
    node = makers.get(product.inputs[-2]) if len(product.inputs) > 1 else None
    width = product.kernels[0].product.k if product.kernels[0].product is not None else 1
    for _ in range(_STEPS):
        if node is None or node.waits in starts:
            break
        whole_rows = node.outputs[0].shape[-1] % width == 0 if node.target.startswith("aten.transpose.") else True
        node = makers.get(node.inputs[0]) if node.target.startswith(_PASSING) and whole_rows else None
    return node.waits if node is not None and node.waits and starts[node.waits].kind == "all_gather" else None


def _scatter_of(product: Node, readers: Mapping[str, list[Node]]) -> Collective | None:
    """The reduce-scatter of a product's result."""
    node = product
    for _ in range(_STEPS):
        following = readers.get(node.outputs[0].name, []) if node.outputs else []
        node = following[0] if following else product
        if node.starts is not None:
            return node.starts if node.starts.kind == "reduce_scatter" else None
        if not node.target.startswith(_PASSING):
            return None
    return None


def _fastest(members: list[tuple[Pair, PieceCosts]]) -> tuple[int, str] | None:
    """The number of pieces that is fastest for these products on their devices, with the reason; None if the plain form
    is."""
    plain_s = sum(costs.whole_s(pair.product, pair.collective) for pair, costs in members)
    times = {}
    for chunks in CHUNKS:
        numbers = {chunks * pair.collective.size for pair, _ in members}
        rows = min(pair.rows for pair, _ in members)
        if len(numbers) == 1 and (pieces := numbers.pop()) <= rows:
            times[pieces] = sum(costs.pieces_s(pair.product, pair.collective, pieces) for pair, costs in members)
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    if times[best] > (1 - LEAST_GAIN) * plain_s:
        return None
    return best, f"{units.seconds(times[best])} a micro-batch; in plain form {units.seconds(plain_s)}"


def _divided(plan: Plan, graph: Graph, pieces: Mapping[tuple[str, bool], int]) -> Plan:
    """The plan with these numbers of pieces."""
    texts = {
        starred(operator.name): in_pieces(pieces[group])
        for operator in graph.operators
        if operator.target.startswith(_PRODUCTS[0])
        and (group := (starred(operator.name.rpartition(":")[0]), operator.backward)) in pieces
    }
    stages = []
    for stage in plan.stages:
        held = set(map(starred, stage.strategies))
        own = {name: text for name, text in texts.items() if name in held}
        stages.append(msgspec.structs.replace(stage, operator_algorithms={**own, **stage.operator_algorithms}))
    return msgspec.structs.replace(plan, stages=tuple(stages))
