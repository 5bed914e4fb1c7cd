"""Find ranks that behave alike: the engine simulates one rank of each class, and copies its timeline."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshwright.ir.mesh import Mesh


class Classes(NamedTuple):
    """Classes of ranks that behave alike. ``of`` has the class of each rank. ``first`` has the lowest rank of each
    class. ``groups`` maps an axis to one entry per class: the classes of the ranks in a group that holds a rank of the
    class. Along ``pp``, these classes are in the order of coordinates."""

    of: tuple[int, ...]
    first: tuple[int, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]


def classes(mesh: Mesh, axes: Sequence[str], colors: Sequence[Hashable], submeshes: Sequence[Mesh] = ()) -> Classes:
    """The coarsest classes in which all ranks of a class have the same color, the same coordinate on ``pp``, and along
    every axis a group of the same classes. ``colors`` has a color for each rank. Ranks of different colors behave
    differently. ``submeshes`` has the mesh of each pipeline rank, if these differ.

    This is the equitable partition of color refinement (Weisfeiler and Leman 1968; McKay 1981). Two ranks of a class
    run the same program, meet ranks of the same classes in every collective, and exchange messages with ranks of the
    same classes. So, by induction over the events, every event happens to both at the same time: one timeline is exact
    for all ranks of the class. Without stragglers, each stage is one class. One straggler among dp x tp replicas makes
    at most four classes of each stage.
    """
    meshes = (mesh, *submeshes)
    named = [axis for axis in dict.fromkeys(("pp", *axes)) if any(each.has(axis) for each in meshes)]
    groups = {axis: _groups(axis, mesh, submeshes) for axis in named}
    stage = {rank: index for group in groups.get("pp", ()) for index, rank in enumerate(group)}
    of = _numbered([(color, stage.get(rank, 0)) for rank, color in enumerate(colors)])
    while True:
        around = {axis: _around(axis, groups[axis], of) for axis in named}
        finer = _numbered([(class_id, *(around[axis][rank] for axis in named)) for rank, class_id in enumerate(of)])
        if max(finer) == max(of):
            break
        of = finer
    first = tuple(of.index(class_id) for class_id in range(max(of) + 1))
    return Classes(tuple(of), first, {axis: tuple(around[axis][rank] for rank in first) for axis in named})


def _groups(axis: str, mesh: Mesh, submeshes: Sequence[Mesh]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks along an axis. A rank whose submesh has no such axis is a group of its own."""
    if axis == "pp" or not submeshes:
        return mesh.groups(axis)
    groups: list[tuple[int, ...]] = []
    for submesh in submeshes:
        first = sum(map(len, groups))
        own = submesh.groups(axis) if submesh.has(axis) else tuple((rank,) for rank in range(submesh.world_size))
        groups += [tuple(first + rank for rank in group) for group in own]
    return tuple(groups)


def _around(axis: str, groups: Sequence[tuple[int, ...]], of: list[int]) -> dict[int, tuple[int, ...]]:
    """Maps a rank to the classes of the ranks in its group on an axis."""
    neighbours = dict[int, tuple[int, ...]]()
    for group in groups:
        members = [of[rank] for rank in group]
        neighbours |= dict.fromkeys(group, tuple(members) if axis == "pp" else tuple(sorted(set(members))))
    return neighbours


def _numbered(colors: Sequence[Hashable]) -> list[int]:
    """The colors replaced by numbers from 0, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(color, len(numbers)) for color in colors]
