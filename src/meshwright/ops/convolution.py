"""Convolution split over samples, channels, filters, groups and space, forward and backward.

If space is split, each rank convolves its rows and the halo around them, without padding. A transposed convolution
makes terms for the halo rows instead, and the owners of these rows add them up. In the gradients of the inputs, the two
swap roles (Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", 2019,
section III).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.ir.convolution import algorithms_of
from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.operator_algorithm import parse
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value
from meshwright.ops.borders import Borders
from meshwright.ops.convolution_algorithms import INPUT, WEIGHT, emit_convolution, emit_gradient, emit_gradients
from meshwright.ops.halo import Side, Window, each, fetch, give_back, split_sides, windows, without
from meshwright.ops.space import SpatialDims

aten = torch.ops.aten


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Capture a convolution with its bias as a convolution and an addition."""
    if bias is None:
        return NotImplemented
    output = aten.convolution.default(input, weight, None, *settings)
    return output + bias.view(1, -1, *[1] * (output.dim() - 2))


def convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Capture backward as one operator for the input's gradient, one for the weight's, and a sum for the bias's."""
    *rest, mask = settings
    if mask in (INPUT, WEIGHT):
        return NotImplemented
    input_grad = aten.convolution_backward.default(grad, input, weight, None, *rest, INPUT)[0] if mask[0] else None
    weight_grad = aten.convolution_backward.default(grad, input, weight, None, *rest, WEIGHT)[1] if mask[1] else None
    bias_grad = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return input_grad, weight_grad, bias_grad


@dataclass
class _Settings:
    """The arguments of a call after input, weight and bias."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    windows: list[Window]
    """The windows of each spatial dim. A window has the rows of the larger side (the input, or the output of a
    transposed convolution) that belong to one row of the smaller side."""

    @classmethod
    def of(cls, given: tuple[Any, ...], kernel: Sequence[int]) -> "_Settings":
        *lists, transposed, output_padding, groups = given
        stride, padding, dilation, more = (each(setting, len(kernel)) for setting in (*lists, output_padding))
        return cls(stride, padding, dilation, transposed, more, groups, windows(kernel, stride, padding, dilation))

    def arguments(self, local: Local, sides: Sequence[Side]) -> tuple[Any, ...]:
        """Return the settings for a rank's part: its number of groups, and no padding in the dims of ``sides``."""
        groups = local.length("g") if local.is_split("g") else self.groups
        padding, output_padding = without(self.padding, sides), without(self.output_padding, sides)
        return self.stride, padding, self.dilation, self.transposed, output_padding, groups

    def channels(self) -> tuple[str, str, str]:
        """Return the patterns of the channels of input, output and weight. If there are several groups, only whole
        groups are distributed: the channels inside a group are never split."""
        if self.groups == 1:
            return "c", "f", "c f" if self.transposed else "f c"
        return "(g !c)", "(g !f)", "(g !c) !f" if self.transposed else "(g !f) !c"


def _rule(call: Call, given: tuple[Any, ...], source: Tensor, weight: Tensor, output: Tensor, pattern: str) -> Rule:
    """Return the rule of a pattern in which ``{source}``, ``{weight}`` and ``{output}`` stand for the operands."""
    kernel = weight.shape[2:]
    settings = _Settings.of(given, kernel)
    space = SpatialDims.of(source.shape, output.shape, [not window.alone for window in settings.windows])
    c, f, filters = settings.channels()
    filters += "".join(f" !{name}" for name in {1: "q", 2: "pq", 3: "rpq"}[len(kernel)])

    def text(image: str, result: str) -> str:
        return pattern.format(source=f"n {c} {image}", weight=filters, output=f"n {f} {result}")

    return space.rule(call, text, **({"g": settings.groups} if settings.groups != 1 else {}))


def convolution_rule(call: Call) -> Rule:
    """``n c ~y ~x, f c !p !q -> n f ~y ~x``; if stride or padding changes a dim's size, it becomes ``~y1``."""
    source, weight = call.args[:2]
    return _rule(call, call.args[3:9], source, weight, call.outputs[0], "^{source}, ^^{weight} -> {output}")


def convolution_backward_rule(call: Call) -> Rule:
    """``n f ~y ~x, n c ~y ~x, f c !p !q`` gives the gradient of input or weight, which has that tensor's pattern.

    The call reads only the shape of the tensor whose gradient it makes."""
    grad, source, weight = call.args[:3]
    to_input, to_weight = "^{output}, {source}, ^^{weight} -> {source}", "^{output}, ^^{source}, {weight} -> {weight}"
    return _rule(call, call.args[4:10], source, weight, grad, to_input if call.args[10] == INPUT else to_weight)


