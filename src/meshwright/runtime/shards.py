"""This rank's parts of tensors, as chunks of whole tensors, and which of them this rank writes.

A rank's part is not always one block of the whole. GPT-2's fused weight ``[k, (3 h d)]``, split by heads over two
ranks, is ``Shard(1, outer=3)``: each rank holds three blocks side by side. DTensor cannot express this placement. So
each part is a list of chunks. A chunk has a place in the whole and a place in the part:

    whole    q0 q1 | k0 k1 | v0 v1        rank 0 holds q0 k0 v0, at 0, 2 and 4 of the whole

A Flat part is a range of elements in row-major order. Its chunks are the end of a row, whole rows, and the beginning of
a row.

Ranks that hold equal parts (replicas) write each byte once. Which of them writes which byte follows from the layout, so
ranks plan a save without a message. All functions here are pure, and their results are kept for the next save.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.ir.mesh import AxisGroup, members, sizes_of
from meshwright.ir.placement import (
    Placement,
    Placements,
    Shard,
    flat_axis,
    flat_shape,
    is_split,
    local_shape,
    unflattened,
)
from meshwright.lower.reshard import local_part
from meshwright.runtime.state import LocalParameters

CHUNK_BYTES = 16 * 2**20
"""Largest size of a saved chunk. A load needs memory for one chunk besides its parts."""
SHARED_BYTES = 2**20
"""Replicas share the writing of a chunk from this size on. One of them writes a smaller chunk."""


@dataclass(frozen=True)
class Chunk:
    """A block of a whole tensor that this rank holds. ``offsets`` is its place in the whole tensor, and ``starts`` its
    place in this rank's part."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def common_block(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """The common part of two blocks of a tensor: its begin in the first block, its begin in the other block, and its
    sizes. None if the blocks have no element in common."""
    begins = [max(first, other) for first, other in zip(offsets, other_offsets, strict=True)]
    ends = [
        min(first + size, other + length)
        for first, size, other, length in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    ]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return None
    return (
        tuple(begin - first for begin, first in zip(begins, offsets, strict=True)),
        tuple(begin - other for begin, other in zip(begins, other_offsets, strict=True)),
        tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
    )


@dataclass(frozen=True)
class StoredPart:
    """This rank's part of a whole tensor of ``shape``.

    If one axis has a Flat placement, the other axes first cut the whole tensor to a tensor of shape ``local``. The part
    is then a range of the elements of that tensor, from element number ``flat_from`` on. The ``starts`` of the part's
    chunks are positions in that tensor. ``flat_from`` is -1 without a Flat placement.

    ``replica`` is (index, count): ``count`` ranks hold an equal part, and this rank is number ``index`` of them.
    ``written_here`` is False if ranks of another stage write the tensor.
    """

    value: Tensor
    shape: tuple[int, ...]
    chunks: list[Chunk]
    local: tuple[int, ...] = ()
    flat_from: int = -1
    replica: tuple[int, int] = (0, 1)
    written_here: bool = True

    def own_chunks(self, name: str) -> tuple[Chunk, ...]:
        """The chunks that this rank writes, none of them larger than ``CHUNK_BYTES``."""
        if not self.written_here:
            return ()
        return _own_chunks(tuple(self.chunks), self.replica, self.value.element_size(), name)

    def view(self, chunk: Chunk) -> Tensor:
        """Return a view of the chunk's elements."""
        value = self.value.detach()
        if self.flat_from >= 0:
            strides = [math.prod(self.local[dim + 1 :]) for dim in range(len(self.local))]
            begin = sum(start * stride for start, stride in zip(chunk.starts, strides, strict=True)) - self.flat_from
            return value.view(-1).as_strided(chunk.sizes, strides, value.storage_offset() + begin)
        return block(value, chunk.starts, chunk.sizes)


