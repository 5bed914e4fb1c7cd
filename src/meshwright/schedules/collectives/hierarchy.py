"""All-reduces along a cluster's levels: add up inside every box, then across boxes, then collect inside.

    2 boxes of 2, one vector "ab":     in the box         across           in the box
        box 0   rank 0                 a of both  ──▶  a of all four  ──▶  a b
                rank 1                 b of both  ──▶  b of all four  ──▶  a b
        box 1   ...

Every rank of a box drives its share over the slow links. Boxes may be unequal: then shares are cut so finely that each
has one owner in every box.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TypeAlias

from meshwright.errors import ScheduleError
from meshwright.schedules.collectives import group
from meshwright.schedules.collectives.group import Half, Whole
from meshwright.schedules.collectives.steps import Rounds, Span, beside, cut

Boxes: TypeAlias = tuple["Boxes | int", ...]
"""How ranks nest: a rank, or the units of a level. ``((0, 1), (2, 3))`` is two boxes of two."""

INSIDE: dict[str, tuple[Half, Half]] = {
    "star": (group.scatter_star, group.gather_star),
    "ring": (group.scatter_ring, group.gather_ring),
}
ACROSS: dict[str, Whole] = {
    "ring": group.in_halves(group.scatter_ring, group.gather_ring),
    "tree": group.all_reduce_tree,
    "butterfly": group.all_reduce_butterfly,
    "rabenseifner": group.all_reduce_rabenseifner,
}

_Owners = list[tuple[Span, int]]
"""Neighbouring spans of the vector, and who owns each."""


def nested(fan_outs: Sequence[int]) -> Boxes:
    """Equal boxes: of levels with these fan-outs, innermost first."""
    units: list[Boxes | int] = list(range(prod(fan_outs)))
    for size in fan_outs[:-1]:
        units = [tuple(units[first : first + size]) for first in range(0, len(units), size)]
    return tuple(units)


def leaves(boxes: Boxes | int) -> list[int]:
    """The ranks in order."""
    return [boxes] if isinstance(boxes, int) else [rank for box in boxes for rank in leaves(box)]


def all_reduce_in_levels(algorithm: str, boxes: Boxes, length: int) -> Rounds:
    """Rounds of INSIDE+ACROSS, as in ``ring+rabenseifner``: inside every level but the outermost, and across that.

    Raises:
        ScheduleError: there is no such algorithm, or the boxes do not hold the ranks 0, 1, ... once each.
    """
    inside, _, across = algorithm.partition("+")
    if inside not in INSIDE or across not in ACROSS:
        raise ScheduleError(
            f"there is no algorithm {algorithm!r} over levels",
            where="all_reduce",
            remedy=f"INSIDE+ACROSS, of {', '.join(INSIDE)} and {', '.join(ACROSS)}",
        )
    ranks = leaves(boxes)
    if sorted(ranks) != list(range(len(ranks))):
        raise ScheduleError(
            f"the boxes hold the ranks {', '.join(map(str, ranks))}", where="boxes", remedy="name 0, 1, ... once each"
        )
    whole = (0, length)
    units = [_reduced(box, whole, inside) for box in boxes]
    up, owners = beside(rounds for rounds, _ in units), [one for _, one in units]
    top = beside(ACROSS[across](members, span) for span, members in _shared(owners))
    return up + top + group.backwards(up)


def _reduced(box: Boxes | int, whole: Span, inside: str) -> tuple[Rounds, _Owners]:
    """The rounds after which each element's sum over the box lies at one of its ranks, and at which."""
    if isinstance(box, int):
        return [], [(whole, box)]
    units = [_reduced(one, whole, inside) for one in box]
    scatter, owners, levels = INSIDE[inside][0], _Owners(), list[Rounds]()
    for span, members in _shared([one for _, one in units]):
        pieces = cut(span, len(members))
        levels.append(scatter(members, [[piece] for piece in pieces]))
        owners += [(piece, rank) for piece, rank in zip(pieces, members, strict=True) if piece[0] < piece[1]]
    return beside(rounds for rounds, _ in units) + beside(levels), sorted(owners)


def _shared(units: Sequence[_Owners]) -> list[tuple[Span, list[int]]]:
    """The pieces of which each unit has one owner, and these owners."""
    borders = sorted({border for owners in units for span, _ in owners for border in span})
    found = []
    for begin, end in pairwise(borders):
        members = [next(rank for span, rank in owners if span[0] <= begin < span[1]) for owners in units]
        found.append(((begin, end), members))
    return found
