"""An ``fx.Graph`` that makes nodes faster, for graphs without symbolic numbers."""

from collections.abc import Callable
from typing import Any

from torch import fx

_set_args: Any = fx.Node.args.fset  # type: ignore[attr-defined]
_set_kwargs: Any = fx.Node.kwargs.fset  # type: ignore[attr-defined]
"""Setters that skip the bookkeeping of a normal assignment, which looks the node up twice in the graph's tables."""

_STEMS: dict[Any, str] = {}
"""Maps the target of a node to the first part of its name."""


class FxGraph(fx.Graph):
    """An ``fx.Graph`` that sets the arguments of a node after making it. ``create_node`` itself would first search the
    arguments for symbolic numbers, and these graphs have none."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any, **named: Any
    ) -> fx.Node:
        """Make a node without arguments, then set its arguments unchanged."""
        node = super().create_node(op, target, None, None, *rest, **named)
        if args:
            _set_args(node, args)
        if kwargs:
            _set_kwargs(node, kwargs)
        return node

    def _target_to_str(self, target: Any) -> str:
        """The first part of the name of a node that calls ``target``. It is computed once for each target."""
        if target not in _STEMS:
            _STEMS[target] = super()._target_to_str(target)
        return _STEMS[target]

    def eliminate_dead_code(self, is_impure_node: Callable[[fx.Node], bool] | None = None) -> bool:
        """Remove the nodes that no other node reads and that change nothing. Return whether there were any. Whether a
        function changes anything is looked up in PyTorch's tables once, not for each call."""
        known: dict[Any, bool] = {}

        def is_impure(node: fx.Node) -> bool:
            if node.op != "call_function":
                return node.is_impure()
            if node.target not in known:
                known[node.target] = node.is_impure()
            return known[node.target]

        return super().eliminate_dead_code(is_impure_node or is_impure)
