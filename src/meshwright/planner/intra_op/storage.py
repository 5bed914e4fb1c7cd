"""The ways to store a parameter between steps: whole, cut as its readers need it, or additionally divided by ZeRO."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.ir.placement import Flat, Placements

BACKWARD_TOO = 2
"""A parameter under ZeRO 3 is gathered for forward and again for backward."""


class Storage(NamedTuple):
    """The placements of a parameter and its optimizer state between steps, and its ZeRO stage.

    Under stages 1 and 2, a Flat parameter is gathered once per step and freed after its last use. Under stage 3 it is
    gathered for every use. Its gradient is reduced once a step under stage 1, and in every micro-batch under stages 2
    and 3."""

    placements: Placements
    zero: int = 0

    def gathers(self, microbatches: int, backward: bool) -> int:
        """The number of times per step that the parameter is brought to its readers. ``backward``: whether backward
        reads it too."""
        return microbatches * (BACKWARD_TOO if backward else 1) if self.zero == 3 else 1

    def reductions(self, microbatches: int) -> int:
        """The number of times per step that the gradient is reduced."""
        return microbatches if self.zero >= 2 else 1


def storages(cuts: Iterable[Placements], axis: str, stages: Sequence[int]) -> list[Storage]:
    """All ways to store a parameter: each placement in ``cuts``, and, unless it already divides ``axis``, the same
    placement divided over ``axis`` under each of the ZeRO ``stages``."""
    result = []
    for cut in cuts:
        result.append(Storage(cut))
        if axis and axis not in cut:
            result += [Storage({**cut, axis: Flat()}, stage) for stage in stages]
    return result
