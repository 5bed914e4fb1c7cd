"""Operators on fake CUDA tensors: their results, what they write to, and in which the host waits for the device."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.outputs import outputs_of
from meshwright.comm.backend import KERNELS
from meshwright.ir.attention import backward_bytes
from meshwright.ir.kernel import PRODUCTS
from meshwright.runtime.unguarded import Unguarded
from meshwright.torch_private import (
    EnableTorchFunction,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_current_modes,
    pytree,
)

aten = torch.ops.aten

DEVICE = torch.device("cuda", 0)
"""The fake device: PyTorch has no other accelerator whose fake tensors work in a build without it."""


def workspace_bytes(function: Any, args: Any) -> int:
    """Bytes that an operator's kernel allocates itself, beside its results."""
    if function.name() == "symm_mem::fused_matmul_reduce_scatter":  # the terms of all ranks
        return int(args[0].shape[0] * args[1].shape[1] * args[0].itemsize)
    if function not in _ATTENTION_BACKWARD:
        return 0
    _, query, key, value = args[:4]
    heads, shared = (tensor.shape[_ATTENTION_BACKWARD[function]] for tensor in (query, key))
    taken = backward_bytes(query.numel() // query.shape[-1], query.shape[-1])
    if shared < heads and function is aten._flash_attention_backward.default:  # gradients of keys for each query head
        taken += (key.nbytes + value.nbytes) // shared * heads
    return taken


class UnfollowableError(Exception):
    """A result whose shape only the values on the device tell: the dry run cannot go on."""


def _rows(source: Tensor, *_: Any, **__: Any) -> Tensor:
    return source.new_empty((source.numel(), max(source.dim(), 1)), dtype=torch.int64)


def _flat(source: Tensor, *_: Any, **__: Any) -> Tensor:
    return source.new_empty(source.numel())


BY_VALUES: dict[Any, Callable[..., Any] | None] = {
    aten.nonzero.default: _rows,
    aten.masked_select.default: _flat,
    aten.bincount.default: lambda source, weights=None, minlength=0: source.new_empty(max(1, minlength)),
    aten.equal.default: lambda *_: True,
    aten.repeat_interleave.Tensor: None,
    aten._unique2.default: None,
    aten.unique_dim.default: None,
    aten.unique_consecutive.default: None,
}
"""Maps an operator whose result, or its shape, depends on values to its largest result, as far as that is known. The
host waits for the device in each of them."""
_NO_KERNEL = tuple(
    f"{name}." for name in (
        *PRODUCTS, "aten.convolution", "aten.convolution_backward", "symm_mem.fused_all_gather_matmul",
        "symm_mem.fused_matmul_reduce_scatter",
    )
)  # fmt: skip
"""The beginnings of the names of operators that have CUDA kernels for floating-point numbers only."""
_ATTENTION_BACKWARD = {
    aten._flash_attention_backward.default: 2,
    aten._scaled_dot_product_cudnn_attention_backward.default: 1,
    aten._scaled_dot_product_efficient_attention_backward.default: 1,
}
"""Maps the backward of a fused attention kernel to the dim of heads."""
_OF_CPUS = ("_for_cpu", "mkldnn", "onednn", "quantized::", "fbgemm")


def kernel_of(function: Any) -> Callable[..., Any] | None:
    """The Python function that is an operator's kernel on the device, for operators of this project."""
    name = function.name().partition("::")[2]
    if function.namespace == "meshwright_comm":
        return KERNELS[name]
    if function.namespace == "meshwright":
        kernel: Callable[..., Any] = function.kernel
        return kernel
    return None


def results(function: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator on fake tensors."""
    try:
        return outputs_of(function, args, kwargs)
    except (NotImplementedError, UnsupportedOperatorException):
        return _shapes_on_cpu(function, args, kwargs)
    except RuntimeError:  # PyTorch makes the result by methods that set the device
        pass
    try:
        with EnableTorchFunction(), Unguarded():
            return function(*args, **kwargs)
    except RuntimeError:  # and some of these methods are out of reach: those of decompositions
        return _shapes_on_cpu(function, args, kwargs)


def _shapes_on_cpu(function: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator of whose results only kernels know the shapes, from those of the CPU's kernel."""

    def host(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    with disable_current_modes(), FakeTensorMode():
        results = function(*pytree.tree_map_only(Tensor, host, args), **pytree.tree_map_only(Tensor, host, kwargs))
    return pytree.tree_map_only(Tensor, _fake_of, results)


def _fake_of(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


def fake_mode() -> FakeTensorMode:
    """A mode for fake tensors that runs no kernel to find a result's shape: there is no device for it."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


@cache
def written(function: Any) -> tuple[str, ...] | None:
    """The names of the arguments that an operator returns after it has written to them; None if it returns something
    else, or changes the shape of an argument."""
    schema = function._schema
    writes = {_sign(each): each.name for each in schema.arguments
              if each.alias_info is not None and each.alias_info.is_write}  # fmt: skip
    if not writes or torch.Tag.inplace_view in function.tags:
        return None
    returned = [_sign(each) for each in schema.returns]
    return tuple(writes[sign] for sign in returned) if all(sign in writes for sign in returned) else None


def _sign(argument: Any) -> str:
    """The letter of the memory that an argument or result has in an operator's schema."""
    return next(iter(argument.alias_info.before_set), argument.name) if argument.alias_info is not None else ""


@cache
def marks(function: Any) -> tuple[str, bool, bool]:
    """An operator's name, whether only CPUs have it, and whether its CUDA kernels are for floating-point numbers
    only."""
    name = str(function)
    return name, any(mark in function.name() for mark in _OF_CPUS), name.startswith(_NO_KERNEL)


@cache
def is_view(function: Any) -> bool:
    """Whether an operator returns views of its arguments, for which no kernel is launched."""
    return written(function) is None and any(each.alias_info is not None for each in function._schema.returns)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from tensors_in(value)


def selects_by_mask(function: Any, args: Any) -> bool:
    """Whether an operator takes the elements that a mask selects, whose number only the device knows."""
    if function not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
