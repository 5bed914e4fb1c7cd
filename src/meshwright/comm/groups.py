"""Process groups of a mesh, by name: the one place that resolves a name to a group."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from meshwright.ir.mesh import Mesh


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one on one axis only: group name, size, this rank's index."""

    name: str
    size: int
    index: int


def axis_groups(mesh: Mesh, rank: int) -> dict[str, AxisGroup]:
    """Make the process groups of every axis (all ranks must call this), and return this rank's."""
    coordinates = mesh.coordinates(rank)
    result: dict[str, AxisGroup] = {}
    for axis in mesh.axes:
        if axis.size == 1:
            continue
        if axis.size == mesh.world_size:
            group = dist.group.WORLD
        else:
            group = None
            for ranks in mesh.groups(axis.name):
                made = dist.new_group(list(ranks))
                if rank in ranks:
                    group = made
        assert group is not None
        result[axis.name] = AxisGroup(group.group_name, axis.size, coordinates[axis.name])
    return result


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(name)
