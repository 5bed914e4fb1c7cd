"""Losses. A mean is captured as a sum divided by the global count or total weight, never as a mean of means."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import meshwright.ops.library  # noqa: F401 - defines the operators below
from meshwright.ir.rule import Rule
from meshwright.ops.base import (
    Call,
    Local,
    OperatorRule,
    Target,
    arguments,
    emit_unchanged,
    make_rule,
    wide_dtype,
    with_gradients,
)
from meshwright.ops.embedding import shifted_indices
from meshwright.ops.patterns import operand
from meshwright.torch_private import OpOverload

aten = torch.ops.aten
ours = torch.ops.meshwright

NONE, MEAN, SUM = 0, 1, 2


def _nll(operator: Target) -> Callable[..., Any]:
    def canonical(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
        """Capture a mean as the sum divided by the total weight. Both are sums over shards. Half precision is summed in
        float32."""
        wide = wide_dtype(self.dtype)
        if reduction == NONE or (reduction == SUM and self.dtype == wide):
            return NotImplemented
        if self.dtype == wide:
            total = operator(self, target, weight, SUM, ignore_index)[0]
        else:
            total = operator(self, target, weight, NONE, ignore_index)[0].sum(dtype=wide)
        # the total weight depends on the labels alone: no rank waits for the model to compute it
        counted = target != ignore_index
        weights = counted
        if weight is not None:
            labels = target.masked_fill(~counted, 0)
            # not ``weight[labels]``, which would read the value of a single label
            weights = aten.index.Tensor(weight, [labels]).masked_fill(~counted, 0)
        divisor = weights.sum(dtype=None if weight is None else wide).to(wide)
        return (total if reduction == SUM else total / divisor).to(self.dtype), divisor

    return canonical


def _nll_backward(operator: Target) -> Callable[..., Any]:
    def canonical(
        grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
        total: Tensor,
    ) -> Any:  # fmt: skip
        """Capture the gradient of a mean as the gradient of the sum, divided by the global total weight. The gradient
        of a sum does not read the total weight; a tensor with one dim takes its place."""
        if total.dim():
            return NotImplemented
        scaled = (grad / total).to(self.dtype) if reduction == MEAN else grad
        return operator(
            scaled, self, target, weight, NONE if reduction == NONE else SUM, ignore_index, self.new_ones(1)
        )

    return canonical


def _names(source: Tensor) -> tuple[str, str]:
    """Return the patterns of the logarithms (``v``, ``n v`` or ``n v y x``) and of the targets (without ``v``)."""
    whole = {1: "v", 2: "n v", 4: "n v y x"}[source.dim()]
    return whole, operand([name for name in whole.split() if name != "v"])


def nll_rule(call: Call) -> Rule:
    """``n v, n -> ., .``: both outputs are sums. Each rank contributes the terms of the targets that it holds."""
    whole, rows = _names(call.args[0])
    weight = ", v" if call.args[2] is not None else ""
    return make_rule(call, f"{whole}, {rows}{weight} -> {rows if call.args[3] == NONE else '.'}, .")


def nll_local(local: Local) -> Any:
    """Run ``aten.nll_loss_forward`` or ``nll_loss2d_forward``, but ignore targets in other ranks' parts of ``v``."""
    if not local.is_split("v"):
        return emit_unchanged(local)
    source, target, weight, reduction, ignore = local.args
    shifted = _local_target(local, target, ignore)
    return local.call(local.target, source, shifted, weight, reduction, _IGNORE)


_IGNORE = -1
"""The index that a shard ignores. No valid target on a shard is negative."""


def _local_target(local: Local, target: Any, ignore: int) -> Any:
    """Return targets as indices into this rank's part. Targets in other parts and ignored targets are ``_IGNORE``."""
    shifted, _ = shifted_indices(local, target, "v", _IGNORE)
    return local.call(aten.masked_fill.Scalar, shifted, local.call(aten.eq.Scalar, target, ignore), _IGNORE)


def nll_backward_rule(call: Call) -> Rule:
    """``., n v, n, 1 -> n v``."""
    source, _, weight, reduction, _, total = call.args[1:7]
    whole, rows = _names(source)
    weights = ", v" if weight is not None else ""
    return make_rule(
        call,
        f"^{rows if reduction == NONE else '.'}, {whole}, {rows}{weights}, {'1' if total.dim() else '.'} -> {whole}",
    )


def nll_backward_local(local: Local) -> Any:
    """Run the gradient of ``nll_local``, with the same ignored targets."""
    if not local.is_split("v"):
        return emit_unchanged(local)
    grad, source, target, weight, reduction, ignore, total = local.args
    shifted = _local_target(local, target, ignore)
    like = local.call(aten.new_empty.default, source, local.shape())  # only the source's shape is read; contiguous
    return local.call(local.target, grad, like, shifted, weight, reduction, _IGNORE, total)


def cross_entropy_backward_rule(call: Call) -> Rule:
    """``., n v, n -> n v``: the joint gradient of softmax and loss needs no sum over ``v``."""
    whole, rows = _names(call.args[1])
    return make_rule(call, f"^., {whole}, {rows} -> {whole}")


def cross_entropy_backward_local(local: Local) -> Any:
    """Return softmax · g, minus g at the target, where g is the row's gradient (zero for ignored rows)."""
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
    weights, indices = (local.call(aten.unsqueeze.default, item, 1 if rows else -1) for item in (weights, indices))
    scaled = local.call(aten.mul.Tensor, local.call(aten.exp.default, logarithms), column)
    return local.call(aten.scatter_add.default, scaled, -1, indices, local.call(aten.neg.default, weights))


