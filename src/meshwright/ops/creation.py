"""Operators that make tensors from nothing: each rank makes its own part."""

from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, letters, make_rule

aten = torch.ops.aten


def fill_rule(call: Call) -> Rule:
    """``-> b s``: constant everywhere, so any dim can be split."""
    names = " ".join(
        name if size != 1 else "1"
        for name, size in zip(letters(call.outputs[0].dim()), call.outputs[0].shape, strict=True)
    )
    left = (
        " ".join(letters(call.tensors[0].dim(), "s", tuple(range(call.tensors[0].dim())))) or "."
        if call.tensors
        else ""
    )
    return make_rule(call, f"{left} -> {names or '.'}")


def fill_local(local: Local) -> Any:
    return local.call(local.target, local.shape(), *local.args[1:], **local.kwargs)


def new_fill_local(local: Local) -> Any:
    return local.call(local.target, local.args[0], local.shape(), *local.args[2:], **local.kwargs)


def position_rule(call: Call) -> Rule:
    """Values that depend on position (arange, eye): whole on every rank."""
    rank = call.outputs[0].dim()
    return make_rule(call, f" -> {' '.join(letters(rank, fixed=tuple(range(rank)))) or '.'}")


_FILL = OperatorRule(fill_rule, fill_local)
_NEW = OperatorRule(fill_rule, new_fill_local)
_POSITION = OperatorRule(position_rule)

RULES = {
    aten.full.default: _FILL,
    aten.zeros.default: _FILL,
    aten.ones.default: _FILL,
    aten.empty.memory_format: _FILL,
    aten.new_zeros.default: _NEW,
    aten.new_ones.default: _NEW,
    aten.new_full.default: _NEW,
    aten.new_empty.default: _NEW,
    aten.scalar_tensor.default: _POSITION,
    aten.arange.default: _POSITION,
    aten.arange.start: _POSITION,
    aten.arange.start_step: _POSITION,
    aten.linspace.default: _POSITION,
    aten.eye.default: _POSITION,
}
