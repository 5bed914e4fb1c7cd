"""Collectives as operators of two halves, start and wait, that lowered graphs call and compilers see through."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library, register_fake

from meshwright.comm.groups import process_group

LIBRARY = Library("meshwright_comm", "DEF")
LIBRARY.define("all_reduce_start(Tensor(a!) value, str op, str group) -> Tensor(a!)")
LIBRARY.define("all_gather_start(Tensor value, str group, int size) -> Tensor")
LIBRARY.define("reduce_scatter_start(Tensor value, str op, str group, int size) -> Tensor")
LIBRARY.define("wait(Tensor(a!) value) -> Tensor(a!)")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WORK = "_meshwright_work"
"""The attribute of a tensor in flight that holds what to wait for."""


def _in_flight(value: Tensor, work: Any) -> Tensor:
    setattr(value, _WORK, work)
    return value


def all_reduce_start(value: Tensor, op: str, group: str) -> Tensor:
    """Start to reduce ``value`` in place over ``group``; it must be waited for before it is read."""
    if not value.is_contiguous():
        value = value.contiguous()
    return _in_flight(value, dist.all_reduce(value, _OPS[op], process_group(group), async_op=True))


def all_gather_start(value: Tensor, group: str, size: int) -> Tensor:
    """Start to gather ``[...]`` of every rank as ``[size, ...]``."""
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    work = dist.all_gather_single(
        result.view(size * value.numel()), value.view(-1), process_group(group), async_op=True
    )
    return _in_flight(result, (work, value))


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int) -> Tensor:
    """Start to reduce ``[size, ...]`` and keep this rank's ``[...]``."""
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    work = dist.reduce_scatter_tensor(result.view(-1), value.view(-1), _OPS[op], process_group(group), async_op=True)
    return _in_flight(result, (work, value))


def wait(value: Tensor) -> Tensor:
    """Block until the collective that makes ``value`` is done."""
    work = value.__dict__.pop(_WORK, None)
    if work is not None:
        (work[0] if isinstance(work, tuple) else work).wait()
    return value


for _name, _function in (
    ("all_reduce_start", all_reduce_start),
    ("all_gather_start", all_gather_start),
    ("reduce_scatter_start", reduce_scatter_start),
    ("wait", wait),
):
    LIBRARY.impl(_name, _function, "CPU")
    LIBRARY.impl(_name, _function, "CUDA")

register_fake("meshwright_comm::all_reduce_start", lambda value, op, group: value, lib=LIBRARY)
register_fake(
    "meshwright_comm::all_gather_start", lambda value, group, size: value.new_empty(size, *value.shape), lib=LIBRARY
)
register_fake(
    "meshwright_comm::reduce_scatter_start",
    lambda value, op, group, size: value.new_empty(value.shape[1:]),
    lib=LIBRARY,
)
register_fake("meshwright_comm::wait", lambda value: value, lib=LIBRARY)

OPERATORS = torch.ops.meshwright_comm
