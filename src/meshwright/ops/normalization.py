"""Layer, group and batch norm. Over a split dim they are exact: statistics are merged from all shards."""

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, letters, make_rule, narrowed, widened

aten = torch.ops.aten


def _wanted(mask: list[bool], image: str, vector: str) -> str:
    """The outputs of a norm's backward that its mask asks for."""
    return ", ".join(name for name, wanted in zip((image, vector, vector), mask, strict=True) if wanted)


# --- layer norm ------------------------------------------------------------------------------------------------


def _layer_names(source: Tensor, shape: list[int]) -> tuple[str, str, str, dict[str, tuple[str, ...]]]:
    """(pattern of the tensor, of weight and bias, of the statistics, decompositions)."""
    lead = letters(source.dim() - len(shape), "_")
    tail = [f"!k{index}" for index in range(len(shape))]
    rest = " ".join(lead) or "."
    decompositions: dict[str, tuple[str, ...]] = {"k0": (f"sum 2 {rest}",)} if len(tail) == 1 else {}
    return " ".join([*lead, *tail]), " ".join(tail), " ".join([*lead, *["1"] * len(tail)]), decompositions


def layer_norm_rule(call: Call) -> Rule:
    """``b s !k, !k, !k -> b s !k, b s 1, b s 1``; split over ``k`` it merges means and variances."""
    whole, part, statistic, decompositions = _layer_names(call.args[0], call.args[1])
    vectors = f", {part}" * (len(call.tensors) - 1)
    pattern = f"{whole}{vectors} -> {whole}, {statistic}, {statistic}"
    return make_rule(call, pattern, decompositions=decompositions)


def layer_norm_local(local: Local) -> Any:
    if not local.is_split("k0"):
        return local.call(local.target, *local.args, **local.kwargs)
    source, _, weight, bias, eps = local.args
    source = widened(local, source)
    mean = _mean(local, source)
    centered = local.call(aten.sub.Tensor, source, mean)
    variance = _mean(local, local.call(aten.mul.Tensor, centered, centered))
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, eps))
    output = local.call(aten.mul.Tensor, centered, scale)
    if weight is not None:
        output = local.call(aten.mul.Tensor, output, weight)
    if bias is not None:
        output = local.call(aten.add.Tensor, output, bias)
    return tuple(narrowed(local, value, index) for index, value in enumerate((output, mean, scale)))


def _mean(local: Local, value: Value) -> Value:
    """The mean over all shards of the last dim."""
    total = local.all_reduce(local.call(aten.sum.dim_IntList, value, [-1], True), "k0")
    return local.call(aten.div.Tensor, total, local.size("k0"))


def layer_norm_backward_rule(call: Call) -> Rule:
    """``b s !k, b s !k, b s 1, b s 1, !k, !k -> b s !k, !k, !k``: the vectors' gradients are sums over b and s."""
    whole, part, statistic, decompositions = _layer_names(call.args[1], call.args[2])
    vectors = f", {part}" * sum(isinstance(argument, Tensor) for argument in call.args[5:7])
    outputs = _wanted(call.args[7], whole, part)
    pattern = f"^{whole}, {whole}, {statistic}, {statistic}{vectors} -> {outputs}"
    return make_rule(call, pattern, decompositions=decompositions)


def layer_norm_backward_local(local: Local) -> Any:
    if not local.is_split("k0"):
        return local.call(local.target, *local.args, **local.kwargs)
    grad, source, _, mean, scale, weight, _, mask = local.args
    grad, source = widened(local, grad), widened(local, source)
    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, mean), scale)
    result: list[Value] = []
    if mask[0]:
        inner = grad if weight is None else local.call(aten.mul.Tensor, grad, weight)
        first = _mean(local, inner)
        second = _mean(local, local.call(aten.mul.Tensor, inner, normal))
        shifted = local.call(aten.sub.Tensor, inner, first)
        shifted = local.call(aten.sub.Tensor, shifted, local.call(aten.mul.Tensor, normal, second))
        result.append(local.call(aten.mul.Tensor, shifted, scale))
    lead = list(range(len(local.input_shape(0)) - 1))
    terms = [local.call(aten.mul.Tensor, grad, normal)] * mask[1] + [grad] * mask[2]
    result += [local.call(aten.sum.dim_IntList, term, lead) if lead else term for term in terms]
    values = iter(narrowed(local, value, index) for index, value in enumerate(result))
    return tuple(next(values) if wanted else None for wanted in mask)


