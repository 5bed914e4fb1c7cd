"""Pooling, split over samples, channels and space: a halo exchange fetches the rows of windows that cross parts.

Max pooling returns positions in the whole image. Averages at the border have the same divisors as in PyTorch. The
windows of adaptive pooling never cross parts if all parts of the input have one size, and all parts of the output too.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import (
    Call,
    Local,
    OperatorRule,
    Target,
    Value,
    arguments,
    emit_unchanged,
    make_rule,
    with_gradients,
)
from meshwright.ops.halo import Side, Window, each, fetch, give_back, split_sides, windows, without
from meshwright.ops.patterns import letters, operand
from meshwright.ops.space import SPACE, SpatialDims, image_and_output, is_gradient, largest_flops, space_rank

aten = torch.ops.aten


def pool_rule(call: Call) -> Rule:
    """``n c ~y ~x -> n c ~y1 ~x1``, the reverse for gradients. Max pooling also returns positions in the whole image.

    Adaptive pooling has no halo: the rule requires parts of equal size if input and output differ in size, so that each
    window lies inside a part."""
    maxima, adaptive, rank = "max" in str(call.target), "adaptive" in str(call.target), space_rank(call.target)
    halos = [False] * rank if adaptive else [not window.alone for window in _Pool.of(call).windows]
    space = SpatialDims.of(*image_and_output(call), halos, contiguous=maxima, equal=adaptive)
    return space.spatial_rule(call, linear=is_gradient(call.target) or not maxima)


# --- windows of one size ----------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """The settings of a pooling or of its gradient, with one number for each spatial dim."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool
    counts_padding: bool
    divisor: int | None
    windows: list[Window]

    @classmethod
    def of(cls, call: Call | Local) -> "_Pool":
        given, space = arguments(call), space_rank(call.target)
        kernel = each(given["kernel_size"], space)
        stride = each(given["stride"] or kernel, space)
        padding, dilation = each(given["padding"], space), each(given.get("dilation", 1), space)
        return cls(
            kernel, stride, padding, dilation, given["ceil_mode"], given.get("count_include_pad", True),
            given.get("divisor_override"), windows(kernel, stride, padding, dilation),
        )  # fmt: skip

    def maxima(self, sides: Sequence[Side]) -> tuple[Any, ...]:
        """Return the arguments of max pooling on a rank's part."""
        return self.kernel, self.stride, without(self.padding, sides), self.dilation, self.ceil_mode

    def averages(self, sides: Sequence[Side]) -> tuple[Any, ...]:
        """Return the arguments of average pooling on a rank's part. If windows at the border have other divisors, the
        divisor is 1, so that the operator sums each window."""
        divisor = self.divisor if self.is_alike(sides) else 1
        padding = without(self.padding, sides)
        return self.kernel, self.stride, padding, self.ceil_mode, self.counts_padding, divisor

    def is_alike(self, sides: Sequence[Side]) -> bool:
        """Whether averages at the border of the image have the same divisor as averages inside."""
        if self.divisor is not None:
            return True
        for side in sides:
            window = self.windows[side.index]
            end = window.rows(side.output[-1]) - window.padding
            counted = window.padding if self.counts_padding else 0
            if end > side.image[-1] + counted or (window.padding and not self.counts_padding):
                return False
        return True


def _where_split(emit: Callable[[Local, _Pool, list[Side]], Any]) -> Callable[[Local], Any]:
    """Return the local rewrite of a pooling: ``emit`` if spatial dims are split, else the unchanged operator. Max
    pooling needs ``emit`` even if windows are single rows, to convert positions on a rank to positions in the image."""

    def rewrite(local: Local) -> Any:
        settings = _Pool.of(local)
        maxima = "max" in str(local.target)
        sides = split_sides(local, len(settings.kernel), () if maxima else settings.windows)
        return emit(local, settings, sides) if sides else emit_unchanged(local)

    return rewrite


def _max_pool(local: Local, settings: _Pool, sides: list[Side]) -> Any:
    source = fetch(local, local.args[0], sides, settings.windows, -math.inf)
    call = local.call(local.target, source, *settings.maxima(sides))
    values, indices = (local.call(operator.getitem, call, index) for index in (0, 1))
    part_place = _Place.of(local, local.input_shape(0), sides, settings.windows)
    return values, part_place.outwards(local, indices)


def _max_pool_backward(local: Local, settings: _Pool, sides: list[Side]) -> Any:
    grad, shape = local.args[0], local.shape()
    part_place = _Place.of(local, shape, sides, settings.windows)
    like = local.call(aten.new_empty.default, grad, part_place.shape(shape))
    indices = part_place.inwards(local, arguments(local)["indices"])
    result = local.call(local.target, grad, like, *settings.maxima(sides), indices)
    return give_back(local, result, sides, settings.windows)


