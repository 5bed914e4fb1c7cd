"""Pooling, padding and resizing, split over samples and channels."""

import re
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, letters, make_rule

aten = torch.ops.aten

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


def _pool_flops(call: Call, rule: Rule | None) -> float:
    return float(max(tensor.numel() for tensor in (*call.tensors, *call.outputs)))


_POOL = OperatorRule(pool_rule, flops=_pool_flops)
_LINEAR_POOL = OperatorRule(pool_linear_rule, flops=_pool_flops)

_RESIZE_BACKWARD = OperatorRule(pool_linear_rule, resize_backward_local, _pool_flops)

RULES = {
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
