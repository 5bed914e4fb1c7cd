"""Attention as lowered: one fused kernel where the device has it, else products and softmax over scores in memory."""

from collections.abc import Sequence
from math import prod

from meshwright.cost.kernels import Cost, Operand, Product, Rates
from meshwright.ir.graph import ITEM_BYTES, Operator
from meshwright.ir.kind import fused_attention

_PASSES = {False: {"pointwise": 6.0, "activation": 4.0, "reduction": 2.0}, True: {"pointwise": 9.0, "activation": 2.0}}
"""How often the kernels between the products read or write the scores, forward and backward (``ops/library.py``)."""
_KERNELS = {False: 9, True: 12}
_CAST = {False: 3.0, True: 6.0}
"""More passes of 16-bit attention, whose softmax is in float32."""
_DROPOUT = {False: 5.0, True: 8.0}
_HELD = {False: 2, True: 4}
"""Scores that are in memory at once."""


def attention_cost(rates: Rates, operator: Operator, inputs: Sequence[Operand], flops: float, num_bytes: float) -> Cost:
    """Attention or its backward pass of one rank, from its parts of the operator's inputs."""
    backward, dropout, causal = _call(operator)
    query, key, value = inputs[backward : backward + 3]
    kind = "attention_backward" if backward else "attention"
    if _fused(rates, query, value, dropout):
        return Cost(rates.seconds(kind, query.dtype, flops, num_bytes), flops, round(num_bytes))
    batch, rows, width = prod(query.shape[:2]), query.shape[2], query.shape[3]
    values = value.shape[3]
    # In a ring, the keys of all ranks come by.
    keys = max(key.shape[2], round(flops / (batch * rows * (width + values) * (5 if backward else 2))))
    products = [Product(rows, keys, width, batch), Product(rows, values, keys, batch)]
    if backward:
        products = [
            Product(rows, keys, width, batch), Product(rows, keys, values, batch), Product(keys, values, rows, batch),
            Product(rows, width, keys, batch), Product(keys, width, rows, batch),
        ]  # fmt: skip
    total = Cost(0.0, flops)
    for one in products:
        moved = ITEM_BYTES[query.dtype] * batch * (one.m * one.k + one.k * one.n + one.m * one.n)
        computed = 2 * batch * one.m * one.n * one.k
        total += Cost(rates.seconds("matmul", query.dtype, computed, moved, one), 0.0, round(moved))
    masked = len(inputs) > (6 if backward else 3)
    passes = dict(_PASSES[backward])
    passes["pointwise"] += 2 * causal + 2 * masked + _CAST[backward] * (ITEM_BYTES[query.dtype] == 2)
    if dropout:
        passes["pointwise"] += _DROPOUT[backward]
        passes["random"] = 1.0
    for name, times in passes.items():
        total += rates.stream(name, times * _scores_bytes(query, keys))
    total += Cost((_KERNELS[backward] - len(passes)) * rates.kernel_s)
    return total + rates.stream("copy", 2 * (2 if backward else 1) * (query.num_bytes + value.num_bytes))


def attention_scratch_bytes(rates: Rates, operator: Operator, inputs: Sequence[Operand]) -> int:
    """The memory of the scores, while it runs; none of fused attention."""
    backward, dropout, _ = _call(operator)
    query, key, value = inputs[backward : backward + 3]
    if _fused(rates, query, value, dropout):
        return 0
    return (_HELD[backward] + bool(dropout)) * _scores_bytes(query, key.shape[2])


def _call(operator: Operator) -> tuple[bool, float, bool]:
    """Whether it is the backward pass, its dropout, and whether it is causal (signatures: ``ops/library.py``)."""
    backward = operator.target.startswith("meshwright.attention_backward")
    words = operator.arguments.split(", ")
    at = 7 if backward else 4
    if len(words) <= at + 1:  # a graph without arguments
        return backward, 0.0, False
    return backward, float(words[at]), words[at + 1] == "True"


def _fused(rates: Rates, query: Operand, value: Operand, dropout: float) -> bool:
    return fused_attention(rates.device.kind == "cpu", query.dtype, dropout, query.shape[-1] == value.shape[-1])


def _scores_bytes(query: Operand, keys: int) -> int:
    return prod(query.shape[:3]) * keys * max(4, ITEM_BYTES[query.dtype])
