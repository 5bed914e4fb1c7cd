"""Unfolding of images into columns (one for each window) and its adjoint, split over samples, channels and space.

As in a convolution, each rank makes the windows of its part from its rows and the halo around them. Folding back also
makes terms for the halo's rows, and the owners of these rows add them up.
"""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, arguments, make_rule
from meshwright.ops.halo import Side, Window, each, fetch, give_back, split_sides, windows, without
from meshwright.ops.patterns import letters, normalize_dim, operand
from meshwright.ops.space import SpatialDims, largest_flops

aten = torch.ops.aten


def _windows(given: dict[str, Any]) -> tuple[list[int], list[Window]]:
    """Return the kernel sizes and the windows of both dims."""
    kernel, dilation, padding, stride = (
        each(given[name], 2) for name in ("kernel_size", "dilation", "padding", "stride")
    )
    return kernel, windows(kernel, stride, padding, dilation)


def unfold_rule(call: Call) -> Rule:
    """``^n c ~y ~x -> n (c !p !q) (~y1 ~x1)``, or the reverse for folding back."""
    back = call.target is aten.col2im.default
    kernel, windows = _windows(arguments(call))
    image = (call.outputs[0] if back else call.tensors[0]).shape[-2:]
    counts = [
        (rows + 2 * window.padding - window.extent) // window.stride + 1
        for rows, window in zip(image, windows, strict=True)
    ]
    lead = "n " if call.tensors[0].dim() == (3 if back else 4) else ""

    def pattern(large: str, small: str) -> str:
        folded, columns = f"{lead}c {large}", f"{lead}(c !p !q) ({small})"
        return f"^{columns} -> {folded}" if back else f"^{folded} -> {columns}"

    sizes = {"p": kernel[0], "q": kernel[1], "y1": counts[0], "x1": counts[1], "y": image[0], "x": image[1]}
    return SpatialDims.of(image, counts, [True, True]).rule(call, pattern, **sizes)


def _settings(given: dict[str, Any], sides: Sequence[Side]) -> tuple[Any, ...]:
    """Return the arguments after the tensor and the size, without padding in the dims of ``sides``."""
    return given["kernel_size"], given["dilation"], without(each(given["padding"], 2), sides), given["stride"]


def unfold_local(local: Local) -> Any:
    """Run ``aten.im2col`` on one rank: fetch the halo, then unfold without padding in split dims."""
    given, sides = arguments(local), split_sides(local, 2)
    rows = fetch(local, given["self"], sides, _windows(given)[1])
    return local.call(local.target, rows, *_settings(given, sides))


def fold_local(local: Local) -> Any:
    """Run ``aten.col2im`` on one rank: fold into own rows and halo rows, then send the halo rows to their owners."""
    given, sides, size = arguments(local), split_sides(local, 2), local.shape()[-2:]
    windows = _windows(given)[1]
    for side in sides:
        part, _ = local.coordinate(side.factor)
        size[side.index] = windows[side.index].rows(side.output[part + 1] - side.output[part])
    return give_back(local, local.call(local.target, given["self"], size, *_settings(given, sides)), sides, windows)


# --- windows of one dim -----------------------------------------------------------------------------------------------


def window_rule(call: Call) -> Rule:
    """``^b !x -> b !y !w``, or the reverse; windows side by side may be split: ``^b (y !w) -> b y !w``."""
    given = arguments(call)
    back = call.target is aten.unfold_backward.default
    long, windowed = (call.outputs[0], call.tensors[0]) if back else (call.tensors[0], call.outputs[0])
    rank, size = long.dim(), given["size"]
    *names, windows, width, length = letters(rank + 3)
    left, right = names, [*names, f"!{width}"]
    if rank:
        dim = normalize_dim(given["dim" if back else "dimension"], rank)
        tiles = given["step"] == size and long.shape[dim] == windowed.shape[dim] * size
        right = [*names[:dim], windows if tiles else f"!{windows}", *names[dim + 1 :], f"!{width}"]
        left = [*names[:dim], f"({windows} !{width})" if tiles else f"!{length}", *names[dim + 1 :]]
    whole, parts = operand(left), operand(right)
    return make_rule(call, f"^{parts} -> {whole}" if back else f"^{whole} -> {parts}", **{width: size})


def window_backward_local(local: Local) -> Any:
    """Run ``aten.unfold_backward`` on one rank, with the shape of the rank's part."""
    return local.call(local.target, local.args[0], local.shape(), *local.args[2:], **local.kwargs)


RULES = {
    aten.im2col.default: OperatorRule(unfold_rule, unfold_local, largest_flops),
    aten.col2im.default: OperatorRule(unfold_rule, fold_local, largest_flops),
    aten.unfold.default: OperatorRule(window_rule),
    aten.unfold_backward.default: OperatorRule(window_rule, window_backward_local),
}
