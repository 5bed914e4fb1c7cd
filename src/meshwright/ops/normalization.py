"""Layer, group and batch norm. Over a split dim they are exact: statistics are merged from all shards."""

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, letters, make_rule

aten = torch.ops.aten


# --- layer norm ------------------------------------------------------------------------------------------------


def _layer_names(call: Call, source: Tensor, shape: list[int]) -> tuple[list[str], list[str]]:
    lead = letters(source.dim() - len(shape), "_")
    return lead, [f"!k{index}" for index in range(len(shape))]


def _decompositions(names: list[str], reduces: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {names[0][1:]: reduces} if len(names) == 1 else {}


def layer_norm_rule(call: Call) -> Rule:
    """``b s !k, !k, !k -> b s !k, b s 1, b s 1``; split over ``k`` it merges means and variances."""
    source, shape = call.args[0], call.args[1]
    lead, tail = _layer_names(call, source, shape)
    whole, part = " ".join([*lead, *tail]), " ".join(tail)
    statistic = " ".join([*lead, *["1"] * len(tail)])
    vectors = f", {part}" * (len(call.tensors) - 1)
    rest = " ".join(lead) or "."
    return make_rule(
        call, f"{whole}{vectors} -> {whole}, {statistic}, {statistic}",
        decompositions=_decompositions(tail, (f"sum {rest}", f"sum {rest}")),
    )  # fmt: skip


def layer_norm_local(local: Local) -> Any:
    if not local.is_split("k0"):
        return local.call(local.target, *local.args, **local.kwargs)
    source, _, weight, bias, eps = local.args
    count = local.size("k0")
    mean = _scaled_sum(local, source, count)
    centered = local.call(aten.sub.Tensor, source, mean)
    variance = _scaled_sum(local, local.call(aten.mul.Tensor, centered, centered), count)
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, eps))
    output = local.call(aten.mul.Tensor, centered, scale)
    if weight is not None:
        output = local.call(aten.mul.Tensor, output, weight)
    if bias is not None:
        output = local.call(aten.add.Tensor, output, bias)
    return output, mean, scale


def _scaled_sum(local: Local, node: fx.Node, count: int) -> fx.Node:
    total = local.all_reduce(local.call(aten.sum.dim_IntList, node, [-1], True), "k0")
    return local.call(aten.div.Tensor, total, count)


def layer_norm_backward_rule(call: Call) -> Rule:
    """``b s !k, b s !k, b s 1, b s 1, !k, !k -> b s !k, !k, !k``: the vectors' gradients are sums over b and s."""
    source, shape = call.args[1], call.args[2]
    lead, tail = _layer_names(call, source, shape)
    whole, part = " ".join([*lead, *tail]), " ".join(tail)
    statistic = " ".join([*lead, *["1"] * len(tail)])
    vectors = f", {part}" * sum(isinstance(argument, Tensor) for argument in call.args[5:7])
    rest = " ".join(lead) or "."
    return make_rule(
        call, f"^{whole}, {whole}, {statistic}, {statistic}{vectors} -> {', '.join([whole, part, part][: len(call.outputs)])}",
        decompositions=_decompositions(tail, (f"sum {rest}", f"sum {rest}")),
    )  # fmt: skip


def layer_norm_backward_local(local: Local) -> Any:
    if not local.is_split("k0"):
        return local.call(local.target, *local.args, **local.kwargs)
    grad, source, _, mean, scale, weight, bias, mask = local.args
    count = local.size("k0")
    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, mean), scale)
    inner = grad if weight is None else local.call(aten.mul.Tensor, grad, weight)
    first = _scaled_sum(local, inner, count)
    second = _scaled_sum(local, local.call(aten.mul.Tensor, inner, normal), count)
    shifted = local.call(aten.sub.Tensor, inner, first)
    shifted = local.call(aten.sub.Tensor, shifted, local.call(aten.mul.Tensor, normal, second))
    lead = list(range(len(local.shape()) - 1))
    weight_grad = local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, grad, normal), lead) if mask[1] else None
    bias_grad = local.call(aten.sum.dim_IntList, grad, lead) if mask[2] else None
    return local.call(aten.mul.Tensor, shifted, scale), weight_grad, bias_grad


