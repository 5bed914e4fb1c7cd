"""Reductions over dims. A mean is a sum divided by the global count, so that it is correct for unequal shards."""

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Target, arguments, emit_unchanged, make_rule, wide_dtype
from meshwright.ops.patterns import letters, normalize_dim, operand

aten = torch.ops.aten

_EXTREMA: dict[Target, str] = {
    aten.amax.default: "max", aten.max.default: "max", aten.amin.default: "min", aten.min.default: "min",
}  # fmt: skip


def _reduced_dims(call: Call) -> list[int]:
    rank, dims = call.tensors[0].dim(), arguments(call).get("dim")
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(rank))
    return [normalize_dim(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)] if rank else []


def _pattern(call: Call, dims: Sequence[int], mark: str = "", caret: str = "", name: str = "") -> str:
    """Return the pattern of a reduction. The letters of ``dims`` get the prefix ``mark`` and, if given, ``name``."""
    rank, keep = call.tensors[0].dim(), call.outputs[0].dim() == call.tensors[0].dim()
    left = [f"{mark}{name or letter}" if dim in dims else letter for dim, letter in enumerate(letters(rank))]
    right = ["1" if dim in dims else letter for dim, letter in enumerate(left) if keep or dim not in dims]
    return f"{caret}{operand(left)} -> {', '.join([operand(right)] * len(call.outputs))}"


def reduction_rule(call: Call) -> Rule:
    """``b s k -> b s``: the factor that is missing in the output is reduced."""
    linear = call.target not in _EXTREMA and call.tensors[0].is_floating_point()
    pattern = _pattern(call, _reduced_dims(call), caret="^" if linear else "")
    return make_rule(call, pattern, reduction=_EXTREMA.get(call.target, "sum"))


def sum_rule(call: Call) -> Rule:
    """``b s k -> b s``: a sum of what a function makes of each element (nansum, count_nonzero), which is not linear."""
    return make_rule(call, _pattern(call, _reduced_dims(call)))


def fixed_reduction_rule(call: Call) -> Rule:
    """Reductions that no collective completes (any, all, prod): the reduced dims cannot be split."""
    return make_rule(call, _pattern(call, _reduced_dims(call), "!"))


def gathered_reduction_rule(call: Call) -> Rule:
    """``b !v -> b``; if ``v`` is split, the results of all shards are gathered and reduced by the same operator.

    For argmax, the result of a shard is its extreme value and the position of this value."""
    dims = _reduced_dims(call)
    if len(dims) != 1 or arguments(call).get("dim") is None:
        return fixed_reduction_rule(call)
    return make_rule(call, _pattern(call, dims, "!", name="v"), decompositions={"v": "gather"})


def scan_rule(call: Call) -> Rule:
    """The dim along which an operator works (cumsum, sort, topk) cannot be split. It may be missing in the output."""
    rank = call.tensors[0].dim()
    if not rank:
        return make_rule(call, f". -> {', '.join('.' for _ in call.outputs)}")
    dim = normalize_dim(arguments(call)["dim"], rank)
    names = letters(rank, fixed=(dim,))
    right = list(names)
    if call.outputs[0].dim() < rank:
        del right[dim]
    elif call.outputs[0].shape[dim] != call.tensors[0].shape[dim]:
        right[dim] = "!w"
    caret = "^" if call.target is aten.cumsum.default else ""
    return make_rule(call, f"{caret}{operand(names)} -> {', '.join([operand(right)] * len(call.outputs))}")


def logsumexp_local(local: Local) -> Any:
    """Run ``aten.logsumexp`` on one rank. If ``v`` is split, gather the shards' results and reduce them again."""
    part = emit_unchanged(local)
    if not local.is_split("v"):
        return part
    shape = [local.coordinate("v")[1], *local.shape()]
    return local.call(local.target, local.call(aten.reshape.default, local.all_gather(part, "v"), shape), [0])


def argmax_local(local: Local) -> Any:
    """Run ``aten.argmax`` or ``argmin`` on one rank. If ``v`` is split, gather the shards' extremes and positions."""
    if not local.is_split("v"):
        return emit_unchanged(local)
    source, dim = local.args[:2]
    extreme = aten.amax.default if local.target is aten.argmax.default else aten.amin.default
    index, parts = local.coordinate("v")
    shape = [parts, *local.shape()]
    keep = len(local.shape()) == len(local.input_shape(0))
    positions = local.call(local.target, source, dim, keep)
    where = local.call(aten.add.Tensor, positions, local.bounds("v")[index])
    values, places = (
        local.call(aten.reshape.default, local.all_gather(value, "v"), shape)
        for value in (local.call(extreme, source, [dim], keep), where)
    )
    best = local.call(local.target, values, 0, True)
    return local.call(aten.squeeze.dim, local.call(aten.gather.default, places, 0, best), 0)