@dataclass
class _Place:
    """The place in the image of the rows that a rank pools. For each spatial dim, ``lows`` has the first row, ``rows``
    the number of rows, and ``whole`` the number of rows of the whole image."""

    lows: list[int]
    rows: list[int]
    whole: list[int]

    @classmethod
    def of(
        cls, local: Local, shape: Sequence[int], sides: Sequence[Side], windows: Sequence[Window] | None
    ) -> "_Place":
        """Return the place of a part of shape ``shape``. ``windows`` has the windows of all spatial dims; without it, a
        rank reads only its own part."""
        rank = sides[0].space
        rows = list(shape[-rank:])
        place = cls([0] * rank, rows, list(rows))
        for side in sides:
            part, _ = local.coordinate(side.factor)
            low, high = side.image[part : part + 2]
            if windows is not None:
                low, high = windows[side.index].ranges(side.output)[part]
            place.lows[side.index], place.rows[side.index] = low, high - low
            place.whole[side.index] = side.image[-1]
        return place

    def shape(self, part: Sequence[int]) -> list[int]:
        """Return the shape of the tensor that is pooled: ``part`` is the shape without the halo."""
        return [*part[: -len(self.rows)], *self.rows]

    def outwards(self, local: Local, indices: Value) -> Value:
        """Convert positions on this rank to positions in the whole image. If all values of a window are -inf, the
        reported position is in the window's first row, or in the image's first row if the window begins in the
        padding."""
        within = all(
            low >= 0 and low + rows <= whole for low, rows, whole in zip(self.lows, self.rows, self.whole, strict=True)
        )
        return _moved(local, indices, self.rows, self.whole, self.lows, within)

    def inwards(self, local: Local, indices: Value) -> Value:
        """Convert positions in the whole image to positions on this rank."""
        return _moved(local, indices, self.whole, self.rows, [-low for low in self.lows], True)


def _moved(local: Local, indices: Value, before: list[int], after: list[int], by: list[int], within: bool) -> Value:
    """Convert positions in an image of sizes ``before`` to positions in an image of sizes ``after``, shifted ``by``
    rows. ``within`` says that all positions lie in the new image. Otherwise, positions outside are clamped to it."""
    last = max((dim for dim in range(len(by)) if by[dim] or before[dim] != after[dim]), default=None)
    if last is None:
        return indices
    inner = prod(before[last + 1 :])
    if last == 0 and within:
        return local.call(aten.add.Tensor, indices, by[0] * inner)
    rest, columns = indices, None
    if inner > 1:
        columns = local.call(aten.remainder.Scalar, rest, inner)
        rest = _floor(local, rest, inner)
    coordinates: list[Value] = []
    for dim in range(last, -1, -1):
        coordinate = local.call(aten.remainder.Scalar, rest, before[dim]) if dim else rest
        rest = _floor(local, rest, before[dim]) if dim else rest
        coordinate = local.call(aten.add.Tensor, coordinate, by[dim])
        coordinates.insert(0, coordinate if within else local.call(aten.clamp.default, coordinate, 0, after[dim] - 1))
    flat = coordinates[0]
    for dim in range(1, last + 1):
        flat = local.call(aten.add.Tensor, local.call(aten.mul.Tensor, flat, after[dim]), coordinates[dim])
    if columns is None:
        return flat
    return local.call(aten.add.Tensor, local.call(aten.mul.Tensor, flat, inner), columns)


def _floor(local: Local, value: Value, by: int) -> Value:
    return local.call(aten.div.Tensor_mode, value, by, rounding_mode="floor")


def _avg_pool(local: Local, settings: _Pool, sides: list[Side]) -> Any:
    source = fetch(local, local.args[0], sides, settings.windows)
    result = local.call(local.target, source, *settings.averages(sides))
    return _divided(local, result, settings, sides, local.input_shape(0), local.shape())


def _avg_pool_backward(local: Local, settings: _Pool, sides: list[Side]) -> Any:
    grad = _divided(local, local.args[0], settings, sides, local.shape(), local.input_shape(0))
    shape = local.shape()
    for side in sides:
        shape[side.dim] = settings.windows[side.index].rows(local.input_shape(0)[side.dim])
    like = local.call(aten.new_empty.default, grad, shape)
    result = local.call(local.target, grad, like, *settings.averages(sides))
    return give_back(local, result, sides, settings.windows)


