"""Emits halo exchanges, which extend a rank's part of a dim by its neighbours' rows, and sums of halo rows.

    own rows        4 5 6 7              strips = halo_exchange(own)       rows 3, 8
    extended      3 4 5 6 7 8            cat(strips[:1], own, strips[1:])

Exchanged rows are cached by value and range, so that backward, which reads the same rows, needs no second exchange. A
dim that is split over several axes is first gathered over the inner axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from meshwright.ir.halo import Rows, fetched, outside, overlap, owned
from meshwright.ir.mesh import AxisGroup
from meshwright.ops import collectives

aten = torch.ops.aten


@dataclass
class Exchanged:
    """The exchanges of a graph. ``strips`` maps the key of an exchange (value, dim, rows, fill and group) to the node
    of the received rows. ``extended`` maps a value with its halo to the key of its exchange, which is a part of the key
    of the next dim's exchange."""

    strips: dict[tuple[object, ...], fx.Node] = field(default_factory=dict)
    extended: dict[fx.Node, tuple[object, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """An exchange that ``node`` has started. If ``node`` is None, the exchange was already done. ``before`` and
    ``after`` are the numbers of rows before and after the rank's part."""

    node: fx.Node | None
    key: tuple[object, ...]
    before: int
    after: int


class HaloEmitter:
    """Emits the halo exchanges of one dim, which is split over ``axes`` (outermost first) at ``edges``; ``dim`` is
    negative."""

    def __init__(self, emit: Callable[..., fx.Node], axes: Sequence[AxisGroup], dim: int, edges: Sequence[int]) -> None:
        assert dim < 0
        self._emit, self._dim, self._inner = emit, dim, axes[1:]
        self._group = axes[0]
        self._place = 0
        for axis in self._inner:
            self._place = self._place * axis.size + axis.index
        self._places = prod(axis.size for axis in self._inner)
        self._edges = list(edges[:: self._places])
        self._own = owned(self._edges, axes[0].index)
        first = axes[0].index * self._places
        self._within = [edge - self._own[0] for edge in edges[first : first + self._places + 1]]

    def extended(self, value: fx.Node, ranges: Sequence[Rows], fill: float, known: Exchanged) -> fx.Node:
        """The rows that this rank reads: its part ``value``, extended or cut. Rows that no rank owns hold ``fill``."""
        group_ranges = self._group_ranges(ranges)
        key = self._key(value, group_ranges, fill, known)
        result = self._extended(self._joined(value), group_ranges, fill, key, known)
        if result is value:
            if all(part_rows == owned(self._edges, part) for part, part_rows in enumerate(group_ranges)):
                return value
            # The parts of other ranks change. The alias is a separate node, so that all ranks cache the same exchanges.
            result = self._emit(aten.alias.default, value)
        known.extended[result] = key
        return result

    def _extended(
        self, value: fx.Node, group_ranges: tuple[Rows, ...], fill: float, key: tuple[object, ...], known: Exchanged
    ) -> fx.Node:
        own_range = group_ranges[self._group.index]
        sides = outside(own_range, self._own)
        before, after = (high - low for low, high in sides)
        kept = overlap(own_range, self._own)
        pieces = [value] if kept == self._own else []
        if kept[0] < kept[1] and not pieces:
            pieces = [self._slice(value, kept[0] - self._own[0], kept[1] - self._own[0])]
        if not self._meets(group_ranges):
            padding = [0, 0] * (-self._dim - 1) + [before, after]
            return self._emit(aten.constant_pad_nd.default, pieces[0], padding, fill) if any(padding) else pieces[0]
        if key not in known.strips:
            known.strips[key] = self._emit(
                collectives.WAIT, self._start(collectives.HALO_EXCHANGE, value, group_ranges, fill)
            )
        strips = known.strips[key]
        if before and after and pieces:
            pieces = [self._slice(strips, 0, before), *pieces, self._slice(strips, before, before + after)]
        else:  # a rank that receives no rows also reads its (empty) strips, because it takes part in order to send
            pieces = [*pieces, strips] if after else [strips, *pieces]
        return self._emit(aten.cat.default, pieces, self._dim) if len(pieces) > 1 else strips

    def begun(self, value: fx.Node, ranges: Sequence[Rows], fill: float, known: Exchanged) -> Begun | None:
        """Start the exchange of the rows around this rank's part. None if no rows travel, if this rank does not read
        all of its own rows, or if the dim is split over several axes."""
        group_ranges = self._group_ranges(ranges)
        own_range, key = group_ranges[self._group.index], self._key(value, group_ranges, fill, known)
        whole = overlap(own_range, self._own) == self._own
        if self._inner or not whole or not self._meets(group_ranges):
            return None
        before, after = (high - low for low, high in outside(own_range, self._own))
        return Begun(
            self._start(collectives.HALO_EXCHANGE, value, group_ranges, fill) if key not in known.strips else None,
            key,
            before,
            after,
        )

    def ended(self, begun: Begun, known: Exchanged) -> tuple[fx.Node | None, fx.Node | None]:
        """Wait for an exchange. Returns the rows before the part and the rows after it, or None where there are no
        rows."""
        if begun.node is not None:
            known.strips[begun.key] = self._emit(collectives.WAIT, begun.node)
        strips = known.strips[begun.key]
        before = self._slice(strips, 0, begun.before) if begun.before else None
        return before, self._slice(strips, begun.before, begun.before + begun.after) if begun.after else None

    def returned(self, strips: Sequence[fx.Node], ranges: Sequence[Rows]) -> fx.Node:
        """Start to send ``strips``, the terms of rows that other ranks own, to the owners, and to receive terms of this
        rank's own rows."""
        joined = self._emit(aten.cat.default, list(strips), self._dim) if len(strips) > 1 else strips[0]
        return self._start(collectives.HALO_RETURN, joined, self._group_ranges(ranges))

    def reduced(self, value: fx.Node, ranges: Sequence[Rows]) -> fx.Node:
        """Sum the terms that all ranks have for the rows of their ranges; return the sums of this rank's own rows."""
        group_ranges = self._group_ranges(ranges)
        own_range = group_ranges[self._group.index]
        kept = overlap(own_range, self._own)
        if self._meets(group_ranges):
            value = self._emit(collectives.WAIT, self._start(collectives.HALO_REDUCE, value, group_ranges))
        else:
            if kept != own_range:
                value = self._slice(value, kept[0] - own_range[0], kept[1] - own_range[0])
            missing = [kept[0] - self._own[0], self._own[1] - kept[1]]
            if any(missing):
                value = self._emit(aten.constant_pad_nd.default, value, [0, 0] * (-self._dim - 1) + missing)
        for axis in self._inner:
            value = self._emit(collectives.ALL_REDUCE, value, "sum", axis.name, axis.algorithm)
            value = self._emit(collectives.WAIT, value)
        if self._inner:
            value = self._slice(value, *owned(self._within, self._place))
        return value

    def _key(self, value: fx.Node, group_ranges: tuple[Rows, ...], fill: float, known: Exchanged) -> tuple[object, ...]:
        return (known.extended.get(value, value), self._dim, group_ranges, fill, self._group.name, self._place)

    def _start(self, target: Any, value: fx.Node, group_ranges: tuple[Rows, ...], *fill: float) -> fx.Node:
        lows, highs = map(list, zip(*group_ranges, strict=True))
        group = self._group
        return self._emit(target, value, self._dim, lows, highs, self._edges, *fill, group.name, group.index)

    def _group_ranges(self, ranges: Sequence[Rows]) -> tuple[Rows, ...]:
        """The ranges of the ranks in this rank's group on the outermost axis; their coordinates on the inner axes are
        equal."""
        return tuple(ranges[part * self._places + self._place] for part in range(self._group.size))

    def _meets(self, group_ranges: tuple[Rows, ...]) -> bool:
        """Whether any rank reads rows of another rank, or none of its own rows. If so, all ranks take part in the
        exchange."""
        for part in range(self._group.size):
            low, high = overlap(group_ranges[part], owned(self._edges, part))
            if low >= high or fetched(group_ranges, self._edges, part):
                return True
        return False

    def _joined(self, value: fx.Node) -> fx.Node:
        """This rank's part on the outermost axis, gathered from the ranks of the inner axes."""
        edges, place = self._within, self._place
        for axis in reversed(self._inner):
            first = place // axis.size * axis.size
            rows = [edges[first + index + 1] - edges[first + index] for index in range(axis.size)]
            if missing := rows[0] - rows[axis.index]:
                padding = [0, 0] * (-self._dim - 1) + [0, missing]
                value = self._emit(aten.constant_pad_nd.default, value, padding)
            gathered = self._emit(collectives.ALL_GATHER, value, axis.name, axis.size, axis.algorithm)
            gathered = self._emit(collectives.WAIT, gathered)
            parts = [self._emit(aten.select.int, gathered, 0, index) for index in range(axis.size)]
            parts = [
                self._slice(part, 0, own) if own < rows[0] else part for part, own in zip(parts, rows, strict=True)
            ]
            value = self._emit(aten.cat.default, parts, self._dim)
            edges, place = edges[:: axis.size], place // axis.size
        return value

    def _slice(self, value: fx.Node, begin: int, end: int) -> fx.Node:
        return self._emit(aten.slice.Tensor, value, self._dim, begin, end)
