"""Layer and group norm. They are exact if their dims are split, because the statistics of all shards are merged."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import (
    Call,
    Local,
    OperatorRule,
    Value,
    emit_unchanged,
    make_rule,
    narrowed,
    wide_dtype,
    widened,
)
from meshwright.ops.patterns import letters
from meshwright.ops.space import SPACE

aten = torch.ops.aten


def wanted(mask: list[bool], image: str, vector: str) -> str:
    """Return the patterns of the outputs that the mask of a norm's backward requests."""
    return ", ".join(name for name, is_asked in zip((image, vector, vector), mask, strict=True) if is_asked)


# --- layer norm ------------------------------------------------------------------------------------------------


def _layer_names(source: Tensor, shape: list[int]) -> tuple[str, str, str, dict[str, str]]:
    """Return the patterns of the tensor, of weight and bias, and of the statistics, and then the decompositions."""
    lead = letters(source.dim() - len(shape), "_")
    tail = [f"!k{index}" for index in range(len(shape))]
    decompositions = {name[1:]: "sum" for name in tail}
    return " ".join([*lead, *tail]), " ".join(tail), " ".join([*lead, *["1"] * len(tail)]), decompositions


def layer_norm_rule(call: Call) -> Rule:
    """``b s !k, !k, !k -> b s !k, b s 1, b s 1``; if normalized dims are split, means and variances are merged."""
    whole, part, statistic, decompositions = _layer_names(call.args[0], call.args[1])
    vectors = f", {part}" * (len(call.tensors) - 1)
    pattern = f"{whole}{vectors} -> {whole}, {statistic}, {statistic}"
    return make_rule(call, pattern, decompositions=decompositions)


def layer_norm_local(local: Local) -> Any:
    """Run ``aten.native_layer_norm`` on one rank. If normalized dims are split, mean and variance cover all shards."""
    split = split_factors(local, [f"k{index}" for index in range(len(local.args[1]))])
    if not split:
        return emit_unchanged(local)
    source, shape, weight, bias, eps = local.args
    source = widened(local, source)
    mean = _mean(local, source, shape, split)
    centered = local.call(aten.sub.Tensor, source, mean)
    variance = _mean(local, local.call(aten.mul.Tensor, centered, centered), shape, split)
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, eps))
    output = local.call(aten.mul.Tensor, centered, scale)
    if weight is not None:
        output = local.call(aten.mul.Tensor, output, weight)
    if bias is not None:
        output = local.call(aten.add.Tensor, output, bias)
    return tuple(narrowed(local, value, index) for index, value in enumerate((output, mean, scale)))


def split_factors(local: Local, names: Iterable[str]) -> list[str]:
    """The factors among ``names`` that are split."""
    return [name for name in names if local.is_split(name)]


def all_reduced(local: Local, value: Value, split: Iterable[str]) -> Value:
    """Return the sum of ``value`` over the shards of the ``split`` factors."""
    for name in split:
        value = local.all_reduce(value, name)
    return value


def _mean(local: Local, value: Value, shape: Sequence[int], split: Iterable[str]) -> Value:
    """Return the mean over the normalized dims (the last dims) of all shards."""
    total = local.call(aten.sum.dim_IntList, value, list(range(-len(shape), 0)), True)
    return local.call(aten.div.Tensor, all_reduced(local, total, split), prod(shape))


def layer_norm_backward_rule(call: Call) -> Rule:
    """``b s !k, b s !k, b s 1, b s 1, !k, !k -> b s !k, !k, !k``: weight and bias gradients are sums over b and s."""
    whole, part, statistic, decompositions = _layer_names(call.args[1], call.args[2])
    vectors = f", {part}" * sum(isinstance(argument, Tensor) for argument in call.args[5:7])
    outputs = wanted(call.args[7], whole, part)
    pattern = f"^{whole}, {whole}, {statistic}, {statistic}{vectors} -> {outputs}"
    return make_rule(call, pattern, decompositions=decompositions)


