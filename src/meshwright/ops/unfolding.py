"""Unfolding of images into columns, one a window, and its adjoint: split over samples, channels and space.

Parts make their own windows from their rows and the halo around them, as convolutions do; folding back gives terms for
the halo's rows too, which are added up at their owners.
"""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, arguments
from meshwright.ops.halo import SPACE, Space, Window, each, fetch, give_back, split_sides, windows

aten = torch.ops.aten

NAMES = ("kernel_size", "dilation", "padding", "stride")


def _windows(given: dict[str, Any]) -> tuple[list[int], list[Window]]:
    """(the kernel, the windows of both dims)."""
    kernel, dilation, padding, stride = (each(given[name], 2) for name in NAMES)
    return kernel, windows(kernel, stride, padding, dilation)


def _counts(image: Sequence[int], every: Sequence[Window]) -> list[int]:
    """How many windows there are along height and width."""
    pairs = zip(image, every, strict=True)
    return [(rows + 2 * one.padding - one.extent) // one.stride + 1 for rows, one in pairs]


def unfold_rule(call: Call) -> Rule:
    """``^n c ~y ~x -> n (c !p !q) (~y1 ~x1)``, or back."""
    back = call.target is aten.col2im.default
    kernel, every = _windows(arguments(call.target, call.args, call.kwargs))
    whole = call.outputs[0] if back else call.tensors[0]
    image = whole.shape[-2:]
    space, counts = Space(), _counts(image, every)
    for name, large, small in zip(SPACE[2], image, counts, strict=True):
        space.add(name, (large, small), halo=True)
    lead = "n " if call.tensors[0].dim() == (3 if back else 4) else ""

    def pattern(large: str, small: str) -> str:
        folded, columns = f"{lead}c {large}", f"{lead}(c !p !q) ({small})"
        return f"^{columns} -> {folded}" if back else f"^{folded} -> {columns}"

    return space.rule(call, pattern, p=kernel[0], q=kernel[1], y1=counts[0], x1=counts[1], y=image[0], x=image[1])


def unfold_local(local: Local) -> Any:
    given, every, padding = _given(local)
    result = given["self"]
    for side in split_sides(local, 2):
        result = fetch(local, result, side, every[side.index], side.image, side.made)
    return local.call(local.target, result, given["kernel_size"], given["dilation"], padding, given["stride"])


def fold_local(local: Local) -> Any:
    given, every, padding = _given(local)
    sides, size = split_sides(local, 2), local.shape()[-2:]
    for side in sides:
        part, _ = local.coordinate(side.factor)
        size[side.index] = every[side.index].rows(side.made[part + 1] - side.made[part])
    result = local.call(
        local.target, given["self"], size, given["kernel_size"], given["dilation"], padding, given["stride"]
    )
    for side in reversed(sides):
        result = give_back(local, result, side, every[side.index], side.image, side.made)
    return result


def _given(local: Local) -> tuple[dict[str, Any], list[Window], list[int]]:
    """(arguments, the windows, the padding that is left where halos are there)."""
    given = arguments(local.target, local.args, local.kwargs)
    every, split = _windows(given)[1], {side.index for side in split_sides(local, 2)}
    padding = [0 if index in split else one for index, one in enumerate(each(given["padding"], 2))]
    return given, every, padding


def _flops(call: Call, rule: Rule | None) -> float:
    return float(max(tensor.numel() for tensor in (*call.tensors, *call.outputs)))


RULES = {
    aten.im2col.default: OperatorRule(unfold_rule, unfold_local, _flops),
    aten.col2im.default: OperatorRule(unfold_rule, fold_local, _flops),
}
