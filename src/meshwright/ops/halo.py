"""Halos of operators that read windows of an image: the rows that a rank reads, and how they travel.

The large side of an operator has the rows that windows cover; the small side has one row for each window. Each rank
owns a run of rows on both sides. To make its rows of the small side, a rank fetches the rows that its windows cover
from their owners. The operator then runs without padding in that dim. The adjoint of the operator makes gradients of
all fetched rows and sends them to the owners of the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.ir.halo import Rows, window_ranges
from meshwright.ops.base import Local, Value
from meshwright.ops.space import SPACE, both

Edges = tuple[int, ...]
"""The first row of each part of a dim, then the end of the last part."""


@dataclass(frozen=True)
class Window:
    """The windows of an operator along a dim: each row of the small side reads ``extent`` rows, dilation included."""

    stride: int
    extent: int
    padding: int

    @property
    def alone(self) -> bool:
        """Whether each row of the small side depends only on the row of the large side with the same index."""
        return (self.stride, self.extent, self.padding) == (1, 1, 0)

    def ranges(self, small: Edges) -> tuple[Rows, ...]:
        """For each part of the small side (edges ``small``), the rows of the large side that its windows read."""
        return window_ranges(small, stride=self.stride, window=self.extent, padding=self.padding)

    def rows(self, small: int) -> int:
        """The number of rows of the large side that the windows of ``small`` rows cover."""
        return (small - 1) * self.stride + self.extent


@dataclass(frozen=True)
class Side:
    """A split spatial dim of a call. ``index`` is its number among the ``space`` spatial dims. ``image`` and ``output``
    are the edges of the ranks' parts in the image and in the output computed from it."""

    index: int
    space: int
    factor: str
    image: Edges
    output: Edges

    @property
    def dim(self) -> int:
        """The index of the dim, counted from the back."""
        return self.index - self.space

    def turned(self) -> "Side":
        """Return the same dim with ``image`` and ``output`` exchanged, for a transposed convolution."""
        return replace(self, image=self.output, output=self.image)


def split_sides(local: Local, space: int, windows: Sequence[Window] = ()) -> list[Side]:
    """Return the split spatial dims, without dims whose windows are single rows."""
    sides = (split_side(local, name, index, space) for index, name in enumerate(SPACE[space]))
    return [side for side in sides if side is not None and not (windows and windows[side.index].alone)]


def split_side(local: Local, name: str, index: int, space: int) -> Side | None:
    """Return the spatial dim called ``name``; None if it is not split."""
    if local.is_split(name):
        return Side(index, space, name, local.bounds(name), local.bounds(name))
    if local.is_split(both(name)):
        return Side(index, space, both(name), local.bounds(both(name), name), local.bounds(both(name), f"{name}1"))
    return None


def fetch(local: Local, value: Value, sides: Sequence[Side], windows: Sequence[Window], fill: float = 0.0) -> Value:
    """Fetch the rows of the image that this rank's windows read, in each split dim."""
    for side in sides:
        value = local.halo(value, side.factor, side.dim, side.image, windows[side.index].ranges(side.output), fill)
    return value


def give_back(local: Local, value: Value, sides: Sequence[Side], windows: Sequence[Window]) -> Value:
    """Send ``value``, terms of sums over the rows that this rank's windows read, to the rows' owners for addition."""
    for side in reversed(sides):
        value = local.halo_sum(value, side.factor, side.dim, side.image, windows[side.index].ranges(side.output))
    return value


def without(padding: Sequence[int], sides: Sequence[Side]) -> list[int]:
    """Return the padding that the operator itself still adds: 0 in the dims of ``sides``."""
    split = {side.index for side in sides}
    return [0 if index in split else pad for index, pad in enumerate(padding)]


def each(value: int | Sequence[int], space: int) -> list[int]:
    """Return a setting as one number for each spatial dim. A single number holds for all dims."""
    given = [value] if isinstance(value, int) else list(value)
    return given * space if len(given) == 1 else given


def windows(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Window]:
    """Return the windows of each spatial dim."""
    return [
        Window(step, far * (size - 1) + 1, pad)
        for size, step, pad, far in zip(kernel, stride, padding, dilation, strict=True)
    ]
