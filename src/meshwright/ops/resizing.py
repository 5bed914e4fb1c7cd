"""Padding and resizing of images, split over samples, channels and space.

A padded image has other parts than the image: a part's rows come from whichever ranks have them, and rows beyond the
border are made where they are needed. Resizing by whole factors copies rows inside a part; interpolation also reads the
rows next to it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from meshwright.ir.halo import Rows
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, arguments, letters
from meshwright.ops.halo import SPACE, Side, Space, Window, both, split_sides
from meshwright.ops.pooling import space_rank, spatial_rule

aten = torch.ops.aten

# --- padding with a constant ------------------------------------------------------------------------------------------

_FROM_THE_BACK = "xyzwuv"


def _amounts(padding: Sequence[int], rank: int) -> list[Rows]:
    """Rows before and after, by dim; PyTorch tells them from the last dim on."""
    pairs = [(padding[index], padding[index + 1]) for index in range(0, len(padding), 2)]
    return [*reversed(pairs + [(0, 0)] * (rank - len(pairs)))]


def _flat(amounts: Sequence[Rows]) -> list[int]:
    return [one for pair in reversed(amounts) for one in pair]


def _pad_window(amount: Rows) -> Window:
    """Every row that is made is one row, further on by what is put before it."""
    return Window(1, 1, amount[0])


def constant_pad_rule(call: Call) -> Rule:
    """``n c ~y ~x -> n c ~y1 ~x1``: parts of a padded dim are other rows."""
    source, made = call.tensors[0], call.outputs[0]
    space, names = Space(), letters(source.dim())
    for dim, amount in enumerate(_amounts(call.args[1], source.dim())):
        if any(amount):
            name = _FROM_THE_BACK[source.dim() - 1 - dim]
            space.add(name, (source.shape[dim], made.shape[dim]), halo=True)
        else:
            space.left.append(names[dim])
            space.right.append(names[dim])
    linear = "^" if call.argument(2, "value", 0) == 0 else ""
    return space.rule(call, lambda image, padded: f"{linear}{image or '.'} -> {padded or '.'}")


def constant_pad_local(local: Local) -> Any:
    given = arguments(local.target, local.args, local.kwargs)
    result, rank = given["self"], len(local.shape())
    rest = _amounts(given["pad"], rank)
    for dim, amount in enumerate(rest):
        name = _FROM_THE_BACK[rank - 1 - dim]
        factor = next((one for one in (name, 2 * name) if any(amount) and local.is_split(one)), None)
        if factor is not None:
            image = local.bounds(factor, name)
            made = image if factor == name else local.bounds(factor, f"{name}1")
            ranges = _pad_window(amount).ranges(made)
            result = local.halo(result, factor, dim - rank, image, ranges, float(given["value"]))
            rest[dim] = (0, 0)
    if any(map(any, rest)) or result is given["self"]:
        return local.call(local.target, result, _flat(rest), given["value"])
    return result


# --- padding with the image -------------------------------------------------------------------------------------------


def image_pad_rule(backward: bool) -> Callable[[Call], Rule]:
    """``^n c ~y ~x -> n c ~y1 ~x1``: rows beyond the border repeat rows of the image."""

    def rule(call: Call) -> Rule:
        image, made = (call.args[1], call.args[0]) if backward else (call.args[0], call.outputs[0])
        space, rank = Space(), space_rank(call.target)
        amounts = _amounts(arguments(call.target, call.args, call.kwargs)["padding"], rank)
        for index, name in enumerate(SPACE[rank]):
            sizes = image.shape[index - rank], made.shape[index - rank]
            space.add(name, sizes, halo=any(amounts[index]))
        return spatial_rule(call, space, "made image" if backward else "image", linear=True)

    rule.__doc__ = image_pad_rule.__doc__
    return rule


@dataclass(frozen=True)
class _Padded:
    """One split dim of a padded image on this rank: the rows of the image that each part needs, the rows beyond its
    border that this one adds, and which of all of these are its own."""

    side: Side
    ranges: tuple[Rows, ...]
    amount: Rows
    first: int
    rows: int
    own: int

    @classmethod
    def of(cls, local: Local, side: Side, amount: Rows) -> "_Padded":
        part, length = local.coordinate(side.factor)[0], side.image[-1]
        wanted = _pad_window(amount).ranges(side.made)
        reflects = "reflection" in str(local.target)
        ranges = tuple(_needed(one, length, reflects) for one in wanted)
        (low, high), (first, last) = wanted[part], ranges[part]
        before, after = max(0, -low), max(0, high - length)
        return cls(side, ranges, (before, after), low - (first - before), last - first, high - low)

    @property
    def padded(self) -> int:
        """The rows with those beyond the border."""
        return self.rows + sum(self.amount)

    @property
    def rest(self) -> Rows:
        """How many of them before and after are not its own."""
        return self.first, self.padded - self.first - self.own


def _needed(rows: Rows, length: int, reflects: bool) -> Rows:
    """The rows of the image from which rows of the padded one are made."""
    low, high = max(0, rows[0]), min(length, rows[1])
    if rows[0] < 0:
        low, high = 0, max(high, min(length, 1 - rows[0] if reflects else 1))
    if rows[1] > length:
        low, high = min(low, max(0, 2 * length - 1 - rows[1] if reflects else length - 1)), length
    return low, high


def image_pad_local(local: Local) -> Any:
    given, padded, amounts = _image_padding(local)
    result = given["self"]
    for one in padded:
        result = local.halo(result, one.side.factor, one.side.dim, one.side.image, one.ranges)
    result = local.call(local.target, result, _flat(amounts))
    for one in padded:
        if any(one.rest):
            result = local.call(aten.slice.Tensor, result, one.side.dim, one.first, one.first + one.own)
    return result


def image_pad_backward_local(local: Local) -> Any:
    given, padded, amounts = _image_padding(local)
    grad, shape = given["grad_output"], local.shape()
    rest = [(0, 0)] * len(amounts)
    for one in padded:
        rest[one.side.index] = one.rest
        shape[one.side.dim] = one.rows
    if any(map(any, rest)):
        grad = local.call(aten.constant_pad_nd.default, grad, _flat(rest))
    image = local.call(aten.new_empty.default, grad, shape) if padded else given["self"]
    result = local.call(local.target, grad, image, _flat(amounts))
    for one in reversed(padded):
        result = local.halo_sum(result, one.side.factor, one.side.dim, one.side.image, one.ranges)
    return result


def _image_padding(local: Local) -> tuple[dict[str, Any], list[_Padded], list[Rows]]:
    """(arguments, the split dims, what is padded here in every dim)."""
    given, rank = arguments(local.target, local.args, local.kwargs), space_rank(local.target)
    amounts = _amounts(given["padding"], rank)
    padded = [_Padded.of(local, side, amounts[side.index]) for side in split_sides(local, rank)]
    padded = [one for one in padded if any(amounts[one.side.index])]
    for one in padded:
        amounts[one.side.index] = one.amount
    return given, padded, amounts


# --- resizing ---------------------------------------------------------------------------------------------------------


def _scales(given: dict[str, Any]) -> list[float | None]:
    return [value for name, value in given.items() if name.startswith("scales")]


def _reach(image: int, made: int, cubic: bool) -> int:
    """How many rows next to its own a part reads for interpolation: one (cubic: two), or as many as a whole number of
    new rows lies on; none, where a line lies between rows that are made fewer by a whole factor."""
    step = image // math.gcd(image, made)
    if cubic:
        return -(-2 // step) * step
    return 0 if image % made == 0 else step


def resize_rule(call: Call) -> Rule:
    """``^n c ~y ~x -> n c ~y1 ~x1``: whole factors, or interpolation between centres of pixels."""
    given, rank = arguments(call.target, call.args, call.kwargs), space_rank(call.target)
    backward, nearest = "backward" in str(call.target), "nearest" in str(call.target)
    image, made = (call.outputs[0], call.tensors[0]) if backward else (call.tensors[0], call.outputs[0])
    space = Space()
    for index, (name, scale) in enumerate(zip(SPACE[rank], _scales(given), strict=True)):
        large, small = image.shape[index - rank], made.shape[index - rank]
        whole_factor = large % small == 0 or small % large == 0
        even = scale is None or scale * large == small
        if not even or (not whole_factor if nearest else given["align_corners"]):
            space.whole(name, (large, small))
            continue
        reach = 0 if nearest else _reach(large, small, "cubic" in str(call.target))
        space.add(name, (large, small), halo=reach > 0)
    return spatial_rule(call, space, "made" if backward else "image", linear=True)


@dataclass(frozen=True)
class _Near:
    """One split dim of a resized image on this rank: the rows that each part reads, as many as whole numbers of new
    rows lie on, and how many new rows lie on them before and after its own."""

    side: Side
    ranges: tuple[Rows, ...]
    rows: int
    rest: Rows

    @classmethod
    def of(cls, local: Local, side: Side) -> "_Near":
        part, image, made = local.coordinate(side.factor)[0], side.image[-1], side.made[-1]
        step = image // math.gcd(image, made)
        cubic = "cubic" in str(local.target)
        near = 0 if "nearest" in str(local.target) else min(2 if cubic else 1, _reach(image, made, cubic))
        ranges = tuple(
            (max(0, (first * image // made - near) // step * step),
             min(image, -(-(-(-end * image // made) + near) // step) * step))
            for first, end in pairwise(side.made)
        )  # fmt: skip
        low, high = ranges[part]
        first, end = side.made[part : part + 2]
        return cls(side, ranges, high - low, (first - low * made // image, high * made // image - end))


def resize_local(local: Local) -> Any:
    """The part's own sizes, with the rows around it that it is made of."""
    given, rank = arguments(local.target, local.args, local.kwargs), space_rank(local.target)
    near = [_Near.of(local, side) for side in split_sides(local, rank) if side.factor == both(SPACE[rank][side.index])]
    result, size = given["self"], local.shape()[-rank:]
    for one in near:
        result = local.halo(result, one.side.factor, one.side.dim, one.side.image, one.ranges)
        size[one.side.index] += sum(one.rest)
    result = local.call(local.target, result, size, *_corners(given), *_scales(given))
    for one in near:
        if any(one.rest):
            own = local.shape()[one.side.dim]
            result = local.call(aten.slice.Tensor, result, one.side.dim, one.rest[0], one.rest[0] + own)
    return result


