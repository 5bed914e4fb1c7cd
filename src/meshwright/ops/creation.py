"""Operators that make tensors without tensor inputs: each rank makes its own part."""

from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, make_rule
from meshwright.ops.patterns import letters, named, operand

aten = torch.ops.aten


def fill_rule(call: Call) -> Rule:
    """``-> b s``: all values are equal, so any dim can be split."""
    return make_rule(call, f" -> {operand(named(call.outputs[0].shape))}")


def fill_local(local: Local) -> Any:
    """Run ``aten.full``, ``zeros``, ``ones`` or ``empty`` on one rank, with the shape of the rank's part."""
    return local.call(local.target, local.shape(), *local.args[1:], **local.kwargs)


def position_rule(call: Call) -> Rule:
    """The values depend on their positions (arange, eye), so every rank makes the whole tensor."""
    rank = call.outputs[0].dim()
    return make_rule(call, f" -> {operand(letters(rank, fixed=tuple(range(rank))))}")


def _filled(value: Any) -> Any:
    """Return a function that captures new_zeros or a similar operator without its input tensor, because only the dtype
    and device of this tensor matter."""

    def full(self: Tensor, size: list[int], *rest: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        options = {"dtype": dtype or self.dtype, "device": device or self.device}
        if value is None and not rest:
            return aten.empty.memory_format(size, **options)
        return aten.full.default(size, rest[0] if value is None else value, **options)

    return full


def _filled_scalar(value: Any) -> Any:
    """Return a function that captures ones_like or a similar operator without its input tensor if this is a scalar, so
    that the gradient of the loss does not wait for the loss."""

    filled = _filled(value)

    def full(self: Tensor, *rest: Any, **options: Any) -> Any:
        # a tensor with dims stays an input: its dims say what can be split
        return NotImplemented if self.dim() else filled(self, [], *rest, **options)

    return full


def _empty_strided(self: Tensor, size: list[int], stride: list[int], **options: Any) -> Tensor:
    return _filled(None)(self, size, **options)


_FILL = OperatorRule(fill_rule, fill_local)
_POSITION = OperatorRule(position_rule)

RULES = {
    **dict.fromkeys([aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format], _FILL),
    **dict.fromkeys([aten.scalar_tensor.default, aten.linspace.default, aten.eye.default, aten.eye.m], _POSITION),
    **dict.fromkeys([aten.arange.default, aten.arange.start, aten.arange.start_step], _POSITION),
    **dict.fromkeys([aten.tril_indices.default, aten.triu_indices.default], _POSITION),
}

CANONICAL = {
    aten.new_zeros.default: _filled(0),
    aten.new_ones.default: _filled(1),
    aten.new_full.default: _filled(None),
    aten.new_empty.default: _filled(None),
    aten.new_empty_strided.default: _empty_strided,
    aten.ones_like.default: _filled_scalar(1),
    aten.zeros_like.default: _filled_scalar(0),
    aten.full_like.default: _filled_scalar(None),
}
