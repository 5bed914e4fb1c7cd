"""Passes over a rank's graph: fuse operators, drop redundant operators, and reuse memory."""

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from meshwright.capture.outputs import outputs_of
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import FINISH
from meshwright.ops import collectives
from meshwright.ops.view import VIEWS

aten, ours = torch.ops.aten, torch.ops.meshwright
Key = TypeVar("Key", bound=Hashable)

_IN_PLACE: dict[Any, tuple[Any, str]] = {
    aten.add.Tensor: (aten.add.out, "out"),
    aten.sub.Tensor: (aten.sub.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.div.Tensor: (aten.div.out, "out"),
    aten.addcmul.default: (aten.addcmul.out, "out"),
    aten.clamp_min.default: (aten.clamp_min.out, "out"),
    aten.exp.default: (aten.exp.out, "out"),
    aten.neg.default: (aten.neg.out, "out"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.mse_loss_backward.default: (aten.mse_loss_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.scatter_add.default: (aten.scatter_add.out, "out"),
}
"""Maps an operator that can write into its input's memory to its overload that does so, and to the overload's keyword
for the memory."""
_INTO: dict[Any, tuple[Any, str]] = {
    aten.mm.default: (aten.mm.out, "out"),
    aten.add.Tensor: (aten.add.out, "out"),
    aten.sum.dim_IntList: (aten.sum.IntList_out, "out"),
}
"""Maps an operator that often computes a gradient last to its overload that writes into given memory, and to the
overload's keyword for the memory."""
FUNCTIONAL = {into: (target, keyword) for target, (into, keyword) in {**_IN_PLACE, **_INTO}.items()}
"""Maps an overload that writes into given memory to the operator that returns a new tensor, and to the overload's
keyword for the memory."""
_FIRST_ONLY = frozenset({aten.scatter_add.default})
_ALIASES = VIEWS | {
    aten.contiguous.default, aten.reshape.default, collectives.ALL_REDUCE, collectives.ADD_ROWS, collectives.WAIT,
}  # fmt: skip


def fuse(graph: fx.Graph, again: Recomputation) -> None:
    """Fuse operators, or replace them by faster operators with the same results.

        mm + add of a bias -> addmm, unless a collective stands between them
        both gradients of a convolution -> one call
        relu -> clamp_min, which can write into its input
        argmax -> max, which finds the same indices in less time
        t(t(x)) -> x;  reshape(reshape(x)) -> reshape(x)
        equal reshapes of x, which may each copy -> one reshape
        experts -> experts that keep their activations, unless backward recomputes the experts (``again``)

    Nodes whose values are returned by name (``meta["returned"]``) are not changed.
    """
    forward: dict[str, fx.Node] = {}
    gradients: dict[tuple[object, ...], fx.Node] = {}
    shaped: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.add.Tensor:
            _fuse_addmm(graph, node)
        elif node.target is aten.convolution_backward.default:
            _fuse_gradients(node, gradients)
        elif node.target is ours.experts.default and not again.holds(str(node.meta.get("operator", ""))):
            forward[str(node.args)] = node
        elif node.target is ours.experts_backward.default and str(node.args[1:]) in forward:
            _keep_activations(graph, forward.pop(str(node.args[1:])), node)
        elif node.target is aten.relu.default:
            node.target, node.args = aten.clamp_min.default, (*node.args, 0)
        elif node.target is aten.argmax.default:
            _fuse_argmax(graph, node)
        elif node.target is aten.t.default:
            source = node.args[0]
            if isinstance(source, fx.Node) and source.target is aten.t.default and not node.meta.get("returned"):
                node.replace_all_uses_with(source.args[0])
        elif node.target is aten.reshape.default:
            source = node.args[0]
            if isinstance(source, fx.Node) and source.target is aten.reshape.default:
                node.args = (source.args[0], *node.args[1:])
            when = node.meta.get("phase"), node.meta.get("backward")  # backward must not keep the copy in forward alive
            first = shaped.setdefault((node.args[0], str(node.args[1]), *when), node)
            if first is not node and not node.meta.get("returned"):
                node.replace_all_uses_with(first)
    graph.eliminate_dead_code()


def _fuse_addmm(graph: fx.Graph, node: fx.Node) -> None:
    if len(node.args) != 2 or node.kwargs:
        return
    product, bias = node.args
    if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)):
        return
    if (
        product.target is not aten.mm.default
        or len(product.users) != 1
        or len(bias.meta.get("local_shape", (0, 0))) != 1
        or bias.meta.get("dtype") != product.meta.get("dtype")
    ):
        return
    node.target, node.args = aten.addmm.default, (bias, *product.args)
    node.meta |= {key: product.meta[key] for key in ("pieces",) if key in product.meta}
    graph.erase_node(product)


def _fuse_argmax(graph: fx.Graph, node: fx.Node) -> None:
    if len(node.args) < 2 or node.args[1] is None:
        return
    with graph.inserting_before(node):
        largest = graph.call_function(aten.max.dim, node.args)
    largest.meta = {key: value for key, value in node.meta.items() if key != "returned"}
    node.target, node.args = operator.getitem, (largest, 1)


def _fuse_gradients(node: fx.Node, before: dict[tuple[object, ...], fx.Node]) -> None:
    """Compute the gradients of a convolution's input and weight in one call, because they read the same tensors. If a
    collective sends the first gradient, keep two calls: the second gradient is then computed during the transfer."""
    key = (*map(str, node.args[:-1]), node.meta.get("phase"))
    first = before.setdefault(key, node)
    if first is node or _is_sent(first) or any(gradient.meta.get("returned") for gradient in (first, node)):
        return
    mask = [left or right for left, right in zip(first.args[-1], node.args[-1], strict=True)]  # type: ignore[arg-type]
    first.args = (*first.args[:-1], mask)
    node.replace_all_uses_with(first)


def _keep_activations(graph: fx.Graph, forward: fx.Node, backward: fx.Node) -> None:
    """Let experts keep their activations, so that backward does not recompute them."""
    if forward.meta.get("returned"):
        return
    with graph.inserting_before(forward):
        kept = graph.call_function(ours.experts_kept.default, forward.args)
        output, hidden = (graph.call_function(operator.getitem, (kept, index)) for index in range(2))
    for node in (kept, output, hidden):
        node.meta = dict(forward.meta)
    forward.replace_all_uses_with(output)
    backward.target = ours.experts_backward_kept.default
    backward.args = (*backward.args[:6], hidden, *backward.args[6:])


def _is_sent(node: fx.Node) -> bool:
    """Whether a collective sends the node's result."""
    for user in node.users:
        again = user.target in (operator.getitem, aten.clone.default, aten.reshape.default, aten.contiguous.default)
        if user.target in collectives.STARTS or (again and _is_sent(user)):
            return True
    return False


def separate(graph: fx.Graph, results: Mapping[Key, fx.Node], others: Iterable[fx.Node]) -> dict[Key, fx.Node]:
    """Give each of ``results`` (gradients, new values of buffers) memory of its own, so that writing into one changes
    no other tensor. A result is copied if its memory belongs to an input, to another result or to one of ``others``, or
    if its elements overlap. Returns the node of each result, or of its copy.

    Call ``propagate`` first.
    """
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _aliased(node)
        root[node] = node if source is None else root[source]
    end = graph.output_node()
    outputs = list(end.args[0])  # type: ignore[arg-type]
    taken = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")} | {root[node] for node in others}
    separated = dict(results)
    for key, node in results.items():
        value = node.meta["val"]
        expanded = any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if root[node] in taken or expanded:
            with graph.inserting_before(end):
                separated[key] = graph.call_function(aten.clone.default, (node,))
            separated[key].meta.update(node.meta, val=value.clone(), phase=FINISH, returned=True)
            outputs.append(separated[key])
        taken.add(root[node])
    end.args = (outputs,)
    return separated


def write_into_buckets(graph: fx.Graph) -> None:
    """Compute gradients directly in their bucket's memory, instead of copying them into it.

        g0 = mm(a, b)                            flat = empty(n)
        g1 = layer_norm_backward(...)            g0 = mm(a, b, out=flat[:k])
        flat = cat(g0, g1)            becomes    g1 = layer_norm_backward(...)
        all_reduce_start(flat)                   cat(g1, out=flat[k:])
                                                 all_reduce_start(flat)

    Call ``propagate`` first. The pass handles every ``cat`` whose only reader is an all-reduce.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in order:
        joined = node.op == "call_function" and node.target is aten.cat.default and len(node.users) == 1
        if joined and next(iter(node.users)).target is collectives.ALL_REDUCE:
            _write_into(graph, node, order)


def _write_into(graph: fx.Graph, joined: fx.Node, order: Mapping[fx.Node, int]) -> None:
    parts = [_gradient(part) for part in joined.args[0]]  # type: ignore[union-attr]
    writers = [part for part in parts if part is not None]
    if not writers:
        return
    sizes = [part.meta["val"].numel() for part in joined.args[0]]  # type: ignore[union-attr]
    value = joined.meta["val"]
    with graph.inserting_before(min(writers, key=order.__getitem__)):
        flat = graph.call_function(
            aten.empty.memory_format, ([value.numel()],), {"dtype": value.dtype, "device": joined.meta["device"]}
        )
    flat.meta = _like(joined, value)
    offset, between = 0, list[Any]()

    def copy(until: int) -> None:
        """Copy the neighbouring parts collected in ``between`` into the bucket, in one call."""
        if between:
            begin = until - sum(part.meta["val"].numel() for part in between)
            with graph.inserting_before(joined):
                view = graph.call_function(aten.slice.Tensor, (flat, 0, begin, until))
                copied = graph.call_function(aten.cat.out, (list(between),), {"out": view})
            view.meta = copied.meta = _like(joined, _slice(value, begin, until))
        between.clear()

    for gradient, writer, size in zip(joined.args[0], parts, sizes, strict=True):  # type: ignore[arg-type]
        if writer is None:
            between.append(gradient)
        else:
            copy(offset)
            with graph.inserting_before(writer):
                part = graph.call_function(aten.slice.Tensor, (flat, 0, offset, offset + size))
                view = graph.call_function(aten.view.default, (part, list(writer.meta["val"].shape)))
                part.meta = _like(writer, _slice(value, offset, offset + size))
                shape = list(writer.meta["val"].shape)
                view.meta = _like(writer, outputs_of(aten.view.default, (part.meta["val"], shape), {}))
                writer.target, keyword = _INTO[writer.target]
                writer.kwargs = {**writer.kwargs, keyword: view}
        offset += size
    copy(offset)
    gradients = list(joined.args[0])  # type: ignore[arg-type]
    joined.replace_all_uses_with(flat)
    graph.erase_node(joined)
    for gradient in gradients:
        if gradient.target is aten.reshape.default and not gradient.users:
            graph.erase_node(gradient)


def _slice(value: Tensor, begin: int, end: int) -> Tensor:
    part: Tensor = outputs_of(aten.slice.Tensor, (value, 0, begin, end), {})
    return part


def _like(node: fx.Node, value: Tensor) -> dict[str, Any]:
    """The ``meta`` for a new call that belongs to ``node`` and returns ``value``."""
    return {key: node.meta[key] for key in ("operator", "phase", "backward") if key in node.meta} | {"val": value}


def _gradient(part: Any) -> fx.Node | None:
    """The node that can write ``part``, a flattened gradient, directly into the bucket. None if other nodes read the
    gradient, or if no overload of its operator writes into given memory."""
    source = part.args[0] if part.target is aten.reshape.default else part
    value = source.meta.get("val")
    ours = isinstance(value, Tensor) and value.is_contiguous() and len(source.users) == 1
    return source if ours and source.target in _INTO and "out" not in source.kwargs else None


def accumulate_products(graph: fx.Graph) -> None:
    """Add products into gradients as they are computed: ``total.add_(mm(a, b))`` -> ``total.addmm_(a, b)``."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.add_.Tensor:
            continue
        total, product = node.args
        if (
            isinstance(product, fx.Node)
            and product.target is aten.mm.default
            and list(product.users) == [node]
            and total.meta["val"].dtype == product.meta["val"].dtype
        ):
            node.target = aten.addmm_.default
            node.args = (total, *product.args)
            graph.erase_node(product)


def reuse_memory(graph: fx.Graph) -> None:
    """Let element-wise operators write into an input that no node reads later. This saves memory and page faults.

    Call ``propagate`` first. An input may be overwritten if no node reads its memory later (also through a view, or
    in a collective in flight). It must not be a placeholder, a constant or a returned value.
    """
    nodes = list(graph.nodes)
    index = {node: position for position, node in enumerate(nodes)}
    root: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    overlapping: set[fx.Node] = set()
    for node in nodes:
        source = _aliased(node)
        root[node] = node if source is None else root[source]
        if node.op == "call_function" and node.target is aten.expand.default:
            overlapping.add(root[node])
        users = [index[user] for user in node.users]
        last[root[node]] = max([last.get(root[node], -1), *users])
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, own in root.items():
        members[own].append(node)
    for node in nodes:  # the inputs of a collective in flight must stay until its wait
        if node.op == "call_function" and node.target in collectives.STARTS:
            waits = [index[user] for user in node.users if user.target is collectives.WAIT] or [len(nodes)]
            for source in node.all_input_nodes:
                last[root[source]] = max([last[root[source]], *waits])
    kept = {root[node] for node in nodes[-1].all_input_nodes} | {
        node for node in nodes if node.op in ("placeholder", "get_attr")
    }
    for node in nodes:
        if node.op != "call_function" or node.target not in _IN_PLACE or node.kwargs.keys() - {"approximate"}:
            continue
        target = _destination(node, root, last, index, kept, overlapping)
        if target is None:
            continue
        node.target, keyword = _IN_PLACE[node.target]
        node.kwargs = {**node.kwargs, keyword: target}
        # from here on the result shares the memory of its input
        node_root, target_root = root[node], root[target]
        last[target_root] = max(last[target_root], last[node_root])
        if node_root in kept:
            kept.add(target_root)
        alike = members.pop(node_root)
        root.update(dict.fromkeys(alike, target_root))
        members[target_root] += alike


def _aliased(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node`` shares; None if ``node`` has memory of its own."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    given = node.kwargs.get("out")
    if isinstance(given, fx.Node):
        return given
    source = node.args[0]
    if node.target is operator.getitem:  # results share no memory, unless they are views of the input
        return source if source.target in VIEWS else None
    return source if node.target in _ALIASES else None


def _destination(
    node: fx.Node, root: dict[fx.Node, fx.Node], last: dict[fx.Node, int], index: dict[fx.Node, int],
    kept: set[fx.Node], overlapping: set[fx.Node],
) -> fx.Node | None:  # fmt: skip
    value = node.meta.get("val")
    arguments = [item for item in node.args if isinstance(item, fx.Node)]
    if not isinstance(value, Tensor):
        return None
    for candidate in arguments[:1] if node.target in _FIRST_ONLY else arguments:
        operand, own = candidate.meta.get("val"), root[candidate]
        if not isinstance(operand, Tensor) or operand.shape != value.shape or operand.dtype != value.dtype:
            continue
        if own in kept or own in overlapping or last[own] > index[node] or operand.stride() != value.stride():
            continue
        if any(other is not candidate and root[other] is own for other in arguments):
            continue
        return candidate
    return None
