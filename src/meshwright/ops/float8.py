"""Matrix products in float8: operands are rounded to eight bits, with scales that are computed on the device.

An operand x is stored as ``round(x / scale)``, with ``scale = max|x| / largest``: one for the whole tensor
(``tensorwise``), or one for each row of the left operand and each column of the right one (``rowwise``). Values of the
forward pass have the format e4m3 (3 bits of mantissa, largest 448). Gradients have e5m2 (2 bits, largest 57,344) under
tensorwise scaling, and e4m3 under rowwise scaling. Sums are in float32 (P. Micikevicius et al., "FP8 Formats for Deep
Learning", 2022).

Ranks that hold parts of the values of a scale reduce its maximum. So a product has the same numbers under every layout,
except that each micro-batch has its own scales.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.ir.operator_algorithm import FLOAT8_MULTIPLE, float8_of
from meshwright.ops.base import Local
from meshwright.ops.library import define
from meshwright.torch_private import scaled_mm

ours = torch.ops.meshwright
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Maps the name of a format to its dtype."""
LEAST = 1e-12
"""The smallest magnitude from which a scale is computed, so that the scale of a tensor of zeros is not 0."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest(value: Tensor, dim: int) -> Tensor:
    """The largest magnitude along ``dim``, which is kept; of all elements if ``dim`` is -1."""
    if not value.numel():
        return _fake_largest(value, dim).zero_()
    dims = None if dim < 0 else [dim]
    return torch.linalg.vector_norm(value, float("inf"), dims, keepdim=dim >= 0, dtype=_wide(value.dtype))


def rounded(value: Tensor, most: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A tensor in float8, and the scale by which it is multiplied. ``most`` is its largest magnitude."""
    limit, dtype = torch.finfo(FORMATS[name]).max, _wide(value.dtype)
    scale = most.clamp_min(LEAST) / limit
    return (value.to(dtype) / scale).clamp(-limit, limit).to(FORMATS[name]), scale


def multiply(
    left: Tensor, right: Tensor, left_most: Tensor, right_most: Tensor, left_format: str, right_format: str
) -> Tensor:
    """Round both matrices to float8 and multiply them. The result has the dtype of ``left``. Products in float64, and
    sizes for which PyTorch has no kernel, multiply the rounded values in the wider dtype."""
    first, first_scale = rounded(left, left_most, left_format)
    second, second_scale = rounded(right, right_most, right_format)
    (_, inner), columns = left.shape, right.shape[1]
    if left.dtype == torch.float64 or inner % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE or not left.numel():
        dtype = _wide(left.dtype)
        return ((first.to(dtype) * first_scale) @ (second.to(dtype) * second_scale)).to(left.dtype)
    if second.stride(0) != 1:  # the kernel reads the right matrix by columns
        second = second.t().contiguous().t()
    return scaled_mm(first, second, scale_a=first_scale, scale_b=second_scale, out_dtype=left.dtype)


def _fake_largest(value: Tensor, dim: int) -> Tensor:
    shape = [] if dim < 0 else [1 if index == dim else size for index, size in enumerate(value.shape)]
    return value.new_empty(shape, dtype=_wide(value.dtype))


define("float8_max(Tensor value, int dim) -> Tensor", largest, _fake_largest)
define(
    "float8_mm(Tensor left, Tensor right, Tensor left_most, Tensor right_most, str left_format, str right_format) "
    "-> Tensor",
    multiply,
    lambda left, right, *_: left.new_empty(left.shape[0], right.shape[1]),
)


FLOAT8_MAX, FLOAT8_MM = ours.float8_max.default, ours.float8_mm.default


def product_in_float8(local: Local) -> Any:
    """Run ``aten.mm`` on one rank in float8, as the plan's algorithm says."""
    form = float8_of(local.algorithm)
    most = []
    for value, dim, factors in ((local.args[0], 1, "mj"), (local.args[1], 0, "jf")):
        maximum = local.call(FLOAT8_MAX, value, dim if form.rowwise else -1)
        for factor in "j" if form.rowwise else factors:
            maximum = local.all_reduce(maximum, factor, "max")
        most.append(maximum)
    return local.call(FLOAT8_MM, *local.args, *most, form.left, form.right)
