"""Captures ``as_strided`` as a view or a look-up of elements. Strides and offsets from the captured step do not hold
for a part of a tensor, nor for a tensor that is gathered from parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.errors import CaptureError

aten = torch.ops.aten


def as_strided(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """Capture ``as_strided`` as a view if the strides select all elements in order, else as a look-up of elements."""
    if _in_order(input, size, stride, storage_offset):
        return aten.view.default(input, list(size))
    lookup = _Lookup.of(input, size, stride, storage_offset)
    base = input
    for dim in reversed(range(input.dim())):
        base = base if dim in lookup.order else base.select(dim, 0)
    base = base.permute([sorted(lookup.order).index(dim) for dim in lookup.order]).reshape(lookup.shape)
    return (aten.index.Tensor(base, lookup.indices(input)) if lookup.looks_up else base).reshape(list(size))


def as_strided_scatter(
    input: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Capture ``as_strided_scatter``: reshape ``src`` if it overwrites all elements in order, else write by index."""
    if _in_order(input, size, stride, storage_offset):
        return aten.clone.default(aten.reshape.default(src, list(input.shape)))
    lookup = _Lookup.of(input, size, stride, storage_offset)
    order = [*(dim for dim in range(input.dim()) if dim not in lookup.order), *lookup.order]
    base = input.permute(order)
    values = src.reshape([*lookup.shape[: lookup.kept], *lookup.size[lookup.kept :]])
    if lookup.looks_up:
        values = aten.index_put.default(base.reshape(lookup.shape), lookup.indices(input), values)
    return aten.clone.default(values.reshape(base.shape).permute([order.index(dim) for dim in range(len(order))]))


@dataclass(frozen=True)
class _Lookup:
    """A look-up of the elements that strides select. It indexes ``tensor.permute(order).reshape(shape)`` in all dims
    but the first ``kept``. The result has the shape ``size``. For its element at the indices ``i``, the index in a dim
    is ``starts[dim] + sum(i[k] * moves[k][dim])``."""

    order: list[int]
    shape: list[int]
    size: list[int]
    starts: list[int]
    moves: list[list[int]]

    @staticmethod
    def of(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> "_Lookup":
        """Return the look-up of a call. If the dims do not allow indices, dense innermost dims are merged into one.

        Raises:
            CaptureError: the strides select a place that holds no element of the tensor.
        """
        offset = 0 if storage_offset is None else storage_offset - int(input.storage_offset())
        dims = [dim for dim in range(input.dim()) if input.shape[dim] != 1 and input.stride(dim)]
        order = sorted(dims, key=input.stride, reverse=True)
        pairs = [(length, step) for length, step in zip(size, stride, strict=True) if length != 1]
        shape, steps = [input.shape[dim] for dim in order] or [1], [input.stride(dim) for dim in order] or [1]
        while True:
            starts = _digits(offset, steps)
            moves = [_digits(step, steps) for _, step in pairs]
            lookup = _Lookup(order, shape, [length for length, _ in pairs], starts or [], [row or [] for row in moves])
            if starts is not None and None not in moves and lookup._is_within():
                return lookup
            if len(shape) == 1 or steps[-2] != shape[-1] * steps[-1]:
                raise CaptureError(
                    f"it shows {list(size)} by strides {list(stride)}, {offset} elements after the first of a tensor "
                    f"{list(input.shape)} with strides {list(input.stride())}, which has no such elements",
                    where="as_strided",
                    remedy="use it on a contiguous tensor (x.contiguous()) that holds all that it shows",
                )
            shape, steps = [*shape[:-2], shape[-2] * shape[-1]], [*steps[:-2], steps[-1]]

    def _is_within(self) -> bool:
        return all(
            start + sum((length - 1) * move[dim] for length, move in zip(self.size, self.moves, strict=True)) < rows
            for dim, (start, rows) in enumerate(zip(self.starts, self.shape, strict=True))
        )

    @property
    def kept(self) -> int:
        """The number of outermost dims that stay as they are, without indices."""
        count = 0
        for dim, (rows, length) in enumerate(zip(self.shape, self.size, strict=False)):
            unit = [int(dim == other) for other in range(len(self.shape))]
            alone = [move[dim] for move in self.moves] == [int(dim == other) for other in range(len(self.size))]
            if rows != length or self.starts[dim] or self.moves[dim] != unit or not alone:
                break
            count += 1
        return count if len(self.size) == len(self.shape) else min(count, len(self.shape) - 1)

    @property
    def looks_up(self) -> bool:
        return not self.kept == len(self.shape) == len(self.size)

    def indices(self, like: Tensor) -> list[Tensor | None]:
        """Return the index for each dim of ``shape``; None for a dim that stays as it is."""
        size = self.size[self.kept :]
        places = [torch.arange(length, device=like.device) for length in size]
        places = [positions.reshape([-1] + [1] * (len(size) - 1 - dim)) for dim, positions in enumerate(places)]
        result: list[Tensor | None] = [None] * self.kept
        for dim in range(self.kept, len(self.shape)):
            index = torch.zeros(size, dtype=torch.int64, device=like.device) + self.starts[dim]
            for place, move in zip(places, self.moves[self.kept :], strict=True):
                index = index + place * move[dim] if move[dim] else index
            result.append(index)
        return result


def _digits(value: int, steps: Sequence[int]) -> list[int] | None:
    """Divide ``value`` by each of the ``steps`` in turn. Return the quotients, or None if a remainder is left."""
    result = []
    for step in steps:
        count, value = divmod(value, step)
        result.append(count)
    return result if not value and min(result) >= 0 else None


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
