"""Padding and resizing of images, split over samples, channels and space.

A rank's part of a padded image begins and ends at other rows than its part of the image. Each rank fetches the rows
that it needs from the ranks that own them, and makes the rows beyond the border itself. Nearest resizing by a whole
factor copies rows inside a part. Interpolation also reads the rows next to the part.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from meshwright.ir.halo import Rows
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Target, Value, arguments, with_gradients
from meshwright.ops.halo import Side, Window, split_side, split_sides
from meshwright.ops.patterns import letters
from meshwright.ops.space import SPACE, SpatialDims, both, image_and_output, largest_flops, space_rank

aten = torch.ops.aten


@dataclass(frozen=True)
class _Needed:
    """One split dim of a padded or resized image on this rank. ``ranges`` has the rows of the image that each part
    reads, ``rows`` the number of rows that this rank reads, and ``rest`` the numbers of rows that the operator makes
    before and after the rank's own rows of the result."""

    side: Side
    ranges: tuple[Rows, ...]
    rows: int
    rest: Rows


def _computed_from(local: Local, value: Value, needed: Sequence[_Needed], *settings: Any) -> Value:
    """Run the operator on the part's rows and their halo; keep the rows of the result that belong to the part."""
    for need in needed:
        value = local.halo(value, need.side.factor, need.side.dim, need.side.image, need.ranges)
    value = local.call(local.target, value, *settings)
    for need in needed:
        if any(need.rest):
            own = local.shape()[need.side.dim]
            value = local.call(aten.slice.Tensor, value, need.side.dim, need.rest[0], need.rest[0] + own)
    return value


def _gradient_of(
    local: Local, grad: Value, needed: Sequence[_Needed], gradient: Callable[[Value, list[int]], Value]
) -> Value:
    """Apply the adjoint of ``_computed_from`` to a gradient. First, pad the gradient to the rows that forward made.
    Then call ``gradient(grad, shape)`` for the gradient of the rows that forward read, and add up its rows at their
    owners."""
    shape, rest = local.shape(), [(0, 0)] * space_rank(local.target)
    for need in needed:
        rest[need.side.index], shape[need.side.dim] = need.rest, need.rows
    if any(map(any, rest)):
        grad = local.call(aten.constant_pad_nd.default, grad, _flat(rest))
    result = gradient(grad, shape)
    for need in reversed(needed):
        result = local.halo_sum(result, need.side.factor, need.side.dim, need.side.image, need.ranges)
    return result


# --- padding with a constant ------------------------------------------------------------------------------------------

_FROM_THE_BACK = "xyzwuv"


def _amounts(padding: Sequence[int], rank: int) -> list[Rows]:
    """Return the numbers of padded rows (before, after) of each dim. PyTorch lists the last dim first."""
    pairs = [(padding[index], padding[index + 1]) for index in range(0, len(padding), 2)]
    return [*reversed(pairs + [(0, 0)] * (rank - len(pairs)))]


def _flat(amounts: Sequence[Rows]) -> list[int]:
    return [rows for pair in reversed(amounts) for rows in pair]


def _pad_window(amount: Rows) -> Window:
    """Return the window of a padding: each new row reads one row, shifted by the rows put before the image."""
    return Window(1, 1, amount[0])


def constant_pad_rule(call: Call) -> Rule:
    """``n c ~y ~x -> n c ~y1 ~x1``: a part of a padded dim begins and ends at other rows than a part of the image."""
    source, output = call.tensors[0], call.outputs[0]
    space, names = SpatialDims(), letters(source.dim())
    for dim, amount in enumerate(_amounts(call.args[1], source.dim())):
        if any(amount):
            name = _FROM_THE_BACK[source.dim() - 1 - dim]
            space.add(name, (source.shape[dim], output.shape[dim]), halo=True)
        else:
            space.left.append(names[dim])
            space.right.append(names[dim])
    linear = "^" if arguments(call)["value"] == 0 else ""
    return space.rule(call, lambda image, padded: f"{linear}{image or '.'} -> {padded or '.'}")


def constant_pad_local(local: Local) -> Any:
    """Run ``aten.constant_pad_nd`` on one rank. In a split dim, the halo exchange fills in the rows of the padding."""
    given, rank = arguments(local), len(local.shape())
    result, rest = given["self"], _amounts(given["pad"], rank)
    for dim, amount in enumerate(rest):
        side = split_side(local, _FROM_THE_BACK[rank - 1 - dim], dim, rank) if any(amount) else None
        if side is not None:
            ranges = _pad_window(amount).ranges(side.output)
            result = local.halo(result, side.factor, side.dim, side.image, ranges, float(given["value"]))
            rest[dim] = (0, 0)
    if any(map(any, rest)) or result is given["self"]:
        return local.call(local.target, result, _flat(rest), given["value"])
    return result


