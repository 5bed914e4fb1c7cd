"""Tensors told by their strides, as some backward passes make them: views, where all elements are in order."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

aten = torch.ops.aten


def as_strided(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """A view, where the strides are those of all elements in order."""
    if not _in_order(input, size, stride, storage_offset):
        return NotImplemented
    return aten.view.default(input, list(size))


def as_strided_scatter(
    input: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """What is written over all elements in order is all that there is."""
    if not _in_order(input, size, stride, storage_offset):
        return NotImplemented
    return aten.clone.default(aten.reshape.default(src, list(input.shape)))


def _in_order(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> bool:
    if any(
        length != 1 and step != prod(size[dim + 1 :])
        for dim, (length, step) in enumerate(zip(size, stride, strict=True))
    ):
        return False
    offset = input.storage_offset() if storage_offset is None else storage_offset
    return prod(size) == input.numel() and input.is_contiguous() and offset == input.storage_offset()


CANONICAL = {
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
}
