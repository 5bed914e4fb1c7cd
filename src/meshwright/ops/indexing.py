"""Gathers and scatters by index: the indexed dim stays whole, other dims may be split."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Unsplit, arguments, make_rule
from meshwright.ops.patterns import aligned, letters, normalize_dim, operand

aten = torch.ops.aten


def gather_rule(call: Call) -> Rule | Unsplit:
    """``b !v, b i -> b i``; dims that the index covers only in part stay whole.

    Where a scatter adds, its index may be split too, and the results are summed; otherwise it stays whole."""
    source, index = call.tensors[0], call.tensors[1]
    dim = normalize_dim(call.args[1], source.dim())
    left, right = letters(source.dim()), letters(source.dim())
    for position in range(source.dim()):
        if position == dim or source.shape[position] != index.shape[position]:
            left[position], right[position] = f"!x{position}", f"!y{position}"
    if source.dim() and (call.target is aten.gather.default or _adds(call)):
        right[dim] = "i"
    source_dims, index_dims = operand(left), operand(right)
    if call.target is aten.gather.default:
        return make_rule(call, f"^{source_dims}, {index_dims} -> {index_dims}")
    if any(tensor.shape != index.shape for tensor in call.tensors[2:]):
        return Unsplit("the values of this scatter have another shape than its index")
    values = call.tensors[2:]
    linear = "^" if arguments(call).get("reduce") in (None, "sum", "mean") and (values or call.args[3] == 0) else ""
    written = f", {linear}{index_dims}" * len(values)
    return make_rule(call, f"{linear}{source_dims}, {index_dims}{written} -> {source_dims}")


def _adds(call: Call) -> bool:
    """Whether a scatter adds its values to the tensor, so that every rank may add some of them."""
    given = arguments(call)
    return call.target is aten.scatter_add.default or (given.get("reduce") == "sum" and given["include_self"])


def _adjacent(indices: list[Tensor | None]) -> list[int] | None:
    """Return the indexed dims; None if an index is a mask or if the indexed dims are not adjacent."""
    used = [position for position, index in enumerate(indices) if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices if index is not None)
    return None if masks or used != list(range(used[0], used[0] + len(used))) else used


_NO_PATTERN = Unsplit("its indices are masks or not adjacent")


def _index_patterns(call: Call) -> tuple[str, list[str], list[str], list[int]] | None:
    """Return the parts of the pattern ``!x b, i, i -> i b``: the indexed tensor, every index, and the letters and sizes
    of the result's dims. Return None if an index is a mask or if the indexed dims are not adjacent."""
    source, indices = call.args[0], call.args[1]
    used = _adjacent(indices)
    if used is None:
        return None
    before, after = slice(0, used[0]), slice(used[0] + len(used), None)
    left = letters(source.dim(), fixed=tuple(used))
    shapes = [index.shape for index in indices if index is not None]
    shape = list(torch.broadcast_shapes(*shapes))
    names = [f"i{position}" if size != 1 else "1" for position, size in enumerate(shape)]
    taken, sizes = [*left[before], *names, *left[after]], [*source.shape[before], *shape, *source.shape[after]]
    return operand(left), [operand(aligned(names, shape, index_shape)) for index_shape in shapes], taken, sizes


def index_rule(call: Call) -> Rule | Unsplit:
    """The output has the dims of the indices and the dims without an index. Indexed dims stay whole."""
    patterns = _index_patterns(call)
    if patterns is None:
        return _NO_PATTERN
    source, indices, taken, _ = patterns
    return make_rule(call, f"^{source}, {', '.join(indices)} -> {operand(taken)}")


def index_put_rule(call: Call) -> Rule | Unsplit:
    """``!x b, i, i b -> !x b``; indices may be split if values accumulate, otherwise they stay whole."""
    patterns = _index_patterns(call)
    if patterns is None:
        return _NO_PATTERN
    source, indices, taken, sizes = patterns
    if not arguments(call)["accumulate"]:
        taken, indices = ([name.replace("i", "!i") for name in names] for names in (taken, indices))
    values = operand(aligned(taken, sizes, call.args[2].shape))
    return make_rule(call, f"^{source}, {', '.join(indices)}, ^{values} -> {source}")


_INDICES = ("i", *(f"i{position}" for position in range(8)))


def accumulate_local(local: Local) -> Any:
    """Run an operator that adds into a tensor on one rank. The first rank starts from the tensor, other ranks from
    zeros. With several micro-batches, each starts from the tensor divided by their number."""
    base, times = local.args[0], prod(local.times(factor) for factor in _INDICES)
    if any(local.coordinate(factor)[0] for factor in _INDICES):
        base = local.call(aten.zeros_like.default, base)
    elif times > 1:
        base = local.call(aten.div.Tensor, base, times)
    return local.call(local.target, base, *local.args[1:], **local.kwargs)


def _one_index(call: Call) -> tuple[str, str, str]:
    """Return the operands ``!x b`` (the indexed tensor), ``i``, and ``i b`` (the rows taken from the tensor)."""
    source, index = call.args[0], call.args[2]
    places = "i" if index.dim() else "."
    if not source.dim():
        return ".", places, "."
    dim = normalize_dim(call.args[1], source.dim())
    left = letters(source.dim(), fixed=(dim,))
    return operand(left), places, operand([*left[:dim], "i" if index.dim() else "1", *left[dim + 1 :]])


def index_select_rule(call: Call) -> Rule:
    """``!x b, i -> i b``."""
    source, places, taken = _one_index(call)
    return make_rule(call, f"^{source}, {places} -> {taken}")


