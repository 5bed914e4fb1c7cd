"""Measures the links between ranks: the times of messages and collectives of each size, inside boxes and across them.

two boxes of two     box        0 1    2 3       a group is a box; all boxes at once
                     network    0 2    1 3       a group has one rank of each box; all such groups at once
                     network    0 1 2 3          all ranks, also with the hierarchical algorithms
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright.comm.backend  # noqa: F401 - gives the collective operators their kernels
from meshwright.comm.device_channel import connect
from meshwright.comm.groups import axis_groups, boxes_of, broadcast_along, channels, from_every_rank, meet
from meshwright.comm.transport import mpi
from meshwright.comm.transport.base import Channel
from meshwright.errors import LaunchError
from meshwright.ir.cluster import NETWORK, CollectiveTiming, Operation
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ops import collectives
from meshwright.runtime.device import CPU
from meshwright.runtime.measured import BOX
from meshwright.runtime.stopwatch import Stopwatch
from meshwright.schedules.collectives.choice import CHOSEN, LONG_BYTES, MPI, NATIVE, candidates, in_pieces
from meshwright.schedules.collectives.hierarchy import equal_boxes

OURS = "ring"
"""The name of one of Meshwright's own algorithms. Groups are made with this algorithm, so that they have the
connections that Meshwright's algorithms need."""
HOPELESS_BYTES, HOPELESS = 2**22, 3.0
"""An algorithm is not measured at larger sizes if, at ``HOPELESS_BYTES`` or more, it takes more than ``HOPELESS`` times
as long as the fastest algorithm."""

BLOCK_S, MOST_CALLS, LEAST_BLOCKS = 1e-3, 50, 3
"""Calls are timed in blocks. These are the approximate seconds of a block, the maximum number of calls in a block, and
the minimum number of blocks."""
WARM_S = 0.01
"""Maximum seconds of untimed calls before the timed calls, because calls take longer after the cores were idle."""

Advance = Callable[[str], None]
Call = Callable[[], object]


_Pair = tuple[str, Channel | None, bool]


class MeasuredSizes(msgspec.Struct, frozen=True):
    """The messages and the collective ``operations`` to measure, at each of the sizes ``bytes``. All sizes are measured
    in each of ``sweeps`` passes. In a pass, a size is timed in at most ``repeats`` blocks of calls, for about
    ``most_s`` seconds. The result is the median over the passes. Passes are separated in time, because the load of
    other programs varies."""

    bytes: tuple[int, ...] = (64, *(2**power for power in range(12, 27)))
    repeats: int = 30
    most_s: float = 0.03
    sweeps: int = 3
    operations: tuple[Operation, ...] = ("broadcast", *CHOSEN)


class Places(NamedTuple):
    """How ranks are distributed: ``num_boxes`` boxes, each with ``each`` consecutive ranks."""

    num_boxes: int
    each: int


class _Group(NamedTuple):
    """Ranks that are measured together, and the level of the links between them. If the group spans several levels,
    ``fan_outs`` is the number of members at each level, innermost first."""

    group: AxisGroup
    level: str
    fan_outs: tuple[int, ...] = ()


def boxes_of_world() -> Places:
    """Return how all ranks are distributed over boxes; without torch.distributed, one box of one rank. Raise a
    LaunchError if boxes have different numbers of ranks, or if the ranks of a box are not consecutive."""
    if not dist.is_initialized():
        return Places(1, 1)
    world = dist.group.WORLD
    assert world is not None
    boxes = boxes_of(world)
    each = len(boxes[0])
    if any(box != tuple(range(index * each, (index + 1) * each)) for index, box in enumerate(boxes)):
        raise LaunchError(
            f"the boxes hold the ranks {' | '.join(' '.join(map(str, box)) for box in boxes)}",
            where="calibrate",
            remedy="start as many ranks in every box, neighbours in the same one",
        )
    return Places(len(boxes), each)


def between(
    sizes: MeasuredSizes, places: Places, advance: Advance, device: torch.device = CPU
) -> list[CollectiveTiming]:
    """Measure messages and collectives of tensors on ``device`` at every level. Every rank must call it."""
    *_, rows = sweeps(sizes, places, advance, device)
    return rows


