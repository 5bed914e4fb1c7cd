"""From one placement of a tensor to another: which moves, in which order, over which axes."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from meshwright.ir.placement import REPLICATE, Flat, Partial, Placements, Shard, flat_axis, is_split, unflattened


class Move(msgspec.Struct, frozen=True):
    """One step: a collective over ``axis``, or a ``slice`` of what is held already. ``placement`` is the Partial that
    is reduced, the Shard (or Flat) that is gathered, or the one that comes of it; ``before`` are the placements that it
    starts from, and ``after`` those that it leaves."""

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "slice"]
    axis: str
    placement: Shard | Flat | Partial
    before: Placements
    after: Placements


def moves(have: Placements, want: Placements, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """The moves from ``have`` to ``want``; ``sizes`` are of the axes with more than one rank, outermost first.

    First Partials are reduced (scattered at once where that dim is wanted split), then shards are gathered, the
    innermost axis first, then wanted parts are cut out, the outermost axis first. Flat, which cuts what other axes
    leave, is gathered before all else; it is cut as soon as the shards of other axes are as they are wanted: before
    other Partials are reduced, if they are so from the beginning, so that only parts are.
    """
    order = list(sizes)
    now = {axis: placement for axis, placement in have.items() if placement != REPLICATE}
    found: list[Move] = []
    flat = flat_axis(want)

    def move(
        kind: Literal["all_reduce", "reduce_scatter", "all_gather", "slice"],
        axis: str,
        placement: Shard | Flat | Partial,
    ) -> None:
        nonlocal now
        after = {other: one for other, one in now.items() if other != axis}
        if kind in ("reduce_scatter", "slice"):
            after[axis] = placement
        found.append(Move(kind, axis, placement, now, after))
        now = after

    def cut_flat() -> None:
        if flat and now.get(flat) in (None, Partial("sum")):
            move("reduce_scatter" if now.get(flat) == Partial("sum") else "slice", flat, Flat())

    if (other := flat_axis(now)) and (other != flat or not _alike(now, want)):
        move("all_gather", other, Flat())
    if _alike(now, want):
        cut_flat()
    for axis in order:
        source, target = now.get(axis), want.get(axis, REPLICATE)
        if not isinstance(source, Partial) or target == source or (axis == flat and source.op == "sum"):
            continue
        if isinstance(target, Shard) and source.op == "sum" and _fits(axis, target, now, sizes):
            move("reduce_scatter", axis, target)
        else:
            move("all_reduce", axis, source)
    for axis in reversed(order):
        source = now.get(axis)
        if isinstance(source, Shard) and (want.get(axis) != source or _regather(axis, now, want, order)):
            move("all_gather", axis, source)
    for axis in order:
        wanted = want.get(axis)
        if isinstance(wanted, Shard) and now.get(axis) != wanted:
            move("slice", axis, wanted)
    cut_flat()
    lost = [axis for axis, wanted in want.items() if isinstance(wanted, Partial) and now.get(axis) != wanted]
    assert not lost, f"no partial sum over {lost} to pass on"  # a whole value would be counted once a rank
    return tuple(found)


def _alike(now: Placements, want: Placements) -> bool:
    """Whether the axes other than Flat's cut alike."""
    mine, theirs = ({axis: one for axis, one in unflattened(each).items() if is_split(one)} for each in (now, want))
    return mine == theirs


def _regather(axis: str, now: Placements, want: Placements, order: list[str]) -> bool:
    """Whether an outer axis begins or ceases to cut the same factor, which this inner axis would block."""
    outer = order[: order.index(axis)]
    return any((now.get(other) == now[axis]) != (want.get(other) == now[axis]) for other in outer)


def _fits(axis: str, target: Shard, now: Placements, sizes: Mapping[str, int]) -> bool:
    """Whether the axis can cut as ``target`` beside what other axes cut now: on one dim, an inner factor must begin
    where the parts of an outer one begin."""
    for other, placement in now.items():
        if other == axis or not isinstance(placement, Shard) or placement.dim != target.dim:
            continue
        if placement == target:  # one factor: the inner axis cuts what the outer one has left
            if list(sizes).index(other) > list(sizes).index(axis):
                return False
            continue
        if placement.outer <= target.outer:
            outer, inner, size = placement.outer, target.outer, sizes[other]
        else:
            outer, inner, size = target.outer, placement.outer, sizes[axis]
        if inner % (outer * size):
            return False
    return True
