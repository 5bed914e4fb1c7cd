"""Finds the matrix products whose operand an all-gather brings, or whose result a reduce-scatter takes, and how their
rows lie.

A resharding divides one dim of a tensor among ranks. Seen by a product, the whole tensor is a matrix of ``lead`` runs
of rows, and each run has a part for each rank:

    run 0: rank 0's rows, rank 1's rows, ...   run 1: rank 0's rows, rank 1's rows, ...

A rank's block are its parts of all runs. Parts may differ by one unit of the dim; then shorter blocks travel padded.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from meshwright.ops import collectives

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
"""Views that keep the order of elements."""


class ProductRows(NamedTuple):
    """``lead`` runs of rows, in each of which rank r has ``lengths[r]`` rows."""

    lead: int
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The rows of a run that a rank has at most."""
        return max(self.lengths)

    @property
    def block(self) -> int:
        """The rows of a padded block."""
        return self.lead * self.longest

    @property
    def total(self) -> int:
        """The rows of the whole matrix."""
        return self.lead * sum(self.lengths)

    @property
    def even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return min(self.lengths) == self.longest

    @property
    def in_order(self) -> bool:
        """Whether the whole matrix is all blocks, one after the other."""
        return self.lead == 1 and self.even


class Gathered(NamedTuple):
    """An all-gather, its wait, and the rows that it brings."""

    start: fx.Node
    wait: fx.Node
    rows: ProductRows


class Scattered(NamedTuple):
    """A reduce-scatter, its wait, and the rows that it takes. ``dtype``: the terms are cast to it before they are
    added up (None: they are not cast)."""

    start: fx.Node
    wait: fx.Node
    rows: ProductRows
    dtype: torch.dtype | None = None


def gathered_by(product: fx.Node) -> Gathered | None:
    """The all-gather that brings the left operand of a product; None if there is none, or if it gathers columns."""
    left = product.args[-2]
    if not isinstance(left, fx.Node):
        return None
    width = int(left.meta["val"].shape[1])
    source = _under_reshapes(left)
    parts = source.args[0] if source.target is aten.cat.default and source.args[1:] == (1,) else None
    if isinstance(parts, list | tuple):
        return _gathered_unevenly(list(parts), width)
    lead = 1
    if source.target is aten.transpose.int and source.args[1:] == (0, 1):
        apart = _node(source.args[0])
        if apart is None or apart.target is not aten.view.default or len(apart.meta["val"].shape) != 3:
            return None
        lead, source = int(apart.meta["val"].shape[1]), _under_reshapes(apart)
    if source.target is not collectives.WAIT:
        return None
    size, *shape = map(int, source.meta["val"].shape)
    start, elements = _node(source.args[0]), prod(shape)
    if start is None or start.target is not collectives.ALL_GATHER or not elements or elements % (lead * width):
        return None
    return Gathered(start, source, ProductRows(lead, (elements // (lead * width),) * size))


def _gathered_unevenly(parts: list[Any], width: int) -> Gathered | None:
    """Parts of different lengths were gathered with padding, which is cut off."""
    waits, lengths = set(), []
    for rank, part in enumerate(parts):
        shape = part.meta["val"].shape
        taken = part.args[0] if part.target is aten.slice.Tensor else part
        if len(shape) != 3 or shape[2] % width or taken.target is not aten.select.int or taken.args[1:] != (0, rank):
            return None
        waits.add(taken.args[0])
        lengths.append(int(shape[1] * shape[2] // width))
    wait = waits.pop() if len(waits) == 1 else None
    if wait is None or wait.target is not collectives.WAIT or not max(lengths, default=0):
        return None
    start, gathered = _node(wait.args[0]), wait.meta["val"].shape
    if start is None or start.target is not collectives.ALL_GATHER or gathered[0] != len(parts):
        return None
    rows = ProductRows(int(gathered[1]), tuple(lengths))
    return Gathered(start, wait, rows) if rows.longest * width == gathered[2] * gathered[3] else None


def scattered_by(product: fx.Node) -> Scattered | None:
    """The reduce-scatter that takes a product's result and nothing else of it; None if there is none, or if it
    scatters columns."""
    if product.target is not aten.mm.default:
        return None
    width, node = int(product.meta["val"].shape[1]), product
    while (reader := _only_reader(node)) is not None and (reader.target in _RESHAPES or _is_cast(reader)):
        node = reader
    value = product.meta["val"]
    dtype = node.meta["val"].dtype if node.meta["val"].dtype != value.dtype else None
    whole = node  # [lead, parts, block], or [lead, all parts, tail] of uneven parts
    if len(whole.meta["val"].shape) != 3 or not whole.meta["val"].numel():
        return None
    lead = int(whole.meta["val"].shape[0])
    transposed = _only_reader(whole)
    if transposed is not None and transposed.target is aten.transpose.int and transposed.args[1:] == (0, 1):
        size, block = map(int, whole.meta["val"].shape[1:])
        start = _only_reader(transposed)
        return _scattered(start, ProductRows(lead, (block // width,) * size), dtype) if block % width == 0 else None
    return _scattered_unevenly(whole, width, dtype)


def _scattered_unevenly(whole: fx.Node, width: int, dtype: torch.dtype | None) -> Scattered | None:
    """Parts of different lengths are padded before they are scattered."""
    lead, _, tail = map(int, whole.meta["val"].shape)
    pieces = sorted(whole.users)
    if tail % width or not all(piece.target is aten.slice.Tensor and piece.args[1:2] == (1,) for piece in pieces):
        return None
    padded = []
    for piece in pieces:
        reader = _only_reader(piece)
        if reader is None:
            return None
        padded.append(reader if reader.target is aten.constant_pad_nd.default else piece)
    stacked = {_only_reader(node) for node in padded}
    stack = stacked.pop() if len(stacked) == 1 else None
    if stack is None or stack.target is not aten.stack.default or list(stack.args[0]) != padded:  # type: ignore[arg-type]
        return None
    lengths = tuple(int(piece.meta["val"].shape[1]) * tail // width for piece in pieces)
    return _scattered(_only_reader(stack), ProductRows(lead, lengths), dtype)


def _is_cast(node: fx.Node) -> bool:
    """Whether a node does nothing but cast its input to another dtype."""
    return node.target is aten._to_copy.default and node.kwargs.keys() <= {"dtype", "layout", "device"}


def _scattered(start: fx.Node | None, rows: ProductRows, dtype: torch.dtype | None) -> Scattered | None:
    if start is None or start.target is not collectives.REDUCE_SCATTER or start.args[1] != "sum":
        return None
    wait = _only_reader(start)
    fits = wait is not None and wait.target is collectives.WAIT and rows.longest
    return Scattered(start, wait, rows, dtype) if fits and wait is not None else None


def _under_reshapes(node: fx.Node) -> fx.Node:
    """The node that makes the elements which ``node`` shows in another shape."""
    while node.target in _RESHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 and not node.meta.get("returned") else None


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
