"""Resharding: the fastest moves from one placement of a tensor to another, given the links of the mesh axes.

A move is one collective, or a slice without communication. A sequence of moves is a path between placements, and
Dijkstra's algorithm finds the path of least time. The table gives the time of a move over ``p`` ranks, with ``n`` bytes
on each rank (Thakur, Rabenseifner, Gropp 2005; Chan et al. 2007):

    all_reduce       2 log2(p) latencies and 2 (p - 1)/p n / bandwidth
    reduce_scatter     log2(p) latencies and   (p - 1)/p n / bandwidth      n: before the move
    all_gather         log2(p) latencies and   (p - 1)/p n / bandwidth      n: after the move
    all_to_all         (p - 1) latencies and   (p - 1)/p n / bandwidth
    slice              nothing

Neighbouring axes with equal placements may move as one joined axis (``dp+tp``), in a group of all their ranks.
"""

import heapq
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from math import ceil, log2, prod
from typing import Literal, NamedTuple

import msgspec

from meshwright.ir.mesh import members
from meshwright.ir.placement import (
    REPLICATE,
    Flat,
    Partial,
    Placement,
    Placements,
    Shard,
    local_shape,
    nested,
)

Kind = Literal["all_reduce", "reduce_scatter", "all_to_all", "all_gather", "slice"]
_ORDER = {"all_reduce": 0, "reduce_scatter": 0, "all_to_all": 1, "all_gather": 2, "slice": 3}
"""The order of preference among moves that take equal time."""


class AxisLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between the ranks of an axis: the seconds for an empty message, and the seconds per byte."""

    latency_s: float = 1e-5
    byte_s: float = 1e-9


class ReshardingMove(msgspec.Struct, frozen=True):
    """A collective over ``axis`` (or joined axes), or a ``slice`` of data that the rank already holds.

    For an all-reduce, all-gather or all-to-all, ``placement`` is the old placement on the axis. For a slice or
    reduce-scatter, it is the new placement. ``target`` is the new placement of an all-to-all. ``before`` and ``after``
    are the placements on all axes before and after the move."""

    kind: Kind
    axis: str
    placement: Shard | Flat | Partial
    before: Placements
    after: Placements
    target: Shard | None = None


class Mover(msgspec.Struct, frozen=True, dict=True):
    """Finds moves on a mesh.

    ``sizes`` maps each axis with more than one rank to its size, outermost first. ``links`` maps axes, and joined axes
    that may move as one, to their links. An axis without an entry has the default link."""

    sizes: Mapping[str, int]
    links: Mapping[str, AxisLink] = {}

    def moves(
        self, have: Placements, want: Placements, shape: tuple[int, ...], item_bytes: int
    ) -> tuple[ReshardingMove, ...]:
        """The moves from ``have`` to ``want`` that take the least time for a tensor of ``shape``.

        Among paths with equal times, the path with the fewest moves is taken. Among paths with equal numbers of moves,
        the order of the kinds of moves decides: reductions, then all-to-alls, gathers and slices. Then the order of the
        axes decides: inner axes first for gathers, else outer axes first."""
        sizes, names, links = self._axes
        start, end = (_state(placements, names) for placements in (have, want))
        return _cheapest(start, end, sizes, links, shape, item_bytes) if start != end else ()

    @cached_property
    def _axes(self) -> tuple[tuple[tuple[str, int], ...], list[str], tuple[tuple[str, AxisLink], ...]]:
        """The sizes and names of all axes but joint axes, and the links of these axes and of joint axes that consist of
        them."""
        sizes = tuple((axis, size) for axis, size in self.sizes.items() if len(members(axis)) == 1)
        names = [axis for axis, _ in sizes]
        links = tuple((name, link) for name, link in self.links.items() if set(names).issuperset(members(name)))
        return sizes, names, links


_State = tuple[Placement | None, ...]
"""The placement on each axis, outermost first; None stands for Replicate."""


def _state(placements: Placements, names: list[str]) -> _State:
    return tuple(None if placements.get(axis) == REPLICATE else placements.get(axis) for axis in names)


@lru_cache(maxsize=65536)
def _cheapest(
    start: _State,
    end: _State,
    sizes: tuple[tuple[str, int], ...],
    links: tuple[tuple[str, AxisLink], ...],
    shape: tuple[int, ...],
    item_bytes: int,
) -> tuple[ReshardingMove, ...]:
    tensor = _tensor(sizes, links, shape, item_bytes)
    cuts = _cuts(tensor, start, end)
    differ = sum(1 << axis for axis, (have, want) in enumerate(zip(start, end, strict=True)) if have != want)
    # Axes that already have their final placement move only if they block the others, or offer a shortcut.
    path = None if Flat() in start or tensor.has_shortcut(start, differ) else _path(tensor, start, end, cuts, differ)
    if path is None:
        path = _path(tensor, start, end, cuts, (1 << len(sizes)) - 1)
    lost = [tensor.names[axis] for axis, want in enumerate(end) if isinstance(want, Partial) and start[axis] != want]
    # A whole tensor does not serve as a Partial: the sum over ranks would contain it once for every rank.
    assert path is not None, f"no partial sum over {lost} to pass on: {start} to {end}"
    return tuple(tensor.move(before, step) for before, step in path)


def _cuts(tensor: "_Tensor", start: _State, end: _State) -> list[list[Shard]]:
    """The Shards that a search tries for each axis and for each group of joined axes.

    The search tries the Shards that the axis has in ``start`` and ``end``. If several axes are Partial in ``start``, it
    also tries a Shard of one dim for each of these axes, preferably of a dim that no axis cuts in ``start``. Joined
    axes get equal Shards."""
    terms = [isinstance(placement, Partial) for placement in start]
    taken = {placement.dim for placement in start if isinstance(placement, Shard)}
    dims = sorted((dim for dim, size in enumerate(tensor.shape) if size > 1), key=taken.__contains__)
    part = [Shard(dim) for dim in dims[:1]] if sum(terms) > 1 else []
    own = [
        list(dict.fromkeys([*(shard for shard in ends if isinstance(shard, Shard)), *(part if term else [])]))
        for term, *ends in zip(terms, end, start, strict=True)
    ]
    return [[cut for cut in own[group.axes[0]] if all(cut in own[a] for a in group.axes)] for group in tensor.groups]


def _path(
    tensor: "_Tensor", start: _State, end: _State, cuts: list[list[Shard]], moved: int
) -> list[tuple[_State, "_Step"]] | None:
    """The fastest steps over axes in the bit set ``moved``, each with the state before it; None if no path exists."""
    flat = end.index(Flat()) if Flat() in end else None
    first: tuple[float, int, tuple[_Order, ...]] = (0.0, 0, ())
    best = {start: first}
    reached: dict[_State, tuple[_State, _Step]] = {}
    queue = [(first, 0, start)]
    number = 0
    while queue:
        label, _, state = heapq.heappop(queue)
        if state == end:
            return _steps(reached, start, end)
        if label is not best[state]:
            continue
        seconds, count, order = label
        for step in tensor.steps(state, end, flat, cuts, moved):
            new = (seconds + step.seconds, count + 1, (*order, step.order))
            if step.after not in best or new < best[step.after]:
                best[step.after], reached[step.after] = new, (state, step)
                number += 1
                heapq.heappush(queue, (new, number, step.after))
    return None


def _steps(reached: dict[_State, tuple[_State, "_Step"]], start: _State, state: _State) -> list[tuple[_State, "_Step"]]:
    path: list[tuple[_State, _Step]] = []
    while state != start:
        path.append(reached[state])
        state = path[-1][0]
    return path[::-1]


_Order = tuple[int, int, str]
"""The order of preference among paths with equal time and equally many steps: the smaller tuple wins."""


class _Group(NamedTuple):
    """An axis, or several axes that move as one. ``axes`` are their indices, ``bits`` the bit set of the indices."""

    number: int
    name: str
    axes: tuple[int, ...]
    bits: int


class _Step(NamedTuple):
    """A move without the state before it. ``even`` says whether all ranks hold equally large parts after the move."""

    kind: Kind
    group: _Group
    placement: Placement
    after: _State
    seconds: float
    order: _Order
    even: bool


class _Start(NamedTuple):
    """A group's steps from a state: ``step`` makes the group Replicate; if ``open`` is true, steps may also cut it."""

    group: _Group
    step: _Step | None
    open: bool


@lru_cache(maxsize=1024)
def _tensor(
    sizes: tuple[tuple[str, int], ...], links: tuple[tuple[str, AxisLink], ...], shape: tuple[int, ...], item_bytes: int
) -> "_Tensor":
    return _Tensor(dict(sizes), dict(links), shape, item_bytes)


