"""Gathers and scatters by index: the indexed dim stays whole, the others may be split."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Unsplit, letters, make_rule, normalize_dim

aten = torch.ops.aten


def gather_rule(call: Call) -> Rule | Unsplit:
    """``b !v, b !w -> b !w``; dims that the index takes only a part of stay whole as well."""
    source, index = call.tensors[0], call.tensors[1]
    dim = normalize_dim(call.args[1], source.dim())
    left, right = letters(source.dim()), letters(source.dim())
    for position in range(source.dim()):
        if position == dim or source.shape[position] != index.shape[position]:
            left[position], right[position] = f"!x{position}", f"!y{position}"
    one, two = " ".join(left) or ".", " ".join(right) or "."
    if call.target is aten.gather.default:
        return make_rule(call, f"^{one}, {two} -> {two}")
    if any(tensor.shape != index.shape for tensor in call.tensors[2:]):
        return Unsplit("the values of this scatter have another shape than its index")
    values = f", ^{two}" * len(call.tensors[2:])
    linear = "^" if values or call.args[3] == 0 else ""
    return make_rule(call, f"{linear}{one}, {two}{values} -> {one}")


def _adjacent(indices: list[Tensor | None]) -> list[int] | None:
    """The indexed dims, or None where they are masks or not adjacent."""
    used = [position for position, index in enumerate(indices) if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices if index is not None)
    return None if masks or used != list(range(used[0], used[0] + len(used))) else used


def _index_patterns(call: Call) -> tuple[str, list[str], str] | None:
    """(the indexed tensor, each index, what is taken): ``!x b, i, i -> i b``."""
    source, indices = call.args[0], call.args[1]
    used = _adjacent(indices)
    if used is None:
        return None
    left = letters(source.dim(), fixed=tuple(used))
    tensors = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    names = [f"i{position}" if size != 1 else "1" for position, size in enumerate(shape)]
    parts = []
    for index in tensors:
        offset = len(shape) - index.dim()
        dims = [names[offset + i] if size == shape[offset + i] else "1" for i, size in enumerate(index.shape)]
        parts.append(" ".join(dims) or ".")
    right = [*left[: used[0]], *names, *left[used[0] + len(used) :]]
    return " ".join(left), parts, " ".join(right) or "."


def index_rule(call: Call) -> Rule | Unsplit:
    """Dims that no index touches are shared, those of the indices appear in the output; indexed dims stay whole."""
    patterns = _index_patterns(call)
    if patterns is None:
        return Unsplit("its indices are masks or not adjacent")
    source, indices, taken = patterns
    return make_rule(call, f"^{source}, {', '.join(indices)} -> {taken}")


def index_put_rule(call: Call) -> Rule | Unsplit:
    """``!x b, i, i b -> !x b``: split over the indices, values that are accumulated add up."""
    patterns = _index_patterns(call)
    if patterns is None:
        return Unsplit("its indices are masks or not adjacent")
    source, indices, taken = patterns
    if not call.argument(3, "accumulate", False):
        taken, indices = taken.replace("i", "!i"), [index.replace("i", "!i") for index in indices]
    names, values = taken.split() if taken != "." else [], call.args[2]
    offset = len(names) - values.dim()
    widths = _taken_shape(call)
    parts = [names[offset + i] if size == widths[offset + i] else "1" for i, size in enumerate(values.shape)]
    return make_rule(call, f"^{source}, {', '.join(indices)}, ^{' '.join(parts) or '.'} -> {source}")


def _taken_shape(call: Call) -> list[int]:
    source, indices = call.args[0], call.args[1]
    used = [position for position, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    return [*source.shape[: used[0]], *shape, *source.shape[used[0] + len(used) :]]


def accumulate_local(local: Local, factors: list[str]) -> Any:
    """Only the first of the ranks that add into a tensor starts from it, the others from zero. Of several micro-batches
    each starts from its share."""
    if all(local.coordinate(factor)[0] == 0 for factor in factors):
        base, times = local.args[0], prod(local.times(factor) for factor in factors)
        base = local.call(aten.div.Tensor, base, times) if times > 1 else base
        return local.call(local.target, base, *local.args[1:], **local.kwargs)
    zeros = local.call(aten.zeros_like.default, local.args[0])
    return local.call(local.target, zeros, *local.args[1:], **local.kwargs)


def index_put_local(local: Local) -> Any:
    return accumulate_local(local, [f"i{position}" for position in range(8)])


def index_select_rule(call: Call) -> Rule:
    """``!x b, i -> i b``."""
    source, dim = call.args[0], normalize_dim(call.args[1], call.args[0].dim())
    left = letters(source.dim(), fixed=(dim,))
    right = [*left[:dim], "i", *left[dim + 1 :]]
    return make_rule(call, f"^{' '.join(left)}, i -> {' '.join(right)}")


def index_add_rule(call: Call) -> Rule:
    """``!x b, i, i b -> !x b``: split over the index, the parts add up."""
    target, dim = call.args[0], normalize_dim(call.args[1], call.args[0].dim())
    left = letters(target.dim(), fixed=(dim,))
    right = [*left[:dim], "i", *left[dim + 1 :]]
    return make_rule(call, f"^{' '.join(left)}, i, ^{' '.join(right)} -> {' '.join(left)}")


def index_add_local(local: Local) -> Any:
    return accumulate_local(local, ["i"])


_GATHER = OperatorRule(gather_rule)
_PUT = OperatorRule(index_put_rule, index_put_local)

RULES = {
    aten.gather.default: _GATHER,
    aten.scatter.src: _GATHER,
    aten.scatter.value: _GATHER,
    aten.scatter_add.default: _GATHER,
    aten.index.Tensor: OperatorRule(index_rule),
    aten.index_put.default: _PUT,
    aten._unsafe_index_put.default: _PUT,
    aten._unsafe_index.Tensor: OperatorRule(index_rule),
    aten.index_select.default: OperatorRule(index_select_rule),
    aten.index_add.default: OperatorRule(index_add_rule, index_add_local),
}