def mean(self: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Capture a mean as a sum divided by the global count."""
    dims, given = list(dim) if dim else list(range(self.dim())), dtype or self.dtype
    return (self.sum(dims, keepdim, dtype=wide_dtype(given)) / prod(self.shape[index] for index in dims)).to(given)


def _sizes(value: Tensor) -> Tensor:
    """Return the magnitudes of complex numbers; return real numbers as they are."""
    return value.abs() if value.is_complex() else value


def var_correction(
    self: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    """Capture a variance as two sums (for the mean, then of squared differences), each divided by a global count."""
    dims = list(dim) if dim else list(range(self.dim()))
    count = prod(self.shape[index] for index in dims)
    wide = self.to(wide_dtype(self.dtype))
    centered = _sizes(wide - mean(wide, dims, True))
    variance = (centered * centered).sum(dims, keepdim) / max(count - (1 if correction is None else correction), 0)
    return variance.to(self.dtype.to_real())


def std_correction(self: Tensor, dim: list[int] | None = None, **settings: Any) -> Tensor:
    """Capture a standard deviation as the root of ``var_correction``, which takes the same settings."""
    return var_correction(self.to(wide_dtype(self.dtype)), dim, **settings).sqrt().to(self.dtype.to_real())


def _with_mean(spread: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def canonical(self: Tensor, dim: list[int] | None = None, *, keepdim: bool = False, **rest: Any) -> Any:
        """Capture ``var_mean`` or ``std_mean`` as two computations: the variance or deviation, and the mean."""
        return spread(self, dim, keepdim=keepdim, **rest), mean(self, dim, keepdim)

    return canonical


def vector_norm(
    self: Tensor, ord: Any = 2, dim: int | list[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Capture a vector norm as elementwise operators and a sum, maximum or minimum. In the older operator
    ``aten.norm``, ``ord`` may be None, which means 2."""
    given = dtype or self.dtype
    values = _sizes(self.to(wide_dtype(given)))
    dims = [dim] if isinstance(dim, int) else list(dim) if dim else list(range(self.dim()))
    return _norm(values, ord, dims, keepdim).to(given.to_real())


def _norm(values: Tensor, ord: Any, dims: list[int], keepdim: bool) -> Tensor:
    if ord in (2, None):
        return (values * values).sum(dims, keepdim).sqrt()
    if ord == 0:
        return (values != 0).sum(dims, keepdim).to(values.dtype)
    if abs(ord) == math.inf:
        sizes = values.abs()
        return sizes.amax(dims, keepdim) if ord > 0 else sizes.amin(dims, keepdim)
    sizes = values.abs() if ord == 1 else values.abs().pow(ord)
    return sizes.sum(dims, keepdim) if ord == 1 else sizes.sum(dims, keepdim).pow(1.0 / ord)


def _flops(call: Call, rule: Rule | None) -> float:
    return float(call.tensors[0].numel())


_REDUCE = OperatorRule(rule=reduction_rule, flops=_flops)
_FIXED = OperatorRule(rule=fixed_reduction_rule, flops=_flops)
_SCAN = OperatorRule(rule=scan_rule, flops=_flops)
_SUM = OperatorRule(rule=sum_rule, flops=_flops)
_ARGMAX = OperatorRule(rule=gathered_reduction_rule, local=argmax_local, flops=_flops)

RULES = {
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default, *_EXTREMA], _REDUCE),
    **dict.fromkeys([aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList], _SUM),
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], _ARGMAX),
    **dict.fromkeys([aten.any.default, aten.any.dim, aten.any.dims], _FIXED),
    **dict.fromkeys([aten.all.default, aten.all.dim, aten.all.dims], _FIXED),
    **dict.fromkeys([aten.max.dim, aten.min.dim, aten.prod.default, aten.prod.dim_int], _FIXED),
    **dict.fromkeys([aten.aminmax.default, aten.median.default, aten.nanmedian.default], _FIXED),
    aten.logsumexp.default: OperatorRule(rule=gathered_reduction_rule, local=logsumexp_local, flops=_flops),
    **dict.fromkeys([aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.cumsum.default], _SCAN),
    **dict.fromkeys([aten.kthvalue.default, aten.logcumsumexp.default, aten.median.dim], _SCAN),
    **dict.fromkeys([aten.nanmedian.dim, aten.mode.default], _SCAN),
    **dict.fromkeys([aten.sort.default, aten.sort.stable, aten.topk.default], _SCAN),
}

CANONICAL = {
    aten.mean.dim: mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.mean.default: mean,
    aten.norm.Scalar: vector_norm,
    aten.norm.ScalarOpt_dim: vector_norm,
    aten.std.correction: std_correction,
    aten.std_mean.correction: _with_mean(std_correction),
    aten.var.correction: var_correction,
    aten.var_mean.correction: _with_mean(var_correction),
}
