"""The second pass: no mutation, canonical operators, nothing that computes nothing."""

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.ops.loss import SUM
from meshwright.ops.table import CANONICAL

aten = torch.ops.aten
ours = torch.ops.meshwright
IDENTITY = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default})
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default})


def functionalized(first: fx.GraphModule, leaves: Sequence[Tensor]) -> tuple[fx.GraphModule, set[int]]:
    """The same graph without in-place operators, and the positions of the inputs that these would have changed.

    What such an input becomes must be among the outputs; constants stay attributes.
    """
    flat = _flatten(first)
    module = make_fx(
        torch.func.functionalize(lambda *values: flat(*values)), decomposition_table=cast(Any, dict(CANONICAL))
    )(*leaves)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    copied = {node.args[0] for node in module.graph.nodes if node.target is aten.copy_.default}
    changed = {index for index, node in enumerate(inputs) if node in copied}
    _simplify(module)
    return module, changed


def _flatten(first: fx.GraphModule) -> Any:
    """The first pass with a flat signature and its outputs as a flat list; metadata follows each node."""
    first.graph.set_codegen(fx.graph.CodeGen())
    interpreter = fx.Interpreter(first)
    return lambda *values: interpreter.run(*values, enable_io_processing=False)


def _simplify(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.copy_.default:
            if not node.users:
                graph.erase_node(node)
        elif node.target in IDENTITY or _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in RESHAPES:
            node.args = (node.args[0], list(node.meta["val"].shape), *node.args[2:])
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten._log_softmax_backward_data.default:
            _join_cross_entropy(graph, node)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _join_cross_entropy(graph: fx.Graph, node: fx.Node) -> None:
    """The gradients of nll_loss (a sum) and log_softmax as one operator: it needs no sum over a split vocabulary."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.nll_loss_backward.default or len(inner.users) != 1:
        return
    grad, logarithms, target, weight, reduction, ignore = inner.args[:6]
    if weight is not None or reduction != SUM or logarithms is not node.args[1] or node.args[2] not in (-1, 1):
        return
    if not isinstance(logarithms, fx.Node) or logarithms.meta["val"].dtype != node.meta["val"].dtype:
        return
    with graph.inserting_before(node):
        joined = graph.call_function(ours.cross_entropy_backward.default, (grad, logarithms, target, ignore))
    joined.meta.update(node.meta)
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
    graph.erase_node(inner)


def _is_identity(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source, value = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, Tensor) or not isinstance(value, Tensor):
        return False
    if node.target in RESHAPES or node.target is aten.slice.Tensor:
        return source.shape == value.shape
    if node.target is aten._to_copy.default:
        return source.dtype == value.dtype and set(node.kwargs) <= {"dtype", "device", "layout"}
    return False


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one output of an operator with several."""
    return node.op == "call_function" and node.target is operator.getitem
