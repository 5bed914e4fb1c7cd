"""Gathers and scatters by index: the indexed dim stays whole, the others may be split."""

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Unsplit, letters, make_rule, normalize_dim

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
    rest = ", ".join([two] * (len(call.tensors) - 1))
    if any(tensor.shape != index.shape for tensor in call.tensors[2:]):
        return Unsplit("the values of this scatter have another shape than its index")
    return make_rule(call, f"{one}, {rest} -> {one}")


def index_rule(call: Call) -> Rule | Unsplit:
    """Dims that no index touches are shared; indexed dims are gone, index dims stay whole."""
    source, indices = call.args[0], call.args[1]
    used = [position for position, index in enumerate(indices) if index is not None]
    if used != list(range(used[0], used[0] + len(used))) or any(
        index.dtype in (torch.bool, torch.uint8) for index in indices if index is not None
    ):
        return Unsplit("indices that are masks or not adjacent")
    left = letters(source.dim(), fixed=tuple(used))
    tensors = [index for index in indices if index is not None]
    rank = max(index.dim() for index in tensors)
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    names = [f"i{position}" if size != 1 else "1" for position, size in enumerate(shape)]
    parts = []
    for index in tensors:
        offset = rank - index.dim()
        dims = [names[offset + i] if size == shape[offset + i] else "1" for i, size in enumerate(index.shape)]
        parts.append(" ".join(dims) or ".")
    right = [*left[: used[0]], *names, *left[used[0] + len(used) :]]
    return make_rule(call, f"^{' '.join(left)}, {', '.join(parts)} -> {' '.join(right) or '.'}")


_GATHER = OperatorRule(gather_rule)

RULES = {
    aten.gather.default: _GATHER,
    aten.scatter.src: _GATHER,
    aten.scatter.value: _GATHER,
    aten.scatter_add.default: _GATHER,
    aten.index.Tensor: OperatorRule(index_rule),
}