class _Tensor:
    """The steps of a tensor on a mesh, with their times. Searches reuse the steps that earlier searches computed."""

    def __init__(
        self, sizes: dict[str, int], links: dict[str, AxisLink], shape: tuple[int, ...], item_bytes: int
    ) -> None:
        self.sizes, self.links, self.shape, self.item_bytes = sizes, links, shape, item_bytes
        self.names = list(sizes)
        names = [*self.names, *(name for name in links if len(members(name)) > 1)]
        axes = [tuple(self.names.index(axis) for axis in members(name)) for name in names]
        self.groups = [
            _Group(number, name, own, sum(1 << axis for axis in own))
            for number, (name, own) in enumerate(zip(names, axes, strict=True))
        ]
        self._starts: dict[_State, list[_Start]] = {}
        self._cuts: dict[tuple[_State, int, Shard | Flat], _Step | None] = {}
        self._bytes: dict[_State, int] = {}

    def steps(
        self, state: _State, end: _State, flat: int | None, cuts: list[list[Shard]], moved: int
    ) -> Iterator[_Step]:
        """The steps from ``state`` that a search for ``end`` tries.

        These are steps of groups whose axes are all in the bit set ``moved``, and gathers of Flat. ``flat`` is the axis
        that is Flat in ``end``. A step may make uneven parts only if ``end`` has the same Shards."""
        if state not in self._starts:
            self._starts[state] = list(self._starts_of(state))
        for group, whole, is_open in self._starts[state]:
            if group.bits & ~moved and not (whole and whole.placement == Flat()):
                continue
            if whole:
                yield whole
            if not is_open:
                continue
            if group.axes == (flat,) and (step := self._cut(state, group, Flat())):
                yield step
            for cut in cuts[group.number]:
                if (step := self._cut(state, group, cut)) and (step.even or all(end[a] == cut for a in group.axes)):
                    yield step

    def has_shortcut(self, start: _State, differ: int) -> bool:
        """Whether one gather over joined axes may be faster than separate gathers over single axes.

        The separate gathers are over single axes of a joined axis; their bits are set in ``differ``. The
        one gather moves more data, because it also gathers over the other joined axes."""
        for group in self.groups:
            differing = [axis for axis in group.axes if differ >> axis & 1]
            others = [axis for axis in group.axes if axis not in differing]
            if not differing or not others or not all(isinstance(start[axis], Shard) for axis in others):
                continue
            latency_s, byte_s = self._gather(group.name, group.axes)
            apart = [self._gather(self.names[axis], (axis,)) for axis in differing]
            less = latency_s < sum(latency for latency, _ in apart)
            if less or self._parts(*others) * byte_s < sum(per_byte for _, per_byte in apart):
                return True
        return False

    def _gather(self, name: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """The seconds of latency in an all-gather, and its seconds for each byte of the result."""
        parts, link = self._parts(*axes), self.links.get(name) or AxisLink()
        return ceil(log2(parts)) * link.latency_s, (parts - 1) / parts * link.byte_s

    def _starts_of(self, state: _State) -> Iterator[_Start]:
        """The steps by which each group can leave a state.

        Flat cuts the part that the other axes leave. So until Flat is gathered, the other axes may only all-reduce."""
        flat = state.index(Flat()) if Flat() in state else None
        if flat is not None:
            yield _Start(self.groups[flat], self._step("all_gather", self.groups[flat], state, None), False)
        for group in self.groups:
            if len({state[axis] for axis in group.axes}) > 1:
                continue
            placement = state[group.axes[0]]
            if isinstance(placement, Partial):
                yield _Start(group, self._step("all_reduce", group, state, None), flat is None)
            elif flat is None and placement is None:
                yield _Start(group, None, True)
            # An inner axis with the same Shard cuts the parts of this axis, and must be gathered first.
            elif flat is None and placement not in state[group.axes[-1] + 1 :]:
                yield _Start(group, self._step("all_gather", group, state, None), True)

    def _cut(self, state: _State, group: _Group, cut: Shard | Flat) -> _Step | None:
        """The step that gives a group the placement ``cut``; None if no single move can do this."""
        key = (state, group.number, cut)
        if key not in self._cuts:
            self._cuts[key] = self._cut_of(state, group, cut)
        return self._cuts[key]

    def _cut_of(self, state: _State, group: _Group, cut: Shard | Flat) -> _Step | None:
        placement = state[group.axes[0]]
        kind: Kind
        if placement is None and len(group.axes) == 1:
            kind = "slice"
        elif placement == Partial("sum"):
            kind = "reduce_scatter"
        elif isinstance(placement, Shard) and isinstance(cut, Shard) and placement.dim != cut.dim:
            kind = "all_to_all"
        else:
            return None
        if isinstance(cut, Flat):
            return self._step(kind, group, state, cut)
        if not self._fits(group, cut, state):
            return None
        step = self._step(kind, group, state, cut)
        even = self._divides(cut.dim, step.after)
        if isinstance(placement, Shard) and not (even and self._divides(placement.dim, state)):
            return None  # ranks would send unequal amounts
        return step._replace(even=even)

    def _step(self, kind: Kind, group: _Group, state: _State, cut: Shard | Flat | None) -> _Step:
        after = tuple(cut if axis in group.axes else old for axis, old in enumerate(state))
        placement = cut if kind in ("slice", "reduce_scatter") else state[group.axes[0]]
        assert placement is not None
        place = -group.axes[0] if kind == "all_gather" else group.axes[0]
        order = (_ORDER[kind], place, str(cut if kind == "all_to_all" else placement))
        return _Step(kind, group, placement, after, self._seconds(kind, group, state, after), order, True)

    def move(self, before: _State, step: _Step) -> ReshardingMove:
        """The ``ReshardingMove`` that corresponds to a step from the state ``before``."""
        cut = step.after[step.group.axes[0]]
        target = cut if step.kind == "all_to_all" and isinstance(cut, Shard) else None
        assert isinstance(step.placement, Shard | Flat | Partial)
        return ReshardingMove(
            step.kind, step.group.name, step.placement, self._named(before), self._named(step.after), target
        )

    def _named(self, state: _State) -> dict[str, Placement]:
        return {axis: placement for axis, placement in zip(self.names, state, strict=True) if placement is not None}

    def _fits(self, group: _Group, cut: Shard, state: _State) -> bool:
        """Whether the axes of a group can have the Shard ``cut``, given the Shards of the other axes on the same dim.

        The parts of an outer factor must contain whole blocks of an inner factor. If several axes cut one factor, outer
        axes must cut it before inner axes."""
        return all(
            self._nests(axis, cut, other, placement)
            for axis in group.axes
            for other, placement in enumerate(state)
            if other not in group.axes and isinstance(placement, Shard) and placement.dim == cut.dim
        )

    def _nests(self, axis: int, cut: Shard, other: int, placement: Shard) -> bool:
        if placement == cut:
            return other < axis
        if placement.outer <= cut.outer:
            return nested(placement, self._parts(other), cut, self.shape[cut.dim])
        return nested(cut, self._parts(axis), placement, self.shape[cut.dim])

    def _parts(self, *axes: int) -> int:
        return prod(self.sizes[self.names[axis]] for axis in axes)

    def _divides(self, dim: int, state: _State) -> bool:
        """Whether all blocks of a dim are cut evenly."""
        cuts = [(shard, axis) for axis, shard in enumerate(state) if isinstance(shard, Shard) and shard.dim == dim]
        if any(shard.unit > 1 for shard, _ in cuts):
            return False
        outers = sorted({shard.outer for shard, _ in cuts})
        parts = {outer: self._parts(*(axis for shard, axis in cuts if shard.outer == outer)) for outer in outers}
        return all(inner % (outer * parts[outer]) == 0 for outer, inner in pairwise([*outers, self.shape[dim]]))

    def _seconds(self, kind: Kind, group: _Group, before: _State, after: _State) -> float:
        """The time of one step."""
        if kind == "slice":
            return 0.0
        parts = self._parts(*group.axes)
        link = self.links.get(group.name) or AxisLink()
        largest = max(self._size(before), self._size(after))
        passes = 2 if kind == "all_reduce" else 1
        rounds = parts - 1 if kind == "all_to_all" else passes * ceil(log2(parts))
        return rounds * link.latency_s + passes * (parts - 1) / parts * largest * link.byte_s

    def _size(self, state: _State) -> int:
        if state not in self._bytes:
            self._bytes[state] = prod(local_shape(self.shape, self._named(state), self.sizes)) * self.item_bytes
        return self._bytes[state]
