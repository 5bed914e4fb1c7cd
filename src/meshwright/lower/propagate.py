"""Gives every node of a rank's graph its fake value: shape, strides and dtype, without memory."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from meshwright.capture.outputs import fake_mode, fake_scalar, outputs_of
from meshwright.ops import collectives
from meshwright.torch_private import FakeTensor, FakeTensorMode, OpOverload

aten = torch.ops.aten

_SAME = frozenset({collectives.ALL_REDUCE, collectives.WAIT, collectives.ADD_ROWS, aten.add_.Tensor})
"""Operators that return their first input. All of these except ``WAIT`` write into it."""


@cache
def _fakes() -> tuple[FakeTensorMode, FakeTensor]:
    """The mode in which all fake values are made, and a fake scalar of this mode. The mode is kept for the whole
    process, because making a mode for each operator would take as long as making the values of a small operator. The
    mode holds no values. It needs no lock, because only one thread lowers."""
    mode = fake_mode()
    return mode, fake_scalar(mode)


def propagate(graph: fx.Graph) -> None:
    """Give every node its fake value on this rank (``meta["val"]``). A placeholder or constant needs ``local_shape``
    and ``dtype`` in its ``meta``, unless it is a number."""
    values: dict[fx.Node, Any] = {}
    lookup: Callable[[fx.Node], Any] = values.__getitem__
    mode, like = _fakes()
    with mode:
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                shape, dtype = node.meta.get("local_shape"), {"dtype": node.meta.get("dtype")}
                values[node] = 0 if shape is None else outputs_of(aten.new_empty.default, (like, list(shape)), dtype)
            elif node.op == "call_function" and node.target in _SAME:
                values[node] = values[node.all_input_nodes[0]]
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                is_operator = isinstance(node.target, OpOverload)
                values[node] = outputs_of(node.target, args, kwargs) if is_operator else node.target(*args, **kwargs)
            node.meta["val"] = values.get(node)
