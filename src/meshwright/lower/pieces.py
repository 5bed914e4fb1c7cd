"""Runs matrix products in pieces, while their operand arrives or their result leaves (micro-pipelined tensor
parallelism).

The rows of a product are divided among the ranks of a group. In its plain form, a rank waits for an all-gather of the
rows before the product, or for a reduce-scatter of the result after it. In pieces, the ranks form a ring:

    gather, product                        product, reduce-scatter         (rank 1 of 3; row blocks a, b, c of 3 ranks)
    shift b ──▶  |  b @ w                  a @ w               |
    shift a ──▶  |  a @ w  (a arrived)     c @ w + c arrived   |  shift a's term ──▶
                 |  c @ w  (c arrived)     b @ w + b arrived   |  shift c's sum  ──▶

The same bytes travel as in the plain form. Each block may be divided further into chunks, so that the first of them
travels earlier (``chunks`` = pieces / ranks). Other readers of gathered rows, such as the gradient of the weight, read
them when they have all arrived. On accelerators that share memory, PyTorch's own operators do the same
(``torch.ops.symm_mem``; ``comm/symmetric_memory.py``).

References: S. Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS 2023.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from meshwright.capture.outputs import outputs_of
from meshwright.errors import PlanError
from meshwright.lower.product_rows import Gathered, ProductRows, Scattered, gathered_by, scattered_by
from meshwright.ops import collectives
from meshwright.torch_private import disable_current_modes

aten = torch.ops.aten
_MOVABLE = frozenset({collectives.WAIT, collectives.GATHER_PARTS})
"""Collectives that may run earlier than emitted: all ranks move them alike."""


class _Work(NamedTuple):
    """The division of a group's products: the rank's place, the rows, and the (begin, end) of each chunk of a block."""

    place: int
    rows: ProductRows
    chunks: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.rows.lengths)


class _Emitter:
    """Adds calls to a graph, for the product ``node``."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph = graph
        keys = ("operator", "phase", "backward")
        self._meta: dict[str, Any] = {key: node.meta[key] for key in keys if key in node.meta}

    def __call__(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
        """Add a call. ``value``: its fake value (default: made by the operator)."""
        node = self._graph.call_function(target, args, kwargs)
        if value is None:
            given, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
            if target is collectives.WAIT:
                value = given[0]
            else:
                value = target(*given) if target is getitem else outputs_of(target, tuple(given), dict(named))
        node.meta = {**self._meta, "val": value}
        return node

    def product(self, like: fx.Node, left: fx.Node, into: fx.Node | None = None) -> fx.Node:
        """Multiply other rows as ``like`` multiplies its own; write the result to ``into``."""
        args = (*like.args[:-2], left, like.args[-1])
        if into is None:
            return self(like.target, *args)
        target = aten.addmm.out if like.target is aten.addmm.default else aten.mm.out
        return self(target, *args, value=into.meta["val"], out=into)


class ProductDivider:
    """Divides the products of a rank's graphs. ``places`` maps a group to this rank's index in it. ``symmetric`` names
    the groups whose accelerators share memory."""

    def __init__(self, places: Mapping[str, int], symmetric: Collection[str] = ()) -> None:
        self._places, self._symmetric = places, symmetric

    def divide(self, graph: fx.Graph) -> None:
        """Run in pieces each product that asks for it (``meta["pieces"]``) if its operand is gathered in the graph or
        its result is scattered there. Products that read the same rows share the pieces. Call ``propagate`` first.

        Raises:
            PlanError: the number of pieces is no multiple of the number of ranks.
        """
        with disable_current_modes():  # a dry run watches what runs, not what is lowered
            self._divide(graph)

    def _divide(self, graph: fx.Graph) -> None:
        gathers: dict[fx.Node, list[tuple[fx.Node, Gathered]]] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or "pieces" not in node.meta:
                continue
            if (gathered := gathered_by(node)) is not None:
                gathers.setdefault(gathered.wait, []).append((node, gathered))
            elif (scattered := scattered_by(node)) is not None:
                self._scatter(graph, node, scattered)
        for wait, readers in gathers.items():
            self._gather(graph, wait, readers)

    def _work(self, node: fx.Node, start: fx.Node, rows: ProductRows) -> _Work:
        group, size = _group_of(start)
        pieces, block = node.meta["pieces"], rows.block
        if pieces % size:
            raise PlanError(
                f"{pieces} pieces of a product that {size} ranks share", where=f"operator_algorithms: "
                f"{node.meta.get('operator', '')}", remedy=f"use a multiple of {size}",
            )  # fmt: skip
        count = max(1, min(pieces // size, block))
        edges = [block * number // count for number in range(count + 1)]
        return _Work(self._places[group], rows, tuple(pairwise(edges)))

    # --- all-gather, product -----------------------------------------------------------------------------------------

    def _gather(self, graph: fx.Graph, wait: fx.Node, readers: list[tuple[fx.Node, Gathered]]) -> None:
        start, rows = readers[0][1].start, readers[0][1].rows
        alike = [node for node, gathered in readers if gathered.rows == rows]
        products = [node for node in alike if _moved_before(wait, node)]
        if not products:
            return
        work, emit = self._work(products[0], start, rows), _Emitter(graph, products[0])
        group, size = _group_of(start)
        chain, parts, moving = list[fx.Node](), list[fx.Node](), list[fx.Node]()
        width = products[0].args[-2].meta["val"].shape[1]  # type: ignore[union-attr]
        with graph.inserting_before(start):
            own = emit(aten.reshape.default, start.args[0], [rows.block, width])
            if group not in self._symmetric:
                parts = [_rows_of(emit, own, work, chunk) for chunk in work.chunks]
                moving = [_shift(emit, part, start) for part in parts]
        with graph.inserting_before(wait):
            if group in self._symmetric:
                weights = [product.args[-1] for product in products]
                gathered_products = emit(collectives.GATHER_MULTIPLY, own, weights, group, size)
                whole, *outputs = (emit(getitem, gathered_products, number) for number in range(1 + len(products)))
                pieces = [whole]
            else:
                outputs = [_buffer(emit, own, product, rows) for product in products]
                pieces = _ring(emit, start, work, parts, moving, list(zip(products, outputs, strict=True)))
            joined = [_joined(emit, *pair, rows) for pair in zip(products, outputs, strict=True)]
            if group in self._symmetric:
                joined = [_with_bias(emit, *pair) for pair in zip(products, joined, strict=True)]
        for product, result in zip(products, joined, strict=True):
            chain += [node for node in product.args[-2:-1] if isinstance(node, fx.Node)]
            _replace(graph, product, result)
        _erase_unread(graph, chain, wait)
        if wait.users:
            with graph.inserting_before(wait):
                shape, value = list(wait.meta["val"].shape), wait.meta["val"]
                if len(pieces) == 1:
                    held = emit(aten.view.default, pieces[0], shape)
                else:
                    held = emit(aten.new_empty.default, own, shape, value=value)
                    flat = emit(aten.view.default, held, [size * rows.block, width])
                    emit(aten.cat.out, pieces, value=flat.meta["val"], out=flat)
            _replace(graph, wait, held)
        else:
            graph.erase_node(wait)
        graph.erase_node(start)

    # --- product, reduce-scatter -------------------------------------------------------------------------------------

    def _scatter(self, graph: fx.Graph, product: fx.Node, scattered: Scattered) -> None:
        start, wait, rows = scattered.start, scattered.wait, scattered.rows
        work, emit = self._work(product, start, rows), _Emitter(graph, product)
        group, size = _group_of(start)
        value, width = wait.meta["val"], product.meta["val"].shape[1]
        flat = _view(value, [rows.block, width])
        moving, terms, sums = list[fx.Node](), list[fx.Node](), list[fx.Node]()
        shares = group in self._symmetric and scattered.dtype is None
        with graph.inserting_before(product):
            left = product.args[-2]
            blocks = emit(aten.reshape.default, left, [rows.lead, rows.total // rows.lead, -1])
            if shares:
                ordered = [_block(emit, blocks, rows, rank) for rank in range(size)]
                joined = emit(aten.cat.default, ordered)
                sums = [emit(collectives.MULTIPLY_SCATTER, joined, product.args[-1], group, size, value=flat)]
            else:
                for step in range(size):
                    block = _block(emit, blocks, rows, (work.place - 1 - step) % size)
                    for number, chunk in enumerate(work.chunks):
                        term = emit.product(product, _rows_of(emit, block, work, chunk))
                        if scattered.dtype is not None:
                            term = emit(aten._to_copy.default, term, dtype=scattered.dtype)
                        if step == size - 1:
                            terms.append(term)
                            continue
                        if step:
                            term = emit(aten.add.Tensor, emit(collectives.WAIT, moving[number]), term)
                        shifted = _shift(emit, term, start)
                        moving = [*moving[:number], shifted, *moving[number + 1 :]]
        with graph.inserting_before(wait):
            if not shares:
                arrived = (emit(collectives.WAIT, node) for node in moving)
                alone = flat if len(terms) == 1 else None
                sums = [emit(aten.add.Tensor, *pair, value=alone) for pair in zip(arrived, terms, strict=True)]
            result = sums[0] if len(sums) == 1 else emit(aten.cat.default, sums, value=flat)
            held = emit(aten.view.default, result, list(value.shape), value=value)
        _replace(graph, wait, held)
        _erase_unread(graph, [start], product)
        graph.erase_node(product)


def _group_of(start: fx.Node) -> tuple[str, int]:
    """The group of a collective, and its number of ranks."""
    at = 1 if start.target is collectives.ALL_GATHER else 2
    group, size = start.args[at : at + 2]
    return str(group), int(size)  # type: ignore[arg-type]


def _shift(emit: _Emitter, part: fx.Node, start: fx.Node) -> fx.Node:
    """Send rows to the next rank, by the algorithm of the collective that the shifts replace."""
    group, size = _group_of(start)
    return emit(collectives.SHIFT, part, group, size, start.args[-1], label=start.kwargs.get("label", ""))


def _ring(
    emit: _Emitter, start: fx.Node, work: _Work, parts: list[fx.Node], moving: list[fx.Node],
    products: Sequence[tuple[fx.Node, fx.Node]],
) -> list[fx.Node]:  # fmt: skip
    """Multiply each chunk as soon as it has arrived, after it was sent on. ``products``: each with its buffer. Returns
    the chunks of all ranks, in order of the ranks."""
    held: dict[tuple[int, int], fx.Node] = {}
    for step in range(work.size):
        source = (work.place - step) % work.size
        into = [emit(aten.select.int, buffer, 0, source) for _, buffer in products]
        for number, chunk in enumerate(work.chunks):
            part = parts[number]
            if step:
                part = emit(collectives.WAIT, moving[number])
                if step + 1 < work.size:
                    moving[number] = _shift(emit, part, start)
            held[source, number] = part
            for (product, _), rows in zip(products, into, strict=True):
                emit.product(product, part, _rows_of(emit, rows, work, chunk))
    return [held[key] for key in sorted(held)]


def _rows_of(emit: _Emitter, block: fx.Node, work: _Work, chunk: tuple[int, int]) -> fx.Node:
    """The rows of one chunk of a block."""
    return block if len(work.chunks) == 1 else emit(aten.slice.Tensor, block, 0, *chunk)


def _buffer(emit: _Emitter, own: fx.Node, product: fx.Node, rows: ProductRows) -> fx.Node:
    """Memory for a product's blocks [ranks, rows, columns]."""
    value = product.meta["val"]
    shape = [len(rows.lengths), rows.block, value.shape[1]]
    return emit(aten.new_empty.default, own, shape, value=_view(value, shape) if rows.in_order else None)


def _joined(emit: _Emitter, product: fx.Node, blocks: fx.Node, rows: ProductRows) -> fx.Node:
    """The rows of a product in the order of the whole matrix, from its blocks in the order of the ranks."""
    value = product.meta["val"]
    shape, ranks = list(value.shape), len(rows.lengths)
    if rows.in_order:
        return emit(aten.view.default, blocks, shape, value=value if blocks.target is aten.new_empty.default else None)
    apart = emit(aten.view.default, blocks, [ranks, rows.lead, rows.longest, shape[1]])
    if rows.even:
        return emit(aten.reshape.default, emit(aten.transpose.int, apart, 0, 1), shape, value=value)
    parts = [emit(aten.select.int, apart, 0, rank) for rank in range(ranks)]
    cut = [emit(aten.slice.Tensor, part, 1, 0, length) for part, length in zip(parts, rows.lengths, strict=True)]
    joined = emit(aten.cat.default, cut, 1, value=_view(value, [rows.lead, rows.total // rows.lead, -1]))
    return emit(aten.view.default, joined, shape, value=value)


def _with_bias(emit: _Emitter, product: fx.Node, result: fx.Node) -> fx.Node:
    return emit(aten.add.Tensor, result, product.args[0]) if product.target is aten.addmm.default else result


def _block(emit: _Emitter, blocks: fx.Node, rows: ProductRows, rank: int) -> fx.Node:
    """The rows of the left operand whose products a rank keeps, as a matrix; padded to the longest block."""
    begin, length = sum(rows.lengths[:rank]), rows.lengths[rank]
    part = emit(aten.slice.Tensor, blocks, 1, begin, begin + length)
    if length < rows.longest:
        part = emit(aten.constant_pad_nd.default, part, [0, 0, 0, rows.longest - length])
    return emit(aten.reshape.default, part, [rows.block, -1])


def _moved_before(wait: fx.Node, product: fx.Node) -> bool:
    """Move all that a product needs besides its gathered rows before ``wait``. False, and nothing is moved, if some of
    it must run later."""
    needed: list[fx.Node] = []
    pending = [node for node in (*product.args[:-2], product.args[-1]) if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node in needed or node.op != "call_function" or node < wait:
            continue
        schema = getattr(node.target, "_schema", None)
        if node is wait or (node.target not in _MOVABLE and (schema is None or schema.is_mutable)):
            return False
        needed.append(node)
        pending += node.all_input_nodes
    for node in sorted(needed):
        wait.prepend(node)
    return True


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    """Let ``by`` take the place and the name of a node; other functions know results by their names."""
    node.replace_all_uses_with(by)
    if node.meta.get("returned"):
        by.meta["returned"] = True
    graph.erase_node(node)
    by.name = node.name


def _erase_unread(graph: fx.Graph, chain: list[fx.Node], until: fx.Node) -> None:
    """Erase nodes that nobody reads any more, and those that only they read, but not ``until`` and what it reads."""
    erased: set[fx.Node] = set()
    while chain:
        node = chain.pop()
        if node is not until and node.op == "call_function" and not node.users and node not in erased:
            chain += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)


def _view(value: Any, shape: list[int]) -> Any:
    """A fake value of the same memory in another shape."""
    return outputs_of(aten.view.default, (value, shape), {})
