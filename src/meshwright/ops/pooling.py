"""Pooling, split over samples, channels and space: windows that lie over two parts get their rows by halo exchange.

Maxima tell where they were found as positions in the whole image; averages at the border divide by what PyTorch counts
there. Adaptive windows never lie over two parts where the parts' sizes are whole.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Target, Value, arguments, letters
from meshwright.ops.halo import SPACE, Side, Space, Window, each, fetch, give_back, split_sides, windows

aten = torch.ops.aten

_SPACE = re.compile(r"([123])d")


def space_rank(target: Target) -> int:
    """Over how many dims a pooling, padding or resizing works: max_pool2d over 2."""
    found = _SPACE.search(str(target))
    assert found is not None
    return int(found[1])


def spatial_rule(call: Call, space: Space, inputs: str, *, linear: bool) -> Rule:
    """``n c ~y ~x -> n c ~y1 ~x1``, inside each sample and channel. ``inputs`` says whether each tensor is of the
    ``image`` or of what is ``made`` of it; outputs are of the other side than the first."""
    lead = letters(call.tensors[0].dim() - len(space.left), "n")
    names = {"image": [*lead, *space.left], "made": [*lead, *space.right]}
    left = ", ".join(" ".join(names[one]) for one in inputs.split())
    right = " ".join(names["made" if inputs.startswith("image") else "image"])
    return space.rule(call, lambda *_: f"{'^' * linear}{left} -> {', '.join([right] * len(call.outputs))}")


# --- windows of one size ----------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """The settings of a pooling, or of its gradient, with one number for every dim."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool
    counts_padding: bool
    divisor: int | None
    windows: list[Window]

    @classmethod
    def of(cls, target: Target, args: Sequence[Any], kwargs: Any) -> "_Pool":
        given, space = arguments(target, args, kwargs), space_rank(target)
        kernel = each(given["kernel_size"], space)
        stride = each(given["stride"] or kernel, space)
        padding, dilation = each(given["padding"], space), each(given.get("dilation", 1), space)
        return cls(
            kernel, stride, padding, dilation, given["ceil_mode"], given.get("count_include_pad", True),
            given.get("divisor_override"), windows(kernel, stride, padding, dilation),
        )  # fmt: skip

    def padding_without(self, sides: Sequence[Side]) -> list[int]:
        """No padding in dims whose halo is there."""
        split = {side.index for side in sides}
        return [0 if index in split else one for index, one in enumerate(self.padding)]


def _pool_space(call: Call, image: Tensor, made: Tensor, contiguous: bool) -> Space:
    settings, result, rank = _Pool.of(call.target, call.args, call.kwargs), Space(), space_rank(call.target)
    for index, (name, window) in enumerate(zip(SPACE[rank], settings.windows, strict=True)):
        dim = image.dim() - rank + index
        large, small = image.shape[dim], made.shape[dim]
        result.add(name, (large, small), halo=not window.alone, contiguous=contiguous)
    return result


def max_pool_rule(call: Call) -> Rule:
    """``n c ~y ~x -> n c ~y1 ~x1, n c ~y1 ~x1``: maxima, and where they are in the whole image."""
    image, made = call.args[0], call.outputs[0]
    return spatial_rule(call, _pool_space(call, image, made, True), "image", linear=False)


def max_pool_backward_rule(call: Call) -> Rule:
    """``^n c ~y1 ~x1, n c ~y ~x, n c ~y1 ~x1 -> n c ~y ~x``: gradients go where the maxima were."""
    made, image = call.args[:2]
    return spatial_rule(call, _pool_space(call, image, made, True), "made image made", linear=True)


def avg_pool_rule(call: Call) -> Rule:
    """``^n c ~y ~x -> n c ~y1 ~x1``."""
    image, made = call.args[0], call.outputs[0]
    return spatial_rule(call, _pool_space(call, image, made, False), "image", linear=True)


