"""Says why the calls of a phase cannot be captured once as a graph of kernels, and then be launched as a whole.

A graph has fixed shapes and addresses. While it is captured, nothing runs, so that no call may wait for a value. What
the host computes is captured as a constant: the random key of a micro-batch must come as a tensor.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import meshwright.ops.attention_kernels
import meshwright.ops.philox  # noqa: F401 - these define the operators below
from meshwright.ops import collectives

aten = torch.ops.aten
ours = torch.ops.meshwright

_ATTENTION = frozenset({ours.attention.default, ours.attention_backward.default})
KEYED = frozenset({ours.bernoulli.default, ours.uniform.default, ours.normal.default, *_ATTENTION})
"""Operators that take a random key as a tensor."""
_BY_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MASKED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
_BETWEEN = frozenset({collectives.HALO_EXCHANGE, collectives.HALO_REDUCE, collectives.HALO_RETURN})


def moving_parts(graph: fx.Graph, random_key: str) -> tuple[str, ...]:
    """Why the calls of a phase cannot be captured as a graph; empty if they can. ``random_key`` is the name of the
    placeholder of the random key. Every value needs ``meta["val"]``. Collectives that end in another phase do not
    count: if the plan has graphs, they end in their own phase (``open_collectives``)."""
    return tuple(dict.fromkeys(reason for node in graph.nodes for reason in _reasons(node, random_key)))


def open_collectives(graph: fx.Graph) -> tuple[str, ...]:
    """The collectives of a phase that begin or end in another phase, in words."""
    reasons = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in collectives.STARTS:
            if not any(user.target is collectives.WAIT for user in node.users):
                reasons.append(f"{_operator(node)}{_name(node)} ends in another phase")
        elif node.target is collectives.WAIT and node.all_input_nodes[0].op == "placeholder":
            reasons.append(f"{_operator(node)}a collective began in another phase")
    return tuple(dict.fromkeys(reasons))


def _reasons(node: fx.Node, random_key: str) -> Iterator[str]:
    if node.op != "call_function":
        return
    target: Any = node.target
    name, operator = _name(node), _operator(node)
    if target in _BETWEEN or target is collectives.SHIFT:
        yield f"{operator}{name} sends between ranks"
    elif target in collectives.STARTS and node.kwargs.get("codec"):
        yield f"{operator}{name} is coded by the host"
    elif getattr(target, "namespace", "") == "meshwright":
        kind = target.name().partition("::")[2].partition(".")[0]
        if "experts" in kind:
            yield f"{operator}{name} has groups of tokens whose sizes vary"
        elif "ring" in kind:
            yield f"{operator}{name} sends between ranks"
        elif "opaque" in kind:
            yield f"{operator}{name} is code that may do anything"
        elif "packed" in kind:
            yield f"{operator}{name} has sequences whose lengths vary"
    elif not _BY_VALUES.isdisjoint(getattr(target, "tags", ())) or (target in _MASKED and _by_mask(node)):
        yield f"{operator}the shape of {name} depends on values"
    if any(source.name == random_key for source in node.all_input_nodes) and not _takes_key(node):
        yield f"{operator}{name} takes its random key from the host"


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _operator(node: fx.Node) -> str:
    return f"{node.meta['operator']}: " if node.meta.get("operator") else ""


def _by_mask(node: fx.Node) -> bool:
    indices: Any = node.args[1]
    values = [index.meta["val"] for index in indices if isinstance(index, fx.Node)]
    return any(value.dtype in (torch.bool, torch.uint8) for value in values)


def _takes_key(node: fx.Node) -> bool:
    """Whether an operator works with a random key on the device. If micro-batches are parts of the last dim, the host
    cuts the part. The last dim of the scores of attention is the keys, which micro-batches do not divide."""
    if node.target in _ATTENTION:
        return True
    if node.target not in KEYED:
        return False
    place: Any = next((node.args[index:] for index, value in enumerate(node.args) if isinstance(value, list)), None)
    if place is None:
        return True
    sizes, _, _, inner, time = place
    return bool(time < len(sizes) - inner)
