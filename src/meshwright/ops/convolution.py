"""Convolution split over samples, channels, filters, groups and space, forward and backward.

Split over space, each rank convolves its rows and the halo around them without padding; a transposed convolution
makes the halo's rows too, which are added up at their owners. The gradients are the other way round (Dryden et al.,
"Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", 2019, section III).
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value
from meshwright.ops.borders import Borders
from meshwright.ops.halo import SPACE, Space, Window, each, fetch, give_back, split_sides, windows

aten = torch.ops.aten

INPUT, WEIGHT = [True, False, False], [False, True, False]


def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """Canonical convolution: the bias is an addition of its own."""
    if bias is None:
        return NotImplemented
    output = aten.convolution.default(
        input, weight, None, stride, padding, dilation, transposed, output_padding, groups
    )
    return output + bias.view(1, -1, *[1] * (output.dim() - 2))


def convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Canonical backward: one operator for the input's gradient, one for the weight's, a sum for the bias's."""
    if output_mask in (INPUT, WEIGHT):
        return NotImplemented
    rest = (None, stride, padding, dilation, transposed, output_padding, groups)
    input_grad = aten.convolution_backward.default(grad, input, weight, *rest, INPUT)[0] if output_mask[0] else None
    weight_grad = aten.convolution_backward.default(grad, input, weight, *rest, WEIGHT)[1] if output_mask[1] else None
    bias_grad = grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None
    return input_grad, weight_grad, bias_grad


@dataclass
class _Settings:
    """What follows input, weight and bias in a call."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(cls, given: tuple[Any, ...], space: int) -> "_Settings":
        stride, padding, dilation, transposed, output_padding, groups = given
        lists = [each(one, space) for one in (stride, padding, dilation, output_padding)]
        return cls(lists[0], lists[1], lists[2], transposed, lists[3], groups)

    def windows(self, kernel: list[int]) -> list[Window]:
        """Which rows of the larger side, the input's or if transposed the output's, belong to one of the other."""
        return windows(kernel, self.stride, self.padding, self.dilation)

    def arguments(self, local: Local, split: set[int]) -> tuple[Any, ...]:
        """For a rank's part: no padding in dims whose halo is there, and the groups that are."""
        groups = local.length("g") if local.is_split("g") else self.groups
        padding, output_padding = (
            [0 if index in split else one for index, one in enumerate(given)]
            for given in (self.padding, self.output_padding)
        )
        return self.stride, padding, self.dilation, self.transposed, output_padding, groups


def _names(groups: int, transposed: bool) -> tuple[str, str, str]:
    """Patterns of the channels of the input, of the output, and of the weight: channels and filters, or those of each
    group, which are whole."""
    if groups == 1:
        return "c", "f", "c f" if transposed else "f c"
    return "(g !c)", "(g !f)", "(g !c) !f" if transposed else "(g !f) !c"


def _sizes(groups: int) -> dict[str, int]:
    return {"g": groups} if groups != 1 else {}


def _space(source: Tensor, output: Tensor, settings: _Settings, kernel: list[int]) -> Space:
    """Dims of the input and of the output."""
    result = Space()
    for index, (name, window) in enumerate(zip(SPACE[len(kernel)], settings.windows(kernel), strict=True)):
        result.add(name, (source.shape[2 + index], output.shape[2 + index]), halo=not window.alone)
    return result


def _kernel_names(space: int) -> str:
    return " ".join(f"!{name}" for name in {1: "q", 2: "pq", 3: "rpq"}[space])


def convolution_rule(call: Call) -> Rule:
    """``n c ~y ~x, f c !p !q -> n f ~y ~x``; where a stride or missing padding changes a size, ``~y1`` on the right."""
    source, weight = call.args[:2]
    kernel = list(weight.shape[2:])
    settings = _Settings.of(call.args[3:9], len(kernel))
    space = _space(source, call.outputs[0], settings, kernel)
    c, f, filters = _names(settings.groups, settings.transposed)
    filters = f"{filters} {_kernel_names(len(kernel))}"
    return space.rule(
        call, lambda image, made: f"^n {c} {image}, ^^{filters} -> n {f} {made}", **_sizes(settings.groups)
    )


