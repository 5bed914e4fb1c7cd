"""Negative log-likelihood. Captured as a sum over the global total weight, never as a mean of means."""

from typing import Any

import torch
from torch import Tensor

import meshwright.ops.library  # noqa: F401 - defines the operators below
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, make_rule
from meshwright.ops.embedding import shifted_indices

aten = torch.ops.aten
ours = torch.ops.meshwright

NONE, MEAN, SUM = 0, 1, 2


def nll_loss_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Canonical form of a mean: the sum divided by the total weight, both of them sums over shards."""
    if reduction != MEAN:
        return NotImplemented
    total, weights = aten.nll_loss_forward.default(self, target, weight, SUM, ignore_index)
    if weight is None:  # a count of labels, which no rank need wait for the model to know
        weights = (target != ignore_index).sum().to(self.dtype)
    return total / weights, weights


def nll_loss_backward(
    grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    """Canonical form: the gradient of the sum, scaled by the global total weight."""
    if reduction != MEAN:
        return NotImplemented
    return aten.nll_loss_backward.default(grad / total, self, target, weight, SUM, ignore_index, total)


def _rows(call: Call, tensor: Tensor) -> str:
    return "n " if tensor.dim() == 2 else ""


def nll_rule(call: Call) -> Rule:
    """``n v, n -> ., .``: both outputs are sums; each rank counts the targets that it holds."""
    rows = _rows(call, call.args[0])
    weight = ", v" if call.args[2] is not None else ""
    out = (rows.strip() or ".") if call.args[3] == NONE else "."
    mark = "!" if call.args[3] == NONE or weight else ""
    weight = ", !v" if weight else ""
    return make_rule(call, f"{rows}{mark}v, {rows.strip() or '.'}{weight} -> {out}, .")


def nll_local(local: Local) -> Any:
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    source, target, weight, reduction, ignore = local.args
    shifted = _local_target(local, target, ignore)
    return local.call(local.target, source, shifted, weight, reduction, _IGNORE)


_IGNORE = -1
"""The ignored index on shards: no shifted target can equal it by accident."""


def _local_target(local: Local, target: Any, ignore: int) -> Any:
    """Targets of this rank's part; targets elsewhere, and ignored ones, become ``_IGNORE``."""
    shifted, _ = shifted_indices(local, target, "v", _IGNORE)
    return local.call(aten.masked_fill.Scalar, shifted, local.call(aten.eq.Scalar, target, ignore), _IGNORE)


def nll_backward_rule(call: Call) -> Rule:
    """``., n v, n, . -> n v``."""
    grad, source, _, weight, reduction = call.args[:5]
    rows = _rows(call, source)
    first = (rows.strip() or ".") if reduction == NONE else "."
    mark = "!" if weight is not None else ""
    weights = ", !v" if weight is not None else ""
    return make_rule(call, f"^{first}, {rows}{mark}v, {rows.strip() or '.'}{weights}, . -> {rows}{mark}v")


def nll_backward_local(local: Local) -> Any:
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    grad, source, target, weight, reduction, ignore, total = local.args
    shifted = _local_target(local, target, ignore)
    return local.call(local.target, grad, source, shifted, weight, reduction, _IGNORE, total)


def cross_entropy_backward_rule(call: Call) -> Rule:
    """``., n v, n -> n v``: no reduction, since a row's gradients sum to zero."""
    rows = _rows(call, call.args[1])
    return make_rule(call, f"^., {rows}v, {rows.strip() or '.'} -> {rows}v")


def cross_entropy_backward_local(local: Local) -> Any:
    """softmax · g, minus g at the target, where g is the row's gradient (zero for ignored rows)."""
    grad, logarithms, target, ignore = local.args
    rows = len(local.shape()) == 2
    ignored = local.call(aten.eq.Scalar, target, ignore)
    spread = local.call(aten.expand.default, grad, local.shape()[:-1])
    weights = local.call(aten.masked_fill.Scalar, spread, ignored, 0)
    column = local.call(aten.unsqueeze.default, weights, -1)
    if local.is_split("v"):
        indices, outside = shifted_indices(local, target, "v", 0)
        weights = local.call(aten.masked_fill.Scalar, weights, outside, 0)
    else:
        indices = local.call(aten.masked_fill.Scalar, target, ignored, 0)
    if not rows:
        weights, indices = (local.call(aten.unsqueeze.default, item, -1) for item in (weights, indices))
    else:
        weights, indices = (local.call(aten.unsqueeze.default, item, 1) for item in (weights, indices))
    scaled = local.call(aten.mul.Tensor, local.call(aten.exp.default, logarithms), column)
    return local.call(aten.scatter_add.default, scaled, -1, indices, local.call(aten.neg.default, weights))


def mse_loss(self: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Canonical squared error."""
    squares = (self - target) * (self - target)
    return squares if reduction == NONE else squares.sum() if reduction == SUM else squares.sum() / squares.numel()


def mse_loss_backward(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Canonical gradient of the squared error."""
    scale = 2.0 / self.numel() if reduction == MEAN else 2.0
    return (self - target) * grad * scale


RULES = {
    aten.nll_loss_forward.default: OperatorRule(nll_rule, nll_local, contiguous=frozenset("v")),
    ours.cross_entropy_backward.default: OperatorRule(
        cross_entropy_backward_rule,
        cross_entropy_backward_local,
        lambda call, rule: 3.0 * call.outputs[0].numel(),
        frozenset("v"),
    ),
    aten.nll_loss_backward.default: OperatorRule(nll_backward_rule, nll_backward_local, contiguous=frozenset("v")),
}

CANONICAL = {
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
}