# --- padding with the image -------------------------------------------------------------------------------------------


def image_pad_rule(call: Call) -> Rule:
    """``^n c ~y ~x -> n c ~y1 ~x1``: rows beyond the border repeat rows of the image."""
    amounts = _amounts(arguments(call)["padding"], space_rank(call.target))
    return SpatialDims.of(*image_and_output(call), [any(amount) for amount in amounts]).spatial_rule(call, linear=True)


def _sources(rows: Rows, length: int, reflects: bool) -> Rows:
    """Return the range of rows of the image from which the range ``rows`` of the padded image is made."""
    low, high = max(0, rows[0]), min(length, rows[1])
    if rows[0] < 0:
        low, high = 0, max(high, min(length, 1 - rows[0] if reflects else 1))
    if rows[1] > length:
        low, high = min(low, max(0, 2 * length - 1 - rows[1] if reflects else length - 1)), length
    return low, high


def image_pad_local(local: Local) -> Any:
    """Run a reflection or replication padding on one rank: fetch the rows it reads, and pad at the image's border."""
    given, needed, amounts = _image_padding(local)
    return _computed_from(local, given["self"], needed, _flat(amounts))


def image_pad_backward_local(local: Local) -> Any:
    """Run the gradient of ``image_pad_local``: gradients of fetched rows are added up at their owners."""
    given, needed, amounts = _image_padding(local)

    def gradient(grad: Value, shape: list[int]) -> Value:
        image = local.call(aten.new_empty.default, grad, shape) if needed else given["self"]
        return local.call(local.target, grad, image, _flat(amounts))

    return _gradient_of(local, given["grad_output"], needed, gradient)


def _image_padding(local: Local) -> tuple[dict[str, Any], list[_Needed], list[Rows]]:
    """Return the arguments, the split dims that are padded, and the padding that this rank adds in every dim."""
    given, rank = arguments(local), space_rank(local.target)
    amounts, reflects, needed = _amounts(given["padding"], rank), "reflection" in str(local.target), []
    for side in split_sides(local, rank):
        if any(amounts[side.index]):
            part, length = local.coordinate(side.factor)[0], side.image[-1]
            wanted = _pad_window(amounts[side.index]).ranges(side.output)
            ranges = tuple(_sources(rows, length, reflects) for rows in wanted)
            (low, high), (first, last) = wanted[part], ranges[part]
            before, after = max(0, -low), max(0, high - length)
            amounts[side.index] = before, after
            rest = low - (first - before), (last + after) - high
            needed.append(_Needed(side, ranges, last - first, rest))
    return given, needed, amounts


# --- resizing ---------------------------------------------------------------------------------------------------------


def _scales(given: dict[str, Any]) -> list[float | None]:
    return [value for name, value in given.items() if name.startswith("scales")]


