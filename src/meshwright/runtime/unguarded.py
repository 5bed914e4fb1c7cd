"""Methods of fake CUDA tensors whose Python binding sets the current device first, which fails without CUDA.

They are called as operators here, which do the same on fake tensors without setting a device. A fake tensor has no
address either: its storage's identity takes the place of one.
"""

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.torch_private import FakeTensor

aten = torch.ops.aten


class Unguarded(TorchFunctionMode):
    """Calls these methods of fake tensors as operators."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        route = _ROUTES.get(function)
        if route is not None and isinstance(args[0], FakeTensor):
            return route(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _getitem(value: Tensor, index: Any) -> Tensor:
    view, indices = _viewed(value, index)
    result: Tensor = aten.index.Tensor(view, indices) if indices else aten.alias.default(view)
    return result


def _setitem(value: Tensor, index: Any, new: Any) -> None:
    view, indices = _viewed(value, index)
    if not isinstance(new, Tensor):
        new = torch.full((), new, dtype=value.dtype, device=value.device)
    if indices:
        aten.index_put_.default(view, indices, new)
    else:
        aten.copy_.default(view, new)


def _viewed(value: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that the numbers, slices and None of an index select, and its tensors by dim (empty: none)."""
    places = list(index) if isinstance(index, tuple) else [index]
    num_given = sum(_num_dims(place) for place in places)
    for position, place in enumerate(places):
        if isinstance(place, EllipsisType):
            places[position : position + 1] = [slice(None)] * (value.dim() - num_given)
            break
    indices: list[Tensor | None] = []
    dim = 0
    for place in places:
        if place is None:
            value = aten.unsqueeze.default(value, dim)
        elif isinstance(place, slice):
            if place != slice(None):
                value = aten.slice.Tensor(value, dim, place.start, place.stop, place.step or 1)
        elif isinstance(place, int):
            value = aten.select.int(value, dim, place)
            continue
        else:
            indices.append(torch.as_tensor(place))
            dim += _num_dims(place)
            continue
        indices.append(None)
        dim += 1
    return value, indices if any(each is not None for each in indices) else []


def _num_dims(place: Any) -> int:
    """The number of dims that a part of an index consumes."""
    if place is None or isinstance(place, EllipsisType):
        return 0
    return place.dim() if isinstance(place, Tensor) and place.dtype == torch.bool else 1


def _contiguous(value: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if value.is_contiguous(memory_format=memory_format):
        return value
    result: Tensor = aten.clone.default(value, memory_format=memory_format)
    return result


_ROUTES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.contiguous: _contiguous,
    Tensor.copy_: aten.copy_.default,
    Tensor.nonzero: aten.nonzero.default,
    Tensor.__bool__: lambda value: bool(value.item()),
    Tensor.__float__: lambda value: float(value.item()),
    Tensor.__int__: lambda value: int(value.item()),
    Tensor.__index__: lambda value: int(value.item()),
    Tensor.data_ptr: lambda value: value.untyped_storage()._cdata + value.storage_offset() * value.element_size(),
}
"""Maps a method to the function that is called in its place."""