def _divided(
    local: Local, value: Value, settings: _Pool, sides: Sequence[Side], image: Sequence[int], output: Sequence[int]
) -> Value:
    """Divide the sums of windows by the windows' numbers of elements. Averages are returned unchanged."""
    if settings.is_alike(sides):
        return value
    rank = len(settings.kernel)
    split = {side.index: side for side in sides}
    for index, window in enumerate(settings.windows):
        length, first = image[index - rank], 0
        if index in split:
            part, _ = local.coordinate(split[index].factor)
            length, first = split[index].image[-1], split[index].output[part]
        counts = _counts(local, value, window, length, first, output[index - rank], settings.counts_padding)
        value = local.call(
            aten.div.Tensor, value, local.call(aten.view.default, counts, [-1, *[1] * (rank - 1 - index)])
        )
    return value


def _counts(
    local: Local, like: Value, window: Window, length: int, first: int, count: int, counts_padding: bool
) -> Value:
    """Return the number of rows that the divisor counts in each of ``count`` windows, from window ``first`` on."""
    ones = local.call(aten.new_ones.default, like, [count], dtype=torch.int64)
    number = local.call(aten.cumsum.default, ones, 0)
    begin = local.call(aten.mul.Tensor, local.call(aten.add.Tensor, number, first - 1), window.stride)
    begin = local.call(aten.sub.Tensor, begin, window.padding)
    end = local.call(aten.add.Tensor, begin, window.extent)
    end = local.call(aten.clamp.default, end, None, length + (window.padding if counts_padding else 0))
    if not counts_padding:
        begin = local.call(aten.clamp.default, begin, 0)
    counted = local.call(aten.sub.Tensor, end, begin)
    return local.call(aten._to_copy.default, counted, dtype=local.dtype())


# --- adaptive windows -------------------------------------------------------------------------------------------------


def adaptive_local(local: Local) -> Any:
    """Run adaptive pooling on one rank, with the output size of the rank's part."""
    rank = space_rank(local.target)
    sides = split_sides(local, rank)
    result = local.call(local.target, local.args[0], local.shape()[-rank:])
    if not sides or "max" not in str(local.target):
        return result
    values, indices = (local.call(operator.getitem, result, index) for index in (0, 1))
    return values, _Place.of(local, local.input_shape(0), sides, None).outwards(local, indices)


def adaptive_max_backward_local(local: Local) -> Any:
    """Run the gradient of adaptive max pooling on one rank, with positions that count in the rank's own part."""
    grad, source, indices = local.args
    sides = split_sides(local, space_rank(local.target))
    if sides:
        indices = _Place.of(local, local.shape(), sides, None).inwards(local, indices)
    return local.call(local.target, grad, source, indices)


# --- unpooling --------------------------------------------------------------------------------------------------------


def unpool_rule(call: Call) -> Rule:
    """``^n c !y !x, n c !y !x -> n c !y1 !x1``: positions are in the whole result, so space stays whole."""
    space = SpatialDims()
    for index, name in enumerate(SPACE[space_rank(call.target)]):
        dim = index - space_rank(call.target)
        space.whole(name, (call.tensors[0].shape[dim], call.outputs[0].shape[dim]))
    lead = letters(call.tensors[0].dim() - len(space.left), "n")
    small, large = (operand([*lead, *side]) for side in (space.left, space.right))
    return make_rule(call, f"^{small}, {small} -> {large}")


_MAX = OperatorRule(pool_rule, _where_split(_max_pool), largest_flops)
_MAX_BACKWARD = OperatorRule(pool_rule, _where_split(_max_pool_backward), largest_flops)
_AVG = OperatorRule(pool_rule, _where_split(_avg_pool), largest_flops)
_AVG_BACKWARD = OperatorRule(pool_rule, _where_split(_avg_pool_backward), largest_flops)
_ADAPTIVE = OperatorRule(pool_rule, adaptive_local, largest_flops)
_ADAPTIVE_MAX_BACKWARD = OperatorRule(pool_rule, adaptive_max_backward_local, largest_flops)
_ADAPTIVE_AVG_BACKWARD = OperatorRule(pool_rule, flops=largest_flops)

RULES: dict[Target, OperatorRule] = {
    **with_gradients(["max_pool2d_with_indices", "max_pool3d_with_indices"], _MAX, _MAX_BACKWARD),
    **with_gradients(["adaptive_max_pool2d", "adaptive_max_pool3d"], _ADAPTIVE, _ADAPTIVE_MAX_BACKWARD),
    **with_gradients(["avg_pool2d", "avg_pool3d"], _AVG, _AVG_BACKWARD),
    **with_gradients(["_adaptive_avg_pool2d", "_adaptive_avg_pool3d"], _ADAPTIVE, _ADAPTIVE_AVG_BACKWARD),
    **dict.fromkeys([aten.max_unpool2d.default, aten.max_unpool3d.default], OperatorRule(unpool_rule)),
}