def layer_norm_backward_local(local: Local) -> Any:
    """Run ``aten.native_layer_norm_backward`` on one rank. If normalized dims are split, its means cover all shards."""
    split = split_factors(local, [f"k{index}" for index in range(len(local.args[2]))])
    if not split:
        return emit_unchanged(local)
    grad, source, shape, mean, scale, weight, _, mask = local.args
    grad, source = widened(local, grad), widened(local, source)
    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, mean), scale)
    result: list[Value] = []
    if mask[0]:
        inner = grad if weight is None else local.call(aten.mul.Tensor, grad, weight)
        first = _mean(local, inner, shape, split)
        second = _mean(local, local.call(aten.mul.Tensor, inner, normal), shape, split)
        shifted = local.call(aten.sub.Tensor, inner, first)
        shifted = local.call(aten.sub.Tensor, shifted, local.call(aten.mul.Tensor, normal, second))
        result.append(local.call(aten.mul.Tensor, shifted, scale))
    lead = list(range(len(local.input_shape(0)) - len(shape)))
    terms = [local.call(aten.mul.Tensor, grad, normal)] * mask[1] + [grad] * mask[2]
    result += [local.call(aten.sum.dim_IntList, term, lead) if lead else term for term in terms]
    values = iter(narrowed(local, value, index) for index, value in enumerate(result))
    return tuple(next(values) if wanted else None for wanted in mask)


# --- group norm ------------------------------------------------------------------------------------------------


def spatial(source: Tensor, mark: str) -> tuple[str, list[str]]:
    """Return the text of the spatial dims in a pattern, and their letters."""
    names = list(SPACE[source.dim() - 2]) if source.dim() > 2 else []
    return "".join(f" {mark}{name}" for name in names), names


def group_norm_rule(call: Call) -> Rule:
    """``n (g !k) !y !x, (g !k), (g !k) -> n (g !k) !y !x, n g, n g``; if space is split, the statistics are merged.
    Each group of a sample has its own statistics."""
    space, names = spatial(call.args[0], "!")
    vectors = ", (g !k)" * (len(call.tensors) - 1)
    decompositions = dict.fromkeys(names, "sum")
    pattern = f"n (g !k){space}{vectors} -> n (g !k){space}, n g, n g"
    return make_rule(call, pattern, decompositions=decompositions, g=call.args[6])


def group_norm_local(local: Local) -> Any:
    """Run ``aten.native_group_norm`` on one rank. If space is split, mean and variance cover all shards."""
    source, weight, bias = local.args[:3]
    source = local.call(aten.contiguous.default, source)
    split, sizes = split_factors(local, SPACE[3]), _group_sizes(local)
    if not split:
        return local.call(local.target, source, weight, bias, *sizes, local.args[7])
    samples, channels, points, groups = sizes
    count = local.size("k") * local.args[5]

    def mean_of(value: Value) -> Value:
        total = all_reduced(local, local.call(aten.sum.dim_IntList, value, [2]), split)
        return local.call(aten.div.Tensor, total, count)

    flat = local.call(aten.reshape.default, widened(local, source), [samples, groups, -1])
    mean = mean_of(flat)
    centered = local.call(aten.sub.Tensor, flat, local.call(aten.unsqueeze.default, mean, -1))
    variance = mean_of(local.call(aten.mul.Tensor, centered, centered))
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, local.args[7]))
    normal = local.call(aten.mul.Tensor, centered, local.call(aten.unsqueeze.default, scale, -1))
    output = local.call(aten.reshape.default, normal, [samples, channels, points])
    for target, vector in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if vector is not None:
            output = local.call(target, output, local.call(aten.unsqueeze.default, vector, -1))
    output = local.call(aten.reshape.default, output, local.shape())
    return tuple(narrowed(local, value, index) for index, value in enumerate((output, mean, scale)))


def group_norm_backward_rule(call: Call) -> Rule:
    """The gradients of weight and bias are sums over samples. If space is split, sums over space are all-reduced."""
    space, names = spatial(call.args[1], "!")
    image = f"n (g !k){space}"
    weight = ", (g !k)" if call.args[4] is not None else ""
    outputs = wanted(call.args[9], image, "(g !k)")
    decompositions = dict.fromkeys(names, "sum")
    pattern = f"^{image}, {image}, n g, n g{weight} -> {outputs}"
    return make_rule(call, pattern, decompositions=decompositions, g=call.args[8])


