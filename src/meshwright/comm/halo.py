"""Halo exchange between the ranks of a group, each with its part of one dim, and its adjoint (``ops.collectives``).

Each rank knows from the ranges which rows it sends to whom and receives from whom; shards that are thinner than the
halo have more neighbours than two.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir.halo import Rows, fetched, given, outside, overlap, owned


class Transfers:
    """Messages that are under way, and what is done with what comes; ``num_bytes`` are received."""

    def __init__(self, works: Iterable[dist.Work], num_bytes: int, finish: Callable[[], None]) -> None:
        self._works, self.num_bytes, self._finish = works, num_bytes, finish

    def wait(self) -> None:
        """Until all has come, and is in place."""
        for work in self._works:
            work.wait()
        self._finish()


def exchange(
    value: Tensor,
    dim: int,
    ranges: Sequence[Rows],
    edges: Sequence[int],
    fill: float,
    group: dist.ProcessGroup,
    part: int,
) -> tuple[Tensor, Transfers]:
    """Start to get the rows of ``ranges[part]`` that other parts have: they and the filled ones, once waited for."""
    own = owned(edges, part)
    before, after = outside(ranges[part], own)
    shape = list(value.shape)
    shape[dim] = before[1] - before[0] + after[1] - after[0]
    result = value.new_full(shape, fill)
    sent = [(other, value.narrow(dim, low - own[0], high - low)) for other, (low, high) in given(ranges, edges, part)]
    places = []
    for other, (low, high) in fetched(ranges, edges, part):
        at = low - before[0] if low < own[0] else low - after[0] + before[1] - before[0]
        places.append((other, result.narrow(dim, at, high - low)))
    return result, _start(sent, places, group, lambda place, come: place.copy_(come))


def reduce(
    value: Tensor, dim: int, ranges: Sequence[Rows], edges: Sequence[int], group: dist.ProcessGroup, part: int
) -> tuple[Tensor, Transfers]:
    """Start to add up, at their owners, the rows of all parts' ranges, which ``value`` has of this part's."""
    own, low = owned(edges, part), ranges[part][0]
    shape = list(value.shape)
    shape[dim] = own[1] - own[0]
    result = value.new_zeros(shape)
    kept = overlap(ranges[part], own)
    if kept[0] < kept[1]:
        count = kept[1] - kept[0]
        result.narrow(dim, kept[0] - own[0], count).copy_(value.narrow(dim, kept[0] - low, count))
    sent = [(other, value.narrow(dim, a - low, b - a)) for other, (a, b) in fetched(ranges, edges, part)]
    places = [(other, result.narrow(dim, a - own[0], b - a)) for other, (a, b) in given(ranges, edges, part)]
    return result, _start(sent, places, group, lambda place, come: place.add_(come))


def give_back(
    strips: Tensor, dim: int, ranges: tuple[Rows, ...], edges: list[int], group: dist.ProcessGroup, part: int
) -> tuple[Tensor, Transfers]:
    """Start to send ``strips``, the rows before and after one's own, to their owners. What comes is for one's first
    rows, then for one's last (zeros where there is no neighbour)."""
    first, last = owned(edges, part)
    before, after = outside(ranges[part], (first, last))
    count, more = before[1] - before[0], after[1] - after[0]
    result = torch.zeros_like(strips)
    sent = [
        (other, strips.narrow(dim, low - before[0] if low < first else low - last + count, high - low))
        for other, (low, high) in fetched(ranges, edges, part)
    ]
    places = [
        (other, result.narrow(dim, low - first if other < part else low - last + count + more, high - low))
        for other, (low, high) in given(ranges, edges, part)
    ]
    return result, _start(sent, places, group, lambda place, come: place.copy_(come))


def _start(
    sent: list[tuple[int, Tensor]],
    places: list[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    put: Callable[[Tensor, Tensor], object],
) -> Transfers:
    come = [torch.empty_like(place, memory_format=torch.contiguous_format) for _, place in places]
    gone = [rows.contiguous() for _, rows in sent]
    messages = [
        dist.P2POp(dist.isend, _bytes(rows), group=group, group_peer=other)
        for (other, _), rows in zip(sent, gone, strict=True)
    ]
    messages += [
        dist.P2POp(dist.irecv, _bytes(rows), group=group, group_peer=other)
        for (other, _), rows in zip(places, come, strict=True)
    ]

    def finish() -> None:
        for (_, place), rows in zip(places, come, strict=True):
            put(place, rows)
        gone.clear()

    works = dist.batch_isend_irecv(messages) if messages else []
    return Transfers(works, sum(rows.nbytes for rows in come), finish)


def _bytes(value: Tensor) -> Tensor:
    """What can be sent in place of a tensor whose dtype cannot."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value
