"""Table look-ups. If the vocabulary is split, each rank looks up the rows that it holds, and the results are summed."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, emit_unchanged, make_rule
from meshwright.ops.patterns import letters, operand

aten = torch.ops.aten


def shifted_indices(local: Local, indices: Value, factor: str, elsewhere: int) -> tuple[Value, Value]:
    """Return the indices relative to this rank's part of ``factor``, and a mask of those that lie outside of the part.
    Indices outside become ``elsewhere``."""
    first, part = local.bounds(factor)[local.coordinate(factor)[0]], local.length(factor)
    shifted = local.call(aten.sub.Tensor, indices, first)
    inside = local.call(
        aten.logical_and.default, local.call(aten.ge.Scalar, shifted, 0), local.call(aten.lt.Scalar, shifted, part)
    )
    outside = local.call(aten.logical_not.default, inside)
    return local.call(aten.masked_fill.Scalar, shifted, outside, elsewhere), outside


def embedding_rule(call: Call) -> Rule:
    """``v k, b s -> b s k``: a split ``v`` leaves the output Partial."""
    index = letters(call.tensors[1].dim())
    return make_rule(call, f"^v k, {operand(index)} -> {operand([*index, 'k'])}")


def embedding_local(local: Local) -> Any:
    """Run ``aten.embedding`` on one rank. If ``v`` is split, rows that other ranks hold are zeros."""
    if not local.is_split("v"):
        return emit_unchanged(local)
    weight, indices = local.args[:2]
    shifted, outside = shifted_indices(local, indices, "v", 0)
    rows = local.call(aten.embedding.default, weight, shifted)
    return local.call(aten.masked_fill.Scalar, rows, local.call(aten.unsqueeze.default, outside, -1), 0)


def embedding_backward_rule(call: Call) -> Rule:
    """``b s k, b s -> v k``; if gradients are divided by the number of uses of a row, indices cannot be split."""
    rank = call.tensors[1].dim()
    index = letters(rank, fixed=tuple(range(rank)) if call.args[4] else ())
    return make_rule(call, f"^{operand([*index, 'k'])}, {operand(index)} -> v k")


def embedding_backward_local(local: Local) -> Any:
    """Run ``aten.embedding_dense_backward`` on one rank: gradients of other ranks' rows are dropped."""
    grad, indices, _, padding, scale = local.args
    if not local.is_split("v"):
        return emit_unchanged(local)
    rows = local.shape()[0]
    first = local.bounds("v")[local.coordinate("v")[0]]
    shifted, _ = shifted_indices(local, indices, "v", rows)
    padding = padding - first if first <= padding < first + rows else -1
    table = local.call(local.target, grad, shifted, rows + 1, padding, scale)
    return local.call(aten.slice.Tensor, table, 0, 0, rows)


BAGS: Any = F.embedding_bag
"""PyTorch's own function, which ``embedding_bag`` replaces while a step is traced."""


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Run ``F.embedding_bag``. Bags of equal length [b, l] become a look-up and a reduction over ``l``, which have
    rules. PyTorch's operator is called for bags that are given by offsets (no dim of their indices is the batch), with
    ``max_norm`` or ``sparse``, for empty bags, and for arguments that PyTorch refuses."""
    weights = per_sample_weights
    is_refused = offsets is not None or (weights is not None and (mode != "sum" or weights.shape != input.shape))
    unlike = input.dim() != 2 or not input.shape[1] or input.is_floating_point() or max_norm is not None or sparse
    if unlike or is_refused:
        result: Tensor = BAGS(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
        return result
    rows = F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    padding = None if padding_idx is None else input == padding_idx % weight.shape[0]
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if padding is not None:
        rows = rows.masked_fill(padding.unsqueeze(-1), -math.inf if mode == "max" else 0.0)
    if mode == "max":
        result = rows.max(1).values
        return result if padding is None else result.masked_fill(padding.all(1, keepdim=True), 0.0)
    result = rows.sum(1)
    if mode == "sum":
        return result
    return result / (input.shape[1] if padding is None else (~padding).sum(1, keepdim=True).clamp(min=1))


RULES = {
    aten.embedding.default: OperatorRule(embedding_rule, embedding_local, contiguous=frozenset("v")),
    aten.embedding_dense_backward.default: OperatorRule(
        embedding_backward_rule,
        embedding_backward_local,
        lambda call, rule: float(call.tensors[0].numel()),
        frozenset("v"),
    ),
}
