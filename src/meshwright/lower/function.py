"""Compiles a rank's graph to a function that takes its arguments in one list, so that a value is freed after its last
use."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

BoxedFunction = Callable[[list[Any]], list[Any]]
Kernels = Mapping[Any, Callable[..., Any]]
"""Maps an operator to a function that replaces it in a graph. This helps because PyTorch's dispatcher takes longer than
a short collective."""
DISPATCHED: Kernels = MappingProxyType({})
"""No replacements: all operators go through the dispatcher."""


class _Boxed(fx.graph.CodeGen):
    """Generates ``forward(self, values)``, which empties ``values`` before it starts."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.split(":")[0].strip() for name in free_vars if name != "self"]
        unpack = f"\n    {', '.join(names)}, = values\n    values.clear()" if names else ""
        return f"def {self._func_name}(self, values):{unpack}"


def boxed_function(graph: fx.Graph, constants: dict[str, torch.Tensor], kernels: Kernels = DISPATCHED) -> BoxedFunction:
    """Compile a graph to a function that takes the values of its placeholders in one list and empties the list.
    ``kernels`` maps an operator to the function that replaces it. The function leaves the nodes of ``graph``
    unchanged."""
    root = nn.Module()
    for name in {str(node.target) for node in graph.find_nodes(op="get_attr")}:
        root.register_buffer(name, constants[name], persistent=False)
    replaced = {node: node.target for node in graph.nodes if node.target in kernels and node.op == "call_function"}
    for node, target in replaced.items():
        node.target = kernels[target]
    graph.set_codegen(_Boxed())
    try:
        module = fx.GraphModule(root, graph)
    finally:
        for node, target in replaced.items():
            node.target = target
    function: BoxedFunction = module.forward
    return function
