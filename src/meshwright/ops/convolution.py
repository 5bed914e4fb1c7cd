"""Convolution and pooling, split over samples, channels and filters (space follows with halo exchange)."""

import re
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, letters, make_rule

aten = torch.ops.aten

INPUT, WEIGHT = [True, False, False], [False, True, False]


def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """Canonical convolution: the bias is an addition of its own."""
    if bias is None:
        return NotImplemented
    output = aten.convolution.default(
        input, weight, None, stride, padding, dilation, transposed, output_padding, groups
    )
    return output + bias.view(1, -1, *[1] * (output.dim() - 2))


def convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Canonical backward: one operator for the input's gradient, one for the weight's, a sum for the bias's."""
    if output_mask in (INPUT, WEIGHT):
        return NotImplemented
    rest = (None, stride, padding, dilation, transposed, output_padding, groups)
    input_grad = aten.convolution_backward.default(grad, input, weight, *rest, INPUT)[0] if output_mask[0] else None
    weight_grad = aten.convolution_backward.default(grad, input, weight, *rest, WEIGHT)[1] if output_mask[1] else None
    bias_grad = grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None
    return input_grad, weight_grad, bias_grad


def _space(call: Call, source: Tensor, prefix: str) -> str:
    return " ".join(letters(source.dim() - 2, prefix, tuple(range(source.dim() - 2))))


def _channels(groups: int, transposed: bool) -> tuple[str, str]:
    """(weight pattern of channels and filters, mark of both letters): grouped channels stay whole."""
    if groups != 1:
        return ("!f !i" if not transposed else "!c !i"), "!"
    return ("f c" if not transposed else "c f"), ""


def convolution_rule(call: Call) -> Rule:
    """``n c !y !x, f c !p !q -> n f !v !u``."""
    groups, transposed = call.args[8], call.args[6]
    y, p, v = _space(call, call.args[0], "y"), _space(call, call.args[1], "p"), _space(call, call.outputs[0], "v")
    weight, mark = _channels(groups, transposed)
    return make_rule(call, f"^n {mark}c {y}, ^^{weight} {p} -> n {mark}f {v}")


def convolution_backward_rule(call: Call) -> Rule:
    """``n f !v !u, n c !y !x, f c !p !q`` to the gradient of the input or of the weight, the other lends its shape."""
    grad, source, kernel = call.args[:3]
    transposed, groups, mask = call.args[7], call.args[9], call.args[10]
    v, y, p = _space(call, grad, "v"), _space(call, source, "y"), _space(call, kernel, "p")
    weight, mark = _channels(groups, transposed)
    gradient, image, filters = f"n {mark}f {v}", f"n {mark}c {y}", f"{weight} {p}"
    if mask == INPUT:
        return make_rule(call, f"^{gradient}, {image}, ^^{filters} -> {image}")
    return make_rule(call, f"^{gradient}, ^^{image}, {filters} -> {filters}")


_SPACE = re.compile(r"([123])d")


def _space_rank(call: Call) -> int:
    """Over how many dims a pooling, padding or resizing works: max_pool2d over 2."""
    found = _SPACE.search(str(call.target))
    assert found is not None
    return int(found[1])


def pool_rule(call: Call) -> Rule:
    """Pooling, padding and resizing work inside each sample and channel: ``n c !y !x -> n c !v !u``."""
    space = _space_rank(call)
    tails: dict[tuple[int, ...], str] = {}

    def names(tensor: Tensor) -> str:
        size = tuple(tensor.shape[-space:])
        tail = tails.setdefault(size, " ".join(f"!y{len(tails)}{index}" for index in range(space)))
        return " ".join([*letters(tensor.dim() - space, "n"), tail])

    left, right = [names(tensor) for tensor in call.tensors], [names(tensor) for tensor in call.outputs]
    return make_rule(call, f"{', '.join(left)} -> {', '.join(right)}")


def pool_linear_rule(call: Call) -> Rule:
    """Average pooling, padding, resizing and all of their gradients are linear in their first input."""
    return make_rule(call, "^" + pool_rule(call).pattern)


def resize_backward_local(local: Local) -> Any:
    """The size that a gradient of resizing has to come back to counts samples and channels."""
    grad, output_size, _, *rest = local.args
    return local.call(local.target, grad, output_size, local.shape(), *rest, **local.kwargs)


def _convolution_flops(call: Call, rule: Rule | None) -> float:
    weight, output = call.args[1], call.outputs[0]
    source = call.args[0]
    positions = source if call.args[6] else output
    return 2.0 * weight.numel() * positions.shape[0] * positions[0, 0].numel()


def _convolution_backward_flops(call: Call, rule: Rule | None) -> float:
    grad, source, weight = call.args[:3]
    positions = source if call.args[7] else grad
    return 2.0 * weight.numel() * positions.shape[0] * positions[0, 0].numel()


def _pool_flops(call: Call, rule: Rule | None) -> float:
    return float(max(tensor.numel() for tensor in (*call.tensors, *call.outputs)))


_POOL = OperatorRule(pool_rule, flops=_pool_flops)
_LINEAR_POOL = OperatorRule(pool_linear_rule, flops=_pool_flops)

_RESIZE_BACKWARD = OperatorRule(pool_linear_rule, resize_backward_local, _pool_flops)

RULES = {
    aten.convolution.default: OperatorRule(convolution_rule, flops=_convolution_flops),
    aten.convolution_backward.default: OperatorRule(convolution_backward_rule, flops=_convolution_backward_flops),
    aten.max_pool2d_with_indices.default: _POOL,
    aten.max_pool2d_with_indices_backward.default: _LINEAR_POOL,
    aten.max_pool3d_with_indices.default: _POOL,
    aten.max_pool3d_with_indices_backward.default: _LINEAR_POOL,
    aten.adaptive_max_pool2d.default: _POOL,
    aten.adaptive_max_pool2d_backward.default: _LINEAR_POOL,
    aten.avg_pool2d.default: _LINEAR_POOL,
    aten.avg_pool2d_backward.default: _LINEAR_POOL,
    aten.avg_pool3d.default: _LINEAR_POOL,
    aten.avg_pool3d_backward.default: _LINEAR_POOL,
    aten._adaptive_avg_pool2d.default: _LINEAR_POOL,
    aten._adaptive_avg_pool2d_backward.default: _LINEAR_POOL,
    aten.reflection_pad1d.default: _LINEAR_POOL,
    aten.reflection_pad1d_backward.default: _LINEAR_POOL,
    aten.reflection_pad2d.default: _LINEAR_POOL,
    aten.reflection_pad2d_backward.default: _LINEAR_POOL,
    aten.replication_pad1d.default: _LINEAR_POOL,
    aten.replication_pad1d_backward.default: _LINEAR_POOL,
    aten.replication_pad2d.default: _LINEAR_POOL,
    aten.replication_pad2d_backward.default: _LINEAR_POOL,
    aten.upsample_nearest2d.default: _LINEAR_POOL,
    aten.upsample_nearest2d_backward.default: _RESIZE_BACKWARD,
    aten.upsample_bilinear2d.default: _LINEAR_POOL,
    aten.upsample_bilinear2d_backward.default: _RESIZE_BACKWARD,
}

CANONICAL = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
