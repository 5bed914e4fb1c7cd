"""Batch norm. If samples or space are split, it is exact, because the statistics of all shards are merged.
If the factor ``own`` is split, each rank uses the statistics of its own samples.
"""

import operator
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import OWN, Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, emit_unchanged, make_rule
from meshwright.ops.normalization import all_reduced, norm_flops, spatial, split_factors, wanted
from meshwright.ops.space import SPACE

aten = torch.ops.aten


def native_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Capture batch norm as an operator whose schema shows the in-place update of the running statistics."""
    given, running = (input, weight, bias), (running_mean, running_var)
    if not training:
        return aten._native_batch_norm_legit_no_training.default(*given, *running, momentum, eps)
    if running_mean is None:
        return aten._native_batch_norm_legit.no_stats(*given, training, momentum, eps)
    return aten._native_batch_norm_legit.default(*given, *running, training, momentum, eps)


def native_batch_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Capture the gradient of batch norm in training without the running statistics, which are not read then."""
    if not train or running_mean is None:
        return NotImplemented
    return aten.native_batch_norm_backward.default(
        grad, input, weight, None, None, save_mean, save_invstd, train, eps, output_mask
    )


def batch_norm_rule(call: Call) -> Rule:
    """``!n c !y !x, c... -> !n c !y !x, c...``; if samples or space are split, means and variances are merged.
    If ``own`` is split, each part keeps its own mean and scale. The new running statistics are means over the parts."""
    space, names = spatial(call.args[0], "!")
    image = f"!n c{space}"
    vectors = ", c" * (len(call.tensors) - 1)
    outputs = ", c" * (len(call.outputs) - 1)
    decompositions = dict.fromkeys(["n", *names], "gather") | {OWN: f"{OWN} 1 2"}
    pattern = f"{image}{vectors} -> {image}{outputs}"
    return make_rule(call, pattern, decompositions=decompositions, joint={OWN: ("n",)})


_BATCH = "nzyx"
"""The letters over which batch statistics are taken: samples and space."""


def batch_norm_local(local: Local) -> Any:
    """Run batch norm in training on one rank: merge the shards' statistics. If ``own`` is split, divide the new running
    statistics by the number of its parts, so that their sum is a mean."""
    updates = local.target is aten._native_batch_norm_legit_functional.default
    result = _over_shards(local, updates) if split_factors(local, _BATCH) else emit_unchanged(local)
    if not local.is_split(OWN) or not updates:
        return result
    image, mean, scale, *running = (
        result if isinstance(result, tuple) else (local.call(operator.getitem, result, index) for index in range(5))
    )
    parts = local.coordinate(OWN)[1]
    return image, mean, scale, *(local.call(aten.mul.Tensor, statistic, 1 / parts) for statistic in running)


def _over_shards(local: Local, updates: bool) -> tuple[Value, ...]:
    """Normalize by the statistics of all shards. With ``updates``, return the new running statistics too."""
    source, weight, bias = local.args[:3]
    momentum, eps = local.args[-2:]
    mean, variance = _merged_statistics(local, source)
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, variance, eps))
    given = aten._native_batch_norm_legit_no_training.default
    output = local.call(given, source, weight, bias, mean, variance, momentum, eps)
    result = [local.call(operator.getitem, output, 0), mean, scale]
    if updates:
        count = _count(local)
        unbiased = local.call(aten.mul.Tensor, variance, count / max(count - 1, 1))
        pairs = (local.args[3], mean), (local.args[4], unbiased)
        result += [local.call(aten.lerp.Scalar, running, new, momentum) for running, new in pairs]
    return tuple(result)


def _count(local: Local) -> int:
    """Return the number of values of each channel, over all ranks that share statistics."""
    rank = len(local.input_shape(0)) - 2
    samples = local.input_shape(0)[0] if local.is_split(OWN) else local.size("n")
    return samples * prod(local.size(name) for name in (SPACE[rank] if rank else ""))


def _merged_statistics(local: Local, source: Value) -> tuple[Value, Value]:
    """Return the mean and the biased variance over all shards. They are gathered and merged for each split factor in
    turn, by equation 2.1 of Chan et al. 1983. The weight of a shard is its length along the factor."""
    both = local.call(aten.batch_norm_update_stats.default, source, None, None, 0.0)
    mean, variance = (local.call(operator.getitem, both, index) for index in (0, 1))
    for name in split_factors(local, _BATCH):
        pair = local.all_gather(local.call(aten.stack.default, [mean, variance]), name)
        mean, variance = _merged(local, pair, [after - before for before, after in pairwise(local.bounds(name))])
    return mean, variance


def _merged(local: Local, pairs: Value, counts: Sequence[int]) -> tuple[Value, Value]:
    """Return the mean and variance of all parts together, from the mean, variance and count of each part."""
    gathered = local.call(aten.reshape.default, pairs, [len(counts), 2, -1])
    means, variances = (local.call(aten.select.int, gathered, 1, index) for index in (0, 1))
    merged = _weighed(local, means, counts)
    offset = local.call(aten.sub.Tensor, means, merged)
    spread = local.call(aten.add.Tensor, variances, local.call(aten.mul.Tensor, offset, offset))
    return merged, _weighed(local, spread, counts)


