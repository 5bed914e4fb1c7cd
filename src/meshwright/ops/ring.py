"""Attention over a ring of ranks: each keeps its queries, while keys and values go round.

    step     rank 0        rank 1        rank 2          (queries, keys); causal: those in brackets are skipped
    0        q0 k0         q1 k1         q2 k2
    1       (q0 k2)        q1 k0         q2 k1           keys and values move on by one rank while a step computes
    2       (q0 k1)       (q1 k2)        q2 k0

Parts are merged by their log-sum-exp; gradients of keys and values travel with them and end where they began (Liu,
Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.ops import collectives
from meshwright.ops.library import LIBRARY, mix

ours = torch.ops.meshwright

_SETTINGS = (
    "Tensor? mask, {more}float dropout, bool causal, float scale, SymInt random_key, SymInt salt, SymInt row,"
    " SymInt index, str group, SymInt size"
)
LIBRARY.define(
    f"attention_ring(Tensor query, Tensor key, Tensor value, {_SETTINGS.format(more='')}) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_ring_backward(Tensor grad, Tensor query, Tensor key, Tensor value, "
    f"{_SETTINGS.format(more='Tensor output, Tensor logsumexp, ')}) -> (Tensor, Tensor, Tensor)"
)

Shift = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to send a tensor to the next rank of the ring; what it returns waits for that of the rank before."""


@dataclass(frozen=True)
class Ring:
    """A rank's place: its number in the ring, the ring's size, and its first query's number in the sequence."""

    shift: Shift
    index: int
    size: int
    row: int

    def moving(self, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Tensor]:
        """What goes round: keys and values, and a mask of keys alone, which lies as they do."""
        travels = mask is not None and mask.shape[-1] == key.shape[2]
        return [key, value, mask] if travels and mask is not None else [key, value]

    def source(self, step: int) -> int:
        """Whose keys and values are here."""
        return (self.index - step) % self.size

    def mask(
        self, step: int, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[bool, Tensor | None, bool]:
        """(whether any query may see any of these keys, the mask of this part, whether it is just causal)."""
        rows, columns = query.shape[2], key.shape[2]
        column = self.source(step) * columns
        if not causal:
            whole = mask is not None and mask.shape[-1] == columns * self.size
            return True, mask.narrow(-1, column, columns) if whole and mask is not None else mask, False
        if column > self.row + rows - 1:
            return False, None, False
        if column == self.row:
            return True, None, True
        if column + columns - 1 <= self.row:
            return True, None, False
        every = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        return True, every.tril_(self.row - column), False


def forward(
    shift: Shift, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float, random_key: int, salt: int, row: int, index: int, *, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``attention`` of this rank's queries [b, h, s, d] and all ranks' keys and values, of which it has some."""
    ring = Ring(shift, index, size, row)
    wide = torch.promote_types(query.dtype, torch.float32)
    total = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
    every: Tensor | None = None
    for step in range(size):
        coming = [shift(one) for one in ring.moving(key, value, mask)] if step + 1 < size else []
        seen, part_mask, part_causal = ring.mask(step, query, key, mask, causal)
        if seen:
            settings = (dropout, part_causal, scale, random_key, mix(salt, ring.source(step)) if dropout else 0)
            output, own = ours.attention(query, key, value, part_mask, *settings)
            merged = own if every is None else torch.logaddexp(every, own)
            finite = merged.masked_fill(merged == -math.inf, 0.0)  # a query without any key: its output is zero
            if every is not None:
                total.mul_((every - finite).exp_().unsqueeze(-1))
            total.add_(output * (own - finite).exp_().unsqueeze(-1))
            every = merged
        if coming:
            key, value, *rest = (finish() for finish in coming)
            mask = rest[0] if rest else mask
    assert every is not None
    return total.to(query.dtype), every


def backward(
    shift: Shift, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor,
    logsumexp: Tensor, dropout: float, causal: bool, scale: float, random_key: int, salt: int, row: int, index: int,
    *, size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of this rank's queries, keys and values."""
    ring = Ring(shift, index, size, row)
    grads = [torch.zeros_like(one, memory_format=torch.contiguous_format) for one in (query, key, value)]
    for step in range(size):
        coming = [shift(one) for one in ring.moving(key, value, mask)] if step + 1 < size else []
        seen, part_mask, part_causal = ring.mask(step, query, key, mask, causal)
        if seen:
            settings = (dropout, part_causal, scale, random_key, mix(salt, ring.source(step)) if dropout else 0)
            parts = ours.attention_backward(grad, query, key, value, part_mask, output, logsumexp, *settings)
            for one, part in zip(grads, parts, strict=True):
                one.add_(part)
        going = [shift(one) for one in grads[1:]]
        grads[1:] = [finish() for finish in going]
        if coming:
            key, value, *rest = (finish() for finish in coming)
            mask = rest[0] if rest else mask
    return grads[0], grads[1], grads[2]


def _round(group: str, size: int) -> Shift:
    def shift(value: Tensor) -> Callable[[], Tensor]:
        started = collectives.SHIFT(value, group, size)
        return lambda: collectives.WAIT(started)

    return shift


def _forward(*values: Any) -> Any:
    *given, group, size = values
    return forward(_round(group, size), *given, size=size)


def _backward(*values: Any) -> Any:
    *given, group, size = values
    return backward(_round(group, size), *given, size=size)


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    statistics = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=statistics)


def _shapes(grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in values[:3])


for _name, _kernel, _fake in (
    ("attention_ring", _forward, _shape),
    ("attention_ring_backward", _backward, _shapes),
):
    LIBRARY.impl(_name, _kernel, "CPU")
    LIBRARY.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"meshwright::{_name}", _fake, lib=LIBRARY)
