"""Which ranks behave alike: one of them is played, and its timeline copied."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshwright.ir.mesh import Mesh


class Classes(NamedTuple):
    """Ranks in classes. ``of`` is by rank, ``first`` the lowest rank of each class; ``groups`` are by axis and class:
    the classes that a group of one of its ranks consists of (along ``pp``, by coordinate)."""

    of: tuple[int, ...]
    first: tuple[int, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]


def classes(mesh: Mesh, axes: Sequence[str], colors: Sequence[Hashable]) -> Classes:
    """The coarsest classes in which ranks of one class have the same color (what tells ranks apart from the start), the
    same coordinate on ``pp``, and along every axis groups that consist of the same classes.

    This is the equitable partition of color refinement (Weisfeiler and Leman 1968; McKay 1981). Two ranks of a class
    play the same program, meet ranks of the same classes in every collective, and send to and receive from ranks of the
    same classes; so, by induction over the events, everything happens to both at the same time: one timeline is exact
    for all. Without stragglers there is a class for every stage; one straggler among dp x tp replicas makes at most
    four of each.
    """
    named = [axis for axis in dict.fromkeys(("pp", *axes)) if mesh.has(axis)]
    groups = {axis: mesh.groups(axis) for axis in named}
    stage = {rank: index for group in groups.get("pp", ()) for index, rank in enumerate(group)}
    of = _numbered([(color, stage.get(rank, 0)) for rank, color in enumerate(colors)])
    while True:
        around = {axis: _around(axis, groups[axis], of) for axis in named}
        finer = _numbered([(one, *(around[axis][rank] for axis in named)) for rank, one in enumerate(of)])
        if max(finer) == max(of):
            break
        of = finer
    first = tuple(of.index(one) for one in range(max(of) + 1))
    return Classes(tuple(of), first, {axis: tuple(around[axis][rank] for rank in first) for axis in named})


def _around(axis: str, groups: Sequence[tuple[int, ...]], of: list[int]) -> dict[int, tuple[int, ...]]:
    """By rank, the classes of ranks that its group on an axis has."""
    found = dict[int, tuple[int, ...]]()
    for group in groups:
        members = [of[rank] for rank in group]
        found |= dict.fromkeys(group, tuple(members) if axis == "pp" else tuple(sorted(set(members))))
    return found


def _numbered(colors: Sequence[Hashable]) -> list[int]:
    """Colors as numbers from 0, by first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(color, len(numbers)) for color in colors]
