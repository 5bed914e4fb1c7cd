"""Halos of operators that read windows of an image: the rows that a rank's part reads, and how they travel.

Parts are runs of rows. To make its rows of the small side, a part reads the rows of the large side that its windows
cover, from the ranks that own them. The operator then runs without padding in that dim. Its adjoint makes gradients of
all these rows, which go back to the owners of the rows.
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
    """The rows that an operator reads along a dim for each row of the small side: ``extent``, dilation included."""

    stride: int
    extent: int
    padding: int

    @property
    def alone(self) -> bool:
        """Whether each row is made of one row, the row at the same index."""
        return (self.stride, self.extent, self.padding) == (1, 1, 0)

    def ranges(self, small: Edges) -> tuple[Rows, ...]:
        """For each part of the small side (edges ``small``), the rows of the large side that its windows read."""
        return window_ranges(small, stride=self.stride, window=self.extent, padding=self.padding)

    def rows(self, small: int) -> int:
        """The number of rows that the windows of ``small`` rows cover."""
        return (small - 1) * self.stride + self.extent


@dataclass(frozen=True)
class Side:
    """A split spatial dim of a call: its index among the ``space`` spatial dims, its factor, and where the ranks' parts
    begin and end in the image and in the tensor ``made`` from it."""

    index: int
    space: int
    factor: str
    image: Edges
    made: Edges

    @property
    def dim(self) -> int:
        """The dim, counted from the back."""
        return self.index - self.space

    def turned(self) -> "Side":
        """The same dim with edges exchanged, for an operator that makes the image from the other tensor."""
        return replace(self, image=self.made, made=self.image)


def split_sides(local: Local, space: int, windows: Sequence[Window] = ()) -> list[Side]:
    """The spatial dims that are split (in runs of rows), without dims whose windows are single rows."""
    sides = (split_side(local, name, index, space) for index, name in enumerate(SPACE[space]))
    return [side for side in sides if side is not None and not (windows and windows[side.index].alone)]


def split_side(local: Local, name: str, index: int, space: int) -> Side | None:
    """The spatial dim of this name; None if it is not split."""
    if local.is_split(name):
        return Side(index, space, name, local.bounds(name), local.bounds(name))
    if local.is_split(both(name)):
        return Side(index, space, both(name), local.bounds(both(name), name), local.bounds(both(name), f"{name}1"))
    return None


def fetch(local: Local, value: Value, sides: Sequence[Side], every: Sequence[Window], fill: float = 0.0) -> Value:
    """Fetch the rows of the image that this rank's windows read, in each split dim."""
    for side in sides:
        value = local.halo(value, side.factor, side.dim, side.image, every[side.index].ranges(side.made), fill)
    return value


def give_back(local: Local, value: Value, sides: Sequence[Side], every: Sequence[Window]) -> Value:
    """The adjoint of ``fetch``: add up terms for the rows that this rank's windows read, at the rows' owners."""
    for side in reversed(sides):
        value = local.halo_sum(value, side.factor, side.dim, side.image, every[side.index].ranges(side.made))
    return value


def without(padding: Sequence[int], sides: Sequence[Side]) -> list[int]:
    """The padding that the operator still adds: none in dims whose halo was fetched."""
    split = {side.index for side in sides}
    return [0 if index in split else pad for index, pad in enumerate(padding)]


def each(value: int | Sequence[int], space: int) -> list[int]:
    """A setting as one number for each spatial dim; a single number holds for all dims."""
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
