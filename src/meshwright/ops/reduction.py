"""Reductions over dims; a mean is a sum over a global count, so that unequal shards stay right."""

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Target, letters, make_rule, normalize_dim, wide_dtype

aten = torch.ops.aten

SUMS: frozenset[Target] = frozenset({aten.sum.dim_IntList, aten.sum.default})
MAXIMA: dict[Target, str] = {
    aten.amax.default: "max", aten.max.default: "max", aten.amin.default: "min", aten.min.default: "min",
}  # fmt: skip
_WHOLE: frozenset[Target] = frozenset({aten.sum.default, aten.max.default, aten.min.default, aten.prod.default})


def _reduced_dims(call: Call) -> list[int]:
    rank = call.tensors[0].dim()
    if call.target in _WHOLE:
        return list(range(rank))
    dims = call.argument(1, "dim")
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(rank))
    return [normalize_dim(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)] if rank else []


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


_COUNTED: frozenset[Target] = frozenset({aten.topk.default, aten.kthvalue.default})
"""Scans that take a count before their dim."""
_LINEAR_SCANS: frozenset[Target] = frozenset({aten.cumsum.default})


def scan_rule(call: Call) -> Rule:
    """One dim is worked along (cumsum, sort, topk): it cannot be split, and may be shorter or gone in the output."""
    rank = call.tensors[0].dim()
    if not rank:
        return make_rule(call, f". -> {', '.join('.' for _ in call.outputs)}")
    dim = normalize_dim(call.argument(2 if call.target in _COUNTED else 1, "dim", -1), rank)
    names = letters(rank, fixed=(dim,))
    right = list(names)
    if call.outputs[0].dim() < rank:
        del right[dim]
    elif call.outputs[0].shape[dim] != call.tensors[0].shape[dim]:
        right[dim] = "!w"
    caret = "^" if call.target in _LINEAR_SCANS else ""
    return make_rule(call, f"{caret}{' '.join(names)} -> {', '.join([' '.join(right) or '.'] * len(call.outputs))}")


def logsumexp_rule(call: Call) -> Rule:
    """``b s !v -> b s``; split over ``v`` the shards' results are gathered, and merged in the same way."""
    dims = _reduced_dims(call)
    if len(dims) != 1:
        return fixed_reduction_rule(call)
    rank = call.tensors[0].dim()
    left = letters(rank)
    left[dims[0]] = "!v"
    rest = [name for index, name in enumerate(left) if index != dims[0]]
    keep = call.outputs[0].dim() == rank
    right = ["1" if name == "!v" else name for name in left] if keep else rest
    return make_rule(call, f"{' '.join(left)} -> {' '.join(right) or '.'}", decompositions={"v": "gather"})


def logsumexp_local(local: Local) -> Any:
    part = local.call(local.target, *local.args, **local.kwargs)
    if not local.is_split("v"):
        return part
    shape = [local.coordinate("v")[1], *local.shape()]
    return local.call(local.target, local.call(aten.reshape.default, local.all_gather(part, "v"), shape), [0])


def argmax_rule(call: Call) -> Rule:
    """``b !v -> b``; split over ``v`` each shard's extreme and where it stands are gathered."""
    dim, rank = call.argument(1, "dim"), call.tensors[0].dim()
    if dim is None or not rank:
        return fixed_reduction_rule(call)
    dim = normalize_dim(dim, rank)
    left = letters(rank)
    left[dim] = "!v"
    rest = [name for index, name in enumerate(left) if index != dim]
    keep = call.outputs[0].dim() == rank
    right = ["1" if name == "!v" else name for name in left] if keep else rest
    return make_rule(call, f"{' '.join(left)} -> {' '.join(right) or '.'}", decompositions={"v": "gather"})


def argmax_local(local: Local) -> Any:
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    source, dim = local.args[:2]
    extreme = aten.amax.default if local.target is aten.argmax.default else aten.amin.default
    index, parts = local.coordinate("v")
    shape = [parts, *local.shape()]
    keep = len(local.shape()) == len(local.input_shape(0))
    found = local.call(local.target, source, dim, keep)
    where = local.call(aten.add.Tensor, found, local.bounds("v")[index])
    values, places = (
        local.call(aten.reshape.default, local.all_gather(one, "v"), shape)
        for one in (local.call(extreme, source, [dim], keep), where)
    )
    best = local.call(local.target, values, 0, True)
    return local.call(aten.squeeze.dim, local.call(aten.gather.default, places, 0, best), 0)


