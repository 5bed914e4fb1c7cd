"""The kernels of the collective operators: torch.distributed's own, or ours, started without waiting."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from meshwright.comm import halo
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import carrier, collectives, process_group
from meshwright.comm.member import Member, culprit, member, naming
from meshwright.comm.record import blocking, current, place
from meshwright.comm.transport.base import OWN_ERROR, Work
from meshwright.comm.transport.mpi import Mpi
from meshwright.errors import LostRankError
from meshwright.ir.placement import flat_shape
from meshwright.schedules.collectives.choice import MPI, NATIVE

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WORK = "_meshwright_work"
"""The attribute of a tensor in flight that holds what to wait for, and what is noted of it."""
TOGETHER_BYTES = 128 * 2**10
"""Parts up to this size are copied into one message with others: between CPUs, to send one alone takes about as long as
to copy so much there and back."""


class _Ranks(NamedTuple):
    """The ranks of a group, what this one keeps of it, and when a collective of it began."""

    name: str
    group: dist.ProcessGroup
    mine: Member
    begun: float

    def carrier(self, algorithm: str) -> Collectives | Mpi:
        """Who runs an algorithm that is not torch.distributed's own."""
        ours = self.mine.collectives
        return carrier(self.group, algorithm) if ours is None or algorithm == MPI else ours

    def in_flight(self, value: Tensor, work: Work | None, what: str, label: str = "", num_bytes: int = -1) -> Tensor:
        """``num_bytes``: of the whole vector, where that is not ``value``."""
        mine, num_bytes = self.mine, value.nbytes if num_bytes < 0 else num_bytes
        mine.begun = number = mine.begun + 1
        setattr(value, _WORK, _Flight(work, what, self, time.perf_counter(), label, place(), number, num_bytes))
        return value


class _Flight(NamedTuple):
    """What is waited for, and what is noted, or told, of it."""

    work: Work | None
    what: str
    ranks: _Ranks
    started: float
    label: str
    place: object
    number: int
    num_bytes: int


def _ranks(name: str) -> _Ranks:
    """The group of that name, where a collective begins now."""
    begun, group = time.perf_counter(), process_group(name)
    return _Ranks(name, group, member(group), begun)


def all_reduce_start(value: Tensor, op: str, group: str, algorithm: str, label: str = "") -> Tensor:
    """Start to reduce ``value`` in place over ``group`` (in a copy, where it is not contiguous)."""
    if not value.is_contiguous():
        value = value.contiguous()
    ranks = _ranks(group)
    name = ranks.mine.algorithm(algorithm, "all_reduce", value.nbytes)
    if name != NATIVE:
        work = ranks.carrier(name).all_reduce(value, op, name, ranks.mine.told(label, place()))
    else:
        work = dist.all_reduce(value, _OPS[op], ranks.group, async_op=True)
    return ranks.in_flight(value, work, "all_reduce", label)