def avg_pool_backward_rule(call: Call) -> Rule:
    """``^n c ~y1 ~x1, n c ~y ~x -> n c ~y ~x``."""
    made, image = call.args[:2]
    return spatial_rule(call, _pool_space(call, image, made, False), "made image", linear=True)


def max_pool_local(local: Local) -> Any:
    settings, source = _Pool.of(local.target, local.args, local.kwargs), local.args[0]
    sides = split_sides(local, len(settings.kernel))
    if not sides:
        return local.call(local.target, *local.args, **local.kwargs)
    for side in sides:
        window = settings.windows[side.index]
        source = fetch(local, source, side, window, side.image, side.made, -math.inf)
    call = local.call(
        local.target, source, settings.kernel, settings.stride, settings.padding_without(sides), settings.dilation,
        settings.ceil_mode,
    )  # fmt: skip
    found, indices = (local.call(operator.getitem, call, index) for index in (0, 1))
    here = _Place.of(local, local.input_shape(0), sides, settings.windows)
    return found, here.outwards(local, indices)


def max_pool_backward_local(local: Local) -> Any:
    given = arguments(local.target, local.args, local.kwargs)
    settings = _Pool.of(local.target, local.args, local.kwargs)
    sides = split_sides(local, len(settings.kernel))
    if not sides:
        return local.call(local.target, *local.args, **local.kwargs)
    grad, shape = local.args[0], local.shape()
    here = _Place.of(local, shape, sides, settings.windows)
    result = local.call(
        local.target, grad, local.call(aten.new_empty.default, grad, here.shape(shape)), settings.kernel,
        settings.stride, settings.padding_without(sides), settings.dilation, settings.ceil_mode,
        here.inwards(local, given["indices"]),
    )  # fmt: skip
    for side in reversed(sides):
        result = give_back(local, result, side, settings.windows[side.index], side.image, side.made)
    return result


@dataclass
class _Place:
    """Where what a rank pools lies in the image: by spatial dim the first row, the rows, and those of the whole."""

    lows: list[int]
    rows: list[int]
    whole: list[int]

    @classmethod
    def of(cls, local: Local, shape: Sequence[int], sides: Sequence[Side], every: Sequence[Window] | None) -> "_Place":
        """``shape`` is that of the rank's part of the image; without windows, that is all that it reads."""
        rank = sides[0].space
        rows = list(shape[-rank:])
        found = cls([0] * rank, rows, list(rows))
        for side in sides:
            part, _ = local.coordinate(side.factor)
            low, high = side.image[part : part + 2]
            if every is not None:
                low, high = every[side.index].ranges(side.made)[part]
            found.lows[side.index], found.rows[side.index] = low, high - low
            found.whole[side.index] = side.image[-1]
        return found

    def shape(self, part: Sequence[int]) -> list[int]:
        """Of what is pooled, with the halo."""
        return [*part[: -len(self.rows)], *self.rows]

    def outwards(self, local: Local, indices: Value) -> Value:
        """Positions here, as positions in the whole image. A window without any number above -inf is said to have its
        maximum in its first row; if that is padding, it is in the first row of the image."""
        within = all(
            low >= 0 and low + rows <= whole for low, rows, whole in zip(self.lows, self.rows, self.whole, strict=True)
        )
        return _moved(local, indices, self.rows, self.whole, self.lows, within)

    def inwards(self, local: Local, indices: Value) -> Value:
        """Positions in the whole image, as positions here."""
        return _moved(local, indices, self.whole, self.rows, [-low for low in self.lows], True)


def _moved(local: Local, indices: Value, before: list[int], after: list[int], by: list[int], within: bool) -> Value:
    """Positions in an image of the sizes ``before``, in one of the sizes ``after`` that lies elsewhere; all are known
    to be ``within`` it, or are brought there."""
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
    found: list[Value] = []
    for dim in range(last, -1, -1):
        one = local.call(aten.remainder.Scalar, rest, before[dim]) if dim else rest
        rest = _floor(local, rest, before[dim]) if dim else rest
        one = local.call(aten.add.Tensor, one, by[dim])
        found.insert(0, one if within else local.call(aten.clamp.default, one, 0, after[dim] - 1))
    flat = found[0]
    for dim in range(1, last + 1):
        flat = local.call(aten.add.Tensor, local.call(aten.mul.Tensor, flat, after[dim]), found[dim])
    if columns is None:
        return flat
    return local.call(aten.add.Tensor, local.call(aten.mul.Tensor, flat, inner), columns)