def convolution_local(local: Local) -> Any:
    """Run ``aten.convolution`` on one rank. Fetch the halo; if transposed, send terms for the halo to its owners."""
    source, weight = local.args[:2]
    settings, sides, options = _on_rank(local, 3)
    if settings.transposed:
        result = emit_convolution(local, source, weight, options, local.algorithm)
        return give_back(local, result, sides, settings.windows)
    borders, sides = _borders(local, sides, settings)
    source = fetch(local, source, sides, settings.windows)
    if borders is not None:
        return borders.convolved(source, weight, options)
    return emit_convolution(local, source, weight, options, local.algorithm)


def convolution_backward_local(local: Local) -> Any:
    """Run ``aten.convolution_backward`` on one rank, for one gradient. Fetch the halo, or send terms for the halo to
    its owners."""
    grad, source, weight = local.args[:3]
    mask = local.args[10]
    settings, sides, options = _on_rank(local, 4)

    def gradients(grad: Value, source: Value) -> Any:
        return emit_gradients(local, grad, source, weight, options, mask, local.algorithm)

    if settings.transposed:
        return gradients(fetch(local, grad, sides, settings.windows), source)
    borders, sides = _borders(local, sides, settings)
    if mask == WEIGHT:
        source = fetch(local, source, sides, settings.windows)
        return borders.weight_gradient(grad, source, weight, options) if borders else gradients(grad, source)
    if not sides and borders is None:
        return gradients(grad, source)
    shape = local.input_shape(1)
    for side in sides:
        shape[2 + side.index] = settings.windows[side.index].rows(local.input_shape(0)[2 + side.index])
    if borders is not None:
        result = borders.input_gradient(grad, shape, weight, options)
    else:
        like = local.call(aten.new_empty.default, grad, shape)  # only its shape is read
        result = emit_gradient(local, grad, like, weight, options, INPUT, local.algorithm)
    return give_back(local, result, sides, settings.windows), None, None


def _on_rank(local: Local, first: int) -> tuple[_Settings, list[Side], tuple[Any, ...]]:
    """Return the settings (the arguments from ``first`` on), the split dims, and the settings of this rank's part."""
    kernel = local.input_shape(first - 2)[2:]
    settings = _Settings.of(local.args[first : first + 6], kernel)
    sides = split_sides(local, len(kernel), settings.windows)
    sides = [side.turned() for side in sides] if settings.transposed else sides
    options = settings.arguments(local, sides)
    _check_algorithm(local, kernel, options)
    return settings, sides, options


def _check_algorithm(local: Local, kernel: Sequence[int], options: tuple[Any, ...]) -> None:
    """Raise a PlanError if the plan names an algorithm that does not support the operator on this rank."""
    if not local.algorithm:
        return
    direction = "forward"
    if local.target is aten.convolution_backward.default:
        direction = "input" if local.args[10] == INPUT else "weight"
    dtype, (stride, padding, dilation, transposed, _, groups) = str(local.dtype()).removeprefix("torch."), options
    settings = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups, transposed, dtype)
    served = algorithms_of(ConvolutionSizes(direction, 1, 1, 1, (), (), *settings))
    for pieces in parse(local.algorithm):
        if pieces.name not in served:
            raise PlanError(
                f"{pieces.name} does not compute a convolution with these settings",
                where=f"operator_algorithms: {local.name}", remedy=f"use {' or '.join(served)}",
            )  # fmt: skip


def _borders(local: Local, sides: list[Side], settings: _Settings) -> tuple[Borders | None, list[Side]]:
    """Return the last split dim if its halo travels while the part's own rows are convolved, or else None. Return the
    other split dims too."""
    borders = Borders.of(local, sides[-1], settings.windows[sides[-1].index]) if sides else None
    return borders, sides if borders is None else sides[:-1]


def _flops(first: int) -> Callable[[Call, Rule | None], float]:
    """Count two operations for each weight at each position. ``first`` is the index of the first setting (the stride)
    in the arguments."""

    def count(call: Call, rule: Rule | None) -> float:
        source, weight = call.args[first - 3 : first - 1]
        output = call.outputs[0] if first == 3 else call.args[0]
        positions = source if call.args[first + 3] else output
        return 2.0 * weight.numel() * positions.shape[0] * positions[0, 0].numel()

    return count


RULES = {
    aten.convolution.default: OperatorRule(convolution_rule, convolution_local, _flops(3)),
    aten.convolution_backward.default: OperatorRule(convolution_backward_rule, convolution_backward_local, _flops(4)),
}

CANONICAL = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
