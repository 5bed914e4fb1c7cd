"""Halos of operators that read windows of an image: which rows a rank's part reads, and how they come and go.

Parts are runs of rows. A part makes its rows of the small side, and for that reads those rows of the large side that
its windows cover, from whichever ranks they lie on; then the operator runs without padding in that dim. Its adjoint
gives gradients of all these rows, which go back to the ranks whose rows they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.ir.halo import Rows, window_ranges
from meshwright.ops.base import Local, Value
from meshwright.ops.space import SPACE, both

Edges = tuple[int, ...]
"""Where the parts of a dim begin, and where the last one ends."""


@dataclass(frozen=True)
class Window:
    """What an operator reads along a dim for each row of the small side: ``extent`` rows, dilation counted."""

    stride: int
    extent: int
    padding: int

    @property
    def alone(self) -> bool:
        """Whether a row is made of one row."""
        return (self.stride, self.extent, self.padding) == (1, 1, 0)

    def ranges(self, small: Edges) -> tuple[Rows, ...]:
        """By part of the small side, which has these edges, the rows of the large side that its windows read."""
        return window_ranges(small, stride=self.stride, window=self.extent, padding=self.padding)

    def rows(self, small: int) -> int:
        """How many rows the windows of ``small`` rows cover."""
        return (small - 1) * self.stride + self.extent


@dataclass(frozen=True)
class Side:
    """One split dim of a call on a rank: its place among the ``space`` dims, its factor, and the edges of the parts of
    the image and of what is made from it."""

    index: int
    space: int
    factor: str
    image: Edges
    made: Edges

    @property
    def dim(self) -> int:
        """Counted from the back."""
        return self.index - self.space

    def turned(self) -> "Side":
        """The dim of an operator that makes the image from the other side."""
        return replace(self, image=self.made, made=self.image)


def split_sides(local: Local, space: int, windows: Sequence[Window] = ()) -> list[Side]:
    """The spatial dims that are split here, in runs of rows; not those whose windows are single rows."""
    sides = (split_side(local, name, index, space) for index, name in enumerate(SPACE[space]))
    return [side for side in sides if side is not None and not (windows and windows[side.index].alone)]


def split_side(local: Local, name: str, index: int, space: int) -> Side | None:
    """A spatial dim of this name, where it is split here."""
    if local.is_split(name):
        return Side(index, space, name, local.bounds(name), local.bounds(name))
    if local.is_split(both(name)):
        return Side(index, space, both(name), local.bounds(both(name), name), local.bounds(both(name), f"{name}1"))
    return None


def fetch(local: Local, value: Value, sides: Sequence[Side], every: Sequence[Window], fill: float = 0.0) -> Value:
    """The rows of the image that this rank's windows read, in each of the split dims."""
    for side in sides:
        value = local.halo(value, side.factor, side.dim, side.image, every[side.index].ranges(side.made), fill)
    return value


def give_back(local: Local, value: Value, sides: Sequence[Side], every: Sequence[Window]) -> Value:
    """The adjoint: terms for the rows that this rank's windows read, added up where the rows are."""
    for side in reversed(sides):
        value = local.halo_sum(value, side.factor, side.dim, side.image, every[side.index].ranges(side.made))
    return value


def without(padding: Sequence[int], sides: Sequence[Side]) -> list[int]:
    """The padding that the operator still adds: none in dims whose halo was fetched."""
    split = {side.index for side in sides}
    return [0 if index in split else one for index, one in enumerate(padding)]


def each(value: int | Sequence[int], space: int) -> list[int]:
    """A setting of every spatial dim: one number stands for all."""
    given = [value] if isinstance(value, int) else list(value)
    return given * space if len(given) == 1 else given


def windows(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Window]:
    """The windows of each dim."""
    return [
        Window(step, far * (size - 1) + 1, pad)
        for size, step, pad, far in zip(kernel, stride, padding, dilation, strict=True)
    ]
