"""Attention over a ring of ranks: each rank keeps its queries, while keys and values move around the ring.

    step     rank 0        rank 1        rank 2          (queries, keys); causal: those in brackets are skipped
    0        q0 k0         q1 k1         q2 k2
    1       (q0 k2)        q1 k0         q2 k1           keys and values move on by one rank while a step computes
    2       (q0 k1)       (q1 k2)        q2 k0

The outputs of the steps are merged by their log-sum-exp. The gradients of keys and values travel with them and end on
the ranks that own them (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023).

Under a causal mask the first ranks would have less work and wait for the last ranks. Therefore, while the ring runs,
each rank works on an early and a late half part of the sequence ("zigzag"; Brandon et al., "Striped Attention", 2023,
use stripes instead). All ranks then have equal work in every step:

    rank     owns     takes    own keys     keys of earlier ranks         keys of later ranks
    0        0 1      0 5      causal       all queries, early keys       late queries, all keys
    1        2 3      1 4
    2        4 5      2 3

The two exchanges of halves, before and after the ring, cost about as much as two steps of the ring. With a window,
ranks keep their own parts: the ring ends as soon as no query of any rank sees the next keys.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.ops import collectives
from meshwright.ops.attention_kernels import QUERY, RESULTS, SETTINGS
from meshwright.ops.library import define

ours = torch.ops.meshwright

Shift = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to send a tensor to the next rank of the ring; the returned function waits for the previous rank's tensor."""
Permute = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
"""Sends each row of a tensor to the rank that is named for it, and returns a row from each rank in the second list."""


@dataclass(frozen=True)
class RingSlices:
    """The queries (``rows``) and keys (``columns``) on this rank that one step uses, as slices along the sequence, and
    which of the keys the queries see."""

    mask: Tensor | None = None
    causal: bool = False
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    window: int = 0
    first: int = 0