def mean_dim(self: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Canonical mean: a sum times the reciprocal of the global count."""
    return _average(self, dim, keepdim, dtype or self.dtype)


def mean(self: Tensor, *, dtype: Any = None) -> Tensor:
    """Canonical mean of all elements."""
    return _average(self, None, False, dtype or self.dtype)


def _average(self: Tensor, dim: list[int] | None, keepdim: bool, dtype: torch.dtype) -> Tensor:
    dims = list(dim) if dim else list(range(self.dim()))
    return (self.sum(dims, keepdim, dtype=wide_dtype(dtype)) / prod(self.shape[index] for index in dims)).to(dtype)


def _sizes(value: Tensor) -> Tensor:
    """What is squared or raised to a power: magnitudes, where the numbers are complex."""
    return value.abs() if value.is_complex() else value


def var_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    """Canonical variance: two passes of sums over global counts."""
    dims = list(dim) if dim else list(range(self.dim()))
    count = prod(self.shape[index] for index in dims)
    wide = self.to(wide_dtype(self.dtype))
    centered = _sizes(wide - _average(wide, dims, True, wide.dtype))
    variance = (centered * centered).sum(dims, keepdim) / max(count - (1 if correction is None else correction), 0)
    return variance.to(self.dtype.to_real())


def std_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    """Canonical standard deviation."""
    variance = var_correction(self.to(wide_dtype(self.dtype)), dim, correction=correction, keepdim=keepdim)
    return variance.sqrt().to(self.dtype.to_real())


def var_mean_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Canonical variance and mean."""
    return var_correction(self, dim, correction=correction, keepdim=keepdim), mean_dim(self, dim, keepdim)


def std_mean_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Canonical standard deviation and mean."""
    return std_correction(self, dim, correction=correction, keepdim=keepdim), mean_dim(self, dim, keepdim)


def vector_norm(
    self: Tensor, ord: Any = 2, dim: int | list[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Canonical norm: a sum (or maximum) of powers."""
    given = dtype or self.dtype
    values = _sizes(self.to(wide_dtype(given)))
    dims = [dim] if isinstance(dim, int) else list(dim) if dim else list(range(self.dim()))
    return _norm(values, ord, dims, keepdim).to(given.to_real())


def _norm(values: Tensor, ord: Any, dims: list[int], keepdim: bool) -> Tensor:
    if ord == 2:
        return (values * values).sum(dims, keepdim).sqrt()
    if ord == 0:
        return (values != 0).sum(dims, keepdim).to(values.dtype)
    if abs(ord) == math.inf:
        sizes = values.abs()
        return sizes.amax(dims, keepdim) if ord > 0 else sizes.amin(dims, keepdim)
    sizes = values.abs() if ord == 1 else values.abs().pow(ord)
    return sizes.sum(dims, keepdim) if ord == 1 else sizes.sum(dims, keepdim).pow(1.0 / ord)


def norm(self: Tensor, p: Any = 2, dim: list[int] | None = None, keepdim: bool = False) -> Tensor:
    """Canonical form of the older norm."""
    return vector_norm(self, 2 if p is None else p, dim, keepdim)


def _flops(call: Call, rule: Rule | None) -> float:
    return float(call.tensors[0].numel())


_REDUCE = OperatorRule(rule=reduction_rule, flops=_flops)
_FIXED = OperatorRule(rule=fixed_reduction_rule, flops=_flops)
_SCAN = OperatorRule(rule=scan_rule, flops=_flops)
_ARGMAX = OperatorRule(rule=argmax_rule, local=argmax_local, flops=_flops)

RULES = {
    aten.sum.dim_IntList: _REDUCE,
    aten.sum.default: _REDUCE,
    aten.amax.default: _REDUCE,
    aten.amin.default: _REDUCE,
    aten.max.default: _REDUCE,
    aten.min.default: _REDUCE,
    aten.argmax.default: _ARGMAX,
    aten.argmin.default: _ARGMAX,
    aten.any.default: _FIXED,
    aten.any.dim: _FIXED,
    aten.any.dims: _FIXED,
    aten.all.default: _FIXED,
    aten.all.dim: _FIXED,
    aten.all.dims: _FIXED,
    aten.max.dim: _FIXED,
    aten.min.dim: _FIXED,
    aten.prod.default: _FIXED,
    aten.prod.dim_int: _FIXED,
    aten.logsumexp.default: OperatorRule(rule=logsumexp_rule, local=logsumexp_local, flops=_flops),
    aten.cummax.default: _SCAN,
    aten.cumprod.default: _SCAN,
    aten.cumsum.default: _SCAN,
    aten.kthvalue.default: _SCAN,
    aten.logcumsumexp.default: _SCAN,
    aten.median.dim: _SCAN,
    aten.sort.default: _SCAN,
    aten.sort.stable: _SCAN,
    aten.topk.default: _SCAN,
}

CANONICAL = {
    aten.mean.dim: mean_dim,
    aten.linalg_vector_norm.default: vector_norm,
    aten.mean.default: mean,
    aten.norm.Scalar: norm,
    aten.norm.ScalarOpt_dim: norm,
    aten.std.correction: std_correction,
    aten.std_mean.correction: std_mean_correction,
    aten.var.correction: var_correction,
    aten.var_mean.correction: var_mean_correction,
}
