"""Graphs of operators without symbolic numbers."""

from typing import Any

from torch import fx

_set_args: Any = fx.Node.args.fset  # type: ignore[attr-defined]
_set_kwargs: Any = fx.Node.kwargs.fset  # type: ignore[attr-defined]
"""Assignment would look the node up in the graph's table of nodes by target, twice."""


class Graph(fx.Graph):
    """An ``fx.Graph`` whose nodes get their arguments when they are made: given to ``create_node``, arguments are first
    searched for symbolic numbers, and we have none."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any, **named: Any
    ) -> fx.Node:
        node = super().create_node(op, target, None, None, *rest, **named)
        if args:
            _set_args(node, args)
        if kwargs:
            _set_kwargs(node, kwargs)
        return node
