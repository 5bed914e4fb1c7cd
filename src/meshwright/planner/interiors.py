"""Which convolutions compute their interior while the halos travel: where that hides more than the borders cost."""

from collections.abc import Mapping

from meshwright.cost.operators import operator_cost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Strategy, starred
from meshwright.planner.intra_op.prices import Prices

BORDERS = 2
"""Convolutions more than one."""


def interiors(
    graph: Graph, mesh: Mesh, sizes: Mapping[str, int], cluster: Cluster | None, strategies: Mapping[str, Strategy]
) -> tuple[str, ...]:
    """The convolutions for which it pays; none on a CPU, whose cores move the rows themselves."""
    if cluster is None or cluster.device.kind == "cpu":
        return ()
    prices = Prices(graph, mesh, sizes, cluster)
    found = [one.name for one in graph.operators if pays(prices, one, strategies[one.name])]
    return tuple(dict.fromkeys(map(starred, found)))


def pays(prices: Prices, operator: Operator, strategy: Strategy) -> bool:
    """Whether the exchange, or as much of it as the interior takes, is more than two small kernels."""
    if operator.rule is None or not operator.target.startswith("aten.convolution."):
        return False
    fetched = list(prices.fetched(operator, strategy, 0).values())
    if not fetched:
        return False
    cost = operator_cost(prices.parts, prices.rates, operator, strategy)
    return min(fetched[-1], cost.seconds) > BORDERS * prices.rates.kernel_s
