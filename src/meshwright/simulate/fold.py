"""Find ranks that behave alike, so that the engine simulates one rank of each class and copies its timeline."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.ir.mesh import Mesh


class Classes(NamedTuple):
    """Classes of ranks that behave alike. ``of`` has the class of each rank. ``first`` has the lowest rank of each
    class. ``groups`` maps an axis to one entry per class: the classes of the ranks in a group that holds a rank of the
    class. ``links`` has one entry per class: for each stage, the classes of the ranks that exchange messages with a
    rank of the class. ``stages`` has the classes of all ranks of each stage, if stages differ."""

    of: tuple[int, ...]
    first: tuple[int, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    links: tuple[tuple[tuple[int, ...], ...], ...]
    stages: tuple[tuple[int, ...], ...]

    def linked(self, class_id: int, stage: int) -> tuple[int, ...]:
        """The classes of the ranks of a stage that exchange messages with a rank of the class."""
        return self.links[class_id][stage]

    def meeting(self, axis: str, class_id: int, members: Sequence[int]) -> tuple[int, ...]:
        """The classes of the ranks that meet in a collective along an axis. ``members`` are the coordinates of the
        participants; empty: all. If stages differ, all ranks of a stage take part in collectives along ``pp``."""
        if axis != "pp":
            return self.groups[axis][class_id]
        stages = members or range(len(self.links[class_id]))
        if self.stages:
            return tuple(sorted({member for stage in stages for member in self.stages[stage]}))
        return tuple(self.links[class_id][stage][0] for stage in stages)


def classes(mesh: Mesh, axes: Sequence[str], colors: Sequence[Hashable]) -> Classes:
    """The coarsest classes of ranks with the following property. All ranks of a class have the same color, the same
    coordinate on ``pp``, links to ranks of the same classes in every stage, and, along every axis, a group with the
    same classes. ``colors`` has a color for each rank. Ranks of different colors behave differently.

    This is the equitable partition of color refinement (Weisfeiler and Leman 1968; McKay 1981). Two ranks of a class
    run the same program, meet ranks of the same classes in every collective, and exchange messages with ranks of the
    same classes. So, by induction over the events, every event happens to both ranks at the same time, and one timeline
    is exact for all ranks of the class. Without stragglers, each stage is one class. One straggler among dp x tp
    replicas makes at most four classes of each stage.
    """
    meshes = (mesh, *mesh.stages)
    named = [axis for axis in dict.fromkeys(axes) if axis != "pp" and any(each.has(axis) for each in meshes)]
    groups = {axis: mesh.groups(axis) for axis in named}
    links = _links(mesh)
    stage = [mesh.coordinates(rank).get("pp", 0) for rank in range(mesh.world_size)]
    of = _numbered([(color, stage[rank]) for rank, color in enumerate(colors)])
    while True:
        around = {axis: _around(groups[axis], of) for axis in named}
        # Ranks of a pipeline share their links, so each object is translated, and compared, only once.
        linked = {
            id(every): tuple(tuple(sorted({of[peer] for peer in peers})) for peers in every)
            for every in {id(every): every for every in links}.values()
        }
        numbers = dict(zip(linked, _numbered(list(linked.values())), strict=True))
        finer = _numbered([
            (class_id, numbers[id(links[rank])], *(around[axis][rank] for axis in named))
            for rank, class_id in enumerate(of)
        ])  # fmt: skip
        if max(finer) == max(of):
            break
        of = finer
    first = tuple(of.index(class_id) for class_id in range(max(of) + 1))
    return Classes(
        tuple(of),
        first,
        {axis: tuple(around[axis][rank] for rank in first) for axis in named},
        tuple(linked[id(links[rank])] for rank in first),
        tuple(tuple({of[rank]: None for rank in mesh.stage_ranks(number)}) for number in range(len(mesh.stages))),
    )


@lru_cache(maxsize=64)
def classes_of_equals(mesh: Mesh, axes: tuple[str, ...]) -> Classes:
    """The classes if all ranks have the same color."""
    return classes(mesh, axes, [()] * mesh.world_size)


def _links(mesh: Mesh) -> list[tuple[tuple[int, ...], ...]]:
    """For every rank and every stage, the ranks of the stage that exchange messages with the rank."""
    if mesh.stages:
        return [
            tuple(mesh.linked_ranks(rank, stage) for stage in range(mesh.num_stages)) for rank in range(mesh.world_size)
        ]
    links: dict[int, tuple[tuple[int, ...], ...]] = {}
    for group in mesh.groups("pp") if mesh.has("pp") else ((rank,) for rank in range(mesh.world_size)):
        links |= dict.fromkeys(group, tuple((rank,) for rank in group))
    return [links[rank] for rank in range(mesh.world_size)]


def _around(groups: Sequence[tuple[int, ...]], of: list[int]) -> dict[int, tuple[int, ...]]:
    """Maps a rank to the classes of the ranks in its group on an axis."""
    neighbours = dict[int, tuple[int, ...]]()
    for group in groups:
        neighbours |= dict.fromkeys(group, tuple(sorted({of[rank] for rank in group})))
    return neighbours


def _numbered(colors: Sequence[Hashable]) -> list[int]:
    """The colors replaced by numbers from 0, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(color, len(numbers)) for color in colors]
