"""Which convolutions compute their own rows first, while the halos travel: where that saves more than borders cost."""

from collections.abc import Mapping

from meshwright.cost.decomposed import Decomposed
from meshwright.cost.operators import operator_cost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kind import kind_of
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Strategy, starred
from meshwright.planner.intra_op.prices import Prices

BORDER_KERNELS = 6
"""A border before and one after: zeros beside the halo, the convolution, the sum."""


def interiors(
    graph: Graph, mesh: Mesh, sizes: Mapping[str, int], cluster: Cluster | None, strategies: Mapping[str, Strategy]
) -> tuple[str, ...]:
    """The convolutions, and gradients of them, for which it pays."""
    if cluster is None:
        return ()
    prices = Prices(graph, mesh, sizes, cluster)
    hides = cluster.device.kind != "cpu"  # there, the cores that compute move the rows, too
    found = [one.name for one in graph.operators if pays(prices, one, strategies[one.name], hides)]
    return tuple(dict.fromkeys(map(starred, found)))


def pays(prices: Prices, operator: Operator, strategy: Strategy, hides: bool) -> bool:
    """Whether the copy of a part to lie beside its halo, and the time that the halo travels where that hides, are more
    than small kernels for the borders."""
    if operator.rule is None or not operator.target.startswith("aten.convolution"):
        return False
    inside = Decomposed(prices.parts).of(operator, strategy)
    backward = operator.target.startswith("aten.convolution_backward")
    fetched = [one for one in inside.fetched if one.operand == int(backward)]
    halos = [one.exchange for one in fetched] or (inside.exchanges if backward else [])
    if not halos or not inside.copied_bytes or (inside.fetched and not fetched):  # the last: a transposed one
        return False
    cost = operator_cost(prices.parts, prices.rates, operator, strategy)
    copied = inside.copied_bytes / len(halos)
    part = min(1.0, 2 * halos[-1].bytes / copied)
    dtype = prices.graph.tensors[operator.outputs[0]].dtype
    borders_s = prices.rates.seconds(kind_of(operator), dtype, part * cost.flops, part * cost.bytes)
    saved_s = prices.rates.stream("copy", 2 * copied).seconds
    saved_s += min(prices.exchange_s(halos[-1]), cost.seconds) if hides else 0.0
    return saved_s > borders_s + BORDER_KERNELS * prices.rates.kernel_s
