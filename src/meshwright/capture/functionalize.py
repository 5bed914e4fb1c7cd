"""Removes mutation, and operators that compute nothing, from a traced step."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from meshwright.capture import refusals
from meshwright.capture.bands import put_bands
from meshwright.capture.outputs import outputs_of
from meshwright.capture.recorder import CallRecorder
from meshwright.capture.tracer import Traced
from meshwright.ops.loss import SUM
from meshwright.ops.table import rewrites

aten = torch.ops.aten
ours = torch.ops.meshwright
IDENTITY = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default})
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default})


def functionalized(traced: Traced) -> Traced:
    """Return the same step without in-place operators, and without operators that compute nothing.

    Raises:
        CaptureError: the step changes a parameter in place.
    """
    if traced.mutates:
        traced = _replayed(traced)
        copied = {node.args[0] for node in traced.graph.nodes if node.target is aten.copy_.default}
        pairs = zip(traced.parameters, traced.placeholders, strict=False)
        refusals.changed_parameters([name for name, node in pairs if node in copied])
    _simplify(traced.graph, 1 + len(traced.metrics), traced.constants)

    def without_gradient(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return outputs_of(aten.detach.default, (value,), {})
        return value

    with traced.mode, torch.no_grad():
        for node in traced.graph.nodes:
            node.meta["val"] = fx.node.map_aggregate(node.meta.get("val"), without_gradient)
    return traced


class _Replay(fx.Interpreter):
    """Runs the nodes of a step again; ``here`` is the origin of the running node."""

    def __init__(self, step: Traced) -> None:
        super().__init__(nn.Module(), graph=step.graph)
        self.extra_traceback = False  # errors are raised in the form in which operators raise them
        self._constants = step.constants
        self.here: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.here = n.meta.get("custom", self.here)
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        return self._constants[target]


def _replayed(step: Traced) -> Traced:
    """Record the step again with the origin of each node. In-place operators become operators that make new tensors."""
    replay, inputs = _Replay(step), [node.meta["val"] for node in step.placeholders]
    recorder = CallRecorder(inputs, lambda: replay.here, rewrites())
    with step.mode, recorder:
        outputs = torch.func.functionalize(lambda *values: replay.run(*values, enable_io_processing=False))(*inputs)
    recorder.returns(outputs)
    return replace(step, graph=recorder.graph, constants=recorder.constants, mutates=False)


def _simplify(graph: fx.Graph, num_scalars: int, constants: Mapping[str, Tensor]) -> None:
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
    put_bands(graph, constants)
    results = cast(list[fx.Node | None], graph.output_node().args[0])
    graph.output_node().args = ([*map(_unrounded, results[:num_scalars]), *results[num_scalars:]],)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten._log_softmax_backward_data.default:
            _join_cross_entropy(graph, node)
    graph.eliminate_dead_code()
    graph.lint()


def _unrounded(scalar: fx.Node | None) -> fx.Node | None:
    """Return the node before a cast to half precision and back; without such a pair of casts, the scalar itself."""
    source: Any = scalar
    for _ in range(2):
        if not isinstance(source, fx.Node) or source.target is not aten._to_copy.default:
            return scalar
        source = source.args[0]
    return source if scalar is not None and source.meta["val"].dtype == scalar.meta["val"].dtype else scalar


def _join_cross_entropy(graph: fx.Graph, node: fx.Node) -> None:
    """Join the gradients of nll_loss (as a sum) and log_softmax into one operator, which needs no sum over vocabulary
    parts."""
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
    """Whether the node takes one output of an operator with several outputs."""
    return node.op == "call_function" and node.target is operator.getitem