# --- group norm ------------------------------------------------------------------------------------------------


def group_norm_rule(call: Call) -> Rule:
    """``n (g !k) !y !x, (g !k), (g !k) -> n (g !k) !y !x, n g, n g``: statistics live inside a group of a sample."""
    space = _space(call.args[0], fixed=True)
    vectors = ", (g !k)" * (len(call.tensors) - 1)
    return make_rule(call, f"n (g !k){space}{vectors} -> n (g !k){space}, n g, n g", g=call.args[6])


def group_norm_local(local: Local) -> Any:
    source, weight, bias = local.args[:3]
    source = local.call(aten.contiguous.default, source)
    return local.call(local.target, source, weight, bias, *_group_sizes(local, local.args[5]), local.args[7])


def group_norm_backward_rule(call: Call) -> Rule:
    """The gradients of weight and bias are sums over the samples."""
    image = f"n (g !k){_space(call.args[1], fixed=True)}"
    weight = ", (g !k)" if call.args[4] is not None else ""
    outputs = _wanted(call.args[9], image, "(g !k)")
    return make_rule(call, f"^{image}, {image}, n g, n g{weight} -> {outputs}", g=call.args[8])


def group_norm_backward_local(local: Local) -> Any:
    grad, source, mean, scale, weight = local.args[:5]
    grad, source = (local.call(aten.contiguous.default, value) for value in (grad, source))
    sizes = _group_sizes(local, local.args[7])
    return local.call(local.target, grad, source, mean, scale, weight, *sizes, local.args[9])


def _group_sizes(local: Local, points: int) -> tuple[int, int, int, int]:
    """(samples, channels, points, groups) on this rank."""
    samples = local.size("n") // local.coordinate("n")[1]
    groups = local.size("g") // local.coordinate("g")[1]
    return samples, groups * local.size("k"), points, groups


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
    image = f"!n c{_space(call.args[0], fixed=True)}"
    vectors = ", c" * (len(call.tensors) - 1)
    outputs = ", c" * (len(call.outputs) - 1)
    return make_rule(call, f"{image}{vectors} -> {image}{outputs}", decompositions={"n": ("gather 2 c",)})


def batch_norm_local(local: Local) -> Any:
    if not local.is_split("n"):
        return local.call(local.target, *local.args, **local.kwargs)
    stats = local.target is aten._native_batch_norm_legit_functional.default
    source, weight, bias = local.args[:3]
    momentum, eps = local.args[-2:]
    mean, variance = _merged_statistics(local, source)
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, eps))
    output = local.call(
        aten._native_batch_norm_legit_no_training.default, source, weight, bias, mean, variance, momentum, eps
    )
    result = [local.call(operator.getitem, output, 0), mean, scale]
    if stats:
        count = _count(local)
        unbiased = local.call(aten.mul.Tensor, variance, count / max(count - 1, 1))
        for running, new in ((local.args[3], mean), (local.args[4], unbiased)):
            kept = local.call(aten.mul.Tensor, running, 1.0 - momentum)
            result.append(local.call(aten.add.Tensor, kept, local.call(aten.mul.Tensor, new, momentum)))
    return tuple(result)


def _count(local: Local) -> int:
    """How many values there are of each channel, on all ranks."""
    return local.size("n") * prod(local.size(f"y{index}") for index in range(len(local.input_shape(0)) - 2))


