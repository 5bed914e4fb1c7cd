"""From one placement of a tensor to another: the cheapest moves, searched on what latency and bandwidth each axis has.

A sequence of moves is a path between placements. The path of least time is found with Dijkstra's algorithm; a move over
``p`` ranks, of ``n`` bytes on each of them, takes (Thakur, Rabenseifner, Gropp 2005; Chan et al. 2007)

    all_reduce       2 log2(p) latencies and 2 (p - 1)/p n / bandwidth
    reduce_scatter     log2(p) latencies and   (p - 1)/p n / bandwidth      n: before
    all_gather         log2(p) latencies and   (p - 1)/p n / bandwidth      n: afterwards
    all_to_all         (p - 1) latencies and   (p - 1)/p n / bandwidth
    slice              nothing

and neighbouring axes that lie alike may move as one (``dp+tp``), over a group of all their ranks.
"""

import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2, prod
from typing import Literal

import msgspec

from meshwright.ir.mesh import members
from meshwright.ir.placement import (
    REPLICATE,
    Flat,
    Partial,
    Placement,
    Placements,
    Shard,
    flat_axis,
    local_shape,
    nested,
)

Kind = Literal["all_reduce", "reduce_scatter", "all_to_all", "all_gather", "slice"]
_ORDER = {"all_reduce": 0, "reduce_scatter": 0, "all_to_all": 1, "all_gather": 2, "slice": 3}
"""Of moves that take as long."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What joins the ranks of an axis: seconds of a message without content, and seconds of each byte."""

    latency_s: float = 1e-5
    byte_s: float = 1e-9


class Move(msgspec.Struct, frozen=True):
    """One step: a collective over ``axis`` (or axes, joined), or a ``slice`` of what is held already. ``placement`` is
    the Partial that is reduced, the Shard (or Flat) that is gathered or sent away, or the one that is cut out or
    scattered; ``target`` is that which an all-to-all makes of it. ``before`` are the placements that it starts from,
    and ``after`` those that it leaves."""

    kind: Kind
    axis: str
    placement: Shard | Flat | Partial
    before: Placements
    after: Placements
    target: Shard | None = None


class Mover(msgspec.Struct, frozen=True):
    """The moves of a mesh: ``sizes`` of its axes with more than one rank, outermost first, and ``links`` of them and of
    those that may move as one. An axis without a link has a usual one."""

    sizes: Mapping[str, int]
    links: Mapping[str, Link] = {}

    def moves(self, have: Placements, want: Placements, shape: tuple[int, ...], item_bytes: int) -> tuple[Move, ...]:
        """The moves from ``have`` to ``want`` that take the least time for a tensor of ``shape``; of equals the fewest,
        and then reductions before gathers before slices, outer axes first (of gathers, inner ones)."""
        sizes = tuple((axis, size) for axis, size in self.sizes.items() if len(members(axis)) == 1)
        axes = {axis for axis, _ in sizes}
        links = tuple((name, link) for name, link in self.links.items() if axes.issuperset(members(name)))
        start, end = (_named(placements, axes) for placements in (have, want))
        if start == end:
            return ()
        return _cheapest(start, end, sizes, links, shape, item_bytes)


_State = tuple[tuple[str, Placement], ...]
"""The axes that are not Replicate, outermost first."""


def _named(placements: Mapping[str, Placement], axes: set[str]) -> _State:
    return tuple(sorted((axis, one) for axis, one in placements.items() if one != REPLICATE and axis in axes))


@lru_cache(maxsize=65536)
def _cheapest(
    start: _State,
    end: _State,
    sizes: tuple[tuple[str, int], ...],
    links: tuple[tuple[str, Link], ...],
    shape: tuple[int, ...],
    item_bytes: int,
) -> tuple[Move, ...]:
    search = _Search(dict(sizes), dict(links), shape, item_bytes, dict(start), dict(end))
    axes = {axis for axis, _ in sizes}
    differ = frozenset(axis for axis in axes if dict(start).get(axis) != dict(end).get(axis))
    # what lies right is only moved where it blocks what does not
    found = _path(search, start, end, differ) if not flat_axis(dict(start)) else None
    if found is None:
        found = _path(search, start, end, frozenset(axes))
    lost = [axis for axis, one in end if isinstance(one, Partial) and dict(start).get(axis) != one]
    assert found is not None, f"no partial sum over {lost} to pass on: {start} to {end}"  # it would count once a rank
    return found


