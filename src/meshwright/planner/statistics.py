"""Batch norm with statistics of each rank's samples: where it splits samples, it splits them as its ``own``."""

from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME
from meshwright.ir.plan import Strategy
from meshwright.ir.rule import OWN


def owned(operator: Operator, strategy: Strategy) -> Strategy:
    """The strategy with samples as the operator's own, on all axes but time."""
    joint = operator.rule.joint if operator.rule is not None else {}
    if OWN not in joint:
        return strategy
    return {axis: OWN if axis != TIME and choice in joint[OWN] else choice for axis, choice in strategy.items()}


def check_owned(graph: Graph, strategies: dict[str, Strategy]) -> None:
    """That gradients are taken with the statistics that the forward took: backward splits its own samples alike.

    Raises:
        LayoutError: names the first operator that does not.
    """
    consumers = graph.consumers()
    for operator in graph.operators:
        if operator.backward or operator.rule is None or OWN not in operator.rule.joint:
            continue
        axes = _axes(strategies[operator.name])
        readers = [one for output in operator.outputs[1:3] for one, _ in consumers.get(output, ())]
        for reader in readers:
            if _axes(strategies[reader.name]) != axes:
                raise LayoutError(
                    f"batch_statistics='rank', and its gradient splits samples over {_said(reader, strategies)}, "
                    f"itself over {_said(operator, strategies)}",
                    where=operator.name,
                    remedy="pin both alike, or leave out the pin",
                )


def _axes(strategy: Strategy) -> set[str]:
    return {axis for axis, choice in strategy.items() if choice == OWN}


def _said(operator: Operator, strategies: dict[str, Strategy]) -> str:
    return ", ".join(sorted(_axes(strategies[operator.name]))) or "nothing"
