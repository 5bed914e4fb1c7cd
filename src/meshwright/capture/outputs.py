"""Results of operators on fake tensors, made once for all equal calls in a process, because models repeat blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private import (
    FAKE_DEVICE,
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    dispatch_keys,
    make_subclass,
    throw_on_data_pointer,
    warn_on_data_pointer,
)

aten = torch.ops.aten
_META = torch.device("meta")
_PLAIN = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
})  # fmt: skip
_VALUES_MATTER = frozenset({
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view
})  # fmt: skip
"""Tags of operators whose results depend on more than the layout of their inputs."""

_NAMESPACES = frozenset({"aten", "prims", "meshwright", "meshwright_comm"})
"""Namespaces whose operators never change, so that recorded results may be reused; a user may redefine others."""

_AS_ON_META = frozenset({
    aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default,
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten.native_group_norm.default,
    aten.native_group_norm_backward.default, aten.threshold_backward.default, aten.gelu.default,
    aten.gelu_backward.default, aten.hardtanh.default, aten.hardtanh_backward.default,
    aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.nll_loss2d_forward.default,
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten._softmax.default,
    aten._softmax_backward_data.default, aten.upsample_bilinear2d.default, aten.relu.default, aten.silu.default,
    aten.silu_backward.default, aten.tanh.default, aten.exp.default, aten.rsqrt.default, aten.neg.default,
    aten.pow.Tensor_Scalar, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mm.default,
    aten.bmm.default, aten.addmm.default, aten.sum.dim_IntList, aten.mean.dim, aten.clone.default, aten.view.default,
    aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.reshape.default, aten.detach.default,
    aten.new_empty.default, aten.masked_fill.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.embedding.default,
    aten.embedding_dense_backward.default, aten.tanh_backward.default, aten.sigmoid.default,
    aten.sigmoid_backward.default, aten.clamp_min.default, aten.addcmul.default, aten.amax.default, aten.max.dim,
    aten.argmax.default, aten.sum.default, aten.scatter_add.default, aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default, aten.cat.default, aten.index.Tensor,
})  # fmt: skip
"""Operators whose results have the same layout on the meta device as on fake CPU tensors, if the first tensor has a
dtype in ``_FLOATS`` (norms: in ``_WIDE``; batch norm: only in training). They run on the meta device without any mode,
which takes less time: on fake tensors, PyTorch runs many of them as Python functions that call dozens of operators.
Batch norm's update of its running statistics is the only in-place change by these operators."""
_WIDE = frozenset({torch.float32, torch.float64})
_FLOATS = _WIDE | {torch.bfloat16, torch.float16}
_BATCH_NORMS = frozenset({
    aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
})  # fmt: skip
_NORMS = _BATCH_NORMS | {aten.native_layer_norm.default, aten.native_group_norm.default}
"""Operators that keep statistics in float32 if their input is narrower, but not on the meta device."""


def _statistics(source: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return source.new_empty(source.shape[1]), source.new_empty(source.shape[1])


def _normalized(source: Tensor, weight: Any, bias: Any, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    output = (source - mean.reshape(-1, *[1] * (source.dim() - 2))).to(source.dtype)
    return output, source.new_empty(0), source.new_empty(0)


_WITHOUT_META: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_update_stats.default: _statistics,
    aten._native_batch_norm_legit_no_training.default: _normalized,
}
"""Maps operators to functions that make their results on the meta device, because there they have no kernel or results
of other shapes. On fake tensors, PyTorch would run the first operator's own kernel, on zeros of the full size, and the
second one as two dozen operators."""


class UnlikeError(Exception):
    """The arguments or results of a call do not allow conclusions about other calls."""


@dataclass(frozen=True)
class _Form:
    """The layout of a fake tensor, and the attributes that PyTorch gave it except its mode. ``alias`` is the index of
    the call's input tensor that has the same storage; None if the tensor has a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    attributes: Mapping[str, Any]
    alias: int | None

    def new_tensor(self, tensors: Sequence[FakeTensor]) -> FakeTensor:
        """Make a tensor of this form: like ``FakeTensor(mode, value, device)``, but without the checks that take 4/5 of
        its time."""
        with DisableTorchDispatch():
            value = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            if self.alias is not None:
                value.set_(tensors[self.alias].untyped_storage(), self.offset, self.shape, self.stride)
        fake: FakeTensor = make_subclass(
            FakeTensor, value, False, dispatch_device=True, device_for_backend_keys=self.attributes[FAKE_DEVICE]
        )
        mode = tensors[0].fake_mode
        if mode._allow_unsafe_data_ptr_access:
            warn_on_data_pointer(fake)
        else:
            throw_on_data_pointer(fake)
        fake.__dict__.update(self.attributes, fake_mode=mode)
        return fake


MOST_KNOWN = 20_000
"""The largest number of cached calls. Each cached call takes some kilobytes."""


@dataclass(slots=True, unsafe_hash=True)
class _Call:
    """A call of an operator. Calls with the same ``key`` are equal. The cache keeps a call, but not its arguments and
    results: ``given`` and ``result`` are cleared when the call is done."""

    key: tuple[Any, ...]
    given: tuple[Any, tuple[Any, ...], dict[str, Any], list[FakeTensor]] | None = field(compare=False)
    result: Any = field(default=None, compare=False)


def fake_mode() -> FakeTensorMode:
    """Return a mode for fake tensors without PyTorch's cache of calls, in which a look-up takes as long as a call."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def fake_scalar(mode: FakeTensorMode) -> FakeTensor:
    """Return a fake float32 scalar, the template of other fake tensors of the mode."""
    with DisableTorchDispatch():  # hidden from a mode that is recording
        return FakeTensor(mode, torch.empty((), device=_META), torch.device("cpu"))


def outputs_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator, ``function(*args, **kwargs)``. If this process has made an equal call before
    (same operator, arguments and layouts of tensors), make results of the same form. This takes a tenth of the time of
    PyTorch's own cache of calls.

    The operator itself runs if the results of equal calls may differ: if it works in place (other than on running
    statistics), reads values, or is neither PyTorch's nor ours; if a tensor is not fake, or has a known value; or if a
    result has a layout that a new tensor cannot have.
    """
    tensors: list[FakeTensor] = []
    try:
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        key = (function, torch.get_default_dtype(), cast, described(args, tensors), described(kwargs, tensors))
    except UnlikeError:
        return _run(function, args, kwargs)
    follows = _follows(function) or (function is aten.index.Tensor and _takes_places(args))
    if not tensors or torch.is_inference_mode_enabled() or not follows:
        return _run(function, args, kwargs)
    call = _Call(key, (function, args, kwargs, tensors))
    try:
        forms = _forms(call)
    except UnlikeError:
        return call.result
    finally:
        call.given = None
    result, call.result = call.result, None
    return result if result is not None else _tree(lambda form: form.new_tensor(tensors), forms)


@lru_cache(maxsize=MOST_KNOWN)
def _forms(call: _Call) -> Any:
    """Return the forms of a call's results. They depend only on the call's key.

    Raises:
        UnlikeError: a result has a layout that a new tensor cannot have; ``call.result`` holds the results.
    """
    assert call.given is not None
    function, args, kwargs, tensors = call.given
    if _is_as_on_meta(function, args, kwargs, tensors):
        return _on_meta(function, args, kwargs, tensors)
    call.result = _run(function, args, kwargs)
    return _tree(lambda value: _form(value, tensors), call.result)


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call without the modes that watch the user's functions. Inside an operator, the functions are PyTorch's."""
    with DisableTorchFunction():
        return function(*args, **kwargs)


def _is_as_on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[FakeTensor]) -> bool:
    dtypes = _WIDE if function in _NORMS else _FLOATS
    if function not in _WITHOUT_META and (function not in _AS_ON_META or tensors[0].dtype not in dtypes):
        return False
    if "device" in kwargs:  # the result would be on that device, and take memory
        return False
    in_training = function not in _BATCH_NORMS or any(arg is True for arg in args)
    return in_training and all(tensor.fake_device.type == "cpu" for tensor in tensors)