def convolution_backward_rule(call: Call) -> Rule:
    """``n f ~y ~x, n c ~y ~x, f c !p !q`` to the gradient of the input or of the weight, the other lends its shape."""
    grad, source, weight = call.args[:3]
    kernel = list(weight.shape[2:])
    settings = _Settings.of(call.args[4:10], len(kernel))
    space = _space(source, grad, settings, kernel)
    c, f, filters = _names(settings.groups, settings.transposed)
    filters = f"{filters} {_kernel_names(len(kernel))}"

    def pattern(image: str, made: str) -> str:
        if call.args[10] == INPUT:
            return f"^n {f} {made}, n {c} {image}, ^^{filters} -> n {c} {image}"
        return f"^n {f} {made}, ^^n {c} {image}, {filters} -> {filters}"

    return space.rule(call, pattern, **_sizes(settings.groups))


def convolution_local(local: Local) -> Any:
    source, weight = local.args[:2]
    kernel = local.input_shape(1)[2:]
    settings = _Settings.of(local.args[3:9], len(kernel))
    every = settings.windows(kernel)
    sides = split_sides(local, len(kernel), every)
    rest = settings.arguments(local, {side.index for side in sides})
    if not settings.transposed:
        for side in sides[:-1]:
            source = fetch(local, source, side, every[side.index], side.image, side.made)
        for side in sides[-1:]:
            if (borders := Borders.of(local, side, every[side.index])) is not None:
                return borders.convolved(source, weight, rest)
            source = fetch(local, source, side, every[side.index], side.image, side.made)
        return local.call(local.target, source, weight, None, *rest)
    result = local.call(local.target, source, weight, None, *rest)
    for side in reversed(sides):
        result = give_back(local, result, side, every[side.index], side.made, side.image)
    return result


def convolution_backward_local(local: Local) -> Any:
    grad, source, weight = local.args[:3]
    mask, kernel = local.args[10], local.input_shape(2)[2:]
    settings = _Settings.of(local.args[4:10], len(kernel))
    every = settings.windows(kernel)
    sides = split_sides(local, len(kernel), every)
    rest = settings.arguments(local, {side.index for side in sides})

    def gradients(grad: Value, source: Value) -> Value:
        return local.call(local.target, grad, source, weight, None, *rest, mask)

    if settings.transposed:
        for side in sides:
            grad = fetch(local, grad, side, every[side.index], side.made, side.image)
        return gradients(grad, source)
    borders = Borders.of(local, sides[-1], every[sides[-1].index]) if sides else None
    if borders is not None:
        sides = sides[:-1]
    if mask == WEIGHT:
        for side in sides:
            source = fetch(local, source, side, every[side.index], side.image, side.made)
        return borders.weight_gradient(grad, source, weight, rest) if borders else gradients(grad, source)
    if not sides and borders is None:
        return gradients(grad, source)
    shape = local.input_shape(1)
    for side in sides:
        shape[2 + side.index] = every[side.index].rows(local.input_shape(0)[2 + side.index])
    if borders is not None:
        result = borders.input_gradient(grad, shape, weight, rest)
    else:
        like = local.call(aten.new_empty.default, grad, shape)  # only its shape is looked at
        result = local.call(operator.getitem, gradients(grad, like), 0)
    for side in reversed(sides):
        result = give_back(local, result, side, every[side.index], side.image, side.made)
    return result, None, None


def _convolution_flops(call: Call, rule: Rule | None) -> float:
    weight, output = call.args[1], call.outputs[0]
    source = call.args[0]
    positions = source if call.args[6] else output
    return 2.0 * weight.numel() * positions.shape[0] * positions[0, 0].numel()


def _convolution_backward_flops(call: Call, rule: Rule | None) -> float:
    grad, source, weight = call.args[:3]
    positions = source if call.args[7] else grad
    return 2.0 * weight.numel() * positions.shape[0] * positions[0, 0].numel()


RULES = {
    aten.convolution.default: OperatorRule(convolution_rule, convolution_local, _convolution_flops),
    aten.convolution_backward.default: OperatorRule(
        convolution_backward_rule, convolution_backward_local, _convolution_backward_flops
    ),
}

CANONICAL = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