def _floor(local: Local, value: Value, by: int) -> Value:
    return local.call(aten.div.Tensor_mode, value, by, rounding_mode="floor")


def avg_pool_local(local: Local) -> Any:
    settings, source = _Pool.of(local.target, local.args, local.kwargs), local.args[0]
    sides = split_sides(local, len(settings.kernel), settings.windows)
    if not sides:
        return local.call(local.target, *local.args, **local.kwargs)
    for side in sides:
        source = fetch(local, source, side, settings.windows[side.index], side.image, side.made)
    result = local.call(local.target, source, *_averaging(settings, sides))
    if _alike(settings, sides):
        return result
    return _divided(local, result, settings, sides, local.input_shape(0), local.shape())


def avg_pool_backward_local(local: Local) -> Any:
    settings, grad = _Pool.of(local.target, local.args, local.kwargs), local.args[0]
    sides = split_sides(local, len(settings.kernel), settings.windows)
    if not sides:
        return local.call(local.target, *local.args, **local.kwargs)
    if not _alike(settings, sides):
        grad = _divided(local, grad, settings, sides, local.shape(), local.input_shape(0))
    shape = local.shape()
    for side in sides:
        shape[side.dim] = settings.windows[side.index].rows(local.input_shape(0)[side.dim])
    like = local.call(aten.new_empty.default, grad, shape)
    result = local.call(local.target, grad, like, *_averaging(settings, sides))
    for side in reversed(sides):
        result = give_back(local, result, side, settings.windows[side.index], side.image, side.made)
    return result


def _averaging(settings: _Pool, sides: Sequence[Side]) -> tuple[Any, ...]:
    """The settings of averages, or of sums where windows at the border count otherwise."""
    divisor = settings.divisor if _alike(settings, sides) else 1
    return (
        settings.kernel, settings.stride, settings.padding_without(sides), settings.ceil_mode,
        settings.counts_padding, divisor,
    )  # fmt: skip


def _alike(settings: _Pool, sides: Sequence[Side]) -> bool:
    """Whether windows at the border divide by what those inside divide by."""
    if settings.divisor is not None:
        return True
    for side in sides:
        window = settings.windows[side.index]
        end = window.rows(side.made[-1]) - window.padding
        counted = window.padding if settings.counts_padding else 0
        if end > side.image[-1] + counted or (window.padding and not settings.counts_padding):
            return False
    return True


def _divided(
    local: Local, value: Value, settings: _Pool, sides: Sequence[Side], image: Sequence[int], made: Sequence[int]
) -> Value:
    """By how many elements each window counts: the product of its rows and its columns."""
    rank = len(settings.kernel)
    split = {side.index: side for side in sides}
    for index, window in enumerate(settings.windows):
        length, first = image[index - rank], 0
        if index in split:
            part, _ = local.coordinate(split[index].factor)
            length, first = split[index].image[-1], split[index].made[part]
        counts = _counts(local, value, window, length, first, made[index - rank], settings.counts_padding)
        value = local.call(
            aten.div.Tensor, value, local.call(aten.view.default, counts, [-1, *[1] * (rank - 1 - index)])
        )
    return value


def _counts(
    local: Local, like: Value, window: Window, length: int, first: int, count: int, counts_padding: bool
) -> Value:
    """How many rows each of ``count`` windows has, from window ``first`` on."""
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


