"""The kernels of the collective operators: torch.distributed's, started without waiting."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from meshwright.comm.groups import process_group

LIBRARY = Library("meshwright_comm", "IMPL")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WORK = "_meshwright_work"
"""The attribute of a tensor in flight that holds what to wait for."""


def _in_flight(value: Tensor, work: Any) -> Tensor:
    setattr(value, _WORK, work)
    return value


def all_reduce_start(value: Tensor, op: str, group: str) -> Tensor:
    """Start to reduce ``value`` in place over ``group`` (in a copy, where it is not contiguous)."""
    if not value.is_contiguous():
        value = value.contiguous()
    return _in_flight(value, dist.all_reduce(value, _OPS[op], process_group(group), async_op=True))


def all_gather_start(value: Tensor, group: str, size: int) -> Tensor:
    """Start to gather ``[...]`` of every rank as ``[size, ...]``."""
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    flat = result.view(size * value.numel())
    return _in_flight(result, dist.all_gather_single(flat, value.view(-1), process_group(group), async_op=True))


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int) -> Tensor:
    """Start to reduce ``[size, ...]`` and keep this rank's ``[...]``."""
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    flat = result.view(-1)
    return _in_flight(
        result, dist.reduce_scatter_single(flat, value.view(-1), _OPS[op], process_group(group), async_op=True)
    )


def wait(value: Tensor) -> Tensor:
    """Block until the collective that makes ``value`` is done."""
    work = value.__dict__.pop(_WORK, None)
    if work is not None:
        work.wait()
    return value


for _name, _function in (
    ("all_reduce_start", all_reduce_start),
    ("all_gather_start", all_gather_start),
    ("reduce_scatter_start", reduce_scatter_start),
    ("wait", wait),
):
    LIBRARY.impl(_name, _function, "CPU")
    LIBRARY.impl(_name, _function, "CUDA")
