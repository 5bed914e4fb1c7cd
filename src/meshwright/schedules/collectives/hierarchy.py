"""Hierarchical collectives, along a cluster's levels: add up inside every box, then across boxes, then gather inside
the boxes.

    2 boxes of 2, one vector "ab":     in the box         across           in the box
        box 0   rank 0                 a of both  ──▶  a of all four  ──▶  a b
                rank 1                 b of both  ──▶  b of all four  ──▶  a b
        box 1   ...

Every rank of a box sends a share of the vector over the slow links. If boxes are unequal, the shares are cut so finely
that each share has exactly one owner in every box. If the vector is cut into several pieces, one piece is sent between
boxes while the next piece is added up inside them.

An algorithm's name is INSIDE+ACROSS@BOXES, followed by /PIECES if it has several pieces:

    star+ring@2x4          boxes of 2 neighbouring ranks, 4 of them
    star+ring@2x4/8        the same, in 8 pieces
    star+ring@0.2|1.3      two boxes: ranks 0 and 2, ranks 1 and 3; || separates groups of boxes
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from meshwright.errors import ScheduleError
from meshwright.schedules.collectives import group
from meshwright.schedules.collectives.group import Half, Owned, Whole
from meshwright.schedules.collectives.steps import Rounds, Span, beside, cut

Boxes: TypeAlias = tuple["Boxes | int", ...]
"""The nesting of ranks: each entry is a rank, or a tuple that stands for a unit of a level. ``((0, 1), (2, 3))``: two
boxes of two."""

INSIDE: Mapping[str, Half] = {"star": group.scatter_star, "ring": group.scatter_ring}
ACROSS: Mapping[str, Whole] = {
    "ring": group.in_halves(group.scatter_ring, group.gather_ring),
    "tree": group.up_and_down(group.reduce_tree),
    "butterfly": group.all_reduce_butterfly,
    "rabenseifner": group.all_reduce_rabenseifner,
}
HALVES_ACROSS: Mapping[str, Half] = {**INSIDE, "halving": group.scatter_halving}
ACROSS_BY_OPERATION = {
    "all_reduce": tuple(ACROSS),
    "reduce_scatter": tuple(HALVES_ACROSS),
    "all_gather": tuple(HALVES_ACROSS),
}
"""Maps an operation to the names that may follow the +. Other operations have no hierarchical algorithms."""

_NAME = re.compile(r"(?P<inside>[a-z-]+)\+(?P<across>[a-z-]+)@(?P<boxes>[0-9x.|]+)(?:/(?P<pieces>[1-9][0-9]*))?")
_EQUAL, _NAMED = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)+"), re.compile(r"[0-9]+((\.|\|+)[0-9]+)*")

_Owners = list[tuple[Span, int]]
"""Neighbouring spans of the vector, each with the rank that owns it."""


def nested(fan_outs: Sequence[int]) -> Boxes:
    """Nested equal boxes for levels with these fan-outs, innermost first."""
    units: list[Boxes | int] = list(range(prod(fan_outs)))
    for size in fan_outs[:-1]:
        units = [tuple(units[first : first + size]) for first in range(0, len(units), size)]
    return tuple(units)


def leaves(boxes: Boxes | int) -> list[int]:
    """The ranks of the boxes, in order."""
    return [boxes] if isinstance(boxes, int) else [rank for box in boxes for rank in leaves(box)]


class Leveled(NamedTuple):
    """A parsed name of a hierarchical algorithm: its names in INSIDE and in ACROSS_BY_OPERATION, the boxes, and the
    number of pieces."""

    inside: str
    across: str
    boxes: Boxes
    pieces: int = 1


@lru_cache(maxsize=1024)
def read(name: str) -> Leveled | None:
    """The algorithm with this name; None if the name is not that of a hierarchical algorithm."""
    match = _NAME.fullmatch(name)
    if match is None or match["inside"] not in INSIDE:
        return None
    boxes = _read_boxes(match["boxes"])
    return None if boxes is None else Leveled(match["inside"], match["across"], boxes, int(match["pieces"] or 1))


def written(inside: str, across: str, boxes: str, pieces: int = 1) -> str:
    """The name of an algorithm. ``boxes`` is a result of ``equal_boxes`` or ``named_boxes``."""
    return f"{inside}+{across}@{boxes}" + (f"/{pieces}" if pieces > 1 else "")


def equal_boxes(fan_outs: Sequence[int]) -> str:
    """The text of equal boxes, such as ``2x4``, for levels with these fan-outs, innermost first."""
    return "x".join(map(str, fan_outs))


def named_boxes(boxes: Boxes) -> str:
    """The text of any boxes, such as ``0.2|1.3``. If the boxes are equal, the shorter text of ``equal_boxes``."""
    sizes: list[int] = []
    unit: Boxes | int = boxes
    while not isinstance(unit, int):
        sizes.append(len(unit))
        unit = unit[0]
    equal = equal_boxes(sizes[::-1])
    return equal if _read_boxes(equal) == boxes else _named(boxes)[0]


def _named(boxes: Boxes) -> tuple[str, int]:
    """The text of the boxes, and the number of nested levels."""
    if all(isinstance(box, int) for box in boxes):
        return ".".join(map(str, boxes)), 0
    inner = [_named(box) if not isinstance(box, int) else (str(box), 0) for box in boxes]
    depth = 1 + max(level for _, level in inner)
    return ("|" * depth).join(text for text, _ in inner), depth


def _read_boxes(text: str) -> Boxes | None:
    if _EQUAL.fullmatch(text):
        return nested([int(fan_out) for fan_out in text.split("x")])
    if not _NAMED.fullmatch(text) or "|" not in text:
        return None
    return _read_named(text, max(map(len, re.findall(r"\|+", text))))


def _read_named(text: str, depth: int) -> Boxes:
    if depth:
        return tuple(_read_named(part, depth - 1) for part in text.split("|" * depth))
    return tuple(int(rank) for rank in text.split("."))


def all_reduce_in_levels(leveled: Leveled, length: int) -> Rounds:
    """The rounds of an all-reduce: inside the boxes, across the outermost level, and inside again.

    A piece starts ``len(across)`` rounds after the previous piece:

    piece 0   in  across  in
    piece 1       in      across  in
    piece 2               in      across  in
    """
    late: list[Rounds] = []
    begin = 0
    for piece in cut((0, length), leveled.pieces):
        units = [_reduced(box, piece, leveled.inside) for box in leveled.boxes]
        shared = _shared([owners for _, owners in units])
        inside = [moves for moves in beside(rounds for rounds, _ in units) if moves]
        across = [moves for moves in beside(ACROSS[leveled.across](ranks, span) for span, ranks in shared) if moves]
        late.append([[] for _ in range(begin)] + inside + across + group.backwards(inside))
        begin += max(1, len(across))
    return beside(late)


def reduce_scatter_in_levels(leveled: Leveled, owned: Owned) -> Rounds:
    """The rounds of a reduce-scatter. In each box, a part is added up by the rank that has the same position as the
    part's owner. Then the parts are added up across boxes. In reverse, these rounds are an all-gather.

    Raises:
        ScheduleError: the boxes are not equal.
    """
    return _scattered(leveled.boxes, dict(enumerate(owned)), leveled)


def _scattered(boxes: Boxes, owned: Mapping[int, Sequence[Span]], leveled: Leveled) -> Rounds:
    if all(isinstance(box, int) for box in boxes):
        ranks = leaves(boxes)
        return INSIDE[leveled.inside](ranks, [owned[rank] for rank in ranks])
    units = [leaves(box) for box in boxes]
    if len({len(unit) for unit in units}) > 1:
        raise ScheduleError(
            f"boxes of {' and '.join(map(str, sorted({len(unit) for unit in units})))} ranks",
            where="reduce_scatter",
            remedy="only an all-reduce works along unequal boxes",
        )
    inside = []
    for box, unit in zip(boxes, units, strict=True):
        due = {rank: [span for other in units for span in owned[other[place]]] for place, rank in enumerate(unit)}
        inside.append([] if isinstance(box, int) else _scattered(box, due, leveled))
    across = HALVES_ACROSS[leveled.across]
    peers = [list(ranks) for ranks in zip(*units, strict=True)]
    return beside(inside) + beside(across(ranks, [owned[rank] for rank in ranks]) for ranks in peers)


def _reduced(box: Boxes | int, whole: Span, inside: str) -> tuple[Rounds, _Owners]:
    """The rounds that add up each element at one rank of the box, and the rank that owns each span afterwards."""
    if isinstance(box, int):
        return [], [(whole, box)]
    units = [_reduced(unit, whole, inside) for unit in box]
    scatter, owners, levels = INSIDE[inside], _Owners(), list[Rounds]()
    for span, members in _shared([unit_owners for _, unit_owners in units]):
        pieces = cut(span, len(members))
        levels.append(scatter(members, [[piece] for piece in pieces]))
        owners += [(piece, rank) for piece, rank in zip(pieces, members, strict=True) if piece[0] < piece[1]]
    return beside(rounds for rounds, _ in units) + beside(levels), sorted(owners)


def _shared(units: Sequence[_Owners]) -> list[tuple[Span, list[int]]]:
    """The pieces into which the units' spans divide the vector, each with the rank that owns it in each unit."""
    borders = sorted({border for owners in units for span, _ in owners for border in span})
    pieces = []
    for begin, end in pairwise(borders):
        members = [next(rank for span, rank in owners if span[0] <= begin < span[1]) for owners in units]
        pieces.append(((begin, end), members))
    return pieces
