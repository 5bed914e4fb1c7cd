"""Scaled-dot-product attention, forward and backward, split over batch and heads (and queries without a causal mask)."""

from typing import Any

import torch

import meshwright.ops.library  # noqa: F401 - defines the operators below
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, make_rule

ours = torch.ops.meshwright


def _mask_pattern(call: Call, mask: torch.Tensor | None, queries: str) -> str:
    if mask is None:
        return ""
    names = ["b", "h", queries, "!t"][-mask.dim() :]
    return ", " + " ".join("1" if size == 1 else name for size, name in zip(mask.shape, names, strict=True))


def attention_rule(call: Call) -> Rule:
    """``b h s !d, b h !t !d, b h !t !e -> b h s !e, b h s``; with a causal mask ``s`` stays whole."""
    queries = "!s" if call.args[5] else "s"
    mask = _mask_pattern(call, call.args[3], queries)
    return make_rule(call, f"b h {queries} !d, b h !t !d, b h !t !e{mask} -> b h {queries} !e, b h {queries}")


def attention_backward_rule(call: Call) -> Rule:
    """Split over ``s``, the gradients of key and value are sums."""
    queries = "!s" if call.args[8] else "s"
    mask = _mask_pattern(call, call.args[4], queries)
    q, k, v, o = f"b h {queries} !d", "b h !t !d", "b h !t !e", f"b h {queries} !e"
    return make_rule(call, f"{o}, {q}, {k}, {v}{mask}, {o}, b h {queries} -> {q}, {k}, {v}")


def attention_local(local: Local) -> Any:
    dropout = local.args[-5]
    key = local.key() if dropout else (0, 0)
    return local.call(local.target, *local.args[:-2], *key)


def _flops(products: int) -> Any:
    def count(call: Call, rule: Rule | None) -> float:
        first = 1 if products == 5 else 0
        query, value = call.args[first], call.args[first + 2]
        batch, heads, length, width = query.shape
        return 2.0 * batch * heads * length * value.shape[2] * (width + value.shape[3]) * products / 2

    return count


RULES = {
    ours.attention.default: OperatorRule(attention_rule, attention_local, _flops(2)),
    ours.attention_backward.default: OperatorRule(attention_backward_rule, attention_local, _flops(5)),
}