def _corners(given: dict[str, Any]) -> list[bool]:
    return [given["align_corners"]] if "align_corners" in given else []


def resize_backward_local(local: Local) -> Any:
    given, rank = arguments(local.target, local.args, local.kwargs), space_rank(local.target)
    near = [_Near.of(local, side) for side in split_sides(local, rank) if side.factor == both(SPACE[rank][side.index])]
    grad, size, shape = given["grad_output"], local.input_shape(0)[-rank:], local.shape()
    rest = [(0, 0)] * rank
    for one in near:
        rest[one.side.index] = one.rest
        size[one.side.index] += sum(one.rest)
        shape[one.side.dim] = one.rows
    if any(map(any, rest)):
        grad = local.call(aten.constant_pad_nd.default, grad, _flat(rest))
    result: Value = local.call(local.target, grad, size, shape, *_corners(given), *_scales(given))
    for one in reversed(near):
        result = local.halo_sum(result, one.side.factor, one.side.dim, one.side.image, one.ranges)
    return result


def _flops(call: Call, rule: Rule | None) -> float:
    return float(max(tensor.numel() for tensor in (*call.tensors, *call.outputs)))


_PAD = OperatorRule(image_pad_rule(False), image_pad_local, _flops)
_PAD_BACKWARD = OperatorRule(image_pad_rule(True), image_pad_backward_local, _flops)
_NEAREST = OperatorRule(resize_rule, resize_local, _flops)
_NEAREST_BACKWARD = OperatorRule(resize_rule, resize_backward_local, _flops)
_LINEAR = OperatorRule(resize_rule, resize_local, _flops)
_LINEAR_BACKWARD = OperatorRule(resize_rule, resize_backward_local, _flops)

