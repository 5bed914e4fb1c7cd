"""The process groups of a mesh; no other module finds a group by its name."""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm import collective_kind, watch
from meshwright.comm.collectives import Collectives
from meshwright.comm.device_channel import device_channels
from meshwright.comm.exchange_notes import bytes_of_first, gather_everywhere
from meshwright.comm.member import MeasuredCoding, attend, culprit, member, naming, waiting
from meshwright.comm.notes import from_bytes, to_bytes
from meshwright.comm.record import blocking
from meshwright.comm.transport import stream
from meshwright.comm.transport.base import Channel, Lane, Work, timeout_of
from meshwright.comm.transport.connection import shared_lanes
from meshwright.comm.transport.mpi import Mpi
from meshwright.comm.transport.native import Native
from meshwright.comm.transport.point_to_point import PointToPoint, TorchLane
from meshwright.comm.transport.process import box
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.comm.transport.stream import LaneChannel
from meshwright.comm.watch import Key, Watch
from meshwright.errors import MeshwrightError, RankError
from meshwright.ir.amendment import Amendment, amended
from meshwright.ir.mesh import AxisGroup, Mesh, members, sizes_of
from meshwright.ir.placement import Placements, Shard, axis_cut, flat_axis, local_shape, unflattened
from meshwright.schedules.collectives.choice import MPI, NATIVE, chosen, names
from meshwright.torch_private import resolve_process_group

log = logging.getLogger("meshwright")

T = TypeVar("T")
CPU = torch.device("cpu")
REHEARSED = "fake"
"""The backend of torch.distributed under which a rank of a dry run has no other ranks."""


def axis_groups(
    mesh: Mesh, rank: int, algorithms: dict[str, str] | None = None, *, first_rank: int = 0
) -> dict[str, AxisGroup]:
    """Make the process groups of every axis; return this rank's group by axis. All ranks of the world must call this.

    ``algorithms`` maps an axis to its algorithm. A key that joins axes (``dp+tp``) gets a group too. The mesh covers
    the ranks from ``first_rank`` on; a rank outside the mesh gets no groups.
    """
    world, algorithms = dist.group.WORLD, algorithms or {}
    assert world is not None
    result: dict[str, AxisGroup] = {}
    joined = [name for name in algorithms if len(members(name)) > 1 and mesh.has(name)]
    for name in (*mesh.names, *joined):
        size = mesh.size(name)
        if size == 1:
            continue
        group = world if size == world.size() else None
        for ranks in mesh.groups(name) if group is None else ():
            those = [first_rank + mesh_rank for mesh_rank in ranks]
            subgroup = dist.new_group(those, timeout=timeout_of(world))
            if rank in those:
                group = subgroup
        if group is None:
            continue
        algorithm = algorithms.get(name, NATIVE)
        for wanted in sorted(names(algorithm)):
            carrier(group, wanted)
        state = member(group)
        state.axis = f"axis {name}"
        if name in algorithms and state.watch is None and dist.get_backend(group) == "gloo":  # on GPUs NCCL runs all
            boxes = boxes_of(group)
            if len(boxes) > 1:  # no links within one box
                state.watch = Watch(group, boxes, functools.partial(started, group))
        index = mesh.group_ranks(name, rank - first_rank).index(rank - first_rank)
        result[name] = AxisGroup(group.group_name, size, index, algorithm)
    if algorithms:
        watches = [member(process_group(axis_group.name)).watch for axis_group in result.values()]
        member(world).has_links |= any(from_every_rank(any(w is not None and w.has_links for w in watches)))
    return result


def groups_once(mesh: Mesh, rank: int) -> dict[str, AxisGroup]:
    """The groups that ``axis_groups`` makes, made at the first call with this mesh and kept. All ranks of the world
    must call this."""
    world = dist.group.WORLD
    assert world is not None
    kept = member(world).meshes
    if mesh not in kept:
        kept[mesh] = axis_groups(mesh, rank)
    return kept[mesh]


def pipeline_group(mesh: Mesh, rank: int) -> AxisGroup:
    """The group of ``pp`` of a mesh whose stages differ: all ranks of the world (see ``AxisGroup``)."""
    world = dist.group.WORLD
    assert world is not None
    member(world).axis = "axis pp"
    firsts = tuple(mesh.stage_ranks(stage).start for stage in range(mesh.num_stages))
    return AxisGroup(world.group_name, len(firsts), mesh.coordinates(rank)["pp"], firsts=firsts)


