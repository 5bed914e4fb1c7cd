"""Layer, group and batch norm. Over split dims they are exact: statistics are merged from all shards."""

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import OWN, Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, letters, make_rule, narrowed, widened
from meshwright.ops.halo import SPACE

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
    decompositions: dict[str, tuple[str, ...]] = {name[1:]: (f"sum 2 {rest}",) for name in tail}
    return " ".join([*lead, *tail]), " ".join(tail), " ".join([*lead, *["1"] * len(tail)]), decompositions


def layer_norm_rule(call: Call) -> Rule:
    """``b s !k, !k, !k -> b s !k, b s 1, b s 1``; split over normalized dims it merges means and variances."""
    whole, part, statistic, decompositions = _layer_names(call.args[0], call.args[1])
    vectors = f", {part}" * (len(call.tensors) - 1)
    pattern = f"{whole}{vectors} -> {whole}, {statistic}, {statistic}"
    return make_rule(call, pattern, decompositions=decompositions)


def layer_norm_local(local: Local) -> Any:
    split = split_factors(local, [f"k{index}" for index in range(len(local.args[1]))])
    if not split:
        return local.call(local.target, *local.args, **local.kwargs)
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
    """Those of the factors that are split here."""
    return [name for name in names if local.is_split(name)]


def _all_reduce(local: Local, value: Value, split: Iterable[str]) -> Value:
    """The sum over the shards of several factors."""
    for name in split:
        value = local.all_reduce(value, name)
    return value


def _mean(local: Local, value: Value, shape: Sequence[int], split: Iterable[str]) -> Value:
    """The mean over all shards of the last dims, which are normalized."""
    total = local.call(aten.sum.dim_IntList, value, list(range(-len(shape), 0)), True)
    return local.call(aten.div.Tensor, _all_reduce(local, total, split), prod(shape))


def layer_norm_backward_rule(call: Call) -> Rule:
    """``b s !k, b s !k, b s 1, b s 1, !k, !k -> b s !k, !k, !k``: the vectors' gradients are sums over b and s."""
    whole, part, statistic, decompositions = _layer_names(call.args[1], call.args[2])
    vectors = f", {part}" * sum(isinstance(argument, Tensor) for argument in call.args[5:7])
    outputs = _wanted(call.args[7], whole, part)
    pattern = f"^{whole}, {whole}, {statistic}, {statistic}{vectors} -> {outputs}"
    return make_rule(call, pattern, decompositions=decompositions)


def layer_norm_backward_local(local: Local) -> Any:
    split = split_factors(local, [f"k{index}" for index in range(len(local.args[2]))])
    if not split:
        return local.call(local.target, *local.args, **local.kwargs)
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


def _space(source: Tensor, mark: str) -> tuple[str, list[str]]:
    """(spatial dims in a pattern, their letters)."""
    names = list(SPACE[source.dim() - 2]) if source.dim() > 2 else []
    return "".join(f" {mark}{name}" for name in names), names


def group_norm_rule(call: Call) -> Rule:
    """``n (g !k) !y !x, (g !k), (g !k) -> n (g !k) !y !x, n g, n g``: statistics of a group of a sample, which are
    merged where space is split."""
    space, names = _space(call.args[0], "!")
    vectors = ", (g !k)" * (len(call.tensors) - 1)
    decompositions = dict.fromkeys(names, ("sum n g", "sum n g"))
    pattern = f"n (g !k){space}{vectors} -> n (g !k){space}, n g, n g"
    return make_rule(call, pattern, decompositions=decompositions, g=call.args[6])


def group_norm_local(local: Local) -> Any:
    source, weight, bias = local.args[:3]
    source = local.call(aten.contiguous.default, source)
    split, sizes = _space_split(local), _group_sizes(local)
    if not split:
        return local.call(local.target, source, weight, bias, *sizes, local.args[7])
    samples, channels, points, groups = sizes
    count = local.size("k") * local.args[5]

    def mean_of(value: Value) -> Value:
        total = _all_reduce(local, local.call(aten.sum.dim_IntList, value, [2]), split)
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
    """The gradients of weight and bias are sums over the samples; split over space, so are those of statistics."""
    space, names = _space(call.args[1], "!")
    image = f"n (g !k){space}"
    weight = ", (g !k)" if call.args[4] is not None else ""
    outputs = _wanted(call.args[9], image, "(g !k)")
    decompositions = dict.fromkeys(names, ("sum 2 n g k",))
    pattern = f"^{image}, {image}, n g, n g{weight} -> {outputs}"
    return make_rule(call, pattern, decompositions=decompositions, g=call.args[8])