# --- group norm ------------------------------------------------------------------------------------------------


def group_norm_rule(call: Call) -> Rule:
    """Statistics live inside a sample: only ``n`` is split."""
    source = call.args[0]
    inner = " ".join(letters(source.dim() - 1, "k", tuple(range(source.dim() - 1))))
    vectors = ", !k0" * (len(call.tensors) - 1)
    return make_rule(call, f"n {inner}{vectors} -> n {inner}, n !g, n !g")


def group_norm_backward_rule(call: Call) -> Rule:
    source = call.args[1]
    inner = " ".join(letters(source.dim() - 1, "k", tuple(range(source.dim() - 1))))
    vectors = ", !k0" * (len(call.tensors) - 4)
    outputs = [f"n {inner}", "!k0", "!k0"][: len(call.outputs)]
    return make_rule(call, f"^n {inner}, n {inner}, n !g, n !g{vectors} -> {', '.join(outputs)}")


# --- batch norm ------------------------------------------------------------------------------------------------


def native_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Canonical batch norm: it says that it updates the running statistics, which native_batch_norm hides."""
    if not training:
        return aten._native_batch_norm_legit_no_training.default(
            input, weight, bias, running_mean, running_var, momentum, eps
        )
    if running_mean is None:
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, training, momentum, eps)
    return aten._native_batch_norm_legit.default(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )


def _space(source: Tensor, fixed: bool) -> str:
    return "".join(f" {'!' if fixed else ''}y{index}" for index in range(source.dim() - 2))


def batch_norm_rule(call: Call) -> Rule:
    """``!n c !y !x, c... -> !n c !y !x, c...``; split over ``n`` it merges the shards' means and variances."""
    space = _space(call.args[0], fixed=True)
    image = f"!n c{space}"
    vectors = ", c" * (len(call.tensors) - 1)
    outputs = ", c" * (len(call.outputs) - 1)
    return make_rule(call, f"{image}{vectors} -> {image}{outputs}", decompositions={"n": ("gather c", "gather c")})


def batch_norm_local(local: Local) -> Any:
    if not local.is_split("n"):
        return local.call(local.target, *local.args, **local.kwargs)
    stats = local.target is aten._native_batch_norm_legit_functional.default
    source, weight, bias = local.args[:3]
    momentum, eps = local.args[-2:]
    shape = source.meta["local_shape"]
    dims = [0, *range(2, len(shape))]
    mean, variance = _merged_statistics(local, source, dims, prod(shape) // shape[1])
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, eps))
    output = local.call(
        aten._native_batch_norm_legit_no_training.default, source, weight, bias, mean, variance, momentum, eps
    )
    result = [local.call(operator.getitem, output, 0), mean, scale]
    if stats:
        count = prod(shape) // shape[1] * local.coordinate("n")[1]
        unbiased = local.call(aten.mul.Tensor, variance, count / max(count - 1, 1))
        for running, new in ((local.args[3], mean), (local.args[4], unbiased)):
            kept = local.call(aten.mul.Tensor, running, 1.0 - momentum)
            result.append(local.call(aten.add.Tensor, kept, local.call(aten.mul.Tensor, new, momentum)))
    return tuple(result)


def _merged_statistics(local: Local, source: fx.Node, dims: list[int], count: int) -> tuple[fx.Node, fx.Node]:
    """Mean and biased variance over all shards (equal counts): gathered once, merged as Chan et al. 1983, eq. 2.1."""
    mean = local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, source, dims), count)
    shape = [1, -1, *[1] * (len(dims) - 1)]
    centered = local.call(aten.sub.Tensor, source, local.call(aten.reshape.default, mean, shape))
    squares = local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, centered, centered), dims)
    pair = local.call(aten.stack.default, [mean, local.call(aten.div.Tensor, squares, count)])
    parts = local.coordinate("n")[1]
    gathered = local.call(aten.reshape.default, local.all_gather(pair, "n"), [parts, 2, -1])
    means, variances = (local.call(aten.select.int, gathered, 1, index) for index in (0, 1))
    merged = local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, means, [0]), parts)
    offset = local.call(aten.sub.Tensor, means, merged)
    spread = local.call(aten.add.Tensor, variances, local.call(aten.mul.Tensor, offset, offset))
    return merged, local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, spread, [0]), parts)


