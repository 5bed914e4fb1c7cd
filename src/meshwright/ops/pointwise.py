"""Elementwise operators, with broadcasting."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Target, elementwise_flops, make_rule
from meshwright.ops.patterns import aligned, named, operand
from meshwright.torch_private import OpOverload

aten = torch.ops.aten

_GROUPS: dict[Target, dict[int, list[int]]] = {
    aten.add.Tensor: {2: [1, 1]}, aten.sub.Tensor: {2: [1, 1]}, aten.rsub.Tensor: {2: [1, 1]},
    aten.mul.Tensor: {1: [1], 2: [1, 2]},
    aten.where.self: {3: [0, 1, 1]}, aten.addcmul.default: {3: [1, 1, 0]}, aten.addcdiv.default: {3: [1, 1, 0]},
    aten.complex.default: {2: [1, 1]}, aten.lerp.Scalar: {2: [1, 1]}, aten.lerp.Tensor: {3: [1, 1, 0]},
}  # fmt: skip
"""Maps an operator and a number of tensor arguments to the number of carets of each tensor in the pattern. With other
numbers of tensor arguments the operator is not linear."""


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


_FIRST_WHERE: dict[Target, Callable[[Call], bool]] = {
    aten.div.Tensor: lambda call: isinstance(call.args[0], torch.Tensor),
    aten.masked_fill.Scalar: lambda call: call.args[2] in (0, math.inf, -math.inf),  # infinities add up to infinity
    aten._to_copy.default: lambda call: _is_inexact(call.tensors[0]) and _is_inexact(call.outputs[0]),
}
"""Maps an operator to a test of a call. The operator is linear in the first tensor of a call that passes the test."""
GRADIENTS: frozenset[Target] = frozenset(
    {
        aten._prelu_kernel_backward.default, aten.elu_backward.default, aten.gelu_backward.default,
        aten.hardshrink_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
        aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.logit_backward.default,
        aten.mish_backward.default, aten.native_dropout_backward.default, aten.rrelu_with_noise_backward.default,
        aten.sigmoid_backward.default, aten.silu_backward.default, aten.softplus_backward.default,
        aten.softshrink_backward.default,
        aten.tanh_backward.default, aten.threshold_backward.default,
        # losses, whose sums are made by canonical forms
        aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default, aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default,
    }
)  # fmt: skip
"""Gradients of elementwise operators. Each is linear in its first input."""
FIRST_LINEAR: frozenset[Target] = GRADIENTS | {
    aten.neg.default, aten.positive.default, aten.mul.Scalar, aten.div.Scalar, aten.clone.default,
    aten._conj_physical.default, aten.conj_physical.default, aten.deg2rad.default, aten.ldexp.Tensor,
    aten.polar.default, aten.rad2deg.default,
}  # fmt: skip
EXTRA: frozenset[Target] = GRADIENTS | {
    aten._prelu_kernel.default, aten._to_copy.default, aten.binary_cross_entropy.default, aten.clamp.default,
    aten.clone.default, aten.complex.default, aten.copy.default, aten.empty_like.default, aten.fill.Scalar,
    aten.fill.Tensor, aten.floor_divide.default, aten.full_like.default, aten.hardswish.default,
    aten.huber_loss.default, aten.isinf.default, aten.isnan.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.mse_loss.default, aten.ones_like.default, aten.polar.default, aten.rsub.Tensor, aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default, aten.where.self, aten.zero.default, aten.zeros_like.default,
}  # fmt: skip
"""Elementwise operators that PyTorch does not tag as pointwise."""


def is_pointwise(target: Target) -> bool:
    """Whether PyTorch tags the operator as pointwise, or ``EXTRA`` lists it."""
    return target in EXTRA or (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags)


def carets(call: Call) -> list[int]:
    """Return the number of carets of each tensor in the pattern. The operator is linear in all tensors with the same
    number together, but not in tensors with 0."""
    count = len(call.tensors)
    if call.target in _GROUPS:
        return _GROUPS[call.target].get(count, [0] * count)
    if call.target is aten.copy.default:  # the first tensor is overwritten
        return [0, int(call.tensors[1].dtype == call.outputs[0].dtype)]
    is_linear = _FIRST_WHERE.get(call.target, lambda call: call.target in FIRST_LINEAR)
    return [int(is_linear(call)), *[0] * (count - 1)] if count else []


def pointwise_rule(call: Call) -> Rule:
    """Dims are aligned from the right; a dim of size 1 that is broadcast cannot be split."""
    shape = call.outputs[0].shape
    names = named(shape)
    operands = [
        "^" * linear + operand(aligned(names, shape, tensor.shape))
        for tensor, linear in zip(call.tensors, carets(call), strict=True)
    ]
    return make_rule(call, f"{', '.join(operands)} -> {', '.join([operand(names)] * len(call.outputs))}")


POINTWISE = OperatorRule(rule=pointwise_rule, flops=elementwise_flops)


def glu(self: Tensor, dim: int = -1) -> Tensor:
    """Capture the gated linear unit (Dauphin et al. 2017) as elementwise operators."""
    value, gate = self.chunk(2, dim)
    return value * gate.sigmoid()


def glu_backward(grad: Tensor, self: Tensor, dim: int) -> Tensor:
    """Capture the gradient of the gated linear unit as elementwise operators and a cat."""
    value, gate = self.chunk(2, dim)
    opened = gate.sigmoid()
    return torch.cat([grad * opened, grad * value * opened * (1 - opened)], dim)


def log_sigmoid_forward(self: Tensor) -> tuple[Tensor, Tensor]:
    """Capture the log-sigmoid as elementwise operators. PyTorch's operator fills its buffer only on some devices."""
    small = torch.exp(-self.abs())
    return self.clamp(max=0) - torch.log1p(small), small


def log_sigmoid_backward(grad: Tensor, self: Tensor, buffer: Tensor) -> Tensor:
    """Capture the gradient of the log-sigmoid as elementwise operators, without the buffer."""
    return grad * torch.sigmoid(-self)


CANONICAL = {
    aten.glu.default: glu,
    aten.glu_backward.default: glu_backward,
    aten.log_sigmoid_forward.default: log_sigmoid_forward,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
}