def _reach(image: int, output: int, cubic: bool) -> int:
    """Return the number of neighbouring rows that a part reads for interpolation: one (cubic: two), rounded up so that
    a whole number of new rows covers them. Linear interpolation that shrinks by a whole factor needs no such rows."""
    step = image // math.gcd(image, output)
    if cubic:
        return -(-2 // step) * step
    return 0 if image % output == 0 else step


def resize_rule(call: Call) -> Rule:
    """``^n c ~y ~x -> n c ~y1 ~x1``; a split needs whole factors (nearest) or ``align_corners=False`` (others)."""
    given, rank, nearest = arguments(call), space_rank(call.target), "nearest" in str(call.target)
    image, output = image_and_output(call)
    space = SpatialDims()
    for index, (name, scale) in enumerate(zip(SPACE[rank], _scales(given), strict=True)):
        large, small = image[index - rank], output[index - rank]
        whole_factor = large % small == 0 or small % large == 0
        even = scale is None or scale * large == small
        if not even or (not whole_factor if nearest else given["align_corners"]):
            space.whole(name, (large, small))
            continue
        reach = 0 if nearest else _reach(large, small, "cubic" in str(call.target))
        space.add(name, (large, small), halo=reach > 0)
    return space.spatial_rule(call, linear=True)


def _near(local: Local) -> list[_Needed]:
    """Return the split dims of a resized image. The rows that a part reads are extended to both sides until a whole
    number of new rows covers them."""
    rank, needed = space_rank(local.target), []
    cubic, nearest = "cubic" in str(local.target), "nearest" in str(local.target)
    for side in split_sides(local, rank):
        if side.factor == both(SPACE[rank][side.index]):
            part, image, output = local.coordinate(side.factor)[0], side.image[-1], side.output[-1]
            step = image // math.gcd(image, output)
            near = 0 if nearest else min(2 if cubic else 1, _reach(image, output, cubic))
            ranges = tuple(
                (max(0, (first * image // output - near) // step * step),
                 min(image, -(-(-(-end * image // output) + near) // step) * step))
                for first, end in pairwise(side.output)
            )  # fmt: skip
            low, high = ranges[part]
            first, end = side.output[part : part + 2]
            rest = first - low * output // image, high * output // image - end
            needed.append(_Needed(side, ranges, high - low, rest))
    return needed


def _with_rest(size: list[int], needed: Sequence[_Needed]) -> list[int]:
    """Return the size of the result that the part's rows and their halo give. ``size`` is the size without the halo."""
    rest = {need.side.index: sum(need.rest) for need in needed}
    return [rows + rest.get(index, 0) for index, rows in enumerate(size)]


def _settings(given: dict[str, Any]) -> list[Any]:
    """Return the arguments of the operator after the sizes."""
    return [*([given["align_corners"]] if "align_corners" in given else []), *_scales(given)]


def resize_local(local: Local) -> Any:
    """Resize on one rank, to the size of the rank's part, from the part's rows and the rows around them."""
    given, needed, rank = arguments(local), _near(local), space_rank(local.target)
    size = _with_rest(local.shape()[-rank:], needed)
    return _computed_from(local, given["self"], needed, size, *_settings(given))


def resize_backward_local(local: Local) -> Any:
    """Run the gradient of ``resize_local``: gradients of fetched rows are added up at their owners."""
    given, needed, rank = arguments(local), _near(local), space_rank(local.target)
    size = _with_rest(local.input_shape(0)[-rank:], needed)

    def gradient(grad: Value, shape: list[int]) -> Value:
        return local.call(local.target, grad, size, shape, *_settings(given))

    return _gradient_of(local, given["grad_output"], needed, gradient)


def smooth_rule(call: Call) -> Rule:
    """``^n c !y !x -> n c !y1 !x1``, or the reverse: other kinds of resizing, of which space stays whole."""
    rank, (image, output) = space_rank(call.target), image_and_output(call)
    space = SpatialDims()
    for index, name in enumerate(SPACE[rank]):
        space.whole(name, (image[index - rank], output[index - rank]))
    return space.spatial_rule(call, linear=True)


def smooth_backward_local(local: Local) -> Any:
    """Run the gradient of a resizing on one rank, with the shape of the rank's part."""
    grad, size, _, *settings = local.args
    return local.call(local.target, grad, size, local.shape(), *settings, **local.kwargs)


_PAD = OperatorRule(image_pad_rule, image_pad_local, largest_flops)
_PAD_BACKWARD = OperatorRule(image_pad_rule, image_pad_backward_local, largest_flops)
_RESIZE = OperatorRule(resize_rule, resize_local, largest_flops)
_RESIZE_BACKWARD = OperatorRule(resize_rule, resize_backward_local, largest_flops)
_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_SMOOTH = OperatorRule(smooth_rule, flops=largest_flops)
_SMOOTH_BACKWARD = OperatorRule(smooth_rule, smooth_backward_local, largest_flops)
_OTHER_KINDS = ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "bilinear2d_aa", "bicubic2d_aa")

RULES: dict[Target, OperatorRule] = {
    aten.constant_pad_nd.default: OperatorRule(constant_pad_rule, constant_pad_local),
    **with_gradients([f"reflection_pad{rank}d" for rank in SPACE], _PAD, _PAD_BACKWARD),
    **with_gradients([f"replication_pad{rank}d" for rank in SPACE], _PAD, _PAD_BACKWARD),
    **with_gradients([f"upsample_{kind}" for kind in _KINDS], _RESIZE, _RESIZE_BACKWARD),
    **with_gradients([f"_upsample_{kind}" for kind in _OTHER_KINDS], _SMOOTH, _SMOOTH_BACKWARD),
}