def group_norm_backward_local(local: Local) -> Any:
    grad, source, mean, scale, weight = local.args[:5]
    grad, source = (local.call(aten.contiguous.default, value) for value in (grad, source))
    split, sizes, mask = _space_split(local), _group_sizes(local), local.args[9]
    if not split:
        return local.call(local.target, grad, source, mean, scale, weight, *sizes, mask)
    samples, channels, points, groups = sizes
    count = local.size("k") * local.args[7]

    def spread(value: Value, last: int = 1) -> Value:
        """[n, g] as [n, g, 1, 1]; [n, c] as [n, g, k, 1]."""
        return local.call(aten.reshape.default, value, [-1, groups, last, 1])

    grad, source = (
        local.call(aten.reshape.default, widened(local, value), [samples, groups, -1, points])
        for value in (grad, source)
    )
    normal = local.call(aten.mul.Tensor, local.call(aten.sub.Tensor, source, spread(mean)), spread(scale))
    terms = [local.call(aten.sum.dim_IntList, value, [3], True) for value in (grad, _times(local, grad, normal))]
    sums = _all_reduce(local, local.call(aten.stack.default, terms), split)
    plain, scaled = (local.call(aten.select.int, sums, 0, index) for index in (0, 1))  # each [n, g, k, 1]
    result: list[Value] = []
    if mask[0]:
        factor = None if weight is None else spread(widened(local, weight), channels // groups)
        first, second = (
            local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, _times(local, one, factor), [2], True), count)
            for one in (plain, scaled)
        )
        inner = local.call(aten.sub.Tensor, _times(local, grad, factor), first)
        inner = local.call(aten.sub.Tensor, inner, _times(local, normal, second))
        inner = _times(local, inner, spread(scale))
        result.append(local.call(aten.reshape.default, inner, local.shape()))
    for one in [scaled] * mask[1] + [plain] * mask[2]:
        result.append(local.call(aten.reshape.default, local.call(aten.sum.dim_IntList, one, [0]), [channels]))
    values = iter(narrowed(local, value, index) for index, value in enumerate(result))
    return tuple(next(values) if wanted else None for wanted in mask)


def _times(local: Local, value: Value, factor: Value | None) -> Value:
    return value if factor is None else local.call(aten.mul.Tensor, value, factor)


def _space_split(local: Local) -> list[str]:
    return split_factors(local, "zyx")


def _group_sizes(local: Local) -> tuple[int, int, int, int]:
    """(samples, channels, points, groups) on this rank."""
    samples, channels, *space = local.input_shape(0)
    return samples, channels, prod(space), local.length("g")


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


