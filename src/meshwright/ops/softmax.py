"""Softmax and its logarithm. They are exact if their dim is split: the maxima and sums of all shards are merged."""

from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, arguments, emit_unchanged, make_rule, narrowed, widened
from meshwright.ops.patterns import letters, operand

aten = torch.ops.aten


def safe_softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Capture ``_safe_softmax`` as a softmax whose NaN is replaced by zero where all values are masked."""
    weights = torch.softmax(self, dim, dtype=dtype)
    return weights.masked_fill((self == -torch.inf).all(dim, keepdim=True), 0.0)


def softmax_rule(call: Call) -> Rule:
    """``b !v -> b !v``; if ``v`` is split, maxima and sums are gathered, or one sum is all-reduced for a gradient."""
    given, dims = arguments(call), letters(call.outputs[0].dim())
    if dims:
        dims[given["dim"]] = "!v"
    names = operand(dims)
    if "grad_output" in given:
        return make_rule(call, f"^{names}, {names} -> {names}", decompositions={"v": "sum"})
    return make_rule(call, f"{names} -> {names}", decompositions={"v": "gather"})


def softmax_local(local: Local) -> Any:
    """Return x - log-sum-exp, or its exponential. Each shard's maximum and sum are gathered once and merged."""
    if not local.is_split("v"):
        return emit_unchanged(local)
    source, dim, half_to_float = local.args
    source = local.call(aten._to_copy.default, source, dtype=torch.float32) if half_to_float else widened(local, source)
    # a shard whose values are all -inf gets a finite "maximum", so that its powers are 0 and not NaN
    least = torch.finfo(local.dtype()).min
    maximum = local.call(aten.clamp_min.default, local.call(aten.amax.default, source, [dim], True), least)
    powers = local.call(aten.exp.default, local.call(aten.sub.Tensor, source, maximum))
    total = local.call(aten.sum.dim_IntList, powers, [dim], True)
    pair = local.call(aten.stack.default, [maximum, total])
    shape = [local.coordinate("v")[1], 2, *local.shape()]
    shape[dim + 2 if dim >= 0 else dim] = 1
    gathered = local.call(aten.reshape.default, local.all_gather(pair, "v"), shape)
    maxima, totals = (local.call(aten.select.int, gathered, 1, index) for index in (0, 1))
    highest = local.call(aten.amax.default, maxima, [0])
    weights = local.call(
        aten.mul.Tensor, totals, local.call(aten.exp.default, local.call(aten.sub.Tensor, maxima, highest))
    )
    merged = local.call(aten.sum.dim_IntList, weights, [0])
    if local.target is aten._log_softmax.default:
        logarithm = local.call(aten.add.Tensor, highest, local.call(aten.log.default, merged))
        return narrowed(local, local.call(aten.sub.Tensor, source, logarithm))
    scale = local.call(aten.exp.default, local.call(aten.sub.Tensor, maximum, highest))
    return narrowed(local, local.call(aten.mul.Tensor, powers, local.call(aten.div.Tensor, scale, merged)))


def softmax_backward_local(local: Local) -> Any:
    """Return grad - exp(y) sum(grad) (log-softmax) or y (grad - sum(grad y)) (softmax). The sum covers all shards."""
    if not local.is_split("v"):
        return emit_unchanged(local)
    grad, output, dim = local.args[:3]
    grad, output = widened(local, grad), widened(local, output)
    logarithmic = local.target is aten._log_softmax_backward_data.default
    terms = grad if logarithmic else local.call(aten.mul.Tensor, grad, output)
    weights = local.call(aten.exp.default, output) if logarithmic else output
    total = local.all_reduce(local.call(aten.sum.dim_IntList, terms, [dim], True), "v")
    result = local.call(aten.sub.Tensor, terms, local.call(aten.mul.Tensor, weights, total))
    return narrowed(local, result)


def _flops(call: Call, rule: Rule | None) -> float:
    return 5.0 * call.outputs[0].numel()


_FORWARD = OperatorRule(softmax_rule, softmax_local, _flops)
_BACKWARD = OperatorRule(softmax_rule, softmax_backward_local, _flops)

RULES = {
    **dict.fromkeys([aten._softmax.default, aten._log_softmax.default], _FORWARD),
    **dict.fromkeys([aten._softmax_backward_data.default, aten._log_softmax_backward_data.default], _BACKWARD),
}

CANONICAL = {aten._safe_softmax.default: safe_softmax}