def _merged_statistics(local: Local, source: Value) -> tuple[Value, Value]:
    """Mean and biased variance over all shards (equal counts): gathered once, merged as Chan et al. 1983, eq. 2.1."""
    parts = local.coordinate("n")[1]
    dims, count = [0, *range(2, len(local.input_shape(0)))], _count(local) // parts
    mean = local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, source, dims), count)
    shape = [1, -1, *[1] * (len(dims) - 1)]
    centered = local.call(aten.sub.Tensor, source, local.call(aten.reshape.default, mean, shape))
    squares = local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, centered, centered), dims)
    pair = local.call(aten.stack.default, [mean, local.call(aten.div.Tensor, squares, count)])
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
    return make_rule(call, f"n c{space}{vectors} -> n c{space}{', !e' * (len(call.outputs) - 1)}")


def batch_norm_backward_rule(call: Call) -> Rule:
    """The gradient of the input needs two sums over ``n``; those of the vectors are these sums. With given statistics
    (``train`` is False) it needs none, and every dim may be split."""
    grad, train, mask = call.args[0], call.args[7], call.args[9]
    image = f"{'!' if train else ''}n c{_space(grad, fixed=train)}"
    # without batch statistics, the saved ones are empty
    vectors = "".join(", c" if len(value) else ", !e" for value in call.args[2:7] if value is not None)
    return make_rule(
        call,
        f"^{image}, {image}{vectors} -> {_wanted(mask, image, 'c')}",
        decompositions={"n": ("sum 2 c",)} if train else {},
    )


def batch_norm_backward_local(local: Local) -> Any:
    grad, source, weight, running_mean, running_var, mean, scale, train, eps, mask = local.args
    if not local.is_split("n") or not train:
        return local.call(local.target, *local.args, **local.kwargs)
    dims = [0, *range(2, len(local.input_shape(0)))]
    vector, count = [1, -1, *[1] * (len(dims) - 1)], _count(local)

    def broad(value: Value) -> Value:
        return local.call(aten.reshape.default, value, vector)

    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, broad(mean)), broad(scale))
    first = local.call(aten.sum.dim_IntList, grad, dims)
    second = local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, grad, normal), dims)
    sums = local.all_reduce(local.call(aten.stack.default, [first, second]), "n")
    bias_grad, weight_grad = (local.call(aten.select.int, sums, 0, index) for index in (0, 1))
    inner = local.call(aten.sub.Tensor, grad, broad(local.call(aten.div.Tensor, bias_grad, count)))
    scaled = local.call(aten.mul.Tensor, normal, broad(local.call(aten.div.Tensor, weight_grad, count)))
    inner = local.call(aten.sub.Tensor, inner, scaled)
    factor = scale if weight is None else local.call(aten.mul.Tensor, scale, weight)
    input_grad = local.call(aten.mul.Tensor, inner, broad(factor)) if mask[0] else None
    return input_grad, weight_grad if mask[1] else None, bias_grad if mask[2] else None


def _flops(call: Call, rule: Rule | None) -> float:
    return 8.0 * call.outputs[0].numel()


_BATCH_NORM = OperatorRule(batch_norm_rule, batch_norm_local, _flops)

RULES = {
    aten.native_layer_norm.default: OperatorRule(layer_norm_rule, layer_norm_local, _flops),
    aten.native_layer_norm_backward.default: OperatorRule(layer_norm_backward_rule, layer_norm_backward_local, _flops),
    aten.native_group_norm.default: OperatorRule(group_norm_rule, group_norm_local, _flops),
    aten.native_group_norm_backward.default: OperatorRule(group_norm_backward_rule, group_norm_backward_local, _flops),
    aten._native_batch_norm_legit_functional.default: _BATCH_NORM,
    aten._native_batch_norm_legit.no_stats: _BATCH_NORM,
    aten._native_batch_norm_legit_no_training.default: OperatorRule(batch_norm_eval_rule, flops=_flops),
    aten.native_batch_norm_backward.default: OperatorRule(batch_norm_backward_rule, batch_norm_backward_local, _flops),
}

CANONICAL = {aten.native_batch_norm.default: native_batch_norm}
