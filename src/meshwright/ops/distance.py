"""Distances between vectors, and products that work along one dim of vectors."""

from math import inf

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Unsplit, arguments, make_rule
from meshwright.ops.patterns import aligned, letters, named, normalize_dim, operand

aten = torch.ops.aten

_BROADCAST = Unsplit("its vectors are broadcast over a batch")


def distance_rule(call: Call) -> Rule | Unsplit:
    """``b m !k, b r !k -> b m r``: coordinates stay whole, unless distances are sums over them (or maxima)."""
    first, second, p = *call.tensors, call.args[2]
    if first.shape[:-2] != second.shape[:-2]:
        return _BROADCAST
    batch, coordinates = letters(first.dim() - 2), "k" if p in (0, 1, inf) else "!k"
    left, right, pairs = (operand([*batch, *names]) for names in (("m", coordinates), ("r", coordinates), "mr"))
    return make_rule(call, f"{left}, {right} -> {pairs}", reduction="max" if p == inf else "sum")


def distance_backward_rule(call: Call) -> Rule | Unsplit:
    """``b m r, b m k, b r k, b m r -> b m k``: a sum over the vectors of the other side, coordinate by coordinate."""
    grad, first, second, _ = call.tensors
    if not grad.shape[:-2] == first.shape[:-2] == second.shape[:-2]:
        return _BROADCAST
    batch = letters(first.dim() - 2)
    pairs, left, right = (operand([*batch, *names]) for names in ("mr", "mk", "rk"))
    return make_rule(call, f"^{pairs}, {left}, {right}, {pairs} -> {left}")


def cross_rule(call: Call) -> Rule:
    """``b !k, b !k -> b !k``, with broadcasting: the dim of the three coordinates stays whole."""
    shape = call.outputs[0].shape
    names = named(shape)
    names[normalize_dim(arguments(call)["dim"], len(shape))] = "!k"
    first, second = (operand(aligned(names, shape, tensor.shape)) for tensor in call.tensors)
    return make_rule(call, f"^{first}, ^^{second} -> {operand(names)}")


def renorm_rule(call: Call) -> Rule:
    """``b !k -> b !k``: the norm is over all dims but one, which may be split."""
    rank = call.tensors[0].dim()
    kept = normalize_dim(call.args[2], rank)
    names = operand(letters(rank, fixed=tuple(dim for dim in range(rank) if dim != kept)))
    return make_rule(call, f"{names} -> {names}")


def _flops(call: Call, rule: Rule | None) -> float:
    """Count two operations for each coordinate of each pair of vectors."""
    return 2.0 * call.tensors[-1].numel() * call.tensors[0].shape[-2]


def distance(self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Capture ``dist`` as the norm of a difference."""
    return aten.linalg_vector_norm.default(self - other, p)


RULES = {
    aten._cdist_forward.default: OperatorRule(distance_rule, flops=_flops),
    aten._cdist_backward.default: OperatorRule(distance_backward_rule, flops=_flops),
    aten.linalg_cross.default: OperatorRule(cross_rule),
    aten.renorm.default: OperatorRule(renorm_rule),
}

CANONICAL = {aten.dist.default: distance}
