"""Table look-ups. Over a split vocabulary each rank looks up what it holds, and the results add."""

from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, letters, make_rule

aten = torch.ops.aten


def shifted_indices(local: Local, indices: Value, factor: str, elsewhere: int) -> tuple[Value, Value]:
    """(indices into this rank's part of ``factor``, whether each lies in that part); others become ``elsewhere``."""
    first, part = local.bounds(factor)[local.coordinate(factor)[0]], local.length(factor)
    shifted = local.call(aten.sub.Tensor, indices, first)
    inside = local.call(
        aten.logical_and.default, local.call(aten.ge.Scalar, shifted, 0), local.call(aten.lt.Scalar, shifted, part)
    )
    outside = local.call(aten.logical_not.default, inside)
    return local.call(aten.masked_fill.Scalar, shifted, outside, elsewhere), outside


def embedding_rule(call: Call) -> Rule:
    """``v k, b s -> b s k``: a split ``v`` leaves the output Partial."""
    index = " ".join(letters(call.tensors[1].dim())) or "."
    return make_rule(call, f"^v k, {index} -> {'' if index == '.' else index} k")


def embedding_local(local: Local) -> Any:
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    weight, indices = local.args[:2]
    shifted, outside = shifted_indices(local, indices, "v", 0)
    rows = local.call(aten.embedding.default, weight, shifted)
    return local.call(aten.masked_fill.Scalar, rows, local.call(aten.unsqueeze.default, outside, -1), 0)


def embedding_backward_rule(call: Call) -> Rule:
    """``b s k, b s -> v k``; where gradients are divided by how often a row is used, all indices must be there."""
    rank = call.tensors[1].dim()
    index = " ".join(letters(rank, fixed=tuple(range(rank)) if call.args[4] else ()))
    return make_rule(call, f"^{index} k, {index or '.'} -> v k")


def embedding_backward_local(local: Local) -> Any:
    grad, indices, _, padding, scale = local.args
    if not local.is_split("v"):
        return local.call(local.target, *local.args, **local.kwargs)
    rows = local.shape()[0]
    first = local.bounds("v")[local.coordinate("v")[0]]
    shifted, _ = shifted_indices(local, indices, "v", rows)
    padding = padding - first if first <= padding < first + rows else -1
    table = local.call(local.target, grad, shifted, rows + 1, padding, scale)
    return local.call(aten.slice.Tensor, table, 0, 0, rows)


RULES = {
    aten.embedding.default: OperatorRule(embedding_rule, embedding_local, contiguous=frozenset("v")),
    aten.embedding_dense_backward.default: OperatorRule(
        embedding_backward_rule,
        embedding_backward_local,
        lambda call, rule: float(call.tensors[0].numel()),
        frozenset("v"),
    ),
}