@dataclass(frozen=True)
class Ring:
    """A rank's place in the ring. ``row`` is the position of the rank's first query in the sequence. ``balanced`` says
    that each rank takes an early and a late half part of the sequence. ``window`` is the number of keys that a query
    sees at most (0: no limit)."""

    shift: Shift
    index: int
    size: int
    row: int
    balanced: bool
    window: int = 0

    def moving(self, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Return the tensors that move around the ring: keys, values, and the mask if it is split like the keys."""
        travels = mask is not None and mask.shape[-1] == key.shape[2]
        return [key, value, mask] if travels and mask is not None else [key, value]

    def source(self, step: int) -> int:
        """Return the index of the rank whose keys and values are on this rank in a step."""
        return (self.index - step) % self.size

    def part(self, step: int, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> RingSlices | None:
        """Return the queries and keys that a step uses. Return None if no query may see any of the keys."""
        rows, columns = query.shape[2], key.shape[2]
        if self.balanced:
            half, source = rows // 2, self.source(step)
            if source == self.index:
                return RingSlices(causal=True)
            return RingSlices(columns=slice(0, half)) if source < self.index else RingSlices(rows=slice(half, rows))
        column = self.source(step) * columns
        if not causal:
            whole = mask is not None and mask.shape[-1] == columns * self.size
            return RingSlices(mask.narrow(-1, column, columns) if whole and mask is not None else mask)
        last = self.row + rows - 1
        if column > last or (self.window and column + columns <= self.row - self.window + 1):
            return None
        if column + columns - 1 <= self.row and not 0 < self.window <= last - column:
            return RingSlices()
        return RingSlices(causal=True, window=self.window, first=self.row - column)

    def positions(self, index: int, first: int, rows: int) -> list[int]:
        """The positions in the sequence of the ``rows`` queries or keys of the rank ``index``: of the first of each
        half part in a balanced ring, and else of the first, which is ``first``."""
        return [half * (rows // 2) for half in self.takes(index)] if self.balanced else [first]

    def drawn(self, step: int, part: "RingSlices", query: Tensor, key: Tensor) -> tuple[list[int], list[int]]:
        """The first positions of the queries, and those of the keys, of the ranges that a step uses."""
        source, (rows, columns) = self.source(step), (query.shape[2], key.shape[2])
        late, early = part.rows.start is not None, part.columns.stop is not None
        queries = self.positions(self.index, self.row, rows)
        keys = self.positions(source, source * columns, columns)
        return queries[1:] if late else queries, keys[:1] if early else keys

    def takes(self, rank: int) -> tuple[int, int]:
        """Return the indices of the two half parts of the sequence that a rank works on in a balanced ring."""
        return rank, 2 * self.size - 1 - rank

    def swapped(self, permute: Permute, values: Sequence[Tensor], *, back: bool = False) -> list[Tensor]:
        """Exchange the halves that this rank owns for the halves that it takes; with ``back``, do the reverse. The
        ``values`` are tensors [b, h, s, d] of one dtype."""

        def holder(half: int, mirrored: bool) -> int:
            return min(half, 2 * self.size - 1 - half) if mirrored else half // 2

        own = (2 * self.index, 2 * self.index + 1)
        have, want = (self.takes(self.index), own) if back else (own, self.takes(self.index))
        goes = [holder(half, mirrored=not back) for half in have]
        comes = [holder(half, mirrored=back) for half in want]
        rows = torch.cat([tensor.unflatten(2, (2, -1)).movedim(2, 0).reshape(2, -1) for tensor in values], 1)
        received = permute(rows, goes, comes)
        del rows
        result = []
        for tensor, flat in zip(values, received.split([tensor.numel() // 2 for tensor in values], 1), strict=True):
            batch, heads, length, width = tensor.shape
            halves = flat.reshape(2, batch, heads, length // 2, width)
            result.append(halves.movedim(0, 2).reshape(batch, heads, length, width))
        return result

    def returned(self, permute: Permute, values: Sequence[Tensor], steps: int) -> list[Tensor]:
        """Send tensors that moved on by ``steps`` ranks back to the ranks that own them."""
        if steps % self.size == 0:
            return list(values)
        goes, comes = [(self.index - steps) % self.size], [(self.index + steps) % self.size]
        return [permute(value.unsqueeze(0), goes, comes).squeeze(0) for value in values]


def num_steps(rows: int, columns: int, size: int, index: int, row: int, window: int) -> int:
    """The number of steps after which all queries of all ranks have met the keys that they see. ``rows`` and
    ``columns`` are the numbers of queries and keys of a rank; the other arguments are those of ``Ring``."""
    if not window or rows != columns or row != index * columns:
        return size
    return min(size, 1 + -(-(window - 1) // columns))


def forward(
    shift: Shift, permute: Permute, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float,
    causal: bool, scale: float, random_key: int, salt: int, window: int, row: int, algorithm: str, sizes: Sequence[int],
    begins: Sequence[int], lengths: Sequence[int], time: int, index: int, balanced: bool, *, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of this rank's queries [b, h, s, d] with the keys and values of all ranks. ``key`` and
    ``value`` are this rank's parts."""
    ring = Ring(shift, index, size, row, balanced, window)
    if balanced:
        query, key, value = ring.swapped(permute, (query, key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    total = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
    logsumexp = query.new_full(query.shape[:3], -math.inf, dtype=wide)
    steps = num_steps(query.shape[2], key.shape[2], size, index, row, window)

    def merge(step: int, part: RingSlices) -> None:  # a function, so that nothing outlives its step
        settings = (dropout, part.causal, scale, random_key, salt, part.window, part.first, algorithm)
        place = (sizes, begins, lengths, time, *ring.drawn(step, part, query, key)) if dropout else ()
        keys, values = key[:, :, part.columns], value[:, :, part.columns]
        output, own = ours.attention(query[:, :, part.rows], keys, values, part.mask, *settings, *place)
        before, into = logsumexp[:, :, part.rows], total[:, :, part.rows]
        merged = torch.logaddexp(before, own)
        finite = merged.masked_fill(merged == -math.inf, 0.0)  # a query without any allowed key has the output zero
        into.mul_((before - finite).exp_().unsqueeze(-1))
        into.add_(output * (own - finite).exp_().unsqueeze(-1))
        before.copy_(merged)

    for step in range(steps):
        coming = [shift(tensor) for tensor in ring.moving(key, value, mask)] if step + 1 < steps else []
        part = ring.part(step, query, key, mask, causal)
        if part is not None:
            merge(step, part)
        if coming:
            key, value, *rest = (finish() for finish in coming)
            mask = rest[0] if rest else mask
    output = total.to(query.dtype)
    if balanced:
        (output,) = ring.swapped(permute, (output,), back=True)
        logsumexp = ring.swapped(permute, (logsumexp.unsqueeze(-1),), back=True)[0].squeeze(-1)
    return output, logsumexp


def backward(
    shift: Shift, permute: Permute, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    output: Tensor, logsumexp: Tensor, dropout: float, causal: bool, scale: float, random_key: int, salt: int,
    window: int, row: int, algorithm: str, sizes: Sequence[int], begins: Sequence[int], lengths: Sequence[int],
    time: int, index: int, balanced: bool, *, size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of this rank's queries, keys and values."""
    ring = Ring(shift, index, size, row, balanced, window)
    if balanced:
        grad, query, key, value, output = ring.swapped(permute, (grad, query, key, value, output))
        logsumexp = ring.swapped(permute, (logsumexp.unsqueeze(-1),))[0].squeeze(-1)
    grads = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    steps = num_steps(query.shape[2], key.shape[2], size, index, row, window)

    def add(step: int, part: RingSlices) -> None:
        settings = (dropout, part.causal, scale, random_key, salt, part.window, part.first, algorithm)
        place = (sizes, begins, lengths, time, *ring.drawn(step, part, query, key)) if dropout else ()
        rows, columns = part.rows, part.columns
        parts = ours.attention_backward(
            grad[:, :, rows], query[:, :, rows], key[:, :, columns], value[:, :, columns], part.mask,
            output[:, :, rows], logsumexp[:, :, rows], *settings, *place,
        )  # fmt: skip
        for total, term, within in zip(grads, parts, (rows, columns, columns), strict=True):
            total[:, :, within].add_(term)

    for step in range(steps):
        coming = [shift(tensor) for tensor in ring.moving(key, value, mask)] if step + 1 < steps else []
        part = ring.part(step, query, key, mask, causal)
        if part is not None:
            add(step, part)
        if step + 1 < steps or steps == size:  # after as many steps as ranks, gradients are where they belong
            going = [shift(total) for total in grads[1:]]
            grads[1:] = [finish() for finish in going]
        if coming:
            key, value, *rest = (finish() for finish in coming)
            mask = rest[0] if rest else mask
    grads[1:] = ring.returned(permute, grads[1:], steps - 1 if steps < size else size)
    if balanced:
        grads = ring.swapped(permute, grads, back=True)
    return grads[0], grads[1], grads[2]


def _round(group: str, size: int) -> Shift:
    def shift(value: Tensor) -> Callable[[], Tensor]:
        started = collectives.SHIFT(value, group, size)
        return lambda: collectives.WAIT(started)

    return shift


def _rows(group: str) -> Permute:
    return lambda rows, goes, comes: collectives.WAIT(collectives.PERMUTE(rows, goes, comes, group))


def _over_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of ``forward`` or ``backward`` whose last arguments are the ring's group and its size."""

    def kernel(*values: Any) -> Any:
        *given, group, size = values
        return function(_round(group, size), _rows(group), *given, size=size)

    return kernel


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    statistics = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=statistics)


def _shapes(grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(value, memory_format=torch.contiguous_format) for value in values[:3])


_SETTINGS = (
    f"{SETTINGS}, SymInt window, SymInt row, str algorithm, int[] sizes, int[] begins, int[] lengths, int time, "
    "SymInt index, bool balanced, str group, SymInt size"
)
define(f"attention_ring({QUERY}, {_SETTINGS}) -> (Tensor, Tensor)", _over_ranks(forward), _shape)
define(
    f"attention_ring_backward(Tensor grad, {QUERY}, {RESULTS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _over_ranks(backward),
    _shapes,
)