def process_group(name: str) -> dist.ProcessGroup:
    """The process group called ``name``."""
    return resolve_process_group(name)  # type: ignore[arg-type]


def look_at_links(step: int, groups: Mapping[str, AxisGroup]) -> tuple[Amendment, ...]:
    """Every ``watch.EVERY`` steps, check whether groups that span several boxes should use other algorithms. Logs the
    result, and returns the amendments that all ranks of the world apply from step ``step + 1`` on. Every rank must call
    this; ``groups`` maps an axis to this rank's group."""
    world = dist.group.WORLD
    if step % watch.EVERY or world is None or not member(world).has_links:
        return ()
    amendments: list[Amendment] = []
    for axis, axis_group in groups.items():
        group = process_group(axis_group.name)
        group_watch = member(group).watch
        ranks = tuple(dist.get_process_group_ranks(group))
        for switch in group_watch.look(step + 1) if group_watch is not None and group_watch.has_links else ():
            if group.rank() == 0:
                log.warning("%s: %s", member(group).axis or "collectives", switch)
            if switch.after != switch.before:
                what = switch.key._asdict()
                amendments.append(Amendment(step=switch.step, axis=axis, ranks=ranks, algorithm=switch.after, **what))
    return amended((), itertools.chain(*from_every_rank(amendments)))


def amend(groups: Mapping[str, AxisGroup], amendments: Iterable[Amendment]) -> None:
    """Use the algorithms of ``amendments`` in the collectives of the groups; earlier amendments no longer hold.

    Raises:
        PlanError: an amendment names an unknown algorithm.
    """
    for axis, axis_group in groups.items():
        group = process_group(axis_group.name)
        ranks, state = tuple(dist.get_process_group_ranks(group)), member(group)
        taken = {
            Key(each.operation, each.num_bytes): chosen(each.algorithm, each.operation, each.num_bytes)
            for each in amendments
            if (each.axis, each.ranks) == (axis, ranks)
        }
        if taken and state.watch is None:
            state.watch = Watch(group, (), functools.partial(started, group))
        if state.watch is not None:
            state.watch.amended = taken


def started(group: dist.ProcessGroup, operation: str, value: Tensor, algorithm: str) -> Work | None:
    """Start an operation on a flat vector, to measure its time."""
    rows = value.view(group.size(), -1)
    part = torch.empty_like(rows[0])
    runs = carrier(group, algorithm)
    if operation == "all_reduce":
        return runs.all_reduce(value, "sum", algorithm, "measured again")
    if operation == "all_gather":
        return runs.all_gather(part, rows, algorithm, "measured again")
    return runs.reduce_scatter(rows, part, "sum", algorithm, "measured again")


def codings_of(groups: Mapping[str, AxisGroup]) -> dict[tuple[str, str], MeasuredCoding]:
    """Measurements of coded collectives, by axis and label."""
    return {
        (axis, label): measured
        for axis, axis_group in groups.items()
        if not axis_group.firsts
        for label, measured in member(process_group(axis_group.name)).coded.items()
    }


def told_of(axis: str, group: AxisGroup, world_size: int) -> str:
    """The name of an axis in traces. If the group is not the whole world, the name includes the ranks of the group."""
    if group.size == world_size or group.firsts:
        return axis
    return f"{axis} of ranks {' '.join(map(str, dist.get_process_group_ranks(process_group(group.name))))}"


def collectives(group: dist.ProcessGroup) -> Collectives:
    """Meshwright's own collectives in a group. All ranks of the group must make the first call together.

    Ranks of one machine communicate by shared memory, other ranks by send and receive.
    """
    state = member(group)
    if state.collectives is None:
        me, called = group.rank(), dist.get_process_group_ranks(group)
        shared = _connected(group, "lane", [rank for rank in called if rank != called[me]], collective_kind.SLOTS)
        lanes: dict[int, Lane] = {
            peer: shared[name] or TorchLane(group, peer, state.progress)
            for peer, name in enumerate(called)
            if peer != me
        }
        for lane in lanes.values():
            if isinstance(lane, SharedMemory):
                lane.while_waiting = state.progress.move
        state.collectives = Collectives(me, group.size(), lanes, f"rank {called[me]}")
        state.progress.add(state.collectives)
    return state.collectives


