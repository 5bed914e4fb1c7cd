"""Convolutions that compute a part's own rows first, without the halo, and then add the halo's terms at both borders.

    rows read           -1 [ 0  1  2  3 ] 4            windows of 3, padding 1
    own rows first           0  1  2  3                all rows are made, with zeros for rows -1 and 4
    then the halo            0        3                row -1 adds to row 0, row 4 to row 3

A convolution is linear in its input, so this sum is the convolution of all rows. The halo travels while a rank computes
its own rows, and the rank need not copy its part to join it with the halo. The same holds for the gradients.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from meshwright.ir.halo import Rows
from meshwright.ops import collectives
from meshwright.ops.base import Local, Value
from meshwright.ops.convolution_algorithms import INPUT, WEIGHT, emit_convolution, emit_gradient
from meshwright.ops.halo import Side, Window

aten = torch.ops.aten


@dataclass(frozen=True)
class Borders:
    """One split dim of a convolution on a rank. The halo has ``before`` rows before the part and ``after`` rows after
    it. The rank makes ``out_rows`` rows, of which the first ``top`` and the last ``bottom`` read the halo."""

    local: Local
    side: Side
    window: Window
    ranges: tuple[Rows, ...]
    out_rows: int
    before: int
    after: int

    @classmethod
    def of(cls, local: Local, side: Side, window: Window) -> "Borders | None":
        """Return the borders of a split dim. Return None if the plan does not compute own rows first, if parts differ
        in size or are smaller than the halo, or if the part's own rows, padded equally on both sides, do not make all
        rows of the part's result. To make them, the part must have ``stride`` times as many rows as its result, and the
        padding must place each window around its row."""
        rows, out_rows = side.image[1] - side.image[0], side.output[1] - side.output[0]
        alike = all(
            len({after - before for before, after in pairwise(edges)}) == 1 for edges in (side.image, side.output)
        )
        before, after = window.padding, window.extent - window.stride - window.padding
        fits = rows == out_rows * window.stride and 0 <= after <= before and 2 * before < window.extent and before > 0
        borders = cls(local, side, window, window.ranges(side.output), out_rows, before, after)
        reach = max(before, after) <= rows and max(borders.top, borders.bottom) <= out_rows
        return borders if local.interior_first(side.factor) and alike and fits and reach else None

    @property
    def top(self) -> int:
        """The number of output rows that read the halo before the part."""
        return -(-self.before // self.window.stride)

    @property
    def bottom(self) -> int:
        """The number of output rows that read the halo after the part."""
        return -(-self.after // self.window.stride)

    def convolved(self, source: Value, weight: Value, options: tuple[Any, ...]) -> Value:
        """Convolve own rows, and add the halo's terms at the borders."""
        local, dim = self.local, self.side.dim
        begun = self._begun(source)
        result = emit_convolution(local, source, weight, self._padded(options), local.algorithm)
        for strip, start, _ in self._strips(begun):
            terms = emit_convolution(local, strip, weight, options)
            result = local.call(collectives.ADD_ROWS, result, terms, dim, start)
        return result

    def weight_gradient(self, grad: Value, source: Value, weight: Value, options: tuple[Any, ...]) -> Value:
        """Return (None, gradient of the weight, None). The gradient is a sum over own rows and halo rows."""
        local = self.local
        begun = self._begun(source)

        result = emit_gradient(local, grad, source, weight, self._padded(options), WEIGHT, local.algorithm)
        for strip, start, count in self._strips(begun):
            terms = emit_gradient(local, self._rows(grad, start, count), strip, weight, options, WEIGHT)
            result = local.call(aten.add.Tensor, result, terms)
        return None, result, None

    def input_gradient(self, grad: Value, shape: list[int], weight: Value, options: tuple[Any, ...]) -> Value:
        """Return the gradient of own rows. Terms for halo rows go to their owners; terms from neighbours are added."""
        local, dim, window = self.local, self.side.dim, self.window

        def gradient(grad: Value, rows: int, options: tuple[Any, ...], algorithm: str = "") -> Value:
            like = local.call(aten.new_empty.default, grad, [*shape[:dim], rows, *shape[dim:][1:]])
            return emit_gradient(local, grad, like, weight, options, INPUT, algorithm)

        strips = []
        for start, count, (low, high) in self._edges:
            if count:
                terms = gradient(self._rows(grad, start, count), window.rows(count), options)
                strips.append(self._rows(terms, low, high - low))
        started = local.halo_return(strips, self.side.factor, dim, self.side.image, self.ranges)
        rows = self.out_rows * window.stride
        own = gradient(grad, rows, self._padded(options), local.algorithm)
        come = local.call(collectives.WAIT, started)
        for first, count, start in ((0, self.after, 0), (self.after, self.before, rows - self.before)):
            if count:
                own = local.call(collectives.ADD_ROWS, own, self._rows(come, first, count), dim, start)
        return own

    @property
    def _edges(self) -> tuple[tuple[int, int, Rows], ...]:
        """For the halo before and the halo after: the first output row that reads the halo, the number of output
        rows that read it, and the range of the halo within all rows that these output rows read."""
        last = self.window.rows(self.bottom)
        return (0, self.top, (0, self.before)), (self.out_rows - self.bottom, self.bottom, (last - self.after, last))

    def _begun(self, source: Value) -> Any:
        begun = self.local.halo_begin(source, self.side.factor, self.side.dim, self.side.image, self.ranges)
        assert begun is not None, "all of a part's rows are read, and some of its neighbours'"
        return begun

    def _strips(self, begun: Any) -> list[tuple[Value, int, int]]:
        """For each halo that is not empty: the halo's rows with zeros in place of own rows, the first output row that
        reads the halo, and the number of output rows that read it."""
        local, dim, strips = self.local, self.side.dim, []
        for strip, (start, count, (low, high)) in zip(local.halo_end(begun), self._edges, strict=True):
            if count:
                padding = [0, 0] * (-dim - 1) + [low, self.window.rows(count) - high]
                strips.append((local.call(aten.constant_pad_nd.default, strip, padding, 0.0), start, count))
        return strips

    def _rows(self, value: Value, start: int, count: int) -> Value:
        return self.local.call(aten.slice.Tensor, value, self.side.dim, start, start + count)

    def _padded(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operator's settings for this rank's own rows, with zero padding in the split dim."""
        padding = list(options[1])
        padding[self.side.index] = self.before
        return (options[0], padding, *options[2:])
