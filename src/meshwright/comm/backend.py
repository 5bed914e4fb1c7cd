"""The kernels of the collective operators: torch.distributed's own, or our exchange, started without waiting."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from meshwright.comm.groups import process_group

LIBRARY = Library("meshwright_comm", "IMPL")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_WORK = "_meshwright_work"
"""The attribute of a tensor in flight that holds what to wait for."""


class _Work(Protocol):
    def wait(self) -> Any: ...


class _Exchange:
    """Two ranks send each other what they have, and then do what is left to do: one round, each byte once each way."""

    def __init__(self, mine: Tensor, theirs: Tensor, group: dist.ProcessGroup, finish: Callable[[], object]) -> None:
        peer = 1 - group.rank()
        self._works = (group.recv([theirs], peer, 0), group.send([mine], peer, 0))
        self._kept = (mine, theirs)
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._finish()


def _in_flight(value: Tensor, work: _Work | None) -> Tensor:
    setattr(value, _WORK, work)
    return value


def all_reduce_start(value: Tensor, op: str, group: str, algorithm: str) -> Tensor:
    """Start to reduce ``value`` in place over ``group`` (in a copy, where it is not contiguous)."""
    if not value.is_contiguous():
        value = value.contiguous()
    ranks = process_group(group)
    if algorithm == "exchange":
        theirs = torch.empty_like(value)
        return _in_flight(value, _Exchange(value, theirs, ranks, lambda: _REDUCE[op](value, theirs, out=value)))
    return _in_flight(value, dist.all_reduce(value, _OPS[op], ranks, async_op=True))


def all_gather_start(value: Tensor, group: str, size: int, algorithm: str) -> Tensor:
    """Start to gather ``[...]`` of every rank as ``[size, ...]``."""
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    ranks = process_group(group)
    if algorithm == "exchange":
        me = ranks.rank()
        result[me].copy_(value)
        return _in_flight(result, _Exchange(value, result[1 - me], ranks, lambda: None))
    flat = result.view(size * value.numel())
    return _in_flight(result, dist.all_gather_single(flat, value.view(-1), ranks, async_op=True))


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int, algorithm: str) -> Tensor:
    """Start to reduce ``[size, ...]`` and keep this rank's ``[...]``."""
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    ranks = process_group(group)
    if algorithm == "exchange":
        mine, yours = value[ranks.rank()], value[1 - ranks.rank()]
        return _in_flight(result, _Exchange(yours, result, ranks, lambda: _REDUCE[op](mine, result, out=result)))
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
