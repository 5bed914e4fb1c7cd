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
from meshwright.ops.library import define, uses_triton
from meshwright.torch_private import FakeTensor, scaled_mm

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


def scale_of(most: Tensor, name: str) -> Tensor:
    """The scale of numbers whose largest magnitude is ``most``, in the format ``name``."""
    return most.clamp_min(LEAST) / torch.finfo(FORMATS[name]).max


def round_to_float8(value: Tensor, scale: Tensor, dtype: torch.dtype, *, by_columns: bool) -> Tensor:
    """``value / scale`` [r, c] in float8. ``scale``: of one element, [r, 1] or [1, c]. The result lies in memory row
    after row, or column after column, as a device's kernel reads it."""
    if uses_triton(value) and value.dtype != torch.float64:
        shape = value.shape[::-1] if by_columns else value.shape
        result = value.new_empty(shape, dtype=dtype)
        result = result.t() if by_columns else result
        if value.numel() and not isinstance(value, FakeTensor):
            from meshwright.ops import gpu_kernels

            gpu_kernels.round_to_float8(value, scale, result)
        return result
    limit = torch.finfo(dtype).max
    result = (value.to(scale.dtype) / scale).clamp(-limit, limit).to(dtype)
    return result.t().contiguous().t() if by_columns else result.contiguous()


def multiply(
    left: Tensor, right: Tensor, left_most: Tensor, right_most: Tensor, left_format: str, right_format: str
) -> Tensor:
    """Round both matrices to float8 and multiply them. The result has the dtype of ``left``. Products in float64, and
    sizes for which PyTorch has no kernel, multiply the rounded values in the wider dtype."""
    first_scale, second_scale = scale_of(left_most, left_format), scale_of(right_most, right_format)
    first = round_to_float8(left, first_scale, FORMATS[left_format], by_columns=False)
    second = round_to_float8(right, second_scale, FORMATS[right_format], by_columns=True)
    (_, inner), columns = left.shape, right.shape[1]
    if left.dtype == torch.float64 or inner % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE or not left.numel():
        dtype = _wide(left.dtype)
        return ((first.to(dtype) * first_scale) @ (second.to(dtype) * second_scale)).to(left.dtype)
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