def sweeps(
    sizes: MeasuredSizes, places: Places, advance: Advance, device: torch.device = CPU
) -> Iterator[list[CollectiveTiming]]:
    """After each sweep, yield all rows, each with the median of its times so far. Every rank must call it."""
    seconds: dict[CollectiveTiming, list[float]] = {}
    rank, settle = dist.get_rank(), Stopwatch(device).settle
    pairs, groups = list(_pairs(places, rank, device)), list(_groups(places, rank, device))
    memory = torch.zeros(max(sizes.bytes) // 4, device=device)  # shared by all calls: new memory is slower at first
    for _ in range(sizes.sweeps):
        for row in _sweep(sizes, memory, pairs, groups, advance, settle):
            seconds.setdefault(msgspec.structs.replace(row, time_s=1.0), []).append(row.time_s)
        yield [msgspec.structs.replace(row, time_s=statistics.median(times)) for row, times in seconds.items()]


def _sweep(
    sizes: MeasuredSizes, memory: Tensor, pairs: Sequence[_Pair], groups: Sequence[_Group], advance: Advance,
    settle: Call,
) -> Iterator[CollectiveTiming]:  # fmt: skip
    for level, channel, first in pairs:
        for size in sizes.bytes:
            advance(f"send of {size} bytes")
            seconds = _in_step(_ping_pong(channel, first, _vector(memory, size)), sizes, settle) / 2
            yield _row("send", "channel", level, 2, size, seconds)
    for level_group in groups:
        boxes = equal_boxes(level_group.fan_outs) if level_group.fan_outs else ""
        for operation in sizes.operations:
            names: tuple[str, ...] = (NATIVE,)
            if operation in CHOSEN and memory.device.type == "cpu":  # NCCL chooses by itself
                names = (*candidates(operation, level_group.group.size, boxes), *((MPI,) if mpi.is_there() else ()))
            yield from _by_size(level_group, operation, names, sizes, memory, advance, settle)


def _pairs(places: Places, rank: int, device: torch.device) -> Iterator[_Pair]:
    """Yield for each level: its name, the channel to this rank's partner (or None), and whether this rank sends
    first."""
    num_boxes, each = places
    for level, index, count, stride in ((BOX, rank % each, each, 1), (NETWORK, rank // each, num_boxes, each)):
        if count > 1:
            first = index % 2 == 0
            there = not first or index + 1 < count
            peer = rank + stride if first else rank - stride
            yield level, channels([peer] if there else [], device).get(peer), first


def _groups(places: Places, rank: int, device: torch.device) -> Iterator[_Group]:
    count, each = places
    text = OURS if not mpi.is_there() else f"all_reduce {OURS}, 1 {MPI}"
    text = text if device.type == "cpu" else NATIVE

    def connected(mesh: Mesh) -> AxisGroup:
        group = axis_groups(mesh, rank, {"all": text})["all"]
        connect([group], device)
        return group

    if each > 1:
        yield _Group(connected(Mesh.of(boxes=count, all=each)), BOX)
    if each > 2 and each % 2 == 0:
        yield _Group(connected(Mesh.of(rest=count * each // 2, all=2)), BOX)
    if count > 1:
        yield _Group(connected(Mesh.of(all=count, each=each)), NETWORK)
    if count > 1 and each > 1:
        yield _Group(connected(Mesh.of(all=count * each)), NETWORK, (each, count))


def _by_size(
    level_group: _Group, operation: Operation, names: tuple[str, ...], sizes: MeasuredSizes, memory: Tensor,
    advance: Advance, settle: Call,
) -> Iterator[CollectiveTiming]:  # fmt: skip
    """Yield a row for every algorithm and size. Algorithms that cut vectors into pieces are measured only with long
    vectors. Algorithms that were far slower than the fastest (``HOPELESS``) are not measured with longer vectors."""
    left = list(names)
    for size in sizes.bytes:
        seconds: dict[str, float] = {}
        for name in left if size >= LONG_BYTES else (algorithm for algorithm in left if not in_pieces(algorithm)):
            advance(f"{operation} of {size} bytes")
            group = msgspec.structs.replace(level_group.group, algorithm=name)
            seconds[name] = _in_step(_collective(operation, group, _vector(memory, size)), sizes, settle)
            yield _row(operation, name, level_group.level, group.size, size, seconds[name], level_group.fan_outs)
        if size >= HOPELESS_BYTES:
            left = [name for name in seconds if seconds[name] <= HOPELESS * min(seconds.values())]


def _row(
    operation: Operation, name: str, level: str, ranks: int, size: int, time_s: float, fan_outs: tuple[int, ...] = ()
) -> CollectiveTiming:
    return CollectiveTiming(
        operation=operation, algorithm=name, level=level, ranks=ranks, bytes=size, time_s=time_s, fan_outs=fan_outs
    )


def _vector(memory: Tensor, num_bytes: int) -> Tensor:
    return memory[: max(1, num_bytes // 4)]


def _ping_pong(peer: Channel | None, first: bool, value: Tensor) -> Call:
    if peer is None:
        return lambda: None

    def call() -> None:
        for sends in (first, not first):
            (peer.send(value) if sends else peer.receive(value)).wait()

    return call


def _collective(operation: Operation, group: AxisGroup, value: Tensor) -> Call:
    name, size, algorithm = group.name, group.size, group.algorithm
    each = len(value) // size
    part, parts = value[:each], value[: each * size].view(size, each)
    calls: dict[Operation, Call] = {
        "all_reduce": lambda: collectives.WAIT(collectives.ALL_REDUCE(value, "sum", name, algorithm)),
        "all_gather": lambda: collectives.WAIT(collectives.ALL_GATHER(part, name, size, algorithm)),
        "reduce_scatter": lambda: collectives.WAIT(collectives.REDUCE_SCATTER(parts, "sum", name, size, algorithm)),
        "broadcast": lambda: broadcast_along(value, group, 0),
    }
    return calls[operation]


def _in_step(call: Call, sizes: MeasuredSizes, settle: Call) -> float:
    """Time a call that all ranks repeat together, and return its seconds. The call itself must wait for the other
    ranks. ``settle`` waits for the device. The result is the median over blocks of calls, on the slowest rank."""
    call()
    settle()
    meet()
    start = time.perf_counter()
    call()
    settle()
    once_s = max(from_every_rank(time.perf_counter() - start))
    calls = min(MOST_CALLS, max(1, int(BLOCK_S / once_s)))
    blocks = min(sizes.repeats, max(LEAST_BLOCKS, int(sizes.most_s / once_s / calls)))
    meet()
    for _ in range(int(WARM_S / once_s)):
        call()
    settle()
    seconds = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        settle()
        seconds.append((time.perf_counter() - start) / calls)
    slowest: float = max(from_every_rank(statistics.median(seconds)))
    return slowest
