"""Reductions over dims; a mean is a sum over a global count, so that unequal shards stay right."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, letters, make_rule, normalize_dim

aten = torch.ops.aten

SUMS = {aten.sum.dim_IntList, aten.sum.default}
MAXIMA = {aten.amax.default: "max", aten.max.default: "max", aten.amin.default: "min", aten.min.default: "min"}


def _reduced_dims(call: Call) -> list[int]:
    rank = call.tensors[0].dim()
    if call.target in (aten.sum.default, aten.max.default, aten.min.default):
        return list(range(rank))
    dims = call.argument(1, "dim")
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(rank))
    return [normalize_dim(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)]


def _pattern(call: Call, fixed: bool, caret: str) -> str:
    tensor, output = call.tensors[0], call.outputs[0]
    dims = _reduced_dims(call)
    left = letters(tensor.dim(), fixed=tuple(dims) if fixed else ())
    keep = output.dim() == tensor.dim()
    right = ["1" if index in dims else name for index, name in enumerate(left) if keep or index not in dims]
    one = " ".join(right) or "."
    return f"{caret}{' '.join(left) or '.'} -> {', '.join([one] * len(call.outputs))}"


def reduction_rule(call: Call) -> Rule:
    """``b s k -> b s``: the missing factor is reduced."""
    if call.target in SUMS:
        floating = call.tensors[0].is_floating_point()
        return make_rule(call, _pattern(call, fixed=False, caret="^" if floating else ""))
    return make_rule(call, _pattern(call, fixed=False, caret=""), reduction=MAXIMA[call.target])


def fixed_reduction_rule(call: Call) -> Rule:
    """Reductions that no collective finishes (argmax, any, prod): the reduced dims cannot be split."""
    return make_rule(call, _pattern(call, fixed=True, caret=""))


def scan_rule(call: Call) -> Rule:
    """Same shape in and out, one dim worked along (cumsum, sort): that dim cannot be split."""
    rank = call.tensors[0].dim()
    dim = normalize_dim(call.argument(1, "dim", -1), rank) if rank else 0
    names = " ".join(letters(rank, fixed=(dim,))) or "."
    return make_rule(call, f"{names} -> {', '.join([names] * len(call.outputs))}")


def mean_dim(self: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Canonical mean: a sum times the reciprocal of the global count."""
    dims = list(range(self.dim())) if not dim else dim
    return self.sum(dims, keepdim, dtype=dtype) / prod(self.shape[index] for index in dims)


def mean(self: Tensor, *, dtype: Any = None) -> Tensor:
    """Canonical mean of all elements."""
    return self.sum(dtype=dtype) / self.numel()


def var_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    """Canonical variance: two passes of sums over global counts."""
    dims = list(range(self.dim())) if not dim else dim
    count = prod(self.shape[index] for index in dims)
    centered = self - self.sum(dims, True) / count
    return (centered * centered).sum(dims, keepdim) / (count - (1 if correction is None else correction))


def var_mean_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Canonical variance and mean."""
    return var_correction(self, dim, correction=correction, keepdim=keepdim), mean_dim(self, dim, keepdim)


def _flops(call: Call, rule: Rule | None) -> float:
    return float(call.tensors[0].numel())


_REDUCE = OperatorRule(rule=reduction_rule, flops=_flops)
_FIXED = OperatorRule(rule=fixed_reduction_rule, flops=_flops)
_SCAN = OperatorRule(rule=scan_rule, flops=_flops)

RULES = {
    aten.sum.dim_IntList: _REDUCE,
    aten.sum.default: _REDUCE,
    aten.amax.default: _REDUCE,
    aten.amin.default: _REDUCE,
    aten.max.default: _REDUCE,
    aten.min.default: _REDUCE,
    aten.argmax.default: _FIXED,
    aten.argmin.default: _FIXED,
    aten.any.dim: _FIXED,
    aten.all.dim: _FIXED,
    aten.max.dim: _FIXED,
    aten.min.dim: _FIXED,
    aten.prod.dim_int: _FIXED,
    aten.logsumexp.default: _FIXED,
    aten.cumsum.default: _SCAN,
    aten.sort.default: _SCAN,
}

CANONICAL = {
    aten.mean.dim: mean_dim,
    aten.mean.default: mean,
    aten.var.correction: var_correction,
    aten.var_mean.correction: var_mean_correction,
}