def native_batch_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Canonical gradient of batch norm: in training it does not take the running statistics, which it does not read."""
    if not train or running_mean is None:
        return NotImplemented
    return aten.native_batch_norm_backward.default(
        grad, input, weight, None, None, save_mean, save_invstd, train, eps, output_mask
    )


def batch_norm_rule(call: Call) -> Rule:
    """``!n c !y !x, c... -> !n c !y !x, c...``; split over samples or space it merges means and variances. Over ``own``
    samples it does not: mean and scale are each part's own, running statistics the mean of all parts'."""
    space, names = _space(call.args[0], "!")
    image = f"!n c{space}"
    vectors = ", c" * (len(call.tensors) - 1)
    outputs = ", c" * (len(call.outputs) - 1)
    decompositions = dict.fromkeys(["n", *names], ("gather 2 c",)) | {OWN: (f"{OWN} 1 2",)}
    pattern = f"{image}{vectors} -> {image}{outputs}"
    return make_rule(call, pattern, decompositions=decompositions, joint={OWN: ("n",)})


_BATCH = "nzyx"
"""What batch statistics are of: samples and space."""


def batch_norm_local(local: Local) -> Any:
    result = _batch_norm(local)
    if not local.is_split(OWN) or local.target is not aten._native_batch_norm_legit_functional.default:
        return result
    image, mean, scale, *running = (
        result if isinstance(result, tuple) else (local.call(operator.getitem, result, index) for index in range(5))
    )
    parts = local.coordinate(OWN)[1]
    return image, mean, scale, *(local.call(aten.mul.Tensor, one, 1 / parts) for one in running)


def _batch_norm(local: Local) -> Any:
    if not split_factors(local, _BATCH):
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
            result.append(local.call(aten.lerp.Scalar, running, new, momentum))
    return tuple(result)


def _count(local: Local) -> int:
    """How many values there are of each channel, on all ranks that have them in common."""
    rank = len(local.input_shape(0)) - 2
    samples = local.input_shape(0)[0] if local.is_split(OWN) else local.size("n")
    return samples * prod(local.size(name) for name in (SPACE[rank] if rank else ""))


def _merged_statistics(local: Local, source: Value) -> tuple[Value, Value]:
    """Mean and biased variance over all shards: gathered over one factor after the other, and merged as Chan et al.
    1983, eq. 2.1, by how much each shard has of the factor."""
    both = local.call(aten.batch_norm_update_stats.default, source, None, None, 0.0)
    mean, variance = (local.call(operator.getitem, both, index) for index in (0, 1))
    for name in split_factors(local, _BATCH):
        pair = local.all_gather(local.call(aten.stack.default, [mean, variance]), name)
        mean, variance = _merged(local, pair, [after - before for before, after in pairwise(local.bounds(name))])
    return mean, variance


def _merged(local: Local, pairs: Value, counts: Sequence[int]) -> tuple[Value, Value]:
    """The mean and variance of all parts, from theirs."""
    gathered = local.call(aten.reshape.default, pairs, [len(counts), 2, -1])
    means, variances = (local.call(aten.select.int, gathered, 1, index) for index in (0, 1))
    merged = _weighed(local, means, counts)
    offset = local.call(aten.sub.Tensor, means, merged)
    spread = local.call(aten.add.Tensor, variances, local.call(aten.mul.Tensor, offset, offset))
    return merged, _weighed(local, spread, counts)


def _weighed(local: Local, values: Value, counts: Sequence[int]) -> Value:
    """The mean over the first dim, of which every index stands for so many values."""
    if len(set(counts)) == 1:
        return local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, values, [0]), len(counts))
    parts = [local.call(aten.select.int, values, 0, index) for index in range(len(counts))]
    total = local.call(aten.mul.Tensor, parts[0], counts[0])
    for part, count in zip(parts[1:], counts[1:], strict=True):
        total = local.call(aten.add.Tensor, total, local.call(aten.mul.Tensor, part, count))
    return local.call(aten.div.Tensor, total, sum(counts))


def batch_norm_eval_rule(call: Call) -> Rule:
    """With given statistics every dim may be split."""
    space, _ = _space(call.args[0], "")
    vectors = ", c" * (len(call.tensors) - 1)
    return make_rule(call, f"n c{space}{vectors} -> n c{space}{', !e' * (len(call.outputs) - 1)}")


def batch_norm_backward_rule(call: Call) -> Rule:
    """The gradient of the input needs two sums over samples and space; those of the vectors are these sums. With given
    statistics (``train`` is False) it needs none, and every dim may be split."""
    grad, train, mask = call.args[0], call.args[7], call.args[9]
    mark = "!" if train else ""
    space, names = _space(grad, mark)
    image = f"{mark}n c{space}"
    # without batch statistics, the saved ones are empty
    vectors = "".join(", c" if len(value) else ", !e" for value in call.args[2:7] if value is not None)
    pattern = f"^{image}, {image}{vectors} -> {_wanted(mask, image, 'c')}"
    if not train:
        return make_rule(call, pattern)
    decompositions = dict.fromkeys(["n", *names], ("sum 2 c",)) | {OWN: (OWN,)}
    return make_rule(call, pattern, decompositions=decompositions, joint={OWN: ("n",)})


def batch_norm_backward_local(local: Local) -> Any:
    grad, source, weight, running_mean, running_var, mean, scale, train, eps, mask = local.args
    split = split_factors(local, _BATCH)
    if not split or not train:
        return local.call(local.target, *local.args, **local.kwargs)
    # with the statistics of all shards, the vectors' gradients are this shard's terms of the sums
    terms = local.call(local.target, grad, source, weight, None, None, mean, scale, True, eps, [False, True, True])
    both = [local.call(operator.getitem, terms, index) for index in (2, 1)]
    sums = _all_reduce(local, local.call(aten.stack.default, both), split)
    bias_grad, weight_grad = (local.call(aten.select.int, sums, 0, index) for index in (0, 1))
    input_grad = _input_gradient(local, grad, source, weight, mean, scale, sums) if mask[0] else None
    return input_grad, weight_grad if mask[1] else None, bias_grad if mask[2] else None


def _input_gradient(
    local: Local, grad: Value, source: Value, weight: Value | None, mean: Value, scale: Value, sums: Value
) -> Value:
    """``a (grad - m0 - m1 scale (source - mean))``, where ``a`` is weight times scale and ``m`` the sums [2, c] as
    means, computed as ``a grad + (b (source - mean) + c)``: two passes over the image."""
    factor = scale if weight is None else local.call(aten.mul.Tensor, scale, weight)
    means = local.call(aten.mul.Tensor, local.call(aten.mul.Tensor, sums, -1 / _count(local)), factor)
    offset, slope = (local.call(aten.select.int, means, 0, index) for index in (0, 1))
    slope, ones = local.call(aten.mul.Tensor, slope, scale), local.call(aten.ones_like.default, mean)
    line = local.call(aten._native_batch_norm_legit_no_training.default, source, slope, offset, mean, ones, 0.0, 0.0)
    shape = [1, -1, *[1] * (len(local.input_shape(0)) - 2)]
    broad = local.call(aten.reshape.default, factor, shape)
    return local.call(aten.addcmul.default, local.call(operator.getitem, line, 0), grad, broad)


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

CANONICAL = {
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
}
