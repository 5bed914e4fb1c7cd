"""Halo exchange and its adjoint between the ranks of a group; each rank holds a part of one dim (``ops.collectives``).

Each rank knows which rows every part reads. So it knows which rows it sends to, and receives from, every other rank. A
part that is thinner than the halo has more than two neighbours.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import UnderWay
from meshwright.ir.halo import Rows, fetched, given, outside, overlap, owned


class HaloPart(NamedTuple):
    """Part ``number`` of a dim that is cut at ``edges``. ``ranges`` holds the rows that each part reads."""

    dim: int
    ranges: Sequence[Rows]
    edges: Sequence[int]
    number: int


def exchange(value: Tensor, part: HaloPart, group: dist.ProcessGroup, fill: float) -> tuple[Tensor, UnderWay]:
    """Start to fetch the rows that this part reads but other parts own. Returns these rows (the strips) and the work to
    wait for. The strips are complete after the wait. Rows that no part owns hold ``fill``."""
    dim, ranges, edges, number = part
    own = owned(edges, number)
    before, after = outside(ranges[number], own)
    shape = list(value.shape)
    shape[dim] = before[1] - before[0] + after[1] - after[0]
    result = value.new_full(shape, fill)
    sent = [(other, value.narrow(dim, low - own[0], high - low)) for other, (low, high) in given(ranges, edges, number)]
    places = []
    for other, (low, high) in fetched(ranges, edges, number):
        at = low - before[0] if low < own[0] else low - after[0] + before[1] - before[0]
        places.append((other, result.narrow(dim, at, high - low)))
    return result, _start(sent, places, group, Tensor.copy_)


def reduce(value: Tensor, part: HaloPart, group: dist.ProcessGroup) -> tuple[Tensor, UnderWay]:
    """Start to sum rows over the parts: the owner of a row adds up all terms. ``value`` holds this part's terms for all
    rows that it reads. Returns this part's own rows and the work to wait for."""
    dim, ranges, edges, number = part
    own, low = owned(edges, number), ranges[number][0]
    shape = list(value.shape)
    shape[dim] = own[1] - own[0]
    result = value.new_zeros(shape)
    kept = overlap(ranges[number], own)
    if kept[0] < kept[1]:
        count = kept[1] - kept[0]
        result.narrow(dim, kept[0] - own[0], count).copy_(value.narrow(dim, kept[0] - low, count))
    sent = [(other, value.narrow(dim, a - low, b - a)) for other, (a, b) in fetched(ranges, edges, number)]
    places = [(other, result.narrow(dim, a - own[0], b - a)) for other, (a, b) in given(ranges, edges, number)]
    return result, _start(sent, places, group, Tensor.add_)


def give_back(strips: Tensor, part: HaloPart, group: dist.ProcessGroup) -> tuple[Tensor, UnderWay]:
    """Start to send ``strips``, the values for the rows before and after this part's own rows, to the owners of these
    rows. Returns the received values and the work to wait for. The values for this part's first rows come first, then
    the values for its last rows. Values are zero where the part has no neighbour."""
    dim, ranges, edges, number = part
    first, last = owned(edges, number)
    before, after = outside(ranges[number], (first, last))
    count, more = before[1] - before[0], after[1] - after[0]
    result = torch.zeros_like(strips)
    sent = [
        (other, strips.narrow(dim, low - before[0] if low < first else low - last + count, high - low))
        for other, (low, high) in fetched(ranges, edges, number)
    ]
    places = [
        (other, result.narrow(dim, low - first if other < number else low - last + count + more, high - low))
        for other, (low, high) in given(ranges, edges, number)
    ]
    return result, _start(sent, places, group, Tensor.copy_)


def _start(
    sent: list[tuple[int, Tensor]],
    places: list[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    put: Callable[[Tensor, Tensor], object],
) -> UnderWay:
    gone = [(other, rows.contiguous()) for other, rows in sent]
    come = [(other, torch.empty_like(place, memory_format=torch.contiguous_format)) for other, place in places]
    messages = [
        dist.P2POp(call, sendable(rows), group=group, group_peer=other)
        for call, strips in ((dist.isend, gone), (dist.irecv, come))
        for other, rows in strips
    ]

    def finish() -> None:
        for (_, place), (_, rows) in zip(places, come, strict=True):
            put(place, rows)

    works = dist.batch_isend_irecv(messages) if messages else []
    kept = [rows for _, rows in (*gone, *come)]
    return UnderWay(finish, *kept, works=works, num_bytes=sum(rows.nbytes for _, rows in come))


def sendable(value: Tensor) -> Tensor:
    """``value``, or a view of it as bytes if its dtype cannot be sent."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value
