"""Meshwright's own operators for convolutions with a chosen algorithm, and the calls of these operators in a rank's
graph.

They take the arguments of ``aten.convolution`` without the bias, and the text of an algorithm
(``ir/operator_algorithm.py``). Each gradient has an operator of its own. The pieces of samples run one after the other
into one result; pieces of a weight's gradient are summed up.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.operator_algorithm import NATIVE
from meshwright.ops.base import Local, Value
from meshwright.ops.convolution_kernels import ConvolutionSettings, compute, parts
from meshwright.ops.library import define

aten = torch.ops.aten

INPUT, WEIGHT = [True, False, False], [False, True, False]
"""Output masks of convolution_backward: only the gradient of the input, or only the gradient of the weight."""


def _result_shape(
    images: Sequence[int], weight: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> list[int]:  # fmt: skip
    spatial = []
    for size, kernel, step, pad, far, more in zip(
        images[2:], weight[2:], stride, padding, dilation, output_padding, strict=True
    ):
        extent = far * (kernel - 1) + 1
        if transposed:
            spatial.append((size - 1) * step - 2 * pad + extent + more)
        else:
            spatial.append((size + 2 * pad - extent) // step + 1)
    return [images[0], weight[1] * groups if transposed else weight[0], *spatial]


def _settings(options: Sequence[Any]) -> ConvolutionSettings:
    """The settings of two spatial dims. With one spatial dim, the image is one row."""
    stride, padding, dilation = ((neutral, *given)[-2:] for given, neutral in zip(options[:3], (1, 0, 1), strict=True))
    return ConvolutionSettings(stride, padding, dilation, options[5])


@torch.no_grad()
def convolution(images: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """Convolve images by an algorithm, the last argument."""
    *options, algorithm = given
    if algorithm == NATIVE:
        whole: Tensor = aten.convolution.default(images, weight, None, *options)
        return whole
    images, weight = images.contiguous(), weight.contiguous()
    out = images.new_empty(_result_shape(images.shape, weight.shape, *options))
    for name, part in parts(algorithm, len(images)):
        if name == NATIVE:
            out[part] = aten.convolution.default(images[part], weight, None, *options)
        else:
            compute("forward", name, images[part], weight, out[part], _settings(options))
    return out


@torch.no_grad()
def convolution_input(grad: Tensor, images: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """Compute the gradient of a convolution's input by an algorithm. Only the shape of ``images`` is read."""
    *options, algorithm = given
    grad, weight = grad.contiguous(), weight.contiguous()
    if algorithm == NATIVE:
        whole: Tensor = aten.convolution_backward.default(grad, images, weight, None, *options, INPUT)[0]
        return whole
    out = grad.new_empty(images.shape)
    for name, part in parts(algorithm, len(images)):
        if name == NATIVE:
            out[part] = aten.convolution_backward.default(grad[part], images[part], weight, None, *options, INPUT)[0]
        else:
            compute("input", name, grad[part], weight, out[part], _settings(options))
    return out


@torch.no_grad()
def convolution_weight(grad: Tensor, images: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """Compute the gradient of a convolution's weight by an algorithm. Only the shape of ``weight`` is read."""
    *options, algorithm = given
    if algorithm == NATIVE:
        whole: Tensor = aten.convolution_backward.default(grad, images, weight, None, *options, WEIGHT)[1]
        return whole
    grad, images = grad.contiguous(), images.contiguous()
    out = grad.new_zeros(weight.shape)
    for name, part in parts(algorithm, len(images)):
        if name == NATIVE:
            out += aten.convolution_backward.default(grad[part], images[part], weight, None, *options, WEIGHT)[1]
        else:
            compute("weight", name, grad[part], images[part], out, _settings(options))
    return out


_REST = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "str algorithm"
)
define(
    f"convolution(Tensor input, Tensor weight, {_REST}) -> Tensor",
    convolution,
    lambda images, weight, *given: images.new_empty(_result_shape(images.shape, weight.shape, *given[:-1])),
)
define(
    f"convolution_input(Tensor grad, Tensor input, Tensor weight, {_REST}) -> Tensor",
    convolution_input,
    lambda grad, images, *_: grad.new_empty(images.shape),
)
define(
    f"convolution_weight(Tensor grad, Tensor input, Tensor weight, {_REST}) -> Tensor",
    convolution_weight,
    lambda grad, images, weight, *_: grad.new_empty(weight.shape),
)
FORWARD = torch.ops.meshwright.convolution.default
OF_INPUT, OF_WEIGHT = torch.ops.meshwright.convolution_input.default, torch.ops.meshwright.convolution_weight.default
DIRECTIONS = {FORWARD: "forward", OF_INPUT: "input", OF_WEIGHT: "weight"}
"""Maps an operator to the direction that it computes."""


def emit_convolution(
    local: Local, images: Value, weight: Value, options: tuple[Any, ...], algorithm: str = ""
) -> Value:
    """Emit a convolution of a rank's part, by an algorithm (empty: PyTorch's own)."""
    if algorithm:
        return local.call(FORWARD, images, weight, *options, algorithm)
    return local.call(aten.convolution.default, images, weight, None, *options)


def emit_gradients(
    local: Local, grad: Value, images: Value, weight: Value, options: tuple[Any, ...], mask: list[bool],
    algorithm: str = "",
) -> Any:  # fmt: skip
    """Emit the gradient that ``mask`` asks for, by an algorithm (empty: PyTorch's own). Return the results of
    ``aten.convolution_backward``: a value of several tensors, or a tuple with None for gradients that are not
    computed."""
    if not algorithm:
        return local.call(aten.convolution_backward.default, grad, images, weight, None, *options, mask)
    value = local.call(OF_INPUT if mask == INPUT else OF_WEIGHT, grad, images, weight, *options, algorithm)
    return tuple(value if wanted else None for wanted in mask)


def emit_gradient(
    local: Local, grad: Value, images: Value, weight: Value, options: tuple[Any, ...], mask: list[bool],
    algorithm: str = "",
) -> Value:  # fmt: skip
    """Emit the one gradient that ``mask`` asks for, as one value."""
    index = mask.index(True)
    gradients = emit_gradients(local, grad, images, weight, options, mask, algorithm)
    return gradients[index] if isinstance(gradients, tuple) else local.call(operator.getitem, gradients, index)
