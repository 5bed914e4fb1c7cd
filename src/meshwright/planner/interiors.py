"""Choose the convolutions that take less time if they compute their interior rows first, while halos are sent.

A halo is the rows of a neighbour's part that a convolution reads. The interior rows are the rows that need no halo.
"""

from collections.abc import Mapping

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.plan import Strategy, starred
from meshwright.ir.program import OperatorProgram
from meshwright.planner.intra_op.prices import Prices


def interiors(graph: Graph, prices: Prices, strategies: Mapping[str, Strategy], hides: bool) -> tuple[str, ...]:
    """Starred names (``h.*.conv`` for all repetitions of a block) of the convolutions and their gradients that should
    compute their interior rows first. Interior rows are the rows that need no halo. ``hides``: whether halos are sent
    while the device computes."""
    names = [operator.name for operator in graph.operators if pays(prices, operator, strategies[operator.name], hides)]
    return tuple(dict.fromkeys(map(starred, names)))


def pays(prices: Prices, operator: Operator, strategy: Strategy, hides: bool) -> bool:
    """Whether an operator takes less time if it computes its interior rows first, which need no halo.

    The operator then need not copy its part next to the halo. With ``hides``, it computes while the halo is sent. But
    the border rows need small kernels of their own.
    """
    if operator.rule is None or not operator.target.startswith("aten.convolution"):
        return False
    whole, first = (prices.program(operator, strategy, interior_first) for interior_first in (False, True))
    if not any(node.starts for node in whole.nodes) or first.nodes == whole.nodes:
        return False
    return played_s(prices, first, operator, hides) < played_s(prices, whole, operator, hides)


def played_s(prices: Prices, program: OperatorProgram, operator: Operator, hides: bool) -> float:
    """The seconds from the start of an operator's first node to the end of its last node. A backward operator does not
    pay for the halo of a forward input, because forward has already fetched this halo."""
    now, ready = 0.0, {}
    for node in program.nodes:
        if node.starts is not None:
            fetch = program.fetches.get(node.name)
            fetched = operator.backward and fetch is not None and fetch.position > 0
            ready[node.name] = now + (0.0 if fetched else prices.node_exchanges_s(node))
            now = now if hides else ready[node.name]
        elif node.waits:
            now = max(now, ready[node.waits])
        now += prices.costs.nodes_s([node])
    return now
