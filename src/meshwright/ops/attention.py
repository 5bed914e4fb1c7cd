"""Scaled-dot-product attention, forward and backward, split over batch, heads, queries and keys."""

import math
import operator
from typing import Any

import torch

import meshwright.ops.attention_kernels
import meshwright.ops.ring  # noqa: F401 - these define the operators below
from meshwright.errors import PlanError, RuleError
from meshwright.ir.attention import ATTENTIONS
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, make_rule

aten = torch.ops.aten
ours = torch.ops.meshwright


def _heads(query: torch.Tensor, key: torch.Tensor) -> str:
    """The pattern of query heads: ``h``, or ``(h r)`` if r query heads share a key head."""
    return "h" if query.shape[1] == key.shape[1] else "(h r)"


def _mask_pattern(mask: torch.Tensor | None, heads: str, keys: str) -> str:
    if mask is None:
        return ""
    names = ["b", heads, "s", keys][-mask.dim() :]
    return ", " + " ".join("1" if size == 1 else name for size, name in zip(mask.shape, names, strict=True))


def attention_rule(call: Call) -> Rule:
    """``b h s !d, b h !t !d, b h !t !e -> b h s !e, b h s``; if ``t`` is split, the softmaxes of the shards are merged.
    If one axis splits queries and keys together (factor ``st``), keys and values move around a ring of ranks. If query
    heads share key heads, they are ``(h r)``, and the key heads ``h``."""
    query, key, _, mask = call.args[:4]
    heads = _heads(query, key)
    terms = _mask_pattern(mask, heads, "!t")
    pattern = f"b {heads} s !d, b h !t !d, b h !t !e{terms} -> b {heads} s !e, b {heads} s"
    decompositions = {"t": "gather", "st": "ring"}
    return make_rule(
        call, pattern, decompositions=decompositions, joint={"st": ("s", "t")}, equal=("st",), h=key.shape[1]
    )


def attention_backward_rule(call: Call) -> Rule:
    """If ``s`` is split, the gradients of key and value are sums. If ``t`` is split, the query's gradient is a sum."""
    query, key, _, mask = call.args[1:5]
    heads = _heads(query, key)
    q, k, v, o = f"b {heads} s !d", "b h t !d", "b h t !e", f"b {heads} s !e"
    pattern = f"^{o}, {q}, {k}, {v}{_mask_pattern(mask, heads, 't')}, {o}, b {heads} s -> {q}, {k}, {v}"
    return make_rule(
        call, pattern, decompositions={"st": "ring"}, joint={"st": ("s", "t")}, equal=("st",), h=key.shape[1]
    )


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
    gathered = local.call(aten.reshape.default, local.all_gather(own, "t"), shape)
    merged = local.call(aten.logsumexp.default, gathered, [0])
    # a query without any allowed key has the output zero
    finite = local.call(aten.masked_fill.Scalar, merged, local.call(aten.eq.Scalar, merged, -math.inf), 0.0)
    weight = local.call(aten.exp.default, local.call(aten.sub.Tensor, own, finite))
    part = local.call(aten.mul.Tensor, output, local.call(aten.unsqueeze.default, weight, -1))
    total = local.all_reduce(part, "t")
    return local.call(aten._to_copy.default, total, dtype=local.dtype(0)), merged


def emit_attention(local: Local) -> Any:
    """Emit the operator on this rank's parts, or around a ring. Backward communicates only in a ring: it has the output
    and the log-sum-exp over all keys, so the gradient for some keys does not depend on the other keys."""
    at = SETTINGS_AT[local.target]
    tensors = local.args[:at]
    dropout, causal, scale, _, number, window = (*local.args[at:], 0)[:6]
    # forward and backward of one call have the same number, so that they draw the same mask
    key, salt, place = _drawn(local, f"attention {number}") if dropout else (0, 0, _EVERYWHERE)
    settings = (*tensors, dropout, causal, scale, key, salt)
    algorithm = _algorithm(local)
    if local.is_split("st"):
        row, *ring = _ring(local, causal and not window)
        return local.call(_ACROSS[local.target], *settings, window, row, algorithm, *place, *ring)
    positions = [_position(local, factor) for factor in "st"]
    first = positions[0] - positions[1] if causal else 0
    if dropout:
        rows, columns = ([position] for position in positions)
        return local.call(local.target, *settings, window, first, algorithm, *place, rows, columns)
    return local.call(local.target, *settings, *((window, first, algorithm) if window or first or algorithm else ()))


_Place = tuple[list[int], list[int], list[int], int]
_EVERYWHERE: _Place = ([], [], [], -1)


def _drawn(local: Local, name: str) -> tuple[Any, int, _Place]:
    """The random key, the salt, and where this rank's batches and heads lie in all scores (``Dropout``)."""
    key, salt, sizes, begins, lengths, _, time = local.draw(name, ("b", "h", "r"))
    return key, salt, ([*sizes, local.size("s"), local.size("t")], begins, lengths, time)


def _algorithm(local: Local) -> str:
    """The algorithm that the plan names, or empty."""
    if local.algorithm and local.algorithm not in ATTENTIONS:
        raise PlanError(
            f"{local.algorithm!r} is no algorithm of attention", where=f"operator_algorithms: {local.name}",
            remedy=f"use {' or '.join(ATTENTIONS)}",
        )  # fmt: skip
    return local.algorithm


def _ring(local: Local, balances: bool) -> tuple[int, int, bool, str, int]:
    """Return this rank's first query, its index in the ring, whether ranks swap halves, the ring's group and size."""
    if local.is_split("t"):
        raise RuleError(
            "another axis also splits the keys of a ring", where=local.name, remedy="split the queries over that axis"
        )
    (index, _), (part, parts), (group, size) = local.coordinate("st"), local.coordinate("s"), local.group("st")
    rows = local.size("s") // (parts * size)
    place = part * size + index if parts > 1 and local.outside("s", "st") else index * parts + part
    balanced = balances and parts == 1 and rows % 2 == 0 and local.size("s") == local.size("t")
    return place * rows, index, balanced, group, size


def _position(local: Local, factor: str) -> int:
    """The position of this rank's first query (factor ``s``) or first key (``t``) in the sequence."""
    return local.bounds(factor)[local.coordinate(factor)[0]] if local.is_split(factor) else 0


def _flops(products: int) -> Any:
    def count(call: Call, rule: Rule | None) -> float:
        first = 1 if products == 5 else 0
        query, value = call.args[first], call.args[first + 2]
        batch, heads, length, width = query.shape
        return 2.0 * batch * heads * length * value.shape[2] * (width + value.shape[3]) * products / 2

    return count


_CONTIGUOUS = frozenset({"s", "t"})

SETTINGS_AT = {ours.attention.default: 4, ours.attention_backward.default: 7}
"""Position of the first argument that is no tensor."""

RULES = {
    ours.attention.default: OperatorRule(attention_rule, attention_local, _flops(2), _CONTIGUOUS, random=True),
    ours.attention_backward.default: OperatorRule(
        attention_backward_rule, emit_attention, _flops(5), _CONTIGUOUS, random=True
    ),
}
