"""Element by element operators, with broadcasting."""

from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Target, elementwise_flops, make_rule

aten = torch.ops.aten

ADDITIVE: frozenset[Target] = frozenset({aten.add.Tensor, aten.sub.Tensor})
FIRST_LINEAR: frozenset[Target] = frozenset(
    {
        aten.neg.default, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.clone.default,
        aten.alias.default, aten.detach.default, aten.gelu_backward.default, aten.tanh_backward.default,
        aten.threshold_backward.default, aten.sigmoid_backward.default, aten.silu_backward.default,
        aten.native_dropout_backward.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default,
        aten.elu_backward.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
        aten.softplus_backward.default, aten.mish_backward.default, aten.positive.default,
    }
)  # fmt: skip
EXTRA: frozenset[Target] = frozenset(
    {
        aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default, aten.copy.default,
        aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.lift_fresh_copy.default,
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
        aten.native_dropout_backward.default, aten.isnan.default, aten.isinf.default, aten.clamp.default,
    }
)  # fmt: skip
FREE: frozenset[Target] = frozenset(
    {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}
)


def is_pointwise(target: Target) -> bool:
    """Whether PyTorch tags the operator as pointwise, or we know that it is."""
    return target in EXTRA or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def carets(call: Call) -> list[int]:
    """For each tensor operand, the linear group it is in (0: none)."""
    count = len(call.tensors)
    first_two = [isinstance(argument, torch.Tensor) for argument in call.args[:2]]
    if call.target in ADDITIVE:
        return [1, 1] if count == 2 else [0] * count
    if call.target is aten.mul.Tensor:
        return [1, 2] if count == 2 else [1]
    if call.target is aten.div.Tensor:
        return [1, 0] if count == 2 else [1] if first_two[0] else [0]
    if call.target is aten.where.self:
        return [0, 1, 1] if count == 3 else [0] * count
    if call.target is aten._to_copy.default:
        return [1 if call.tensors[0].is_floating_point() and call.outputs[0].is_floating_point() else 0]
    if call.target in FIRST_LINEAR:
        return [1] + [0] * (count - 1)
    return [0] * count


def pointwise_rule(call: Call) -> Rule:
    """Dims aligned from the right; a dim of size 1 that is broadcast cannot be split."""
    output = call.outputs[0]
    names = [f"_{index}" if size != 1 else "1" for index, size in enumerate(output.shape)]
    operands = []
    for tensor, linear in zip(call.tensors, carets(call), strict=True):
        offset = output.dim() - tensor.dim()
        dims = [
            names[offset + index] if size == output.shape[offset + index] else "1"
            for index, size in enumerate(tensor.shape)
        ]
        operands.append("^" * linear + (" ".join(dims) or "."))
    right = " ".join(names) or "."
    return make_rule(call, f"{', '.join(operands)} -> {', '.join([right] * len(call.outputs))}")


POINTWISE = OperatorRule(rule=pointwise_rule, flops=elementwise_flops)


def drop(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Canonical form of detach, alias, lift: the value itself."""
    return self
