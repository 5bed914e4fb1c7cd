"""Move layers between stages until the work of all ranks is as even as possible.

The dynamic program (``stages.py``) handles single stages on equal devices. Here, a rank may hold several stages, whose
sum must be even, and each stage has the prices of its own devices.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.inter_op.stage_prices import Floats

LEAST_GAIN = 1e-3
"""Smallest relative gain for which a layer is moved."""


def balanced(firsts: Sequence[int], ranks: Sequence[int], busy: Sequence[Floats]) -> list[range]:
    """The layers of stages after layers were moved, one at a time, until no move makes the busiest rank less busy.

    Each move takes one layer from a stage of the busiest rank to another stage; the stages between them hand on one
    layer each. The result is a local optimum. Every stage keeps at least one layer.

    Args:
        firsts: the first layer of each stage.
        ranks: the rank of each stage.
        busy: for each stage, an array whose entry ``[i, j]`` is the busy time per step, in seconds, if the stage has
            layers i to j.
    """
    end, places, prices = len(busy[0]) - 1, np.array(ranks), np.stack(busy)
    numbers, current = np.arange(len(firsts)), np.array(firsts)

    def loads(firsts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The busy seconds of each rank."""
        total = np.zeros(len(set(ranks)))
        np.add.at(total, places, prices[numbers, firsts, np.append(firsts[1:] - 1, end)])
        return total

    while True:
        load = loads(current)
        least, best = float(load.max()) * (1 - LEAST_GAIN), None
        for source in np.flatnonzero(places == load.argmax()):
            for target in numbers:
                moved = current.copy()
                moved[source + 1 : target + 1] -= 1  # one of the two spans is empty
                moved[target + 1 : source + 1] += 1
                if (np.diff(moved) < 1).any() or moved[-1] > end:
                    continue
                if (most := float(loads(moved).max())) < least:
                    least, best = most, moved
        if best is None:
            lasts = [*current[1:], end + 1]
            return [range(int(first), int(last)) for first, last in zip(current, lasts, strict=True)]
        current = best


def busiest(stages: Sequence[range], ranks: Sequence[int], busy: Sequence[Floats]) -> float:
    """The busy seconds of the busiest rank if the stages have these layers. The other arguments are those of
    ``balanced``."""
    total = dict.fromkeys(ranks, 0.0)
    for layers, rank, seconds in zip(stages, ranks, busy, strict=True):
        total[rank] += float(seconds[layers.start, layers.stop - 1])
    return max(total.values())
