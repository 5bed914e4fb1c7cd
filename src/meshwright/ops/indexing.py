"""Gathers and scatters by index: the indexed dim stays whole, other dims may be split."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Unsplit, arguments, make_rule
from meshwright.ops.patterns import aligned, letters, normalize_dim, operand

aten = torch.ops.aten


def gather_rule(call: Call) -> Rule | Unsplit:
    """``b !v, b !w -> b !w``; dims that the index covers only in part stay whole too."""
    source, index = call.tensors[0], call.tensors[1]
    dim = normalize_dim(call.args[1], source.dim())
    left, right = letters(source.dim()), letters(source.dim())
    for position in range(source.dim()):
        if position == dim or source.shape[position] != index.shape[position]:
            left[position], right[position] = f"!x{position}", f"!y{position}"
    source_dims, index_dims = operand(left), operand(right)
    if call.target is aten.gather.default:
        return make_rule(call, f"^{source_dims}, {index_dims} -> {index_dims}")
    if any(tensor.shape != index.shape for tensor in call.tensors[2:]):
        return Unsplit("the values of this scatter have another shape than its index")
    values = f", ^{index_dims}" * len(call.tensors[2:])
    linear = "^" if values or call.args[3] == 0 else ""
    return make_rule(call, f"{linear}{source_dims}, {index_dims}{values} -> {source_dims}")


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


def _one_index(call: Call) -> tuple[str, str]:
    """Return the operands ``!x b`` (the indexed tensor) and ``i b`` (the rows that are taken from the tensor)."""
    source, dim = call.args[0], normalize_dim(call.args[1], call.args[0].dim())
    left = letters(source.dim(), fixed=(dim,))
    return operand(left), operand([*left[:dim], "i", *left[dim + 1 :]])


def index_select_rule(call: Call) -> Rule:
    """``!x b, i -> i b``."""
    source, taken = _one_index(call)
    return make_rule(call, f"^{source}, i -> {taken}")


def index_add_rule(call: Call) -> Rule:
    """``!x b, i, i b -> !x b``. If ``i`` is split, every rank adds its rows, and the results are summed."""
    source, taken = _one_index(call)
    return make_rule(call, f"^{source}, i, ^{taken} -> {source}")


_GATHER = OperatorRule(gather_rule)
_INDEX = OperatorRule(index_rule)
_PUT = OperatorRule(index_put_rule, accumulate_local)

RULES = {
    **dict.fromkeys([aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default], _GATHER),
    **dict.fromkeys([aten.index.Tensor, aten._unsafe_index.Tensor], _INDEX),
    **dict.fromkeys([aten.index_put.default, aten._unsafe_index_put.default], _PUT),
    aten.index_select.default: OperatorRule(index_select_rule),
    aten.index_add.default: OperatorRule(index_add_rule, accumulate_local),
}
