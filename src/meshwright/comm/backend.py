"""The kernels of the collective operators: torch.distributed's own, or ours, started without waiting."""

import time
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from meshwright.comm import halo
from meshwright.comm.groups import axis_of, carrier, collectives, count, process_group, watch_of
from meshwright.comm.record import blocking, current, place
from meshwright.comm.transport.base import OWN_ERROR, Work
from meshwright.errors import LostRankError
from meshwright.ir.placement import flat_shape
from meshwright.schedules.collectives.choice import NATIVE, chosen

LIBRARY = Library("meshwright_comm", "IMPL")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WORK = "_meshwright_work"
"""The attribute of a tensor in flight that holds what to wait for, and what is noted of it."""


class _Flight(NamedTuple):
    """What is waited for, and what is noted, or told, of it."""

    work: Work | None
    what: str
    group: str
    begun: float
    started: float
    label: str
    place: object
    number: int
    num_bytes: int


def _in_flight(
    value: Tensor, work: Work | None, what: str, group: str, begun: float, label: str = "", num_bytes: int = -1
) -> Tensor:
    """``num_bytes``: of the whole vector, where that is not ``value``."""
    number, num_bytes = count(process_group(group)), value.nbytes if num_bytes < 0 else num_bytes
    flight = _Flight(work, what, group, begun, time.perf_counter(), label, place(), number, num_bytes)
    setattr(value, _WORK, flight)
    return value


def _chosen(ranks: dist.ProcessGroup, text: str, operation: str, num_bytes: int) -> str:
    """The algorithm of a collective over a vector of so many bytes."""
    found = watch_of(ranks)
    return chosen(text, operation, num_bytes) if found is None else found.algorithm(text, operation, num_bytes)


def _told(group: str, label: str, where: object) -> str:
    """What a collective is of: axis, tensor, stage, micro-batch."""
    return ", ".join(part for part in (axis_of(group), label, str(where or "")) if part)


def all_reduce_start(value: Tensor, op: str, group: str, algorithm: str, label: str = "") -> Tensor:
    """Start to reduce ``value`` in place over ``group`` (in a copy, where it is not contiguous)."""
    if not value.is_contiguous():
        value = value.contiguous()
    ranks, begun = process_group(group), time.perf_counter()
    name = _chosen(ranks, algorithm, "all_reduce", value.nbytes)
    if name != NATIVE:
        work = carrier(ranks, name).all_reduce(value, op, name, _told(group, label, place()))
    else:
        work = dist.all_reduce(value, _OPS[op], ranks, async_op=True)
    return _in_flight(value, work, "all_reduce", group, begun, label)