def carrier(group: dist.ProcessGroup, algorithm: str) -> Collectives | Native | Mpi:
    """The object that runs an algorithm. All ranks of the group must make the first call together, unless the algorithm
    is ``native``.

    Raises:
        RankError: the algorithm is MPI's, and the ranks were not started by MPI.
    """
    if algorithm == NATIVE:
        return Native(group)
    if algorithm != MPI:
        return collectives(group)
    state = member(group)
    if state.by_mpi is None:
        state.by_mpi = Mpi(group, state.progress)
    return state.by_mpi


@naming("all ranks of the group")
def boxes_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """The ranks of a group, with one tuple of ranks for each box. Ranks of a box share memory. Ranks are numbered
    within the group, and boxes are ordered by their first rank. All ranks of the group must call this."""
    with waiting(group, "boxes_of"):
        each = gather_everywhere(box(), group)
    return tuple(tuple(rank for rank, place in enumerate(each) if place == box_id) for box_id in dict.fromkeys(each))


def channels(peers: Iterable[int], device: torch.device = CPU) -> dict[int, Channel]:
    """The channels to the ranks ``peers`` of the world, by rank, for tensors on ``device``. Each of these ranks must
    call this too, with this rank among its ``peers``. On an accelerator, all ranks of the world must call it."""
    world, wanted = dist.group.WORLD, set(peers)
    if world is None or world.size() == 1:
        return {}
    if device.type != "cpu":
        return device_channels(world, wanted, device)
    if not wanted:
        return {}
    known, progress = member(world).channels, member(world).progress
    for peer, lane in _connected(world, "channel", wanted - set(known), stream.SLOTS).items():
        known[peer] = (
            PointToPoint(world, peer, progress, culprit) if lane is None else LaneChannel(lane, progress, world.rank())
        )
    return {peer: known[peer] for peer in wanted}


def _connected(group: dist.ProcessGroup, name: str, peers: Iterable[int], slots: int) -> dict[int, SharedMemory | None]:
    """The memory shared with each peer, or None if memory cannot be shared. If this rank has no memory left, its peers
    raise an error too."""
    rank, store, timeout_s = dist.get_rank(), group.get_group_store(), timeout_of(group).total_seconds()
    attendance = attend()
    assert attendance is not None, "there are peers"
    lanes = shared_lanes(store, name, rank, peers, slots, timeout_s, attendance.check)
    for lane in lanes.values():
        if lane is not None:
            lane.blame = attendance.blame
            attendance.lanes.append(lane)
    if refused := next((lane.process.refused for lane in lanes.values() if lane and lane.process.refused), ""):
        level = logging.WARNING if attendance.is_first("refused") else logging.DEBUG
        log.log(level, "%s; whether other ranks have ended is read in /proc instead", refused)
    return lanes


def alone() -> bool:
    """Whether this rank has nobody to ask: it is the only rank, or the others only exist in a dry run."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    world = dist.group.WORLD
    return world is not None and dist.get_backend(world) == REHEARSED


@naming("all ranks of the group")
def broadcast_along(value: Tensor, group: AxisGroup, index: int) -> None:
    """Copy the value of the rank at ``index`` to all ranks of the group. Along ``pp``, if stages differ, it is the
    value of the first rank of stage ``index``."""
    ranks = process_group(group.name)
    index = group.firsts[index] if group.firsts else index
    with blocking("broadcast", group.name, value.nbytes), waiting(ranks, "broadcast", value):
        dist.broadcast(value, dist.get_global_rank(ranks, index), ranks)


@naming("all ranks")
def meet() -> None:
    """Wait until all ranks of the world have called this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with waiting(None, "barrier"):
            dist.barrier()


@naming("all ranks of the group")
def sum_over(value: Tensor, group: AxisGroup) -> Tensor:
    """The sum of a small tensor over the group. Along ``pp``, if stages differ, each stage counts once: the value of
    its first rank."""
    counts = not group.firsts or dist.get_rank() in group.firsts
    value = value.clone() if counts else torch.zeros_like(value)
    ranks = process_group(group.name)
    with blocking("all_reduce", group.name, value.nbytes), waiting(ranks, "all_reduce", value):
        dist.all_reduce(value, group=ranks)
    return value