def index_add_rule(call: Call) -> Rule:
    """``!x b, i, i b -> !x b``. If ``i`` is split, every rank adds its rows, and the results are summed."""
    source, places, taken = _one_index(call)
    return make_rule(call, f"^{source}, {places}, ^{taken if call.tensors[2].dim() else '.'} -> {source}")


def index_write_rule(call: Call) -> Rule:
    """``b !x, !i, b !i -> b !x``: rows are overwritten or reduced, in the order of their indices."""
    source, places, taken = (text.replace("i", "!i") for text in _one_index(call))
    values = call.tensors[2:]
    if call.target is aten.index_reduce.default:
        linear = "^" if arguments(call)["reduce"] == "mean" else ""
    else:
        linear = "^" if values or call.args[3] == 0 else ""
    written = f", {linear}{taken if values and values[0].dim() else '.'}" * len(values)
    return make_rule(call, f"{linear}{source}, {places}{written} -> {source}")


def take_rule(call: Call) -> Rule:
    """``!a !b, i0 i1 -> i0 i1``: positions in the flattened tensor, which stays whole."""
    source, index = call.tensors
    taken = operand(letters(index.dim(), "i"))
    return make_rule(call, f"^{operand(letters(source.dim(), 'x', tuple(range(source.dim()))))}, {taken} -> {taken}")


def search_rule(call: Call) -> Rule:
    """``b s, k -> b s``: a place in a sorted row is a sum over the row's parts; a sorter keeps the row whole."""
    given = arguments(call)
    names, rows = letters(given["self"].dim()), given.get("sorted_sequence")
    bounds = [
        *(names[:-1] if rows is not None and rows.dim() > 1 else []),
        "!k" if given.get("sorter") is not None else "k",
    ]
    values, table = operand(names), operand(bounds)
    if rows is None:  # bucketize: values come first
        return make_rule(call, f"{values}, {table} -> {values}")
    return make_rule(call, f"{table}, {values}{f', {table}' * len(call.tensors[2:])} -> {values}")


def membership_rule(call: Call) -> Rule:
    """``b s, !k -> b s``: every value is compared with all of the others, which stay whole."""
    names = operand(letters(call.outputs[0].dim()))
    tested = [operand(letters(tensor.dim(), "k", tuple(range(tensor.dim())))) for tensor in call.tensors[1:]]
    return make_rule(call, f"{', '.join([names, *tested])} -> {names}")


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Capture ``masked_scatter`` as a look-up: the place of an element among all masked ones is its row in the source.

    The dims over which the mask is expanded stay dims of the source, so that they may be split."""
    if not self.numel() or not source.numel():
        return NotImplemented
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    places, width = _places(mask, shape, source.numel())
    values = aten.index.Tensor(source.reshape(-1, width), [places]).reshape(shape)
    return torch.where(mask, values, self)


def masked_scatter_backward(grad_output: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Capture the gradient of the source of ``masked_scatter``: gradients of the look-up, added up by place."""
    if not grad_output.numel() or not prod(sizes):
        return NotImplemented
    places, width = _places(mask, grad_output.shape, prod(sizes))
    values = grad_output.masked_fill(mask.logical_not(), 0).reshape(*places.shape, width)
    rows = grad_output.new_zeros(prod(sizes) // width, width)
    return aten.index_put.default(rows, [places], values, True).reshape(list(sizes))


def _places(mask: Tensor, shape: Sequence[int], number: int) -> tuple[Tensor, int]:
    """Return the number of masked rows before each row, and the number of elements of a row. A row consists of the last
    dims over which the mask is expanded, or of one element if ``number`` elements are not a whole number of rows."""
    wide, width = mask.expand(shape), 1
    row = wide
    while row.dim() and not row.stride(-1):
        row, width = row.select(-1, 0), width * row.shape[-1]
    if number % width:
        row, width = wide, 1
    return (row.reshape(-1).cumsum(0).reshape(row.shape) - 1).clamp(min=0), width


_GATHER = OperatorRule(gather_rule)
_ADD = OperatorRule(gather_rule, accumulate_local)
_INDEX = OperatorRule(index_rule)
_PUT = OperatorRule(index_put_rule, accumulate_local)
_WRITE = OperatorRule(index_write_rule)
_SEARCH = OperatorRule(search_rule)

RULES = {
    **dict.fromkeys([aten.gather.default, aten.scatter.src, aten.scatter.value], _GATHER),
    **dict.fromkeys([aten.scatter_add.default, aten.scatter_reduce.two], _ADD),
    **dict.fromkeys([aten.index_fill.int_Scalar, aten.index_fill.int_Tensor], _WRITE),
    **dict.fromkeys([aten.index_copy.default, aten.index_reduce.default], _WRITE),
    **dict.fromkeys([aten.searchsorted.Tensor, aten.bucketize.Tensor], _SEARCH),
    **dict.fromkeys([aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar], OperatorRule(membership_rule)),
    aten.take.default: OperatorRule(take_rule),
    **dict.fromkeys([aten.index.Tensor, aten._unsafe_index.Tensor], _INDEX),
    **dict.fromkeys([aten.index_put.default, aten._unsafe_index_put.default], _PUT),
    aten.index_select.default: OperatorRule(index_select_rule),
    aten.index_add.default: OperatorRule(index_add_rule, accumulate_local),
}

CANONICAL = {
    aten.masked_scatter.default: masked_scatter,
    aten.masked_scatter_backward.default: masked_scatter_backward,
}
