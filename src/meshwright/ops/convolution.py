"""Convolution and pooling, split over samples, channels and filters (space follows with halo exchange)."""

from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, letters, make_rule

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
    """``n f !v !u, n c !y !x, f c !p !q`` to the input's gradient, or to the weight's (the other only lends its shape)."""
    grad, source, kernel = call.args[:3]
    transposed, groups, mask = call.args[7], call.args[9], call.args[10]
    v, y, p = _space(call, grad, "v"), _space(call, source, "y"), _space(call, kernel, "p")
    weight, mark = _channels(groups, transposed)
    gradient, image, filters = f"n {mark}f {v}", f"n {mark}c {y}", f"{weight} {p}"
    if mask == INPUT:
        return make_rule(call, f"^{gradient}, {image}, ^^{filters} -> {image}")
    return make_rule(call, f"^{gradient}, ^^{image}, {filters} -> {filters}")


def pool_rule(call: Call) -> Rule:
    """Pooling works inside each sample and channel: ``n c !y !x -> n c !v !u``."""
    parts = []
    for position, tensor in enumerate(call.tensors):
        rank = tensor.dim()
        lead = letters(rank - 2, "n")
        parts.append(" ".join(lead) + " " + _tail(position))
    rank = call.outputs[0].dim()
    lead_out = " ".join(letters(rank - 2, "n"))
    tail = "!o0 !o1"
    for position, tensor in enumerate(call.tensors):
        if tensor.shape[-2:] == call.outputs[0].shape[-2:]:
            tail = _tail(position)
    right = f"{lead_out} {tail}"
    return make_rule(call, f"{', '.join(parts)} -> {', '.join([right] * len(call.outputs))}")


def _tail(position: int) -> str:
    return f"!y{position} !x{position}"


def pool_linear_rule(call: Call) -> Rule:
    """Average pooling and pooling gradients are linear in their first input."""
    rule = pool_rule(call)
    return make_rule(call, "^" + rule.pattern)


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

RULES = {
    aten.convolution.default: OperatorRule(convolution_rule, flops=_convolution_flops),
    aten.convolution_backward.default: OperatorRule(convolution_backward_rule, flops=_convolution_backward_flops),
    aten.max_pool2d_with_indices.default: _POOL,
    aten.max_pool2d_with_indices_backward.default: _LINEAR_POOL,
    aten.avg_pool2d.default: _LINEAR_POOL,
    aten.avg_pool2d_backward.default: _LINEAR_POOL,
    aten._adaptive_avg_pool2d.default: _LINEAR_POOL,
    aten._adaptive_avg_pool2d_backward.default: _LINEAR_POOL,
}

CANONICAL = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
