"""Softmax and its logarithm. Over a split dim they are exact: maxima and sums of all shards are merged."""

from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, letters, make_rule, normalize_dim

aten = torch.ops.aten


def _names(call: Call) -> tuple[str, str, str]:
    """(pattern of the tensor, the softmax letter, the remaining letters)."""
    rank = call.outputs[0].dim()
    position = 1 if call.target in (aten._softmax.default, aten._log_softmax.default) else 2
    dim = normalize_dim(call.args[position], rank)
    names = letters(rank)
    names[dim] = "!v"
    return " ".join(names), "v", " ".join(name for index, name in enumerate(names) if index != dim) or "."


def softmax_rule(call: Call) -> Rule:
    """``b s !v -> b s !v``; split over ``v`` it gathers a maximum and a sum."""
    names, letter, rest = _names(call)
    return make_rule(call, f"{names} -> {names}", decompositions={letter: (f"gather 2 {rest}",)})


def softmax_backward_rule(call: Call) -> Rule:
    """``b s !v, b s !v -> b s !v``; split over ``v`` it reduces one sum."""
    names, letter, rest = _names(call)
    return make_rule(call, f"^{names}, {names} -> {names}", decompositions={letter: (f"sum {rest}",)})


def softmax_local(local: Local) -> Any:
    """x - log-sum-exp, or its exponential: each shard's maximum and sum are gathered once and merged."""
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    source, dim = local.args[0], local.args[1]
    maximum = local.call(aten.amax.default, source, [dim], True)
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
        return local.call(
            aten.sub.Tensor, source, local.call(aten.add.Tensor, highest, local.call(aten.log.default, merged))
        )
    scale = local.call(aten.exp.default, local.call(aten.sub.Tensor, maximum, highest))
    return local.call(aten.mul.Tensor, powers, local.call(aten.div.Tensor, scale, merged))


def softmax_backward_local(local: Local) -> Any:
    """grad - exp(y) sum(grad), or y (grad - sum(grad y)), the sum taken over all shards."""
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    grad, output, dim = local.args[:3]
    if local.target is aten._log_softmax_backward_data.default:
        total = local.all_reduce(local.call(aten.sum.dim_IntList, grad, [dim], True), "v")
        powers = local.call(aten.exp.default, output)
        return local.call(aten.sub.Tensor, grad, local.call(aten.mul.Tensor, powers, total))
    product = local.call(aten.mul.Tensor, grad, output)
    total = local.all_reduce(local.call(aten.sum.dim_IntList, product, [dim], True), "v")
    return local.call(aten.sub.Tensor, product, local.call(aten.mul.Tensor, output, total))


def _flops(call: Call, rule: Rule | None) -> float:
    return 5.0 * call.outputs[0].numel()


_FORWARD = OperatorRule(softmax_rule, softmax_local, _flops)
_BACKWARD = OperatorRule(softmax_backward_rule, softmax_backward_local, _flops)

RULES = {
    aten._softmax.default: _FORWARD,
    aten._log_softmax.default: _FORWARD,
    aten._softmax_backward_data.default: _BACKWARD,
    aten._log_softmax_backward_data.default: _BACKWARD,
}