def _on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[FakeTensor]) -> Any:
    """Return the forms of an operator's results, which are computed with tensors on the meta device."""
    with DisableTorchFunction(), DisableTorchDispatch():
        like = {id(arg): torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=_META) for arg in tensors}
        result = _WITHOUT_META.get(function, function)(*_replaced(args, like), **_replaced(kwargs, like))
    storages = [like[id(arg)].untyped_storage()._cdata for arg in tensors]

    def form(value: Tensor) -> _Form:
        storage = value.untyped_storage()._cdata
        alias = storages.index(storage) if storage in storages else None
        offset = int(value.storage_offset()) + (0 if alias is None else int(tensors[alias].storage_offset()))
        return _Form(tuple(value.shape), value.stride(), offset, value.dtype, _attributes(), alias)

    return _tree(form, result)


def _replaced(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    """Return an argument with each tensor replaced by the tensor that ``by_id`` maps its id to."""
    if isinstance(value, dict):
        return {name: _replaced(item, by_id) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_replaced(item, by_id) for item in value]
    return by_id.get(id(value), value)


@cache
def _attributes() -> Mapping[str, Any]:
    """Return the attributes of a new fake tensor on the CPU."""
    return {**fake_scalar(FakeTensorMode()).__dict__, "fake_mode": None}


def _tree(make: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``make`` to a result, or to each of several results; a missing output is None."""
    if type(value) in (tuple, list):
        return type(value)(None if item is None else make(item) for item in value)
    return make(value)


@cache
def _follows(function: Any) -> bool:
    """Whether all calls of an operator with the same ``_Call.key`` have results of the same form."""
    own = function.namespace in _NAMESPACES
    writes = function._schema.is_mutable and function not in _AS_ON_META and function not in _WITHOUT_META
    return own and not writes and _VALUES_MATTER.isdisjoint(function.tags)


def _takes_places(args: tuple[Any, ...]) -> bool:
    """Whether a tensor is indexed by positions. Masks are different: their values decide the size of the result."""
    return all(index is None or index.dtype in (torch.int32, torch.int64) for index in args[1])


def described(value: Any, tensors: list[FakeTensor]) -> Any:
    """Return an argument in a form that can be a part of a key. Append its tensors to ``tensors``, in order.

    Raises:
        UnlikeError: the argument holds something other than numbers, names and fake tensors without known values.
    """
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise UnlikeError
        tensors.append(value)
        return (
            kind, value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad,
            value.fake_device, value.untyped_storage().nbytes(), dispatch_keys(value).raw_repr(),
        )  # fmt: skip
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (tuple, list)):
        return (kind, *[(type(part), part) if type(part) in _PLAIN else described(part, tensors) for part in value])
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
    attributes = {**value.__dict__, "fake_mode": None}
    form = _Form(
        tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype,
        _attributes() if attributes == _attributes() else attributes, aliases[0] if aliases else None,
    )  # fmt: skip
    like = form.new_tensor(tensors)
    if (
        dispatch_keys(like) != dispatch_keys(value)
        or like.untyped_storage().nbytes() != value.untyped_storage().nbytes()
        or like.storage_offset() != value.storage_offset()
    ):
        raise UnlikeError
    return form
