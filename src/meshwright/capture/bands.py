"""Finds attention masks that are a causal mask or a window of keys, which kernels need not read from memory.

Models often build a mask from positions alone. Such a mask is computed here, once, when the step is captured. If it
shows all keys, the keys up to the query, or a window of keys up to the query, the operator gets that as its arguments
in place of the mask. Masks that depend on the batch or on the model's state stay as they are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.ir.attention import Band
from meshwright.ops.attention import SETTINGS_AT
from meshwright.ops.attention_scores import allowed
from meshwright.torch_private import FakeTensor, OpOverload

MOST_ELEMENTS = 2**27
"""The largest mask, in elements, that is computed."""


def put_bands(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Give attention a causal flag and a window in place of masks that are one. ``constants`` are the values of the
    graph's constants."""
    bands: dict[fx.Node, Band | None] = {}
    values: dict[fx.Node, Tensor | None] = {}
    for node in graph.nodes:
        if node.target not in SETTINGS_AT:
            continue
        query = SETTINGS_AT[node.target] == 7  # backward's first argument is the gradient
        mask, settings = node.args[query + 3], node.args[SETTINGS_AT[node.target] :]
        if not isinstance(mask, fx.Node) or settings[1]:
            continue
        if mask not in bands:
            queries, keys = (int(node.args[place].meta["val"].shape[2]) for place in (query, query + 1))
            bands[mask] = _band_of(_value(mask, constants, values), queries, keys)
        band = bands[mask]
        if band is not None:
            tensors = (*node.args[: query + 3], None, *node.args[query + 4 : SETTINGS_AT[node.target]])
            node.args = (*tensors, settings[0], band.causal, *settings[2:5], *([band.window] if band.window else []))


def _value(node: fx.Node, constants: Mapping[str, Tensor], known: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """The value of a node that depends on numbers and positions only; None for other nodes. Larger constants may be
    tensors that the model changes."""
    stack = [node]
    while stack:
        current = stack[-1]
        if current in known:
            stack.pop()
        elif current.op == "get_attr":
            value = constants[str(current.target)]
            known[current] = value if value.numel() == 1 and not isinstance(value, FakeTensor) else None
        elif not _is_computable(current) or any(
            known.get(source, current) is None for source in current.all_input_nodes
        ):
            known[current] = None
        elif missing := [source for source in current.all_input_nodes if source not in known]:
            stack += missing
        else:
            args, kwargs = fx.map_arg((current.args, current.kwargs), known.__getitem__)
            target: Any = current.target
            with torch.no_grad():
                known[current] = target(*args, **kwargs)
    return known[node]


def _is_computable(node: fx.Node) -> bool:
    """Whether a node is an operator that always has the same result, and one of a moderate size."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    value = node.meta["val"]
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags or node.target.namespace != "aten"
    return isinstance(value, Tensor) and not drawn and value.numel() <= MOST_ELEMENTS


def _band_of(mask: Tensor | None, queries: int, keys: int) -> Band | None:
    """The band of keys that a mask shows to all heads of all samples; None if it is no band."""
    if mask is None or mask.shape[-2:] != (queries, keys) or queries != keys:
        return None
    for dim in range(mask.dim() - 2):  # a view of one mask for all samples
        mask = mask.narrow(dim, 0, 1) if not mask.stride(dim) else mask
    if mask.dtype != torch.bool:
        hidden = (mask == -torch.inf) | (mask == torch.finfo(mask.dtype).min)
        seen = mask == 0
        if not bool((hidden | seen).all()):
            return None
        mask = seen
    plane = mask.reshape(-1, queries, keys)[0]
    if not bool((mask == plane).all()):
        return None
    if bool(plane.all()):
        return Band(queries, keys)
    window = int(plane[-1].sum())
    band = Band(queries, keys, True, window if window < keys else 0)
    return band if window and torch.equal(plane, allowed(plane, band)) else None
