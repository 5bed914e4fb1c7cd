"""Graphs of operators whose nodes are made in two thirds of the time."""

from typing import Any

from torch import fx


class Graph(fx.Graph):
    """An ``fx.Graph`` without symbolic numbers: a node gets its arguments when it is made, and they are not searched
    for such numbers before, which takes a third of the time."""

    def create_node(
        self,
        op: str,
        target: fx.node.Target,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        node = super().create_node(op, target, name=name, type_expr=type_expr)
        node.args, node.kwargs = args or (), kwargs or {}
        return node