def group_norm_backward_local(local: Local) -> Any:
    """Run ``aten.native_group_norm_backward`` on one rank. If space is split, its sums over space are all-reduced."""
    grad, source, mean, scale, weight = local.args[:5]
    grad, source = (local.call(aten.contiguous.default, value) for value in (grad, source))
    split, sizes, mask = split_factors(local, SPACE[3]), _group_sizes(local), local.args[9]
    if not split:
        return local.call(local.target, grad, source, mean, scale, weight, *sizes, mask)
    samples, channels, points, groups = sizes
    count = local.size("k") * local.args[7]

    def spread(value: Value, last: int = 1) -> Value:
        """Reshape [n, g] to [n, g, 1, 1], or [c] to [1, g, k, 1]."""
        return local.call(aten.reshape.default, value, [-1, groups, last, 1])

    grad, source = (
        local.call(aten.reshape.default, widened(local, value), [samples, groups, -1, points])
        for value in (grad, source)
    )
    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, spread(mean)), spread(scale))
    terms = [local.call(aten.sum.dim_IntList, value, [3], True) for value in (grad, _times(local, grad, normal))]
    sums = all_reduced(local, local.call(aten.stack.default, terms), split)
    plain, scaled = (local.call(aten.select.int, sums, 0, index) for index in (0, 1))  # each [n, g, k, 1]
    result: list[Value] = []
    if mask[0]:
        factor = None if weight is None else spread(widened(local, weight), channels // groups)
        first, second = (
            local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, _times(local, term, factor), [2], True), count)
            for term in (plain, scaled)
        )
        inner = local.call(aten.sub.Tensor, _times(local, grad, factor), first)
        inner = local.call(aten.sub.Tensor, inner, _times(local, normal, second))
        inner = _times(local, inner, spread(scale))
        result.append(local.call(aten.reshape.default, inner, local.shape()))
    for term in [scaled] * mask[1] + [plain] * mask[2]:
        result.append(local.call(aten.reshape.default, local.call(aten.sum.dim_IntList, term, [0]), [channels]))
    values = iter(narrowed(local, value, index) for index, value in enumerate(result))
    return tuple(next(values) if wanted else None for wanted in mask)


def _times(local: Local, value: Value, factor: Value | None) -> Value:
    return value if factor is None else local.call(aten.mul.Tensor, value, factor)


def _group_sizes(local: Local) -> tuple[int, int, int, int]:
    """Return the numbers of samples, channels, spatial points and groups on this rank."""
    samples, channels, *space = local.input_shape(0)
    return samples, channels, prod(space), local.length("g")


def norm_flops(call: Call, rule: Rule | None) -> float:
    """Count eight operations for each element of the first output."""
    return 8.0 * call.outputs[0].numel()


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Capture weight norm (Salimans, Kingma 2016): scale each slice of ``v`` along ``dim`` to its length in ``g``. The
    second output is the length of each slice of ``v``, which the gradient reads."""
    dims, wide = [other for other in range(v.dim()) if other != dim % v.dim()], v.to(wide_dtype(v.dtype))
    lengths = (wide * wide).sum(dims, keepdim=True).sqrt()
    return (wide * (g / lengths)).to(v.dtype), lengths


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, lengths: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Capture the gradients of weight norm in a form that is linear in ``grad``: partial sums give partial sums."""
    dims, wide = [other for other in range(v.dim()) if other != dim % v.dim()], wide_dtype(v.dtype)
    scaled, along = grad.to(wide), v.to(wide) / lengths
    grad_g = (scaled * along).sum(dims, keepdim=True)
    return ((scaled - along * grad_g) * (g / lengths)).to(v.dtype), grad_g.to(g.dtype)


RULES = {
    aten.native_layer_norm.default: OperatorRule(layer_norm_rule, layer_norm_local, norm_flops),
    aten.native_layer_norm_backward.default: OperatorRule(
        layer_norm_backward_rule, layer_norm_backward_local, norm_flops
    ),
    aten.native_group_norm.default: OperatorRule(group_norm_rule, group_norm_local, norm_flops),
    aten.native_group_norm_backward.default: OperatorRule(
        group_norm_backward_rule, group_norm_backward_local, norm_flops
    ),
}

CANONICAL = {
    aten._weight_norm_interface.default: weight_norm,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
}
