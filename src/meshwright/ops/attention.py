"""Scaled-dot-product attention, forward and backward, split over batch, heads, queries and keys."""

import math
import operator
from typing import Any

import torch

import meshwright.ops.library
import meshwright.ops.ring  # noqa: F401 - these define the operators below
from meshwright.errors import RuleError
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, make_rule

aten = torch.ops.aten
ours = torch.ops.meshwright


def _mask_pattern(mask: torch.Tensor | None, keys: str) -> str:
    if mask is None:
        return ""
    names = ["b", "h", "s", keys][-mask.dim() :]
    return ", " + " ".join("1" if size == 1 else name for size, name in zip(mask.shape, names, strict=True))


def attention_rule(call: Call) -> Rule:
    """``b h s !d, b h !t !d, b h !t !e -> b h s !e, b h s``; if ``t`` is split, the softmaxes of the shards are merged.
    If one axis splits queries and keys together (factor ``st``), keys and values move around a ring of ranks."""
    mask = _mask_pattern(call.args[3], "!t")
    pattern = f"b h s !d, b h !t !d, b h !t !e{mask} -> b h s !e, b h s"
    decompositions = {"t": "gather", "st": "ring"}
    return make_rule(call, pattern, decompositions=decompositions, joint={"st": ("s", "t")}, equal=("st",))


def attention_backward_rule(call: Call) -> Rule:
    """If ``s`` is split, the gradients of key and value are sums. If ``t`` is split, the query's gradient is a sum."""
    mask = _mask_pattern(call.args[4], "t")
    q, k, v, o = "b h s !d", "b h t !d", "b h t !e", "b h s !e"
    pattern = f"^{o}, {q}, {k}, {v}{mask}, {o}, b h s -> {q}, {k}, {v}"
    return make_rule(call, pattern, decompositions={"st": "ring"}, joint={"st": ("s", "t")}, equal=("st",))


_ACROSS = {
    ours.attention.default: ours.attention_ring.default,
    ours.attention_backward.default: ours.attention_ring_backward.default,
}
"""For each operator, the operator that computes it around a ring of ranks."""


def attention_local(local: Local) -> Any:
    """Run attention on one rank, with the rank's keys. If ``t`` is split, merge the softmaxes of the shards by their
    log-sum-exp (Milakov, Gimelshein 2018)."""
    call = emit_attention(local)
    if not (local.is_split("t") or local.is_split("st")):
        return call
    output, own = (local.call(operator.getitem, call, index) for index in (0, 1))
    if local.is_split("st"):
        return output, own
    shape = [local.coordinate("t")[1], *local.shape(1)]
    every = local.call(aten.reshape.default, local.all_gather(own, "t"), shape)
    merged = local.call(aten.logsumexp.default, every, [0])
    # a query without any allowed key has the output zero
    finite = local.call(aten.masked_fill.Scalar, merged, local.call(aten.eq.Scalar, merged, -math.inf), 0.0)
    weight = local.call(aten.exp.default, local.call(aten.sub.Tensor, own, finite))
    part = local.call(aten.mul.Tensor, output, local.call(aten.unsqueeze.default, weight, -1))
    total = local.all_reduce(part, "t")
    return local.call(aten._to_copy.default, total, dtype=local.dtype(0)), merged


def emit_attention(local: Local) -> Any:
    """Emit the operator on this rank's parts, or around a ring. Backward communicates only in a ring: it has the output
    and the log-sum-exp over all keys, so the gradient for some keys does not depend on the other keys."""
    *tensors, dropout, causal, scale, _, number = local.args
    # forward and backward of one call have the same number, so that they draw the same mask
    key = local.key(f"attention {number}") if dropout else (0, 0)
    if local.is_split("st"):
        return local.call(_ACROSS[local.target], *tensors, dropout, causal, scale, *key, *_ring(local, causal))
    query = 1 if local.target is ours.attention_backward.default else 0
    tensors[query + 3], causal = _shifted_mask(local, tensors[query], tensors[query + 3], causal)
    return local.call(local.target, *tensors, dropout, causal, scale, *key)


def _ring(local: Local, causal: bool) -> tuple[int, int, bool, str, int]:
    """Return this rank's first query, its index in the ring, whether ranks swap halves, the ring's group and size."""
    if local.is_split("t"):
        raise RuleError(
            "keys that go round a ring are split over another axis too", where=local.name, remedy="split queries there"
        )
    (index, _), (part, parts), (group, size) = local.coordinate("st"), local.coordinate("s"), local.group("st")
    rows = local.size("s") // (parts * size)
    place = part * size + index if parts > 1 and local.outside("s", "st") else index * parts + part
    balanced = causal and parts == 1 and rows % 2 == 0 and local.size("s") == local.size("t")
    return place * rows, index, balanced, group, size


def _shifted_mask(local: Local, query: Value, mask: Value, causal: bool) -> tuple[Value, bool]:
    """Return ``mask`` and ``causal`` for this rank's part. If queries or keys are split, a causal mask becomes a
    tensor, because it depends on the place of the part."""
    if not causal or not (local.is_split("s") or local.is_split("t")):
        return mask, causal
    row, column = (local.bounds(factor)[local.coordinate(factor)[0]] for factor in "st")
    every = local.call(aten.new_ones.default, query, [local.length("s"), local.length("t")], dtype=torch.bool)
    return local.call(aten.tril.default, every, row - column), False


def _flops(products: int) -> Any:
    def count(call: Call, rule: Rule | None) -> float:
        first = 1 if products == 5 else 0
        query, value = call.args[first], call.args[first + 2]
        batch, heads, length, width = query.shape
        return 2.0 * batch * heads * length * value.shape[2] * (width + value.shape[3]) * products / 2

    return count


_CONTIGUOUS = frozenset({"s", "t"})

RULES = {
    ours.attention.default: OperatorRule(attention_rule, attention_local, _flops(2), _CONTIGUOUS, random=True),
    ours.attention_backward.default: OperatorRule(
        attention_backward_rule, emit_attention, _flops(5), _CONTIGUOUS, random=True
    ),
}
