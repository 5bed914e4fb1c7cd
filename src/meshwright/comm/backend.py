"""Kernels of the operators in ``ops/collectives.py``: they start collectives of torch.distributed, MPI or Meshwright.

A kernel that starts a collective returns at once. The kernel of ``wait`` waits for the result.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from meshwright.comm import halo, symmetric_memory
from meshwright.comm.coding import CollectiveCoding
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import carrier, collectives, process_group
from meshwright.comm.member import GroupState, MeasuredCoding, member, naming, waiting
from meshwright.comm.record import blocking, place
from meshwright.comm.started import HALO, attach, wait
from meshwright.comm.transport.base import UnderWay, Work
from meshwright.comm.transport.mpi import Mpi
from meshwright.comm.transport.native import Native
from meshwright.compress.coder import draw_of
from meshwright.ir.placement import flat_shape
from meshwright.ir.shapes import shapes_of
from meshwright.schedules.collectives import hierarchy
from meshwright.schedules.collectives.choice import MPI, NATIVE
from meshwright.schedules.collectives.operations import ALGORITHMS

TOGETHER_BYTES = 128 * 2**10
"""Parts of tensors up to this size are copied into one joint message; larger parts are sent alone. Between CPUs,
sending a message takes about as long as copying this many bytes into the joint message and out of it."""
_Ints = list[int]


class _Ranks(NamedTuple):
    """A process group, this rank's state for the group, and the time when the current collective began."""

    name: str
    group: dist.ProcessGroup
    state: GroupState
    begun: float

    def carrier(
        self, text: str, operation: str, num_bytes: int, label: str
    ) -> tuple[Collectives | Native | Mpi, tuple[str, str]]:
        """Find the algorithm that a plan's ``text`` chooses for a vector of ``num_bytes``. Returns the object that runs
        the algorithm, and a pair: the algorithm's name, and the description of the collective in errors."""
        name, ours = self.state.algorithm(text, operation, num_bytes), self.state.collectives
        by = carrier(self.group, name) if ours is None or name in (NATIVE, MPI) else ours
        return by, (name, self.state.description(label, place()))

    def coded_carrier(
        self, text: str, operation: str, num_bytes: int, label: str
    ) -> tuple[Collectives | Native | Mpi, Collectives, tuple[str, str]]:
        """Find the algorithm of a coded collective. Returns the object that adds up coded vectors, the object that
        carries coded elements, and a pair as ``carrier``."""
        if text in ALGORITHMS.get(operation, ()) or hierarchy.read(text) is not None:
            ours = collectives(self.group)
            return ours, ours, (text, self.state.description(label, place()))
        by, how = self.carrier(text, operation, num_bytes, label)
        return by, collectives(self.group), how

    def coded(self, label: str) -> MeasuredCoding:
        """The measurements of the coded collective with this label."""
        return self.state.coded.setdefault(label, MeasuredCoding())

    def in_flight(self, value: Tensor, work: Work | None, what: str, label: str = "", num_bytes: int = -1) -> Tensor:
        """Attach ``work`` to ``value``, so that ``wait`` finds it. ``num_bytes`` is the size of the collective's whole
        vector, if it differs from the size of ``value``."""
        num_bytes = value.nbytes if num_bytes < 0 else num_bytes
        return attach(value, work, what, label, num_bytes, self.group, self.state, self.begun)


def _ranks(name: str) -> _Ranks:
    """The group called ``name``, with the current time as the time when its collective began."""
    begun, group = time.perf_counter(), process_group(name)
    return _Ranks(name, group, member(group), begun)


def all_reduce_start(
    value: Tensor,
    op: str,
    group: str,
    algorithm: str,
    label: str = "",
    codec: str = "",
    before: Tensor | None = None,
    state: Tensor | None = None,
    draw: int = 0,
    shapes: Sequence[int] = (),
) -> Tensor:
    """Start to reduce ``value`` over ``group``: in place, or in a copy if ``value`` is not contiguous."""
    if not value.is_contiguous():
        value = value.contiguous()
    ranks = _ranks(group)
    if codec:
        coding = CollectiveCoding(
            codec, before, state, _draw(draw, label), shapes_of(shapes), ranks.group.size(), ranks.coded(label)
        )
        by, ours, how = ranks.coded_carrier(algorithm, "all_reduce", value.nbytes, label)
        return ranks.in_flight(value, coding.all_reduce(value, ours, by, *how), "all_reduce", label)
    by, how = ranks.carrier(algorithm, "all_reduce", value.nbytes, label)
    return ranks.in_flight(value, by.all_reduce(value, op, *how), "all_reduce", label)