def all_gather_start(value: Tensor, group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to gather ``[...]`` of every rank as ``[size, ...]``."""
    begun = time.perf_counter()
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    ranks = process_group(group)
    name = _chosen(ranks, algorithm, "all_gather", result.nbytes)
    if name != NATIVE:
        work = carrier(ranks, name).all_gather(value, result, name, _told(group, label, place()))
    else:
        flat = result.view(size * value.numel())
        work = dist.all_gather_single(flat, value.view(-1), ranks, async_op=True)
    return _in_flight(result, work, "all_gather", group, begun, label)


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to reduce ``[size, ...]`` and keep this rank's ``[...]``."""
    begun = time.perf_counter()
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    ranks = process_group(group)
    name = _chosen(ranks, algorithm, "reduce_scatter", value.nbytes)
    work: Work | None
    if name != NATIVE:
        work = carrier(ranks, name).reduce_scatter(value, result, op, name, _told(group, label, place()))
    else:
        work = dist.reduce_scatter_single(result.view(-1), value.view(-1), _OPS[op], ranks, async_op=True)
    return _in_flight(result, work, "reduce_scatter", group, begun, label, value.nbytes)


def all_to_all_start(value: Tensor, group: str, algorithm: str, label: str = "") -> Tensor:
    """Start to send ``value[rank]`` of ``[size, ...]`` to each rank; what they send comes in the same shape."""
    begun, ranks = time.perf_counter(), process_group(group)
    value = value.contiguous()
    result = torch.empty_like(value)
    name = _chosen(ranks, algorithm, "all_to_all", value.nbytes)
    work: Work | None
    if name != NATIVE:
        counts = [[value.numel() // len(value)] * len(value)] * len(value)
        told = _told(group, label, place())
        work = collectives(ranks).all_to_all(value.view(-1), result.view(-1), counts, name, told)
    else:
        work = dist.all_to_all_single(result, value, group=ranks, async_op=True)
    return _in_flight(result, _Then(work, lambda: None, value), "all_to_all", group, begun, label)


def gather_parts_start(parts: list[Tensor], group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to gather the Flat parts of many tensors: the tensors one after the other, each with its padding."""
    begun, ranks = time.perf_counter(), process_group(group)
    flat = [part.reshape(-1) for part in parts]
    counts = [part.numel() for part in flat]
    result = flat[0].new_empty(size * sum(counts))
    places = [one.view(size, -1) for one in result.split([size * count for count in counts])]
    name = _chosen(ranks, algorithm, "all_gather", result.nbytes)
    if name != NATIVE:
        work: Work | None = None
        told = _told(group, label, place())
        for part, into in zip(flat, places, strict=True):  # who waits for the last waits for those before
            work = carrier(ranks, name).all_gather(part, into, name, told)
        return _in_flight(result, work, "all_gather", group, begun, label)
    joined = torch.cat(flat)
    rows = joined.new_empty(size, joined.numel())
    under_way = dist.all_gather_single(rows.view(-1), joined, ranks, async_op=True)

    def spread() -> None:
        for into, part in zip(places, rows.split(counts, 1), strict=True):
            into.copy_(part)

    return _in_flight(result, _Then(under_way, spread, joined), "all_gather", group, begun, label)


def reduce_to_parts_start(values: list[Tensor], group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to sum many tensors over the group, and keep this rank's Flat part of each: one after the other."""
    begun, ranks = time.perf_counter(), process_group(group)
    rows = [_in_rows(value, size) for value in values]
    counts = [row.shape[1] for row in rows]
    result = values[0].new_empty(sum(counts))
    num_bytes = sum(row.nbytes for row in rows)
    name = _chosen(ranks, algorithm, "reduce_scatter", num_bytes)
    if name != NATIVE:
        work: Work | None = None
        told = _told(group, label, place())
        for row, into in zip(rows, result.split(counts), strict=True):
            work = carrier(ranks, name).reduce_scatter(row, into, "sum", name, told)
        return _in_flight(result, work, "reduce_scatter", group, begun, label, num_bytes)
    joined = torch.cat(rows, 1)
    under_way = dist.reduce_scatter_single(result, joined.view(-1), dist.ReduceOp.SUM, ranks, async_op=True)
    return _in_flight(result, _Then(under_way, lambda: None, joined), "reduce_scatter", group, begun, label, num_bytes)


def _in_rows(value: Tensor, size: int) -> Tensor:
    """A tensor as [size, elements], padded with zeros where it must be."""
    flat, count = value.reshape(-1), prod(flat_shape(tuple(value.shape), size))
    if flat.numel() < size * count:
        flat = torch.nn.functional.pad(flat, (0, size * count - flat.numel()))
    return flat.view(size, count)


class _Then:
    """Something under way, what is to be done after it, and what must live as long."""

    def __init__(self, work: Work | None, finish: Callable[[], None], *kept: Tensor) -> None:
        self._work, self._finish, self._kept = work, finish, kept

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._finish()


def exchange_rows(rows: Tensor, counts: Tensor, group: str, size: int) -> tuple[Tensor, Tensor]:
    """Send rows to the ranks of a group, ``counts`` [size, n] of them to each: (the rows that came, their counts)."""
    ranks, theirs = process_group(group), torch.empty_like(counts)
    with blocking("all_to_all", group, counts.nbytes):
        dist.all_to_all_single(theirs, counts.contiguous(), group=ranks)
    sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
    result = rows.new_empty(sum(received), *rows.shape[1:])
    with blocking("all_to_all", group, rows.nbytes):
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=ranks)
    return result, theirs


def shift(value: Tensor, group: str, size: int) -> Tensor:
    """Start to send to the next rank of a group, and to receive as much from the one before: both at once, for where
    each is a kernel of its own (NCCL), ranks that send first would wait for each other around the ring."""
    begun, ranks = time.perf_counter(), process_group(group)
    value = value.contiguous()
    result, me = torch.empty_like(value), ranks.rank()
    mine, theirs = (one.view(torch.uint8) if one.dtype == torch.bool else one for one in (value, result))
    both = [
        dist.P2POp(dist.isend, mine, group=ranks, group_peer=(me + 1) % size),
        dist.P2POp(dist.irecv, theirs, group=ranks, group_peer=(me - 1) % size),
    ]
    works = halo.Transfers(dist.batch_isend_irecv(both), value.nbytes, lambda: None)
    return _in_flight(result, _Then(works, lambda: None, value), "shift", group, begun)


def halo_exchange_start(
    value: Tensor,
    dim: int,
    lows: list[int],
    highs: list[int],
    edges: list[int],
    fill: float,
    group: str,
    index: int,
    label: str = "",
) -> Tensor:
    """Start to get the rows of a dim that this part reads and others have."""
    begun = time.perf_counter()
    ranges = tuple(zip(lows, highs, strict=True))
    result, work = halo.exchange(value, dim, ranges, edges, fill, process_group(group), index)
    return _in_flight(result, work, "halo", group, begun, label)


def halo_reduce_start(
    value: Tensor,
    dim: int,
    lows: list[int],
    highs: list[int],
    edges: list[int],
    group: str,
    index: int,
    label: str = "",
) -> Tensor:
    """Start to add up, at their owners, the rows that the parts have of each other."""
    begun = time.perf_counter()
    ranges = tuple(zip(lows, highs, strict=True))
    result, work = halo.reduce(value, dim, ranges, edges, process_group(group), index)
    return _in_flight(result, work, "halo", group, begun, label)


def halo_return_start(
    strips: Tensor,
    dim: int,
    lows: list[int],
    highs: list[int],
    edges: list[int],
    group: str,
    index: int,
    label: str = "",
) -> Tensor:
    """Start to give rows back to the parts that own them, and to get what is one's own."""
    begun = time.perf_counter()
    ranges = tuple(zip(lows, highs, strict=True))
    result, work = halo.give_back(strips, dim, ranges, edges, process_group(group), index)
    return _in_flight(result, work, "halo", group, begun, label)


def add_rows(value: Tensor, rows: Tensor, dim: int, start: int) -> Tensor:
    """Add some rows in place."""
    value.narrow(dim, start, rows.shape[dim]).add_(rows)
    return value


def wait(value: Tensor) -> Tensor:
    """Block until the collective that makes ``value`` is done.

    Raises:
        LostRankError: torch.distributed's own was not done within the timeout, or lost a rank.
    """
    found: _Flight | None = value.__dict__.pop(_WORK, None)
    if found is not None:
        waiting = time.perf_counter()
        if found.work is not None:
            try:
                found.work.wait()
            except RuntimeError as error:
                raise _lost(found, value, error) from error
        done = time.perf_counter()
        if (looks := watch_of(process_group(found.group))) is not None:
            looks.note(found.what, found.num_bytes, done - waiting + found.started - found.begun)
        if (recorder := current()) is not None:
            num_bytes = found.work.num_bytes if isinstance(found.work, halo.Transfers) else value.nbytes
            recorder.collective(found.what, found.group, (found.begun, found.started, waiting, done), num_bytes)
    return value


def _lost(found: _Flight, value: Tensor, error: RuntimeError) -> LostRankError:
    """What torch.distributed says, with what was waited for."""
    told = _told(found.group, found.label, found.place)
    what = f"{found.what} of {value.numel()} x {str(value.dtype).removeprefix('torch.')}" + f" ({told})" * bool(told)
    return LostRankError(
        f"{str(error).strip().splitlines()[0]}\n     rank {dist.get_rank()} is in #{found.number} {what}, native",
        where=axis_of(found.group) or f"group {found.group}",
        remedy=OWN_ERROR,
    )


for _name, _function in (
    ("all_reduce_start", all_reduce_start),
    ("all_gather_start", all_gather_start),
    ("reduce_scatter_start", reduce_scatter_start),
    ("all_to_all_start", all_to_all_start),
    ("gather_parts_start", gather_parts_start),
    ("reduce_to_parts_start", reduce_to_parts_start),
    ("exchange_rows", exchange_rows),
    ("shift", shift),
    ("halo_exchange_start", halo_exchange_start),
    ("halo_reduce_start", halo_reduce_start),
    ("halo_return_start", halo_return_start),
    ("add_rows", add_rows),
    ("wait", wait),
):
    LIBRARY.impl(_name, _function, "CPU")
    LIBRARY.impl(_name, _function, "CUDA")