def all_gather_start(value: Tensor, group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to gather ``[...]`` of every rank as ``[size, ...]``."""
    ranks = _ranks(group)
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    name = ranks.mine.algorithm(algorithm, "all_gather", result.nbytes)
    if name != NATIVE:
        work = ranks.carrier(name).all_gather(value, result, name, ranks.mine.told(label, place()))
    else:
        flat = result.view(size * value.numel())
        work = dist.all_gather_single(flat, value.view(-1), ranks.group, async_op=True)
    return ranks.in_flight(result, work, "all_gather", label)


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to reduce ``[size, ...]`` and keep this rank's ``[...]``."""
    ranks = _ranks(group)
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    name = ranks.mine.algorithm(algorithm, "reduce_scatter", value.nbytes)
    work: Work | None
    if name != NATIVE:
        work = ranks.carrier(name).reduce_scatter(value, result, op, name, ranks.mine.told(label, place()))
    else:
        work = dist.reduce_scatter_single(result.view(-1), value.view(-1), _OPS[op], ranks.group, async_op=True)
    return ranks.in_flight(result, work, "reduce_scatter", label, value.nbytes)


def all_to_all_start(value: Tensor, group: str, algorithm: str, label: str = "") -> Tensor:
    """Start to send ``value[rank]`` of ``[size, ...]`` to each rank; what they send comes in the same shape."""
    ranks = _ranks(group)
    value = value.contiguous()
    result = torch.empty_like(value)
    name = ranks.mine.algorithm(algorithm, "all_to_all", value.nbytes)
    work: Work | None
    if name != NATIVE:
        counts = [[value.numel() // len(value)] * len(value)] * len(value)
        told = ranks.mine.told(label, place())
        work = collectives(ranks.group).all_to_all(value.view(-1), result.view(-1), counts, name, told)
    else:
        work = dist.all_to_all_single(result, value, group=ranks.group, async_op=True)
    return ranks.in_flight(result, _Then([work], lambda: None, value), "all_to_all", label)


def gather_parts_start(
    parts: list[Tensor], group: str, size: int, algorithm: str, label: str = "", again: bool = False
) -> Tensor:
    """Start to gather the Flat parts of many tensors: the tensors one after the other, each with its padding."""
    ranks = _ranks(group)
    flat = [part.reshape(-1) for part in parts]
    counts = [part.numel() for part in flat]
    result = _empty(flat[0], size * sum(counts), ranks, again)
    places = [one.view(size, -1) for one in result.split([size * count for count in counts])]
    name = ranks.mine.algorithm(algorithm, "all_gather", result.nbytes)
    together, alone = _together(counts, flat[0].element_size(), name)
    joined = torch.cat([flat[index] for index in together]) if together else flat[0].new_empty(0)
    rows = joined.new_empty(size, joined.numel())

    def spread() -> None:
        for index, row in zip(together, rows.split([counts[index] for index in together], 1), strict=True):
            places[index].copy_(row)

    if name == NATIVE:
        works: list[Work | None] = [dist.all_gather_single(rows.view(-1), joined, ranks.group, async_op=True)]
    else:
        carrier, told = ranks.carrier(name), ranks.mine.told(label, place())
        works = [carrier.all_gather(joined, rows, name, told)] if together else []
        works += [carrier.all_gather(flat[index], places[index], name, told) for index in alone]
    return ranks.in_flight(result, _Then(works, spread, joined), "all_gather", label)


def reduce_to_parts_start(
    values: list[Tensor], group: str, size: int, algorithm: str, label: str = "", again: bool = False
) -> Tensor:
    """Start to sum many tensors over the group, and keep this rank's Flat part of each: one after the other."""
    ranks = _ranks(group)
    rows = [_in_rows(value, size) for value in values]
    counts = [row.shape[1] for row in rows]
    result = _empty(values[0], sum(counts), ranks, again)
    places, num_bytes = result.split(counts), sum(row.nbytes for row in rows)
    name = ranks.mine.algorithm(algorithm, "reduce_scatter", num_bytes)
    together, alone = _together(counts, values[0].element_size(), name)
    joined = torch.cat([rows[index] for index in together], 1) if together else rows[0].new_empty(size, 0)
    if name == NATIVE:
        work = dist.reduce_scatter_single(result, joined.view(-1), dist.ReduceOp.SUM, ranks.group, async_op=True)
        return ranks.in_flight(result, _Then([work], lambda: None, joined), "reduce_scatter", label, num_bytes)
    carrier, told, sums = ranks.carrier(name), ranks.mine.told(label, place()), joined.new_empty(joined.shape[1])

    def spread() -> None:
        for index, one in zip(together, sums.split([counts[index] for index in together]), strict=True):
            places[index].copy_(one)

    works: list[Work] = [carrier.reduce_scatter(joined, sums, "sum", name, told)] if together else []
    works += [carrier.reduce_scatter(rows[index], places[index], "sum", name, told) for index in alone]
    return ranks.in_flight(result, _Then(works, spread, joined), "reduce_scatter", label, num_bytes)


def _together(counts: Sequence[int], itemsize: int, algorithm: str) -> tuple[list[int], list[int]]:
    """Which of many parts go in one message, copied together, and which alone: all together by torch.distributed, which
    knows no other way; else those that take longer to be sent alone than to be copied."""
    together: list[int] = []
    alone: list[int] = []
    for index, count in enumerate(counts):
        short = algorithm == NATIVE or count * itemsize <= TOGETHER_BYTES
        (together if short else alone).append(index)
    return together, alone


def _empty(like: Tensor, count: int, ranks: _Ranks, again: bool) -> Tensor:
    """Memory for a result: on a CPU, of one that comes ``again``, a block of the group's."""
    ours = again and like.device.type == "cpu"
    return ranks.mine.blocks.empty(count, like.dtype) if ours else like.new_empty(count)


def _in_rows(value: Tensor, size: int) -> Tensor:
    """A tensor as [size, elements], padded with zeros where it must be."""
    flat, count = value.reshape(-1), prod(flat_shape(tuple(value.shape), size))
    if flat.numel() < size * count:
        flat = torch.nn.functional.pad(flat, (0, size * count - flat.numel()))
    return flat.view(size, count)


class _Then:
    """What is under way, what is to be done after all of it, and what must live as long."""

    def __init__(self, works: Sequence[Work | None], finish: Callable[[], None], *kept: Tensor) -> None:
        self._works, self._finish, self._kept = works, finish, kept

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._finish()


@naming("all ranks of the group")
def exchange_rows(rows: Tensor, counts: Tensor, group: str, size: int) -> tuple[Tensor, Tensor]:
    """Send rows to the ranks of a group, ``counts`` [size, n] of them to each: (the rows that came, their counts)."""
    ranks, theirs = process_group(group), torch.empty_like(counts)
    during = member(ranks).progress.during
    with blocking("all_to_all", group, counts.nbytes):
        during(lambda: dist.all_to_all_single(theirs, counts.contiguous(), group=ranks))
    sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
    result = rows.new_empty(sum(received), *rows.shape[1:])
    with blocking("all_to_all", group, rows.nbytes):
        during(lambda: dist.all_to_all_single(result, rows.contiguous(), received, sent, group=ranks))
    return result, theirs


def shift(value: Tensor, group: str, size: int) -> Tensor:
    """Start to send to the next rank of a group, and to receive as much from the one before: both at once, for where
    each is a kernel of its own (NCCL), ranks that send first would wait for each other around the ring."""
    ranks = _ranks(group)
    value = value.contiguous()
    result, me = torch.empty_like(value), ranks.group.rank()
    mine, theirs = (one.view(torch.uint8) if one.dtype == torch.bool else one for one in (value, result))
    both = [
        dist.P2POp(dist.isend, mine, group=ranks.group, group_peer=(me + 1) % size),
        dist.P2POp(dist.irecv, theirs, group=ranks.group, group_peer=(me - 1) % size),
    ]
    works = halo.Transfers(dist.batch_isend_irecv(both), value.nbytes, lambda: None)
    return ranks.in_flight(result, _Then([works], lambda: None, value), "shift")


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
    ranks = _ranks(group)
    ranges = tuple(zip(lows, highs, strict=True))
    result, work = halo.exchange(value, dim, ranges, edges, fill, ranks.group, index)
    return ranks.in_flight(result, work, "halo", label)


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
    ranks = _ranks(group)
    ranges = tuple(zip(lows, highs, strict=True))
    result, work = halo.reduce(value, dim, ranges, edges, ranks.group, index)
    return ranks.in_flight(result, work, "halo", label)


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
    ranks = _ranks(group)
    ranges = tuple(zip(lows, highs, strict=True))
    result, work = halo.give_back(strips, dim, ranges, edges, ranks.group, index)
    return ranks.in_flight(result, work, "halo", label)


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
                found.ranks.mine.progress.during(found.work.wait)
            except RuntimeError as error:
                raise _lost(found, value, error) from error
        done = time.perf_counter()
        ranks = found.ranks
        if ranks.mine.watch is not None:
            ranks.mine.watch.note(found.what, found.num_bytes, done - waiting + found.started - ranks.begun)
        if (recorder := current()) is not None:
            num_bytes = found.work.num_bytes if isinstance(found.work, halo.Transfers) else value.nbytes
            recorder.collective(found.what, ranks.name, (ranks.begun, found.started, waiting, done), num_bytes)
    return value


def _lost(found: _Flight, value: Tensor, error: RuntimeError) -> LostRankError:
    """What torch.distributed says, with what was waited for."""
    told, lost = found.ranks.mine.told(found.label, found.place), culprit()
    problem = f"{lost.problem}, and this rank waits" if lost else str(error).strip().splitlines()[0]
    what = f"{found.what} of {value.numel()} x {str(value.dtype).removeprefix('torch.')}" + f" ({told})" * bool(told)
    return LostRankError(
        f"{problem}\n     rank {dist.get_rank()} is in #{found.number} {what}, native",
        where=lost.where if lost else found.ranks.mine.axis or f"group {found.ranks.name}",
        remedy=OWN_ERROR,
    )


KERNELS: Mapping[str, Callable[..., object]] = {
    "all_reduce_start": all_reduce_start,
    "all_gather_start": all_gather_start,
    "reduce_scatter_start": reduce_scatter_start,
    "all_to_all_start": all_to_all_start,
    "gather_parts_start": gather_parts_start,
    "reduce_to_parts_start": reduce_to_parts_start,
    "exchange_rows": exchange_rows,
    "shift": shift,
    "halo_exchange_start": halo_exchange_start,
    "halo_reduce_start": halo_reduce_start,
    "halo_return_start": halo_return_start,
    "add_rows": add_rows,
    "wait": wait,
}
LIBRARY = Library("meshwright_comm", "IMPL")
for _name, _function in KERNELS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
    LIBRARY.impl(_name, fallthrough_kernel, "Autograd")  # graphs have their own backward; to ask takes microseconds