@naming("all ranks")
def sum_of_all(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks of the world, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with waiting(None, "all_reduce", value):
            dist.all_reduce(value)
    return value


@naming("all ranks")
def broadcast_tensors(tensors: list[Tensor], device: torch.device = CPU, chunk_bytes: int = 64 * 2**20) -> None:
    """Copy rank 0's values of ``tensors`` to every rank, in chunks; each chunk has one dtype and one device. Chunks
    cross between the ranks' devices, so that a device holds one chunk at a time and not the whole model."""
    pending: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        pending.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in pending.values():
        while group:
            chunk = [group.pop(0)]
            while group and sum(tensor.nbytes for tensor in chunk) < chunk_bytes:
                chunk.append(group.pop(0))
            flat = torch.cat([tensor.reshape(-1) for tensor in chunk]).to(device)
            with waiting(None, "broadcast", flat):
                dist.broadcast(flat, 0)
            for target, part in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                target.copy_(part.view_as(target))


@naming("all ranks of the group")
def gather_whole(value: Tensor, shape: tuple[int, ...], placements: Placements, groups: dict[str, AxisGroup]) -> Tensor:
    """Gather a whole tensor from its parts; return ``value`` itself if it is whole. All ranks of the groups must call
    this."""
    now = {axis: placement for axis, placement in placements.items() if isinstance(placement, Shard)}
    if flat := flat_axis(placements):
        parts = [torch.empty_like(value) for _ in range(groups[flat].size)]
        ranks = process_group(groups[flat].name)
        with waiting(ranks, "all_gather", value):
            dist.all_gather(parts, value.contiguous(), ranks)
        whole = local_shape(shape, unflattened(placements), *sizes_of(groups))
        value = torch.cat([part.view(-1) for part in parts])[: math.prod(whole)].view(whole)
    for axis in reversed(list(groups)):
        shard = now.pop(axis, None)
        if not isinstance(shard, Shard):
            continue
        group, cut = groups[axis], axis_cut(shape, axis, {**now}, shard, *sizes_of(groups))
        piece = value.unflatten(shard.dim, (cut.blocks, cut.length(group.index))).contiguous()
        if missing := cut.length(0) - cut.length(group.index):
            piece = torch.nn.functional.pad(piece, [0, 0] * (piece.dim() - shard.dim - 2) + [0, missing])
        parts = [torch.empty_like(piece) for _ in range(group.size)]
        ranks = process_group(group.name)
        with waiting(ranks, "all_gather", piece):
            dist.all_gather(parts, piece, ranks)
        split = [part.narrow(shard.dim + 1, 0, cut.length(index)) for index, part in enumerate(parts)]
        value = torch.cat(split, shard.dim + 1).flatten(shard.dim, shard.dim + 1)
    return value


@naming("all ranks")
def from_rank_0(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0 only, and return its result on every rank.

    Raises:
        MeshwrightError: ``make`` raised a MeshwrightError on rank 0; every rank raises the same error.
        RankError: ``make`` raised another error on rank 0; rank 0 raises this error, and the other ranks a RankError.
    """
    if alone():
        return make()
    world: Any = dist.group.WORLD
    result: Any = None
    own, note = cast("Exception | None", None), b""
    if world.rank() == 0:
        try:
            result = make()
            note = to_bytes((result, None))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait
            own = error
            text, remedy = f"it failed: {type(error).__name__}: {error}", "look at the error that rank 0 raised"
            words = RankError(text, where="rank 0", remedy=remedy)
            note = to_bytes((None, error if isinstance(error, MeshwrightError) else words))
    with waiting(None, "from_rank_0"):
        note = bytes_of_first(note, world)
    if own is not None:
        raise own
    if world.rank():
        result, failure = from_bytes(note)
        if failure is not None:
            raise failure
    return cast("T", result)


@naming("all ranks")
def from_every_rank(value: T) -> list[T]:
    """Collect the values of all ranks. Every rank gets the list, ordered by rank."""
    if alone():
        return [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    world: Any = dist.group.WORLD
    with waiting(None, "from_every_rank"):
        return gather_everywhere(value, world)
