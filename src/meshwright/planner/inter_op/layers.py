"""Group a chain of operators into layers. Stages are made from layers.

Stages are cut only between layers, so fewer layers make the search for stages faster. The goal is that of Alpa's
operator clustering (Zheng et al., OSDI 2022, section 5.2): little communication between layers of similar work.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 0.5
"""Fraction by which the work of a layer may exceed the mean work of a layer."""
RELAXED = 1.25
"""Factor by which the limit on a layer's work is raised, until layers within the limit exist."""


def group_layers(
    work: Sequence[float], crossing: Sequence[float], count: int, tolerance: float = TOLERANCE
) -> tuple[int, ...]:
    """Group operators into at most ``count`` layers. Return the index of the first operator of each layer except the
    first layer.

    The work of a layer is at most (1 + ``tolerance``) times the mean work of a layer. If this is impossible, for
    example because an inseparable piece of the chain has more work, the limit is raised. The size of a border between
    two layers is the bytes that cross it. Within the bound, the chosen layers have the smallest largest border, then
    the smallest sum of borders, then the most even work.

    Args:
        work: the FLOPs or seconds of each operator.
        crossing: for each operator, the bytes that cross a border directly before it. They are infinite where no border
            is allowed.
    """
    before = np.concatenate([[0.0], np.cumsum(work)])
    positions = [index for index in range(1, len(work)) if crossing[index] < inf]
    count = min(count, len(positions) + 1)
    if count == 1:
        return ()
    bound = (1 + tolerance) * before[-1] / count
    while _fewest(before, positions, bound) > count:
        bound *= RELAXED
    sizes = sorted({crossing[position] for position in positions})
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        narrow = [position for position in positions if crossing[position] <= sizes[middle]]
        if len(narrow) + 1 >= count >= _fewest(before, narrow, bound):
            high = middle
        else:
            low = middle + 1
    narrow = [position for position in positions if crossing[position] <= sizes[low]]
    return _least_crossing(before, np.array(crossing)[narrow], np.array([0, *narrow, len(work)]), count, bound)


def _fewest(before: NDArray[np.float64], positions: Sequence[int], bound: float) -> float:
    """The smallest number of layers with at most ``bound`` work each, with borders at ``positions``; infinite if this
    is impossible."""
    ends = np.array([*positions, len(before) - 1])
    number, start = 0, 0
    while start < len(before) - 1:
        reached = ends[(ends > start) & (before[ends] - before[start] <= bound)]
        if not len(reached):
            return inf
        number, start = number + 1, int(reached[-1])
    return number


def _least_crossing(
    before: NDArray[np.float64], crossing: NDArray[np.float64], borders: NDArray[np.int64], count: int, bound: float
) -> tuple[int, ...]:
    """The ``count`` layers with the smallest sum of ``crossing``. If several divisions have this sum, the smallest sum
    of squared work decides."""
    work = before[borders]
    paid = np.concatenate([[0.0], crossing, [0.0]])
    least = np.full(len(borders), inf)
    squares = least.copy()
    least[0] = squares[0] = 0.0
    previous: list[NDArray[np.int64]] = []
    for _ in range(count):
        next_least, next_squares = np.full_like(least, inf), np.full_like(least, inf)
        back = np.zeros(len(borders), dtype=np.int64)
        for end in range(1, len(borders)):
            size = work[end] - work[:end]
            sums = np.where(size <= bound, least[:end], inf)
            if sums.min() < inf:
                tied = np.where(sums == sums.min(), squares[:end] + size**2, inf)
                back[end] = tied.argmin()
                next_least[end], next_squares[end] = sums.min() + paid[end], tied.min()
        least, squares = next_least, next_squares
        previous.append(back)
    end, chosen = len(borders) - 1, []
    for back in reversed(previous):
        end = int(back[end])
        chosen.append(int(borders[end]))
    return tuple(reversed(chosen[:-1]))
