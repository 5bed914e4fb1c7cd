"""What operators return on fake tensors, once for all calls that are alike: a model repeats its blocks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_META = torch.device("meta")
_as_subclass: Any = Tensor._make_subclass
_PLAIN = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
})  # fmt: skip
_VALUES_MATTER = frozenset({
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view
})  # fmt: skip
"""Operators whose results follow from more than how their inputs are laid out."""


class UnlikeError(Exception):
    """A call with an argument that tells nothing about other calls."""


@dataclass(frozen=True)
class _Form:
    """How a fake tensor is laid out, and the attributes that PyTorch has given it. ``alias``: which tensor of the call
    has the same storage; None: it has its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    attributes: Mapping[str, Any]
    alias: int | None

    def made(self, tensors: Sequence[Tensor]) -> FakeTensor:
        """Another tensor of this form: ``FakeTensor(mode, value, device)`` without its checks, four fifths of it."""
        with torch._C._DisableTorchDispatch():
            value = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            if self.alias is not None:
                value.set_(tensors[self.alias].untyped_storage(), self.offset, self.shape, self.stride)
        fake: FakeTensor = _as_subclass(
            FakeTensor, value, False, dispatch_device=True, device_for_backend_keys=self.attributes["_fake_device"]
        )
        if self.attributes["fake_mode"]._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self.attributes)
        return fake


class Outputs:
    """Calls operators on fake tensors. Where an equal call (operator, arguments, and how tensors are laid out) has
    been made before, it makes the like of what that returned: a tenth of the time of PyTorch's own cache of such calls.

    Not so where results may differ all the same: the operator works in place or looks at values, a tensor is no fake
    one or has a known value, results are laid out in ways that a new tensor is not.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Form | list[_Form | None] | tuple[_Form | None, ...]] = {}

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``."""
        tensors: list[FakeTensor] = []
        try:
            key = (function, torch.get_default_dtype(), described(args, tensors), described(kwargs, tensors))
        except UnlikeError:
            return function(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            return _tree(lambda form: form.made(tensors), known)
        result = function(*args, **kwargs)
        if tensors and _follows(function) and not torch.is_inference_mode_enabled():
            with suppress(UnlikeError):
                self._known[key] = _tree(lambda value: _form(value, tensors), result)
        return result


def _tree(make: Callable[[Any], Any], value: Any) -> Any:
    """``make`` of a result, or of each of several; an output that is not there is None."""
    if type(value) in (tuple, list):
        return type(value)(None if item is None else make(item) for item in value)
    return make(value)


def _follows(function: Any) -> bool:
    return not function._schema.is_mutable and _VALUES_MATTER.isdisjoint(function.tags)


def described(value: Any, tensors: list[FakeTensor]) -> Any:
    """An argument as a part of a key; its tensors are added to the list, in order.

    Raises:
        UnlikeError: it holds another thing than numbers, names and fake tensors.
    """
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise UnlikeError
        tensors.append(value)
        return (
            kind, value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad,
            value.fake_device, value.untyped_storage().nbytes(), torch._C._dispatch_keys(value).raw_repr(),
        )  # fmt: skip
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (tuple, list)):
        return (kind, *[(type(one), one) if type(one) in _PLAIN else described(one, tensors) for one in value])
    if isinstance(value, dict):
        return (kind, *[(name, described(item, tensors)) for name, item in value.items()])
    raise UnlikeError


def _form(value: Any, tensors: list[FakeTensor]) -> _Form:
    if type(value) is not FakeTensor or value.constant is not None or value.requires_grad:
        raise UnlikeError
    storage = value.untyped_storage()._cdata
    aliases = [index for index, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage]
    if len(aliases) > 1 or any(value is tensor for tensor in tensors):
        raise UnlikeError
    form = _Form(
        tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, dict(value.__dict__),
        aliases[0] if aliases else None,
    )  # fmt: skip
    like = form.made(tensors)
    if (
        torch._C._dispatch_keys(like) != torch._C._dispatch_keys(value)
        or like.untyped_storage().nbytes() != value.untyped_storage().nbytes()
        or like.storage_offset() != value.storage_offset()
    ):
        raise UnlikeError
    return form
