"""Passes over a rank's graph that move collectives or join them.

They gather parameters some buckets ahead, start sums over grids early, delay the wait for sums of halo rows until their
first reader, and join the all-reduces of returned values into one.
"""

import operator
from collections import defaultdict
from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import fx

from meshwright.ir.mesh import members
from meshwright.ops import collectives

aten = torch.ops.aten
_VIEWS = (
    aten.t.default, aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default,
)  # fmt: skip


def prefetch(graph: fx.Graph, ahead: int = 1) -> None:
    """Start to gather a bucket of parameters as soon as the bucket ``ahead`` places before it has arrived. The first
    buckets are started together.

    a = wait(gather_parts_start(a0))                  a1 = gather_parts_start(a0)
    x = mm(x, a)                                      a = wait(a1)
    b = wait(gather_parts_start(b0))      becomes     b1 = gather_parts_start(b0)
    y = mm(x, b)                          (ahead=1)   x = mm(x, a)
                                                      b = wait(b1)
                                                      y = mm(x, b)
    """
    gathers = [node for node in graph.nodes if node.op == "call_function" and node.target is collectives.GATHER_PARTS]
    place = {node: index for index, node in enumerate(graph.nodes)}
    for index, node in enumerate(gathers[1:] if ahead else (), 1):
        if index < ahead:
            after = gathers[index - 1]
        else:
            after = next(user for user in gathers[index - ahead].users if user.target is collectives.WAIT)
        # what is gathered may be computed: the cast of a stored part
        after = max((after, *node.all_input_nodes), key=lambda each: place[each])
        if after.op == "call_function":
            after.append(node)
            place[node] = place[after]


def sink_waits(graph: fx.Graph) -> None:
    """Move the wait of a halo reduction to just before the first reader of its sum. So the gradient of a convolution's
    weight is computed while the halo rows of its input's gradient travel.

    gx = wait(halo_reduce_start(...))                 s  = halo_reduce_start(...)
    gw = convolution_backward(...)        becomes     gw = convolution_backward(...)
    y  = relu_backward(gx, x)                         gx = wait(s)
                                                      y  = relu_backward(gx, x)
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is collectives.HALO_REDUCE:
            wait = next(user for user in node.users if user.target is collectives.WAIT)
            first = min(wait.users, key=place.__getitem__, default=None)
            if first is not None:
                first.prepend(wait)


def start_early(graph: fx.Graph) -> None:
    """Compute the terms of sums over the axes of a grid as early as possible, and start the sums at once. So the
    gradient of a product's weight is computed while the gradient of its input is summed.

    gw = mm(x, gy)                                    gx = mm(gy, w)
    gx = mm(gy, w)                        becomes     s  = all_reduce_start(gx)
    gx = wait(all_reduce_start(gx))                   gw = mm(x, gy)
                                                      gx = wait(s)
    """
    place = {node: float(index) for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not collectives.ALL_REDUCE:
            continue
        if {*members(str(node.args[2]))}.isdisjoint(("tx", "ty")):
            continue
        moved, own, term = [node], True, node.args[0]
        assert isinstance(term, fx.Node)
        while term.target in (aten.clone.default, *_VIEWS) and isinstance(term.args[0], fx.Node):
            own = own and len(term.users) == 1
            moved.append(term)
            term = term.args[0]
        # a sum is computed in the memory of its term, which no other node may read
        own = own and (len(term.users) == 1 or any(each.target is aten.clone.default for each in moved))
        if not own or term.target is not aten.mm.default:
            continue
        moved.append(term)
        moved += [operand for operand in term.all_input_nodes if operand.target in _VIEWS]
        inputs = {source for each in moved for source in each.all_input_nodes} - {*moved}
        last = max(inputs, key=place.__getitem__)
        if last.op != "call_function":
            continue
        first = sorted((each for each in moved if place[each] > place[last]), key=place.__getitem__)
        for number, each in enumerate(reversed(first)):
            last.append(each)
            place[each] = place[last] + (len(first) - number) / (2 * len(place) * (len(place) + 1))


def join_returned(graph: fx.Graph, returned: Collection[fx.Node], device: torch.device) -> dict[fx.Node, fx.Node]:
    """Join the all-reduces whose results are only returned (loss, metrics, running statistics) into one all-reduce,
    which starts when its last term is computed. Returns a map from each replaced result to its new node.

    s = all_reduce_start(a)                           flat = cat(a, b)
    t = all_reduce_start(b)               becomes     s = all_reduce_start(flat)
    return wait(s), wait(t)                           x, y = split(wait(s), [len(a), len(b)])
                                                      return x, y
    """
    alike: dict[tuple[object, ...], list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is collectives.ALL_REDUCE and len(node.users) == 1:
            (wait,) = node.users
            if wait in returned and all(user.op == "output" for user in wait.users):
                alike[*node.args[1:], wait.meta["dtype"], wait.meta.get("phase")].append((node, wait))
    joined: dict[fx.Node, fx.Node] = {}
    for pairs in alike.values():
        if len(pairs) > 1:
            joined |= _join(graph, pairs, device)
    return joined


def _join(graph: fx.Graph, pairs: list[tuple[fx.Node, fx.Node]], device: torch.device) -> dict[fx.Node, fx.Node]:
    """Join all-reduces of equal settings: concatenate their terms, reduce once, split the result."""
    (last, end), joined = pairs[-1], dict[fx.Node, fx.Node]()
    shapes = [list(wait.meta["local_shape"]) for _, wait in pairs]
    labels = [str(start.kwargs["label"]) for start, _ in pairs]
    near = {key: value for key, value in last.meta.items() if key not in ("local_shape", "dtype")}

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta.update(near)
        return node

    with graph.inserting_before(last):
        terms = [_own(start) for start, _ in pairs]
        for index, shape in enumerate(shapes):
            if len(shape) != 1:
                terms[index] = call(aten.reshape.default, terms[index], [-1])
        flat = call(aten.cat.default, terms)
        flat.meta["device"] = device
        label = f"{labels[0]} to {labels[-1]}, {len(pairs)} together"
        start = call(collectives.ALL_REDUCE, flat, *last.args[1:], label=label)
    near = end.meta
    with graph.inserting_before(graph.output_node()):
        parts = call(
            aten.split_with_sizes_copy.default, call(collectives.WAIT, start), [prod(shape) for shape in shapes]
        )
        for index, ((start, wait), shape) in enumerate(zip(pairs, shapes, strict=True)):
            part = call(operator.getitem, parts, index)
            if len(shape) != 1:
                part = call(aten.view.default, part, shape)
            wait.replace_all_uses_with(part)
            graph.erase_node(wait)
            graph.erase_node(start)
            joined[wait] = part
    return joined


def _own(start: fx.Node) -> fx.Node:
    """The input of an all-reduce. If the input is a copy that was made only to be reduced in place, the original."""
    value = start.args[0]
    assert isinstance(value, fx.Node)
    copied = value.args[0] if value.target is aten.clone.default and len(value.users) == 1 else value
    assert isinstance(copied, fx.Node)
    return copied
