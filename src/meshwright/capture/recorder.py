"""Records the ATen operators that run on fake tensors as an FX graph, as make_fx does, in a tenth of its time."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.capture.fx_graph import FxGraph
from meshwright.capture.outputs import outputs_of
from meshwright.torch_private import DisableTorchFunction, FakeTensor, TorchDispatchMode, has_kernel

_DEVICE = torch.ops.prim.device.default
Place = Callable[[], dict[str, Any]]
"""Returns the origin of the running code, which becomes ``meta["custom"]`` of each node."""
Rewrites = Mapping[Any, Callable[..., Any]]
"""Maps an operator to the function to call instead. If the function returns NotImplemented, the operator stays."""


class CallRecorder(TorchDispatchMode):
    """Records every operator below autograd as a node.

    A node's ``meta["val"]`` is the fake tensor (or the sequence of fake tensors) that the operator returned. Tensors
    that are neither inputs nor results are constants: ``get_attr`` nodes, whose values are in ``constants``.
    """

    def __init__(self, inputs: Sequence[Tensor], place: Place, rewrites: Rewrites) -> None:
        super().__init__()
        self.graph = FxGraph()
        self.constants: dict[str, Tensor] = {}
        self.mutates = False
        self._place, self._rewrites = place, rewrites
        self._nodes: dict[int, fx.Node] = {}
        self._seen: list[Tensor] = []  # kept alive, so that no other tensor can take their ids
        for index, value in enumerate(inputs):
            node = self.graph.placeholder(f"input{index}")
            node.meta["val"] = value
            self._is(value, node)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and switching torch.compile off would take longer than recording

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # every operator reads it several times
        kwargs = kwargs or {}
        rewrite = self._rewrites.get(function)
        if rewrite is not None or _is_composite(function):
            with self:
                result = (rewrite or function.decompose)(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with DisableTorchFunction():  # the user's modes (torch.set_default_device) have already seen the call
            result = outputs_of(function, args, kwargs)
        is_tuple = isinstance(result, (tuple, list))
        if not is_tuple and not isinstance(result, Tensor):
            return result  # a number that is known from a constant
        self.mutates |= function._schema.is_mutable
        node = self._call(function, tuple(args), kwargs)
        node.meta["val"], node.meta["custom"] = result, self._place()
        if is_tuple:
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = self._call(operator.getitem, (node, index), {})
                    part.meta["val"], part.meta["custom"] = item, node.meta["custom"]
                    self._is(item, part)
        else:
            self._is(result, node)
        return result

    def returns(self, values: Sequence[Tensor | None]) -> None:
        """End the graph with ``values`` as its outputs."""
        self.graph.output([None if value is None else self._node(value) for value in values])

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        given, named = self._argument(args), self._argument(kwargs)  # constants become nodes before this node
        return self.graph.call_function(function, given, named)

    def _is(self, value: Tensor, node: fx.Node) -> None:
        self._nodes[id(value)] = node
        self._seen.append(value)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._argument, value))
        return {name: self._argument(item) for name, item in value.items()} if isinstance(value, dict) else value

    def _node(self, value: Tensor) -> fx.Node:
        node = self._nodes.get(id(value))
        if node is None:
            name = f"_tensor_constant{len(self.constants)}"
            node = self.graph.create_node("get_attr", name)
            self.constants[name] = node.meta["val"] = value
            self._is(value, node)
        return node


@cache
def _is_composite(function: Any) -> bool:
    """Whether the operator has no kernel of its own and only calls other operators. Where autograd is on, PyTorch
    replaces such an operator by those calls before this mode sees it."""
    if function.namespace == "prim" or not function._can_decompose():
        return False
    return not has_kernel(function.name(), "CPU")
