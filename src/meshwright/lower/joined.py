"""Chooses the runs of neighbouring operators of a graph that ``lower/regions.py`` compiles."""

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from meshwright.ops import collectives
from meshwright.ops.pointwise import is_pointwise
from meshwright.ops.view import VIEWS
from meshwright.torch_private import OpOverload

aten = torch.ops.aten

FREE = VIEWS | {operator.getitem, aten.reshape.default, aten.contiguous.default}
"""Operators that move no data inside a kernel."""
_JOINED = frozenset(
    {
        aten.native_layer_norm.default, aten._fused_rms_norm.default, aten._softmax.default, aten._log_softmax.default,
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.nll_loss_forward.default,
        aten.scatter_add.default, aten.gather.default,
    }
)  # fmt: skip
"""Operators that are not element-wise, but run faster when they are joined with element-wise operators."""
_SLOW = frozenset({aten.gelu.default, aten.gelu_backward.default, aten.erf.default, aten.clone.default})
"""Element-wise operators that stay outside regions: they are faster alone (erf: 1.5 times), or a compiler may replace
them by their input."""
_MADE = frozenset(
    {aten.full.default, aten.arange.default, aten.arange.start, aten.new_zeros.default, aten.zeros.default}
)
"""Operators that make a tensor without reading values of another tensor. They can be placed anywhere in a graph."""

_UNKNOWN = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
)
"""Tags of operators that draw random numbers, or whose results depend on values in their shape."""
_WITHIN = frozenset({"dtype", "memory_format", "layout", "device"})
"""Arguments of copies within a device: all tensors of a lowered step are on the device of its rank."""
WORTH = 4096
"""The smallest number of elements in a region's largest result for which the region is compiled. With fewer elements,
calling the kernel takes longer than running the operators."""


def joins(node: fx.Node) -> bool:
    """Whether an operator may be part of a region."""
    if node.op != "call_function" or node.target in FREE or node.target in _SLOW or node.kwargs.keys() & {"out"}:
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(output, Tensor) and output.numel() for output in values if output is not None):
        return False
    if node.target is aten._to_copy.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        assert isinstance(value, Tensor)
        return bool(value.dtype != source.meta["val"].dtype) and set(node.kwargs) <= {"dtype"}
    if node.target is aten.scatter_add.default:
        return _is_one_a_row(node)
    if node.target is aten.native_layer_norm.default:
        return node.args[2] is not None
    return node.target in _JOINED or is_pointwise(node.target)  # type: ignore[arg-type]


def joins_widely(node: fx.Node) -> bool:
    """Whether an operator may be part of a region on a GPU: each operator of PyTorch that writes to no input, draws no
    random numbers, and whose shapes do not depend on values."""
    target = node.target
    if node.op != "call_function" or target in FREE or not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims") or target._schema.is_mutable or not _UNKNOWN.isdisjoint(target.tags):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(output, Tensor) and output.numel() for output in values if output is not None):
        return False
    if target is aten.scatter_add.default:
        return _is_one_a_row(node)
    if target in (aten._to_copy.default, aten.clone.default):  # a compiler may replace it by its input
        source = node.args[0]
        assert isinstance(source, fx.Node)
        assert isinstance(value, Tensor)
        given = source.meta["val"]
        differs = value.dtype != given.dtype or value.stride() != given.stride()
        return differs and not node.kwargs.keys() - _WITHIN
    return True


def _is_one_a_row(node: fx.Node) -> bool:
    """Whether a scatter adds a single number to each row, as in the gradient of a cross-entropy."""
    into, dim, index = node.args[:3]
    assert isinstance(into, fx.Node)
    assert isinstance(index, fx.Node)
    rows, index_shape = into.meta["val"].shape, index.meta["val"].shape
    return dim in (-1, len(rows) - 1) and tuple(index_shape) == (*rows[:-1], 1)


def _is_light(node: fx.Node) -> bool:
    """Whether a region may continue past this node, so that the region's kernel runs after the node. Such a node takes
    almost no time."""
    if node.target in _MADE:
        return True
    value = node.meta.get("val")
    return node.target is collectives.WAIT and isinstance(value, Tensor) and value.numel() == 1


def regions_of(graph: fx.Graph, joined: Callable[[fx.Node], bool]) -> list[list[fx.Node]]:
    """The runs of operators that can be one kernel: no operator outside a run reads results of the run before the run
    ends."""
    runs: list[list[fx.Node]] = []
    members: list[fx.Node] = []
    produced: set[fx.Node] = set()  # results of the run, and views of them
    for node in graph.nodes:
        depends = not produced.isdisjoint(node.all_input_nodes)
        if joined(node):
            members.append(node)
            produced.add(node)
        elif node.op == "call_function" and node.target in FREE:
            if depends:
                produced.add(node)
        elif node.op == "call_function" and not (_is_light(node) and not depends):
            runs.append(members)
            members, produced = [], set()
    runs.append(members)
    return [run for run in runs if len(run) > 1 and max(map(size_of, run)) >= WORTH]


def size_of(node: fx.Node) -> int:
    """The number of elements of a node's largest result."""
    value = node.meta["val"]
    return max(out.numel() for out in (value if isinstance(value, tuple | list) else (value,)) if out is not None)