def block(value: Tensor, starts: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A view of a block of a tensor."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        value = value.narrow(dim, start, size)
    return value


def chunks_of(shape: tuple[int, ...], placements: Placements, groups: dict[str, AxisGroup]) -> list[Chunk]:
    """Return the fewest blocks of a whole tensor that together form this rank's part, without Flat placements.

    ``local_part``, which also cuts the parameters, determines which indices of a dim this rank holds.
    """
    ranges = []
    for dim, size in enumerate(shape):
        here: Placements = {
            axis: Shard(0, placement.outer, placement.unit)
            for axis, placement in placements.items()
            if isinstance(placement, Shard) and placement.dim == dim
        }
        whole = [(0, 0, size)] if size else []
        ranges.append(_runs(local_part(torch.arange(size), here, groups).tolist()) if here else whole)
    boxes = itertools.product(*ranges)
    return [
        Chunk(
            offsets=tuple(offset for offset, _, _ in box),
            starts=tuple(start for _, start, _ in box),
            sizes=tuple(size for _, _, size in box),
        )
        for box in boxes
    ]


def part_of(parameters: LocalParameters, name: str, value: Tensor) -> StoredPart:
    """Return ``value`` as a ``StoredPart`` that is split like the parameter or buffer ``name``."""
    known = parameters.parts.get(name)
    if known is None:
        placements, shape = parameters.placements(name), parameters.global_shape(name)
        part = part_at(value, shape, placements, parameters.groups, written_here=parameters.counts(name))
        known = shape, part.chunks, part.local, part.flat_from, part.replica, part.written_here
        parameters.parts[name] = known
    return StoredPart(value, *known)


def part_at(
    value: Tensor,
    shape: tuple[int, ...],
    placements: Placements,
    groups: dict[str, AxisGroup],
    *,
    unlike: Iterable[str] = (),
    written_here: bool = True,
) -> StoredPart:
    """Return ``value`` as this rank's part of a tensor of ``shape`` with these placements. ``unlike``: axes along which
    ranks hold tensors of other names, not replicas."""
    chunks, local, flat_from = _places(shape, tuple(placements.items()), tuple(groups.items()))
    replica = replica_of(placements, groups, unlike)
    return StoredPart(value, shape, chunks, local, flat_from, replica, written_here)


def replica_of(placements: Placements, groups: dict[str, AxisGroup], unlike: Iterable[str] = ()) -> tuple[int, int]:
    """(index, count) of this rank among the ranks that hold an equal part: those along the axes that do not split."""
    index, count = 0, 1
    for axis, group in groups.items():
        if axis != "pp" and len(members(axis)) == 1 and axis not in unlike and not is_split(placements.get(axis)):
            index, count = index * group.size + group.index, count * group.size
    return index, count


@functools.lru_cache(maxsize=2**16)
def _places(
    shape: tuple[int, ...], placed: tuple[tuple[str, Placement], ...], grouped: tuple[tuple[str, AxisGroup], ...]
) -> tuple[list[Chunk], tuple[int, ...], int]:
    """The fields ``chunks``, ``local`` and ``flat_from`` of a part."""
    placements, groups = dict(placed), dict(grouped)
    chunks = chunks_of(shape, unflattened(placements), groups)
    axis = flat_axis(placements)
    if not axis:
        return chunks, (), -1
    axis_sizes, at = sizes_of(groups)
    local = local_shape(shape, unflattened(placements), axis_sizes, at)
    size = math.prod(flat_shape(local, groups[axis].size))
    begin = groups[axis].index * size
    boxes = boxes_of(local, min(begin, math.prod(local)), min(begin + size, math.prod(local)))
    return [cut for chunk in chunks for box in boxes if (cut := _within(chunk, box))], local, begin


@functools.lru_cache(maxsize=2**16)
def _own_chunks(
    chunks: tuple[Chunk, ...], replica: tuple[int, int], element_bytes: int, name: str
) -> tuple[Chunk, ...]:
    index, count = replica
    own: list[Chunk] = []
    for chunk in chunks:
        dim, rows, row_bytes = _rows(chunk, element_bytes)
        if count == 1:
            own += cut_chunk(chunk, element_bytes)
        elif rows * row_bytes >= SHARED_BYTES and rows >= count:
            begin, end = rows * index // count, rows * (index + 1) // count
            own += cut_chunk(_rows_of(chunk, dim, begin, end), element_bytes)
        elif zlib.crc32(name.encode()) % count == index:
            own += cut_chunk(chunk, element_bytes)
    return tuple(own)


def cut_chunk(chunk: Chunk, element_bytes: int, limit: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut a chunk into chunks of at most ``limit`` bytes: rows of its first dim, and so on."""
    dim, rows, row_bytes = _rows(chunk, element_bytes)
    if rows * row_bytes <= limit or rows == 1:
        return [chunk]
    each = max(1, limit // row_bytes)
    parts = [_rows_of(chunk, dim, begin, min(begin + each, rows)) for begin in range(0, rows, each)]
    return [small for part in parts for small in cut_chunk(part, element_bytes, limit)]


def _rows(chunk: Chunk, element_bytes: int) -> tuple[int, int, int]:
    """The first dim of a chunk that has more than one index, how many it has, and the bytes of each."""
    dim = next((dim for dim, size in enumerate(chunk.sizes) if size > 1), 0)
    rows = chunk.sizes[dim] if chunk.sizes else 1
    return dim, rows, math.prod(chunk.sizes) * element_bytes // max(rows, 1)


def _rows_of(chunk: Chunk, dim: int, begin: int, end: int) -> Chunk:
    def moved(places: tuple[int, ...], by: int) -> tuple[int, ...]:
        return (*places[:dim], places[dim] + by, *places[dim + 1 :])

    sizes = (*chunk.sizes[:dim], end - begin, *chunk.sizes[dim + 1 :])
    return Chunk(moved(chunk.offsets, begin), moved(chunk.starts, begin), sizes)


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, int], ...]]:
    """Cover elements ``begin`` to ``end`` of a tensor, in row-major order, with boxes: (start, size) for every dim."""
    if begin >= end:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        return [((last, 1), *box) for box in boxes_of(shape[1:], begin - last * row, end - last * row)]
    before = boxes_of(shape[1:], begin - (first - 1) * row, row) if begin % row else []
    after = boxes_of(shape[1:], 0, end - last * row)
    whole = [((first, last - first), *((0, size) for size in shape[1:]))] if last > first else []
    return [*(((first - 1, 1), *box) for box in before), *whole, *(((last, 1), *box) for box in after)]


def _within(chunk: Chunk, box: tuple[tuple[int, int], ...]) -> Chunk | None:
    """The part of a chunk that lies in a box; None if they do not overlap."""
    starts = tuple(max(start, begin) for start, (begin, _) in zip(chunk.starts, box, strict=True))
    ends = tuple(
        min(start + size, begin + length)
        for start, size, (begin, length) in zip(chunk.starts, chunk.sizes, box, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if any(size <= 0 for size in sizes):
        return None
    offsets = tuple(
        offset + start - first for offset, start, first in zip(chunk.offsets, starts, chunk.starts, strict=True)
    )
    return Chunk(offsets, starts, sizes)


def _runs(indices: list[int]) -> list[tuple[int, int, int]]:
    """Group rising indices into runs of consecutive indices. A run is (first index, its position, length)."""
    breaks = [place for place in range(1, len(indices)) if indices[place] != indices[place - 1] + 1]
    ends = [*breaks, len(indices)]
    return [(indices[start], start, end - start) for start, end in zip([0, *breaks], ends, strict=True) if end > start]
