"""The part of a cluster that holds a stage. It is described as equal units of the slowest device that the stage
uses."""

import math
from collections.abc import Iterator
from itertools import accumulate
from operator import mul

import msgspec

from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.level import Level, UnitOfRanks, units_of
from meshwright.ir.mesh import Mesh


def stage_cluster(cluster: Cluster, mesh: Mesh, stage: int) -> Cluster:
    """The part of the cluster that holds the ranks of pipeline rank ``stage``. If all devices of the cluster and all
    stages of the mesh are equal, it is the cluster itself."""
    if cluster.homogeneous and not mesh.stages:
        return cluster
    return part_of(cluster, mesh.stage_ranks(stage))


def part_of(cluster: Cluster, ranks: range) -> Cluster:
    """A simpler cluster, with equal boxes of one kind of device, that serves to price a stage on the consecutive
    ``ranks``.

    If the ranks have different devices, all count as the device with the lowest peak FLOP/s, and with the smallest
    memory of any of them, because the ranks of a stage wait for the slowest rank. Likewise, all boxes count as the box
    with the slowest links. If the ranks fill boxes unevenly (the last ranks of one box and the first of the next), each
    box counts as if it held as many ranks as the fullest box.
    """
    if cluster.homogeneous and (_fills_units(cluster.levels, ranks) or ranks.stop > cluster.num_devices):
        return cluster
    levels, device, start = cluster.levels, cluster.device, ranks.start
    units = _overlapped(levels, device, ranks)
    while len(units) == 1 and units[0].levels:  # one unit holds all ranks
        start -= units[0].start
        levels, device = units[0].levels, units[0].device
        units = _overlapped(levels, device, range(start, start + len(ranks)))
    if not units:  # a cluster of one device
        return cluster
    stop = start + len(ranks)
    held = [min(stop, unit.stop) - max(start, unit.start) for unit in units]
    slowest = max((unit.levels for unit in units), key=_beta)
    whole = any(count == unit.stop - unit.start for count, unit in zip(held, units, strict=True))
    inside = slowest if whole else _trimmed(slowest, max(held))
    count = levels[-1].fan_out if len(levels) == 1 and not levels[-1].members else len(units)
    outside = msgspec.structs.replace(levels[-1], fan_out=count, members=())
    devices = [each for unit in units for each in _devices(unit.levels, unit.device)]
    slow = min(devices, key=lambda each: max(each.peak_flops_per_s.values()))
    slow = msgspec.structs.replace(slow, memory_bytes=min(each.memory_bytes for each in devices))
    return _cluster(cluster, slow, (*inside, outside))


def memory_of(cluster: Cluster, ranks: range) -> int:
    """The smallest device memory of these ranks, in bytes."""
    return part_of(cluster, ranks).device.memory_bytes if not cluster.homogeneous else cluster.device.memory_bytes


def pools_of(cluster: Cluster) -> tuple[range, ...]:
    """The ranks of the cluster, in pools of neighbouring ranks with like devices and like boxes.

    Boxes are the units of the outermost level that has ``members``. A cluster whose devices are all equal is one pool.
    """
    if cluster.homogeneous:
        return (range(cluster.num_devices),)
    pools: list[tuple[tuple[Device, tuple[Level, ...]], range]] = []
    for unit in units_of(cluster.levels, cluster.device):
        kind = unit.device, unit.levels
        if pools and pools[-1][0] == kind:
            pools[-1] = kind, range(pools[-1][1].start, unit.stop)
        else:
            pools.append((kind, range(unit.start, unit.stop)))
    return tuple(ranks for _, ranks in pools)


def _cluster(cluster: Cluster, device: Device, levels: tuple[Level, ...]) -> Cluster:
    names = {level.name for level in levels}
    return msgspec.structs.replace(
        cluster,
        device=device,
        levels=levels,
        num_devices=math.prod(level.fan_out for level in levels),
        collectives=tuple(row for row in cluster.collectives if row.level in names),
        open_ended=False,
    )


def _overlapped(levels: tuple[Level, ...], device: Device, ranks: range) -> list[UnitOfRanks]:
    """The units of the outermost level that hold at least one of the ranks."""
    units = units_of(levels, device) if levels else ()
    return [unit for unit in units if unit.start < ranks.stop and ranks.start < unit.stop]


def _fills_units(levels: tuple[Level, ...], ranks: range) -> bool:
    """Whether the ranks lie inside one unit of each level, or fill whole units of it."""
    return all(
        ranks.start // size == (ranks.stop - 1) // size or (ranks.start % size == 0 and len(ranks) % size == 0)
        for size in accumulate((level.fan_out for level in levels), mul)
    )


def _devices(levels: tuple[Level, ...], device: Device) -> Iterator[Device]:
    """The devices below these levels. Each kind appears at least once."""
    unlike = [unit for unit in units_of(levels, device) if any(level.members for level in levels)] if levels else []
    for unit in unlike:
        yield from _devices(unit.levels, unit.device)
    if not unlike:
        yield device


def _beta(levels: tuple[Level, ...]) -> float:
    return max((level.beta_s_per_byte for level in levels), default=0.0)


def _trimmed(levels: tuple[Level, ...], size: int) -> tuple[Level, ...]:
    """The levels of a unit that is cut down to ``size`` devices. Levels with members stay unchanged."""
    result, left = [], size
    for level in levels:
        if level.members:
            return levels
        take = min(left, level.fan_out)
        result.append(msgspec.structs.replace(level, fan_out=take))
        left = -(-left // take)
    return tuple(result)
