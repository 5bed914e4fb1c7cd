"""The kernels of the collective operators: torch.distributed's own, or our exchange, started without waiting."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from meshwright.comm.groups import exchange, process_group
from meshwright.comm.transport.base import Work

LIBRARY = Library("meshwright_comm", "IMPL")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_WORK = "_meshwright_work"
"""The attribute of a tensor in flight that holds what to wait for."""


def _in_flight(value: Tensor, work: Work | None) -> Tensor:
    setattr(value, _WORK, work)
    return value


def all_reduce_start(value: Tensor, op: str, group: str, algorithm: str) -> Tensor:
    """Start to reduce ``value`` in place over ``group`` (in a copy, where it is not contiguous)."""
    if not value.is_contiguous():
        value = value.contiguous()
    ranks = process_group(group)
    if algorithm == "exchange":
        flat, reduce = value.view(-1), _REDUCE[op]

        def add(theirs: Tensor, begin: int) -> None:
            mine = flat[begin : begin + theirs.numel()]
            reduce(mine, theirs, out=mine)

        return _in_flight(value, exchange(ranks).start(value, add))
    return _in_flight(value, dist.all_reduce(value, _OPS[op], ranks, async_op=True))


def all_gather_start(value: Tensor, group: str, size: int, algorithm: str) -> Tensor:
    """Start to gather ``[...]`` of every rank as ``[size, ...]``."""
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    ranks = process_group(group)
    if algorithm == "exchange":
        result[ranks.rank()].copy_(value)
        into = result[1 - ranks.rank()].view(-1)

        def keep(theirs: Tensor, begin: int) -> None:
            into[begin : begin + theirs.numel()].copy_(theirs)

        return _in_flight(result, exchange(ranks).start(value, keep))
    flat = result.view(size * value.numel())
    return _in_flight(result, dist.all_gather_single(flat, value.view(-1), ranks, async_op=True))


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int, algorithm: str) -> Tensor:
    """Start to reduce ``[size, ...]`` and keep this rank's ``[...]``."""
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    ranks = process_group(group)
    if algorithm == "exchange":
        mine, flat, reduce = value[ranks.rank()].view(-1), result.view(-1), _REDUCE[op]

        def add(theirs: Tensor, begin: int) -> None:
            end = begin + theirs.numel()
            reduce(mine[begin:end], theirs, out=flat[begin:end])

        return _in_flight(result, exchange(ranks).start(value[1 - ranks.rank()], add))
    flat = result.view(-1)
    return _in_flight(result, dist.reduce_scatter_single(flat, value.view(-1), _OPS[op], ranks, async_op=True))


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