def _adaptive_space(image: Tensor, made: Tensor, rank: int, contiguous: bool) -> Space:
    result = Space()
    for name, large, small in zip(SPACE[rank], image.shape[-rank:], made.shape[-rank:], strict=True):
        result.add(name, (large, small), halo=False, contiguous=contiguous, equal=True)
    return result


def adaptive_rule(maxima: bool, backward: bool) -> Callable[[Call], Rule]:
    """``n c ~y ~x -> n c ~y1 ~x1``: where a part has whole numbers of rows on both sides, its windows are its own."""

    def rule(call: Call) -> Rule:
        image, made = (call.args[1], call.args[0]) if backward else (call.args[0], call.outputs[0])
        space = _adaptive_space(image, made, space_rank(call.target), maxima)
        inputs = ("made image made" if maxima else "made image") if backward else "image"
        return spatial_rule(call, space, inputs, linear=backward or not maxima)

    rule.__doc__ = adaptive_rule.__doc__
    return rule


def adaptive_local(local: Local) -> Any:
    """The part's own size of the output."""
    rank = space_rank(local.target)
    sides = split_sides(local, rank)
    result = local.call(local.target, local.args[0], local.shape()[-rank:])
    if not sides or "max" not in str(local.target):
        return result
    found, indices = (local.call(operator.getitem, result, index) for index in (0, 1))
    return found, _Place.of(local, local.input_shape(0), sides, None).outwards(local, indices)


def adaptive_max_backward_local(local: Local) -> Any:
    grad, source, indices = local.args
    sides = split_sides(local, space_rank(local.target))
    if sides:
        indices = _Place.of(local, local.shape(), sides, None).inwards(local, indices)
    return local.call(local.target, grad, source, indices)


def _flops(call: Call, rule: Rule | None) -> float:
    return float(max(tensor.numel() for tensor in (*call.tensors, *call.outputs)))


_MAX = OperatorRule(max_pool_rule, max_pool_local, _flops)
_MAX_BACKWARD = OperatorRule(max_pool_backward_rule, max_pool_backward_local, _flops)
_AVG = OperatorRule(avg_pool_rule, avg_pool_local, _flops)
_AVG_BACKWARD = OperatorRule(avg_pool_backward_rule, avg_pool_backward_local, _flops)
_ADAPTIVE_MAX = OperatorRule(adaptive_rule(True, False), adaptive_local, _flops)
_ADAPTIVE_MAX_BACKWARD = OperatorRule(adaptive_rule(True, True), adaptive_max_backward_local, _flops)
_ADAPTIVE_AVG = OperatorRule(adaptive_rule(False, False), adaptive_local, _flops)
_ADAPTIVE_AVG_BACKWARD = OperatorRule(adaptive_rule(False, True), flops=_flops)

RULES = {
    aten.max_pool2d_with_indices.default: _MAX,
    aten.max_pool2d_with_indices_backward.default: _MAX_BACKWARD,
    aten.max_pool3d_with_indices.default: _MAX,
    aten.max_pool3d_with_indices_backward.default: _MAX_BACKWARD,
    aten.adaptive_max_pool2d.default: _ADAPTIVE_MAX,
    aten.adaptive_max_pool2d_backward.default: _ADAPTIVE_MAX_BACKWARD,
    aten.adaptive_max_pool3d.default: _ADAPTIVE_MAX,
    aten.adaptive_max_pool3d_backward.default: _ADAPTIVE_MAX_BACKWARD,
    aten.avg_pool2d.default: _AVG,
    aten.avg_pool2d_backward.default: _AVG_BACKWARD,
    aten.avg_pool3d.default: _AVG,
    aten.avg_pool3d_backward.default: _AVG_BACKWARD,
    aten._adaptive_avg_pool2d.default: _ADAPTIVE_AVG,
    aten._adaptive_avg_pool2d_backward.default: _ADAPTIVE_AVG_BACKWARD,
    aten._adaptive_avg_pool3d.default: _ADAPTIVE_AVG,
    aten._adaptive_avg_pool3d_backward.default: _ADAPTIVE_AVG_BACKWARD,
}