def binary_cross_entropy_with_logits(
    self: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """Capture the binary cross-entropy of logits as elementwise operators, and a mean as a sum over a global count."""
    logarithms = self.clamp(max=0) - torch.log1p(torch.exp(-self.abs()))
    if pos_weight is not None:
        logarithms = ((pos_weight - 1) * target + 1) * logarithms
    values = (1 - target) * self - logarithms
    values = values if weight is None else values * weight
    if reduction == NONE:
        return values
    total = values.sum(dtype=wide_dtype(values.dtype))
    return (total if reduction == SUM else total / values.numel()).to(values.dtype)


def _elementwise(operator: OpOverload[Any, Any]) -> Callable[..., Any]:
    """Return a function that captures a loss as an elementwise operator and a sum, or a sum over a global count."""

    def canonical(*args: Any, **kwargs: Any) -> Any:
        given = arguments(Call(operator, args, kwargs, ()))
        if given["reduction"] == NONE:
            return NotImplemented
        values = operator(**{**given, "reduction": NONE})
        total = values.sum(dtype=wide_dtype(values.dtype))
        return (total if given["reduction"] == SUM else total / values.numel()).to(values.dtype)

    return canonical


def _elementwise_backward(operator: OpOverload[Any, Any]) -> Callable[..., Any]:
    """Return a function that captures the gradient of a mean as a gradient of the sum divided by the global count."""

    def canonical(*args: Any, **kwargs: Any) -> Any:
        given = arguments(Call(operator, args, kwargs, ()))
        if given["reduction"] != MEAN:
            return NotImplemented
        grad = given["grad_output"] / given["self"].numel()
        return operator(**{**given, "grad_output": grad, "reduction": SUM})

    return canonical


def margin_rule(call: Call) -> Rule:
    """``n !c, n -> n``, or the gradient: classes are compared with each other, so they stay whole."""
    given, one_sample = arguments(call), arguments(call)["self"].dim() < 2
    whole = {0: ".", 1: "!c"}.get(given["self"].dim(), "n !c")

    def of(name: str, value: Tensor) -> str:
        if name == "weight":
            return "!c"
        if name in ("self", "is_target") or value.shape == given["self"].shape:
            return whole
        return "." if not value.dim() else "1" if one_sample else "n"

    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[attr-defined]
    inputs = [of(name, given[name]) for name in names if isinstance(given[name], Tensor)]
    if "grad_output" in given:
        return make_rule(call, f"^{', '.join(inputs)} -> {whole}")
    outputs = [of("loss", call.outputs[0]), *(whole for _ in call.outputs[1:])]
    return make_rule(call, f"{', '.join(inputs)} -> {', '.join(outputs)}")


def multilabel_margin(self: Tensor, target: Tensor, reduction: int) -> Any:
    """Capture a mean over samples as a sum divided by their global number."""
    if reduction != MEAN:
        return NotImplemented
    losses, is_target = aten.multilabel_margin_loss_forward.default(self, target, NONE)
    return (losses.sum(dtype=wide_dtype(losses.dtype)) / losses.numel()).to(losses.dtype), is_target


def _margin_backward(operator: OpOverload[Any, Any]) -> Callable[..., Any]:
    def canonical(*args: Any, **kwargs: Any) -> Any:
        """Capture the gradient of a mean over samples as a gradient of the sum, divided by their global number."""
        given = arguments(Call(operator, args, kwargs, ()))
        if given["reduction"] != MEAN:
            return NotImplemented
        samples = given["self"].shape[0] if given["self"].dim() == 2 else 1
        return operator(**{**given, "grad_output": given["grad_output"] / samples, "reduction": SUM})

    return canonical


_NLL = OperatorRule(nll_rule, nll_local, contiguous=frozenset("v"))
_NLL_BACKWARD = OperatorRule(nll_backward_rule, nll_backward_local, contiguous=frozenset("v"))
_MARGIN = OperatorRule(margin_rule)

RULES: dict[Target, OperatorRule] = {
    aten.nll_loss_forward.default: _NLL,
    ours.cross_entropy_backward.default: OperatorRule(
        cross_entropy_backward_rule,
        cross_entropy_backward_local,
        lambda call, rule: 3.0 * call.outputs[0].numel(),
        frozenset("v"),
    ),
    aten.nll_loss_backward.default: _NLL_BACKWARD,
    aten.nll_loss2d_forward.default: _NLL,
    aten.nll_loss2d_backward.default: _NLL_BACKWARD,
    **with_gradients(["multi_margin_loss"], _MARGIN, _MARGIN),
    aten.multilabel_margin_loss_forward.default: _MARGIN,
    aten.multilabel_margin_loss_backward.default: _MARGIN,
}

_ELEMENTWISE = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
_MARGIN_GRADIENTS = (aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
_FORMS: tuple[tuple[Callable[..., Any], tuple[Target, ...]], ...] = (
    (_nll, (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)),
    (_nll_backward, (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)),
    (_elementwise, tuple(getattr(aten, name).default for name in (*_ELEMENTWISE, "multi_margin_loss"))),
    (_elementwise_backward, tuple(getattr(aten, f"{name}_backward").default for name in _ELEMENTWISE)),
    (_margin_backward, _MARGIN_GRADIENTS),
)
CANONICAL: dict[Target, Callable[..., Any]] = {
    **{target: form(target) for form, targets in _FORMS for target in targets},
    aten.multilabel_margin_loss_forward.default: multilabel_margin,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
}