def _weighed(local: Local, values: Value, counts: Sequence[int]) -> Value:
    """Return the mean over the first dim, in which each index has the weight ``counts[index]``."""
    if len(set(counts)) == 1:
        return local.call(aten.div.Tensor, local.call(aten.sum.dim_IntList, values, [0]), len(counts))
    parts = [local.call(aten.select.int, values, 0, index) for index in range(len(counts))]
    total = local.call(aten.mul.Tensor, parts[0], counts[0])
    for part, count in zip(parts[1:], counts[1:], strict=True):
        total = local.call(aten.add.Tensor, total, local.call(aten.mul.Tensor, part, count))
    return local.call(aten.div.Tensor, total, sum(counts))


def batch_norm_eval_rule(call: Call) -> Rule:
    """In evaluation the statistics are given, so every dim may be split."""
    space, _ = spatial(call.args[0], "")
    vectors = ", c" * (len(call.tensors) - 1)
    return make_rule(call, f"n c{space}{vectors} -> n c{space}{', !e' * (len(call.outputs) - 1)}")


def batch_norm_backward_rule(call: Call) -> Rule:
    """The gradient of the input needs two sums over samples and space: the gradients of weight and bias.
    If ``train`` is False, the statistics are given. The gradient then needs no sums, and every dim may be split."""
    grad, train, mask = call.args[0], call.args[7], call.args[9]
    mark = "!" if train else ""
    space, names = spatial(grad, mark)
    image = f"{mark}n c{space}"
    # without batch statistics, the saved statistics are empty
    vectors = "".join(", c" if len(value) else ", !e" for value in call.args[2:7] if value is not None)
    present = mask if len(call.outputs) == sum(mask) else [True] * len(call.outputs)  # fake results ignore the mask
    pattern = f"^{image}, {image}{vectors} -> {wanted(present, image, 'c')}"
    if not train:
        return make_rule(call, pattern)
    decompositions = dict.fromkeys(["n", *names], "sum") | {OWN: OWN}
    return make_rule(call, pattern, decompositions=decompositions, joint={OWN: ("n",)})


def batch_norm_backward_local(local: Local) -> Any:
    """Run ``aten.native_batch_norm_backward`` on one rank. In training, its two sums cover all shards."""
    grad, source, weight, running_mean, running_var, mean, scale, train, eps, mask = local.args
    split = split_factors(local, _BATCH)
    if not split or not train:
        return emit_unchanged(local)
    # with the statistics of all shards, the vectors' gradients are this shard's terms of the sums
    terms = local.call(local.target, grad, source, weight, None, None, mean, scale, True, eps, [False, True, True])
    both = [local.call(operator.getitem, terms, index) for index in (2, 1)]
    sums = all_reduced(local, local.call(aten.stack.default, both), split)
    bias_grad, weight_grad = (local.call(aten.select.int, sums, 0, index) for index in (0, 1))
    input_grad = _input_gradient(local, grad, source, weight, mean, scale, sums) if mask[0] else None
    return input_grad, weight_grad if mask[1] else None, bias_grad if mask[2] else None


def _input_gradient(
    local: Local, grad: Value, source: Value, weight: Value | None, mean: Value, scale: Value, sums: Value
) -> Value:
    """Return ``a (grad - m0 - m1 scale (source - mean))``, where ``a`` is weight times scale and ``m`` is ``sums``
    [2, c] divided by the count. The code computes ``a grad + (b (source - mean) + c)`` in two passes over the image."""
    factor = scale if weight is None else local.call(aten.mul.Tensor, scale, weight)
    means = local.call(aten.mul.Tensor, local.call(aten.mul.Tensor, sums, -1 / _count(local)), factor)
    offset, slope = (local.call(aten.select.int, means, 0, index) for index in (0, 1))
    slope, ones = local.call(aten.mul.Tensor, slope, scale), local.call(aten.ones_like.default, mean)
    line = local.call(aten._native_batch_norm_legit_no_training.default, source, slope, offset, mean, ones, 0.0, 0.0)
    shape = [1, -1, *[1] * (len(local.input_shape(0)) - 2)]
    broad = local.call(aten.reshape.default, factor, shape)
    return local.call(aten.addcmul.default, local.call(operator.getitem, line, 0), grad, broad)


_TRAINING = OperatorRule(batch_norm_rule, batch_norm_local, norm_flops)

RULES = {
    aten._native_batch_norm_legit_functional.default: _TRAINING,
    aten._native_batch_norm_legit.no_stats: _TRAINING,
    aten._native_batch_norm_legit_no_training.default: OperatorRule(batch_norm_eval_rule, flops=norm_flops),
    aten.native_batch_norm_backward.default: OperatorRule(
        batch_norm_backward_rule, batch_norm_backward_local, norm_flops
    ),
}

CANONICAL = {
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
}
