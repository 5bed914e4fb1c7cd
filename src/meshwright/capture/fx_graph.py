"""Graphs of operators without symbolic numbers."""

from typing import Any

from torch import fx

_set_args: Any = fx.Node.args.fset  # type: ignore[attr-defined]
_set_kwargs: Any = fx.Node.kwargs.fset  # type: ignore[attr-defined]
"""Setters that skip the bookkeeping of a normal assignment, which looks the node up twice in the graph's tables."""


class FxGraph(fx.Graph):
    """An ``fx.Graph`` that sets the arguments of a node after making it. ``create_node`` itself would first search the
    arguments for symbolic numbers, and these graphs have none."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any, **named: Any
    ) -> fx.Node:
        """Make a node without arguments, then set its arguments as they are."""
        node = super().create_node(op, target, None, None, *rest, **named)
        if args:
            _set_args(node, args)
        if kwargs:
            _set_kwargs(node, kwargs)
        return node
