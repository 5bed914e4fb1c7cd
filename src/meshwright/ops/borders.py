"""Convolutions of a part's own rows first, as if there were no others; then what the halo adds at both borders.

    rows read           -1 [ 0  1  2  3 ] 4            windows of 3, padding 1
    own rows first           0  1  2  3                all rows are made, with zeros for rows -1 and 4
    then the halo            0        3                row -1 adds to row 0, row 4 to row 3

A convolution is linear in its input, so that the sum is what it makes of all rows. The halo travels meanwhile, and no
part is copied to lie beside it. Gradients are linear in the same rows.
"""

import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from meshwright.ir.halo import Rows
from meshwright.ops import collectives
from meshwright.ops.base import Local, Value
from meshwright.ops.halo import Side, Window

aten = torch.ops.aten

INPUT, WEIGHT = [True, False, False], [False, True, False]
"""Output masks of convolution_backward."""


@dataclass(frozen=True)
class Borders:
    """One split dim of a convolution on a rank: its halo has ``before`` and ``after`` rows, which the first ``top`` and
    the last ``bottom`` of the ``made`` rows read."""

    local: Local
    side: Side
    window: Window
    ranges: tuple[Rows, ...]
    made: int
    before: int
    after: int

    @classmethod
    def of(cls, local: Local, side: Side, window: Window) -> "Borders | None":
        """None where the plan does not want it, parts differ, or own rows do not make all rows by padding alike before
        and after: unless strides fit the parts, and the padding is that of windows around their rows."""
        rows, made = side.image[1] - side.image[0], side.made[1] - side.made[0]
        alike = all(
            len({after - before for before, after in pairwise(edges)}) == 1 for edges in (side.image, side.made)
        )
        before, after = window.padding, window.extent - window.stride - window.padding
        fits = rows == made * window.stride and 0 <= after <= before and 2 * before < window.extent and before > 0
        found = cls(local, side, window, window.ranges(side.made), made, before, after)
        reach = max(before, after) <= rows and max(found.top, found.bottom) <= made
        return found if local.interior_first(side.factor) and alike and fits and reach else None

    @property
    def top(self) -> int:
        """Rows made that read the halo before."""
        return -(-self.before // self.window.stride)

    @property
    def bottom(self) -> int:
        """Rows made that read the halo after."""
        return -(-self.after // self.window.stride)

    def convolved(self, source: Value, weight: Value, rest: tuple[Any, ...]) -> Value:
        """The convolution of own rows, to which the borders' are added."""
        local, dim = self.local, self.side.dim
        begun = self._begun(source)
        result = local.call(local.target, source, weight, None, *self._padded(rest))
        for strip, start, _ in self._strips(begun):
            made = local.call(local.target, strip, weight, None, *rest)
            result = local.call(collectives.ADD_ROWS, result, made, dim, start)
        return result

    def weight_gradient(self, grad: Value, source: Value, weight: Value, rest: tuple[Any, ...]) -> Value:
        """Of own rows, and of the halo, whose rows were kept."""
        local = self.local
        begun = self._begun(source)

        def gradient(grad: Value, source: Value, rest: tuple[Any, ...]) -> Value:
            made = local.call(local.target, grad, source, weight, None, *rest, WEIGHT)
            return local.call(operator.getitem, made, 1)

        result = gradient(grad, source, self._padded(rest))
        for strip, start, count in self._strips(begun):
            result = local.call(aten.add.Tensor, result, gradient(self._rows(grad, start, count), strip, rest))
        return None, result, None

    def input_gradient(self, grad: Value, shape: list[int], weight: Value, rest: tuple[Any, ...]) -> Value:
        """Of own rows; those of the halo go to their owners, and what others have of one's own comes."""
        local, dim, window = self.local, self.side.dim, self.window

        def gradient(grad: Value, rows: int, rest: tuple[Any, ...]) -> Value:
            like = local.call(aten.new_empty.default, grad, [*shape[:dim], rows, *shape[dim:][1:]])
            made = local.call(local.target, grad, like, weight, None, *rest, INPUT)
            return local.call(operator.getitem, made, 0)

        strips = []
        for start, count, (low, high) in self._edges:
            if count:
                made = gradient(self._rows(grad, start, count), window.rows(count), rest)
                strips.append(self._rows(made, low, high - low))
        started = local.halo_return(strips, self.side.factor, dim, self.side.image, self.ranges)
        rows = self.made * window.stride
        own = gradient(grad, rows, self._padded(rest))
        come = local.call(collectives.WAIT, started)
        for first, count, start in ((0, self.after, 0), (self.after, self.before, rows - self.before)):
            if count:
                own = local.call(collectives.ADD_ROWS, own, self._rows(come, first, count), dim, start)
        return own

    @property
    def _edges(self) -> tuple[tuple[int, int, Rows], ...]:
        """The rows made that read the halo before, and after: the first, how many, and where the halo lies among the
        rows that they read."""
        last = self.window.rows(self.bottom)
        return (0, self.top, (0, self.before)), (self.made - self.bottom, self.bottom, (last - self.after, last))

    def _begun(self, source: Value) -> Any:
        begun = self.local.halo_begin(source, self.side.factor, self.side.dim, self.side.image, self.ranges)
        assert begun is not None, "all of a part's rows are read, and some of its neighbours'"
        return begun

    def _strips(self, begun: Any) -> list[tuple[Value, int, int]]:
        """The halo before and after, each with zeros in place of own rows: with the first row made of it, and how many
        there are."""
        local, dim, found = self.local, self.side.dim, []
        for strip, (start, count, (low, high)) in zip(local.halo_end(begun), self._edges, strict=True):
            if count:
                padding = [0, 0] * (-dim - 1) + [low, self.window.rows(count) - high]
                found.append((local.call(aten.constant_pad_nd.default, strip, padding, 0.0), start, count))
        return found

    def _rows(self, value: Value, start: int, count: int) -> Value:
        return self.local.call(aten.slice.Tensor, value, self.side.dim, start, start + count)

    def _padded(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """The settings for own rows, with zeros around them in this dim too."""
        padding = list(rest[1])
        padding[self.side.index] = self.before
        return (rest[0], padding, *rest[2:])