def all_gather_start(value: Tensor, group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to gather the tensors ``[...]`` of all ranks into one tensor ``[size, ...]``."""
    ranks = _ranks(group)
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    by, how = ranks.carrier(algorithm, "all_gather", result.nbytes, label)
    work = UnderWay(None, value, works=(by.all_gather(value, result, *how),))
    return ranks.in_flight(result, work, "all_gather", label)


def reduce_scatter_start(value: Tensor, op: str, group: str, size: int, algorithm: str, label: str = "") -> Tensor:
    """Start to reduce a tensor ``[size, ...]`` over the group. The result is this rank's row ``[...]``."""
    ranks = _ranks(group)
    value = value.contiguous()
    result = value.new_empty(value.shape[1:])
    by, how = ranks.carrier(algorithm, "reduce_scatter", value.nbytes, label)
    work = UnderWay(None, value, works=(by.reduce_scatter(value, result, op, *how),))
    return ranks.in_flight(result, work, "reduce_scatter", label, value.nbytes)


def all_to_all_start(value: Tensor, group: str, algorithm: str, label: str = "") -> Tensor:
    """Start to send row r of ``value`` (``[size, ...]``) to each rank r. Row r of the result comes from rank r."""
    ranks = _ranks(group)
    value = value.contiguous()
    result = torch.empty_like(value)
    name = ranks.state.algorithm(algorithm, "all_to_all", value.nbytes)
    work: Work | None
    if name != NATIVE:
        counts = [[value.numel() // len(value)] * len(value)] * len(value)
        description = ranks.state.description(label, place())
        work = collectives(ranks.group).all_to_all(value.view(-1), result.view(-1), counts, name, description)
    else:
        work = dist.all_to_all_single(result, value, group=ranks.group, async_op=True)
    return ranks.in_flight(result, UnderWay(None, value, works=(work,)), "all_to_all", label)


def gather_parts_start(
    parts: list[Tensor],
    group: str,
    size: int,
    algorithm: str,
    label: str = "",
    again: bool = False,
    codec: str = "",
    draw: int = 0,
) -> Tensor:
    """Start to gather the Flat parts of many tensors. The result holds the tensors in order, each followed by
    padding."""
    ranks = _ranks(group)
    flat = [part.reshape(-1) for part in parts]
    counts = [part.numel() for part in flat]
    result = _empty(flat[0], size * sum(counts), ranks, again)
    places = [rows.view(size, -1) for rows in result.split([size * count for count in counts])]
    if codec:
        _, ours, how = ranks.coded_carrier(algorithm, "all_gather", result.nbytes, label)
        joined = torch.cat(flat)
        rows = joined.new_empty(size, joined.numel())

        def spread_all() -> None:
            for where, row in zip(places, rows.split(counts, 1), strict=True):
                where.copy_(row)

        coding = CollectiveCoding(codec, None, None, _draw(draw, label), (), size, ranks.coded(label))
        work = coding.all_gather(joined, rows, ours, *how)
        return ranks.in_flight(result, UnderWay(spread_all, joined, works=(work,)), "all_gather", label)
    by, how = ranks.carrier(algorithm, "all_gather", result.nbytes, label)
    if isinstance(by, Native) and result.device.type != "cpu":
        work = UnderWay(None, *flat, works=(by.all_gather_each(flat, places),))
        return ranks.in_flight(result, work, "all_gather", label)
    together, alone = _together(counts, flat[0].element_size(), how[0])
    joined = torch.cat([flat[index] for index in together]) if together else flat[0].new_empty(0)
    rows = joined.new_empty(size, joined.numel())

    def spread() -> None:
        for index, row in zip(together, rows.split([counts[index] for index in together], 1), strict=True):
            places[index].copy_(row)

    works = [by.all_gather(joined, rows, *how)] if together else []
    works += [by.all_gather(flat[index], places[index], *how) for index in alone]
    return ranks.in_flight(result, UnderWay(spread, joined, works=works), "all_gather", label)


def reduce_to_parts_start(
    values: list[Tensor],
    group: str,
    size: int,
    algorithm: str,
    label: str = "",
    again: bool = False,
    codec: str = "",
    before: Tensor | None = None,
    state: Tensor | None = None,
    draw: int = 0,
) -> Tensor:
    """Start to sum many tensors over the group. The result holds this rank's Flat part of each sum, one after the
    other."""
    ranks = _ranks(group)
    rows = [_in_rows(value, size) for value in values]
    counts = [row.shape[1] for row in rows]
    result = _empty(values[0], sum(counts), ranks, again)
    places, num_bytes = result.split(counts), sum(row.nbytes for row in rows)
    if codec:
        _, ours, how = ranks.coded_carrier(algorithm, "reduce_scatter", num_bytes, label)
        flat_shapes = [(row.numel(),) for row in rows]
        coding = CollectiveCoding(codec, before, state, _draw(draw, label), flat_shapes, size, ranks.coded(label))
        work = coding.reduce_scatter(torch.cat(rows, 1), result, ours, *how)
        return ranks.in_flight(result, work, "reduce_scatter", label, num_bytes)
    by, how = ranks.carrier(algorithm, "reduce_scatter", num_bytes, label)
    if isinstance(by, Native) and result.device.type != "cpu":
        work = UnderWay(None, *rows, works=(by.reduce_scatter_each(rows, list(places)),))
        return ranks.in_flight(result, work, "reduce_scatter", label, num_bytes)
    together, alone = _together(counts, values[0].element_size(), how[0])
    joined = torch.cat([rows[index] for index in together], 1) if together else rows[0].new_empty(size, 0)
    sums = joined.new_empty(joined.shape[1]) if alone else result

    def spread() -> None:
        for index, part in zip(together, sums.split([counts[index] for index in together]), strict=True):
            places[index].copy_(part)

    works = [by.reduce_scatter(joined, sums, "sum", *how)] if together else []
    works += [by.reduce_scatter(rows[index], places[index], "sum", *how) for index in alone]
    work = UnderWay(spread if alone else None, joined, works=works)
    return ranks.in_flight(result, work, "reduce_scatter", label, num_bytes)


def _draw(draw: int, label: str) -> int:
    """The seed of a collective's random numbers, from the step's number and the collective's label."""
    return draw_of(draw, zlib.crc32(label.encode()))


def _together(counts: Sequence[int], itemsize: int, algorithm: str) -> tuple[list[int], list[int]]:
    """Return the indices of the parts that share one message, then the indices of the parts that are sent alone. With
    torch.distributed, all parts share a message; with other algorithms, parts up to ``TOGETHER_BYTES`` do."""
    most = max(counts) if algorithm == NATIVE else TOGETHER_BYTES // itemsize
    together = [index for index, count in enumerate(counts) if count <= most]
    return together, [index for index, count in enumerate(counts) if count > most]


def _empty(like: Tensor, count: int, ranks: _Ranks, again: bool) -> Tensor:
    """Make memory for a result. On a CPU, a result that recurs (``again``) gets a reused block of the group."""
    ours = again and like.device.type == "cpu"
    return ranks.state.blocks.empty(count, like.dtype) if ours else like.new_empty(count)


def _in_rows(value: Tensor, size: int) -> Tensor:
    """The elements of a tensor as a matrix [size, elements], padded with zeros at the end if needed."""
    flat, count = value.reshape(-1), prod(flat_shape(tuple(value.shape), size))
    if flat.numel() < size * count:
        flat = torch.nn.functional.pad(flat, (0, size * count - flat.numel()))
    return flat.view(size, count)


@naming("all ranks of the group")
def exchange_rows(rows: Tensor, counts: Tensor, group: str, size: int) -> tuple[Tensor, Tensor]:
    """Send the next ``counts[r].sum()`` rows of ``rows`` to each rank r of a group. Returns the received rows and their
    counts, both in order of the senders."""
    ranks, theirs = process_group(group), torch.empty_like(counts)
    with blocking("all_to_all", group, counts.nbytes), waiting(ranks, "all_to_all", counts):
        dist.all_to_all_single(theirs, counts.contiguous(), group=ranks)
    sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
    result = rows.new_empty(sum(received), *rows.shape[1:])
    with blocking("all_to_all", group, rows.nbytes), waiting(ranks, "all_to_all", rows, is_alike=False):
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=ranks)
    return result, theirs


def shift(value: Tensor, group: str, size: int, algorithm: str = NATIVE, label: str = "") -> Tensor:
    """Start to send ``value`` to the next rank of a group, and to receive the previous rank's value. Both transfers are
    in one batch. As separate NCCL kernels, the sends of all ranks would wait for each other around the ring."""
    ranks = _ranks(group)
    value = value.contiguous()
    result, me = torch.empty_like(value), ranks.group.rank()
    if ranks.state.algorithm(algorithm, "all_to_all", value.nbytes) != NATIVE:
        sent, received = [0] * size, [0] * size
        sent[(me + 1) % size] = received[(me - 1) % size] = value.numel()
        description = ranks.state.description(label, place())
        work = collectives(ranks.group).exchange_parts(value.view(-1), result.view(-1), sent, received, description)
        return ranks.in_flight(result, UnderWay(None, value, works=(work,)), "shift", label)
    both = [
        dist.P2POp(dist.isend, halo.sendable(value), group=ranks.group, group_peer=(me + 1) % size),
        dist.P2POp(dist.irecv, halo.sendable(result), group=ranks.group, group_peer=(me - 1) % size),
    ]
    return ranks.in_flight(result, UnderWay(None, value, works=dist.batch_isend_irecv(both)), "shift", label)


def gather_multiply(value: Tensor, weights: list[Tensor], group: str, size: int) -> list[Tensor]:
    """Gather the rows of all ranks and multiply them: on a GPU in pieces, in memory that the ranks share."""
    ranks = process_group(group)
    if value.is_cuda:
        with blocking("all_gather", group, size * value.nbytes, computes=True):
            return symmetric_memory.gather_multiply(value, weights, ranks)
    whole = wait(all_gather_start(value, group, size, NATIVE)).view(-1, value.shape[1])
    return [whole, *(whole @ weight for weight in weights)]


def multiply_scatter(left: Tensor, right: Tensor, group: str, size: int) -> Tensor:
    """Multiply, sum over the ranks and scatter the rows of the sum: on a GPU in pieces, in memory that the ranks
    share."""
    if left.is_cuda:
        ranks = process_group(group)
        num_bytes = left.shape[0] * right.shape[1] * left.itemsize
        with blocking("reduce_scatter", group, num_bytes, computes=True):
            return symmetric_memory.multiply_scatter(left, right, ranks)
    products = (left @ right).view(size, -1, right.shape[1])
    return wait(reduce_scatter_start(products, "sum", group, size, NATIVE))


def permute(rows: Tensor, goes: _Ints, comes: _Ints, group: str) -> Tensor:
    """Start to send row i of ``rows`` to rank ``goes[i]``. Row i of the result comes from rank ``comes[i]``. All
    messages are in one batch; all ranks know the destinations, so that no numbers of rows are sent."""
    ranks = _ranks(group)
    rows, me = rows.contiguous(), ranks.group.rank()
    result = rows.new_empty(len(comes), *rows.shape[1:])
    own = [row for row, peer in zip(rows.unbind(0), goes, strict=True) if peer == me]
    kept = [row for row, peer in zip(result.unbind(0), comes, strict=True) if peer == me]
    for into, row in zip(kept, own, strict=True):
        into.copy_(row)
    messages = [
        dist.P2POp(operation, halo.sendable(row), group=ranks.group, group_peer=peer)
        for operation, tensor, peers in ((dist.isend, rows, goes), (dist.irecv, result, comes))
        for row, peer in zip(tensor.unbind(0), peers, strict=True) if peer != me
    ]  # fmt: skip
    works = dist.batch_isend_irecv(messages) if messages else []
    return ranks.in_flight(result, UnderWay(None, rows, works=works), "permute")


def halo_exchange_start(
    value: Tensor,
    dim: int,
    lows: _Ints,
    highs: _Ints,
    edges: _Ints,
    fill: float,
    group: str,
    index: int,
    label: str = "",
) -> Tensor:
    """Start to fetch the rows of ``dim`` that this rank's part reads but other parts own."""
    ranks, part = _ranks(group), halo.HaloPart(dim, tuple(zip(lows, highs, strict=True)), edges, index)
    return ranks.in_flight(*halo.exchange(value, part, ranks.group, fill), HALO, label)


def halo_reduce_start(
    value: Tensor, dim: int, lows: _Ints, highs: _Ints, edges: _Ints, group: str, index: int, label: str = ""
) -> Tensor:
    """Start to sum rows over the parts. The part that owns a row receives the terms of the row and adds them up."""
    ranks, part = _ranks(group), halo.HaloPart(dim, tuple(zip(lows, highs, strict=True)), edges, index)
    return ranks.in_flight(*halo.reduce(value, part, ranks.group), HALO, label)


def halo_return_start(
    strips: Tensor, dim: int, lows: _Ints, highs: _Ints, edges: _Ints, group: str, index: int, label: str = ""
) -> Tensor:
    """Start to send ``strips``, the terms for rows that other parts own, to the owners; receive terms for own rows."""
    ranks, part = _ranks(group), halo.HaloPart(dim, tuple(zip(lows, highs, strict=True)), edges, index)
    return ranks.in_flight(*halo.give_back(strips, part, ranks.group), HALO, label)


def add_rows(value: Tensor, rows: Tensor, dim: int, start: int) -> Tensor:
    """Add ``rows`` to ``value`` in place, from position ``start`` of ``dim`` on."""
    value.narrow(dim, start, rows.shape[dim]).add_(rows)
    return value


KERNELS: Mapping[str, Callable[..., object]] = {
    "all_reduce_start": all_reduce_start,
    "all_gather_start": all_gather_start,
    "reduce_scatter_start": reduce_scatter_start,
    "all_to_all_start": all_to_all_start,
    "gather_parts_start": gather_parts_start,
    "reduce_to_parts_start": reduce_to_parts_start,
    "exchange_rows": exchange_rows,
    "shift": shift,
    "gather_multiply": gather_multiply,
    "multiply_scatter": multiply_scatter,
    "permute": permute,
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
    LIBRARY.impl(_name, fallthrough_kernel, "Autograd")  # graphs have their own backward, and autograd would cost time