RULES = {
    aten.constant_pad_nd.default: OperatorRule(constant_pad_rule, constant_pad_local),
    aten.reflection_pad1d.default: _PAD,
    aten.reflection_pad1d_backward.default: _PAD_BACKWARD,
    aten.reflection_pad2d.default: _PAD,
    aten.reflection_pad2d_backward.default: _PAD_BACKWARD,
    aten.reflection_pad3d.default: _PAD,
    aten.reflection_pad3d_backward.default: _PAD_BACKWARD,
    aten.replication_pad1d.default: _PAD,
    aten.replication_pad1d_backward.default: _PAD_BACKWARD,
    aten.replication_pad2d.default: _PAD,
    aten.replication_pad2d_backward.default: _PAD_BACKWARD,
    aten.replication_pad3d.default: _PAD,
    aten.replication_pad3d_backward.default: _PAD_BACKWARD,
    aten.upsample_nearest1d.default: _NEAREST,
    aten.upsample_nearest1d_backward.default: _NEAREST_BACKWARD,
    aten.upsample_nearest2d.default: _NEAREST,
    aten.upsample_nearest2d_backward.default: _NEAREST_BACKWARD,
    aten.upsample_nearest3d.default: _NEAREST,
    aten.upsample_nearest3d_backward.default: _NEAREST_BACKWARD,
    aten.upsample_linear1d.default: _LINEAR,
    aten.upsample_linear1d_backward.default: _LINEAR_BACKWARD,
    aten.upsample_bilinear2d.default: _LINEAR,
    aten.upsample_bilinear2d_backward.default: _LINEAR_BACKWARD,
    aten.upsample_bicubic2d.default: _LINEAR,
    aten.upsample_bicubic2d_backward.default: _LINEAR_BACKWARD,
    aten.upsample_trilinear3d.default: _LINEAR,
    aten.upsample_trilinear3d_backward.default: _LINEAR_BACKWARD,
}