def batch_norm_eval_rule(call: Call) -> Rule:
    """With given statistics every dim may be split."""
    space = _space(call.args[0], fixed=False)
    vectors = ", c" * (len(call.tensors) - 1)
    empty = ", ".join("!e" for _ in call.outputs[1:])
    return make_rule(call, f"n c{space}{vectors} -> n c{space}, {empty}")


def batch_norm_backward_rule(call: Call) -> Rule:
    """The gradient of the input needs two sums over ``n``; those of the vectors are these sums."""
    grad = call.args[0]
    space = _space(grad, fixed=True)
    image = f"!n c{space}"
    vectors = ", c" * (len(call.tensors) - 2)
    outputs = [image, "c", "c"][: len(call.outputs)]
    return make_rule(
        call, f"^{image}, {image}{vectors} -> {', '.join(outputs)}", decompositions={"n": ("sum c", "sum c")}
    )


def batch_norm_backward_local(local: Local) -> Any:
    if not local.is_split("n"):
        return local.call(local.target, *local.args, **local.kwargs)
    grad, source, weight, running_mean, running_var, mean, scale, train, eps, mask = local.args
    shape = source.meta["local_shape"]
    dims = [0, *range(2, len(shape))]
    vector = [1, -1, *[1] * (len(shape) - 2)]
    broad = lambda node: local.call(aten.reshape.default, node, vector)  # noqa: E731
    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, broad(mean)), broad(scale))
    first = local.call(aten.sum.dim_IntList, grad, dims)
    second = local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, grad, normal), dims)
    count = prod(shape) // shape[1] * local.coordinate("n")[1]
    sums = local.all_reduce(local.call(aten.stack.default, [first, second]), "n")
    bias_grad, weight_grad = (local.call(aten.select.int, sums, 0, index) for index in (0, 1))
    inner = local.call(aten.sub.Tensor, grad, broad(local.call(aten.div.Tensor, bias_grad, count)))
    scaled = local.call(aten.mul.Tensor, normal, broad(local.call(aten.div.Tensor, weight_grad, count)))
    inner = local.call(aten.sub.Tensor, inner, scaled)
    factor = scale if weight is None else local.call(aten.mul.Tensor, scale, weight)
    return local.call(aten.mul.Tensor, inner, broad(factor)), weight_grad, bias_grad


def _flops(call: Call, rule: Rule | None) -> float:
    return 8.0 * call.outputs[0].numel()


_BATCH_NORM = OperatorRule(batch_norm_rule, batch_norm_local, _flops)

RULES = {
    aten.native_layer_norm.default: OperatorRule(layer_norm_rule, layer_norm_local, _flops),
    aten.native_layer_norm_backward.default: OperatorRule(layer_norm_backward_rule, layer_norm_backward_local, _flops),
    aten.native_group_norm.default: OperatorRule(group_norm_rule, flops=_flops),
    aten.native_group_norm_backward.default: OperatorRule(group_norm_backward_rule, flops=_flops),
    aten._native_batch_norm_legit_functional.default: _BATCH_NORM,
    aten._native_batch_norm_legit.no_stats: _BATCH_NORM,
    aten._native_batch_norm_legit_no_training.default: OperatorRule(batch_norm_eval_rule, flops=_flops),
    aten.native_batch_norm_backward.default: OperatorRule(batch_norm_backward_rule, batch_norm_backward_local, _flops),
}

CANONICAL = {aten.native_batch_norm.default: native_batch_norm}
