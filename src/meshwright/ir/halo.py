"""Halos: the rows of a split dim that a rank's operator reads outside the rank's part, and the parts that own them.

rows        0 1 2 3 | 4 5 6 7 | 8 9 10 11      three parts of a dim, edges 0 4 8 12; windows of 3 rows, padding 1
part 1            3 [ 4 5 6 7 ] 8              reads (3, 9): row 3 comes from part 0, row 8 from part 2
part 0         -1 [ 0 1 2 3 ] 4                reads (-1, 5): row -1 is padding
"""

from collections.abc import Sequence
from itertools import pairwise

Rows = tuple[int, int]
"""A range of rows: from the first number up to, but not including, the second."""


def window_ranges(edges: Sequence[int], *, stride: int, window: int, padding: int) -> tuple[Rows, ...]:
    """The rows that each part of the windows reads. They may include padding before the first row or after the last.

    Window ``o`` (for a convolution, the rows that output row ``o`` reads) begins at row ``o * stride - padding`` and is
    ``window`` rows long. ``edges`` are the bounds of the parts, in numbers of windows."""
    result = []
    for first, end in pairwise(edges):
        low = first * stride - padding
        result.append((low, low + (end - first - 1) * stride + window if end > first else low))
    return tuple(result)


def overlap(first: Rows, second: Rows) -> Rows:
    """The rows that are in both ranges. If there are none, the second bound is not above the first."""
    return max(first[0], second[0]), min(first[1], second[1])


def owned(edges: Sequence[int], part: int) -> Rows:
    """The rows that a part owns."""
    return edges[part], edges[part + 1]


def outside(rows: Rows, own: Rows) -> tuple[Rows, Rows]:
    """Two ranges: the part of ``rows`` before the rows ``own``, and the part after them. Each may be empty."""
    low, high = rows
    return (low, max(low, min(high, own[0]))), (min(high, max(low, own[1])), high)


def fetched(ranges: Sequence[Rows], edges: Sequence[int], part: int) -> list[tuple[int, Rows]]:
    """The rows that a part gets from other parts, as pairs (other part, rows) in order of rows."""
    overlaps = [(other, overlap(ranges[part], owned(edges, other))) for other in range(len(ranges)) if other != part]
    return [(other, each) for other, each in overlaps if each[0] < each[1]]


def given(ranges: Sequence[Rows], edges: Sequence[int], part: int) -> list[tuple[int, Rows]]:
    """The rows that a part gives to other parts, as pairs (other part, rows)."""
    overlaps = [(other, overlap(ranges[other], owned(edges, part))) for other in range(len(ranges)) if other != part]
    return [(other, each) for other, each in overlaps if each[0] < each[1]]


def most_rows(ranges: Sequence[Rows], edges: Sequence[int]) -> int:
    """The largest number of rows that a part gets from other parts."""
    return max(sum(high - low for _, (low, high) in fetched(ranges, edges, part)) for part in range(len(ranges)))