def _path(search: "_Search", start: _State, end: _State, moved: frozenset[str]) -> tuple[Move, ...] | None:
    """The cheapest moves over these axes; None where they cannot do it."""
    axes = set(search.names)
    queue: list[tuple[float, int, tuple[tuple[int, int, str], ...], int]] = [(0.0, 0, (), 0)]
    paths: list[tuple[_State, tuple[Move, ...]]] = [(start, ())]
    done: set[_State] = set()
    while queue:
        seconds, count, order, number = heapq.heappop(queue)
        state, path = paths[number]
        if state == end:
            return path
        if state in done:
            continue
        done.add(state)
        for move in search.moves(dict(state), moved):
            after = _named(move.after, axes)
            if after not in done:
                paths.append((after, (*path, move)))
                cost = seconds + search.seconds(move)
                heapq.heappush(queue, (cost, count + 1, (*order, search.order(move)), len(paths) - 1))
    return None


class _Search:
    """All moves from a placement, and what they take."""

    def __init__(
        self,
        sizes: dict[str, int],
        links: dict[str, Link],
        shape: tuple[int, ...],
        item_bytes: int,
        have: Placements,
        want: Placements,
    ) -> None:
        self.sizes, self.links, self.shape, self.item_bytes = sizes, links, shape, item_bytes
        self.names = list(sizes)
        self.joined = [members(name) for name in links if len(members(name)) > 1]
        terms = [axis for axis, one in have.items() if isinstance(one, Partial)]
        part = [Shard(dim) for dim in range(len(shape)) if shape[dim] > 1][:1] if len(terms) > 1 else []
        self.cuts: dict[str, list[Shard]] = {}
        """By axis: as it is cut at the end or the beginning, and for a sum over levels, each on a part of it."""
        for axis in self.names:
            own = [one for one in (want.get(axis), have.get(axis)) if isinstance(one, Shard)]
            self.cuts[axis] = list(dict.fromkeys([*own, *(part if axis in terms else [])]))
        self.want, self.flat = want, flat_axis(want)
        self._bytes: dict[_State, int] = {}

    def moves(self, now: Placements, moved: frozenset[str]) -> Iterator[Move]:
        """Every move from a placement over the axes ``moved``. What is Flat cuts what other axes leave: until it is
        gathered, these may only be reduced."""
        flat = flat_axis(now)
        if flat:
            yield self._move("all_gather", (flat,), now[flat], now, None)
        for axes in (*((axis,) for axis in self.names), *self.joined):
            if moved.issuperset(axes) and len({now.get(axis) for axis in axes}) == 1:
                yield from self._of(axes, now, bool(flat))

    def _of(self, axes: tuple[str, ...], now: Placements, flat: bool) -> Iterator[Move]:
        placement = now.get(axes[0])
        rest = {axis: one for axis, one in now.items() if axis not in axes}
        single = len(axes) == 1
        if isinstance(placement, Partial):
            yield self._move("all_reduce", axes, placement, now, None)
        if flat:
            return
        if single and axes[0] == self.flat and (placement is None or placement == Partial("sum")):
            kind: Kind = "slice" if placement is None else "reduce_scatter"
            yield self._move(kind, axes, Flat(), now, Flat())
        if isinstance(placement, Shard):
            if self._blocked(axes[-1], placement, now):
                return
            yield self._move("all_gather", axes, placement, now, None)
        for cut in self.cuts[axes[0]]:
            if any(cut not in self.cuts[axis] for axis in axes) or not self._fits(axes, cut, rest):
                continue
            if placement is None and single:
                yield self._move("slice", axes, cut, now, cut)
            elif placement == Partial("sum"):
                yield self._move("reduce_scatter", axes, cut, now, cut)
            elif isinstance(placement, Shard) and cut.dim != placement.dim and self._alike(axes, placement, cut, rest):
                yield self._move("all_to_all", axes, placement, now, cut)

    def _move(
        self, kind: Kind, axes: tuple[str, ...], placement: Placement, now: Placements, made: Shard | Flat | None
    ) -> Move:
        after = {axis: one for axis, one in now.items() if axis not in axes}
        after |= {axis: made for axis in axes if made is not None}
        assert isinstance(placement, Shard | Flat | Partial)
        target = made if kind == "all_to_all" and isinstance(made, Shard) else None
        return Move(kind, "+".join(axes), placement, now, after, target)

    def _blocked(self, axis: str, placement: Shard, now: Placements) -> bool:
        """Whether an inner axis cuts what this one has left of the same factor."""
        inner = self.names[self.names.index(axis) + 1 :]
        return any(now.get(other) == placement for other in inner)

    def _fits(self, axes: tuple[str, ...], cut: Shard, rest: Placements) -> bool:
        """Whether the axes can cut so beside what other axes cut: on one dim, an inner factor must begin where the
        parts of an outer one begin, and one factor is cut by outer axes first."""
        now = dict(rest)
        for axis in axes:
            if not self._nests(axis, cut, now):
                return False
            now[axis] = cut
        return self._divides(cut.dim, now) or all(self.want.get(axis) == cut for axis in axes)

    def _alike(self, axes: tuple[str, ...], placement: Shard, cut: Shard, rest: Placements) -> bool:
        """Whether all ranks of the axes have as much of a tensor under both cuts."""
        return all(self._divides(one.dim, {**rest, **dict.fromkeys(axes, one)}) for one in (placement, cut))

    def _nests(self, axis: str, cut: Shard, now: Placements) -> bool:
        for other, placement in now.items():
            if not isinstance(placement, Shard) or placement.dim != cut.dim:
                continue
            if placement == cut:
                if self.names.index(other) > self.names.index(axis):
                    return False
                continue
            pair = (
                (placement, self.sizes[other], cut)
                if placement.outer <= cut.outer
                else (cut, self.sizes[axis], placement)
            )
            if not nested(*pair, self.shape[cut.dim]):
                return False
        return True

    def _divides(self, dim: int, now: Placements) -> bool:
        """Whether all blocks of a dim are cut evenly."""
        cuts = [(one.outer, self.sizes[axis]) for axis, one in now.items() if isinstance(one, Shard) and one.dim == dim]
        if any(isinstance(one, Shard) and one.dim == dim and one.unit > 1 for one in now.values()):
            return False
        parts = {outer: prod(size for other, size in cuts if other == outer) for outer, _ in cuts}
        ends = [*sorted(parts), self.shape[dim]]
        return all(inner % (outer * parts[outer]) == 0 for outer, inner in pairwise(ends))

    def seconds(self, move: Move) -> float:
        """Of one move."""
        if move.kind == "slice":
            return 0.0
        parts = prod(self.sizes[axis] for axis in members(move.axis))
        link = self.links.get(move.axis) or Link()
        largest = max(self._size(move.before), self._size(move.after))
        passes = 2 if move.kind == "all_reduce" else 1
        rounds = parts - 1 if move.kind == "all_to_all" else passes * ceil(log2(parts))
        return rounds * link.latency_s + passes * (parts - 1) / parts * largest * link.byte_s

    def _size(self, placements: Placements) -> int:
        key = tuple(sorted(placements.items()))
        if key not in self._bytes:
            self._bytes[key] = prod(local_shape(self.shape, placements, self.sizes)) * self.item_bytes
        return self._bytes[key]

    def order(self, move: Move) -> tuple[int, int, str]:
        """Where a move comes among equals."""
        place = self.names.index(members(move.axis)[0])
        return _ORDER[move.kind], -place if move.kind == "all_gather" else place, str(move.target or move.placement)
