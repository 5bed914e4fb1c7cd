"""Reshards tensors from one placement to another. Collectives start early; waits come at the first use of the
result."""

from collections.abc import Callable, Generator, Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from meshwright.ir.mesh import AxisGroup, members, sizes_of
from meshwright.ir.placement import (
    AxisCut,
    Flat,
    Partial,
    Placement,
    Placements,
    Shard,
    axis_cut,
    flat_shape,
    local_shape,
    unflattened,
)
from meshwright.ir.resharding import AxisLink, Mover, ReshardingMove
from meshwright.ops import collectives

aten = torch.ops.aten
Emit = Callable[..., fx.Node]
Steps = Generator[None, None, fx.Node]
"""A generator that emits the calls of a resharding. It yields after it has started a collective, and emits the wait
when it is resumed. It returns the resharded node."""


class Resharder:
    """Emits the calls of reshardings into the graph of one rank."""

    def __init__(self, emit: Emit, groups: dict[str, AxisGroup], links: Mapping[str, AxisLink] | None = None) -> None:
        self._emit = emit
        self._groups = groups
        self._sizes, self._at = sizes_of(groups)
        self._mover = Mover(self._sizes, {axis: link for axis, link in (links or {}).items() if axis in groups})

    def steps(
        self,
        node: fx.Node,
        shape: tuple[int, ...],
        have: Placements,
        want: Placements,
        *,
        item_bytes: int,
        owned: bool,
        label: str = "",
    ) -> Steps:
        """Reshard ``node`` (global ``shape``) from ``have`` to ``want``.

        ``ir.resharding`` chooses the moves and their order. ``owned`` tells that no other node reads the memory of
        ``node``, so that the memory may be reduced in place. ``label`` names the tensor in errors.
        """
        for move in self._mover.moves(have, want, shape, item_bytes):
            group, placement, before = self._groups[move.axis], move.placement, move.before
            if move.kind == "slice":
                assert not isinstance(placement, Partial)
                node = self._slice(node, move.axis, placement, before, shape)
                continue  # a view, so ``owned`` does not change
            if isinstance(placement, Partial):
                if not owned:
                    node = self._emit(aten.clone.default, node)
                node = self._emit(collectives.ALL_REDUCE, node, placement.op, group.name, group.algorithm, label=label)
                yield
                node = self._emit(collectives.WAIT, node)
            elif move.kind == "reduce_scatter":
                node = yield from self._reduce_scatter(node, move.axis, placement, move.after, shape, label)
            elif move.target is not None:
                node = yield from self._all_to_all(node, move, shape, label)
            else:
                node = yield from self._all_gather(node, move.axis, placement, before, shape, label)
            owned = True
        return node

    def _local(self, shape: tuple[int, ...], now: Placements) -> list[int]:
        return list(local_shape(shape, now, self._sizes, self._at))

    def _cut(self, axis: str, shard: Shard, others: Placements, shape: tuple[int, ...]) -> AxisCut:
        return axis_cut(shape, axis, others, shard, self._sizes, self._at)

    def _all_gather(
        self, node: fx.Node, axis: str, shard: Shard | Flat, now: Placements, shape: tuple[int, ...], label: str
    ) -> Steps:
        group = self._groups[axis]
        other_placements = {other: placement for other, placement in now.items() if other not in members(axis)}
        whole = self._local(shape, other_placements)
        if isinstance(shard, Flat):
            node = yield from self._gathered(node, group, label)
            return self.unpadded(node, whole)
        cut, dim = self._cut(axis, shard, other_placements, shape), shard.dim
        lead = prod(whole[:dim]) * cut.blocks
        if cut.even:
            node = yield from self._gathered(node, group, label)
            return self._joined(node, group.size, lead, whole)
        # all parts are padded to the length of the largest part, which has one more unit; the padding is cut off after
        # the gather
        node = self._emit(aten.reshape.default, node, [lead, cut.length(group.index), prod(whole[dim + 1 :])])
        node = yield from self._gathered(self._padded(node, cut, group.index), group, label)
        parts = [self._emit(aten.select.int, node, 0, index) for index in range(group.size)]
        for index, part in enumerate(parts):
            if cut.length(index) < cut.length(0):
                parts[index] = self._emit(aten.slice.Tensor, part, 1, 0, cut.length(index))
        return self._emit(aten.reshape.default, self._emit(aten.cat.default, parts, 1), whole)

    def _gathered(self, node: fx.Node, group: AxisGroup, label: str) -> Steps:
        node = self._emit(collectives.ALL_GATHER, node, group.name, group.size, group.algorithm, label=label)
        yield
        return self._emit(collectives.WAIT, node)

    def _padded(self, node: fx.Node, cut: AxisCut, index: int) -> fx.Node:
        """A part [lead, indices, tail], padded to the length of the largest part."""
        missing = cut.length(0) - cut.length(index)
        return self._emit(aten.constant_pad_nd.default, node, [0, 0, 0, missing]) if missing else node

    def _joined(self, node: fx.Node, parts: int, lead: int, whole: list[int]) -> fx.Node:
        """Join equal parts: [parts, lead, block] -> [lead, parts, block], then reshape the result to ``whole``."""
        if lead > 1:
            node = self._emit(aten.view.default, node, [parts, lead, -1])
            node = self._emit(aten.transpose.int, node, 0, 1)
        return self._emit(aten.reshape.default, node, whole)

    def _apart(self, node: fx.Node, parts: int, lead: int) -> fx.Node:
        """Put the blocks for each rank together: [lead, parts, block] -> [parts, lead, block]."""
        node = self._emit(aten.reshape.default, node, [lead, parts, -1])
        return self._emit(aten.transpose.int, node, 0, 1)

    def _all_to_all(self, node: fx.Node, move: ReshardingMove, shape: tuple[int, ...], label: str) -> Steps:
        """Emit an all-to-all. Each rank sends to each other rank the part of its shard that the other rank will hold.
        All parts have equal sizes."""
        group, source, target = self._groups[move.axis], move.placement, move.target
        assert isinstance(source, Shard)
        assert target is not None
        other_placements = {other: placement for other, placement in move.before.items() if other != move.axis}
        before = self._local(shape, move.before)
        lead = prod(before[: target.dim]) * self._cut(move.axis, target, other_placements, shape).blocks
        node = self._apart(node, group.size, lead)
        node = self._emit(collectives.ALL_TO_ALL, node, group.name, group.algorithm, label=label)
        yield
        node = self._emit(collectives.WAIT, node)
        before[target.dim] //= group.size
        lead = prod(before[: source.dim]) * self._cut(move.axis, source, other_placements, shape).blocks
        return self._joined(node, group.size, lead, self._local(shape, move.after))

    def _reduce_scatter(
        self, node: fx.Node, axis: str, target: Shard | Flat, after: Placements, shape: tuple[int, ...], label: str
    ) -> Steps:
        group = self._groups[axis]
        other_placements = {other: placement for other, placement in after.items() if other not in members(axis)}
        local = self._local(shape, other_placements)
        cut = None
        if isinstance(target, Flat):
            node = self._in_rows(node, local, group.size)
        else:
            cut = self._cut(axis, target, other_placements, shape)
            lead, tail = prod(local[: target.dim]) * cut.blocks, prod(local[target.dim + 1 :])
            if cut.even:
                node = self._apart(node, group.size, lead)
            else:
                node = self._emit(aten.reshape.default, node, [lead, cut.block, tail])
                pieces = [self._emit(aten.slice.Tensor, node, 1, *cut.span(index)) for index in range(group.size)]
                padded = [self._padded(piece, cut, index) for index, piece in enumerate(pieces)]
                node = self._emit(aten.stack.default, padded)
        node = self._emit(collectives.REDUCE_SCATTER, node, "sum", group.name, group.size, group.algorithm, label=label)
        yield
        node = self._emit(collectives.WAIT, node)
        if cut is not None and cut.length(group.index) < cut.length(0):
            node = self._emit(aten.slice.Tensor, node, 1, 0, cut.length(group.index))
        return self._emit(aten.reshape.default, node, self._local(shape, after))

    def _in_rows(self, node: fx.Node, local: list[int], parts: int) -> fx.Node:
        """A tensor of shape ``local`` as a matrix [parts, elements], padded with zeros at the end if needed."""
        missing = prod(flat_shape(tuple(local), parts)) * parts - prod(local)
        if missing:
            node = self._emit(aten.reshape.default, node, [-1])
            node = self._emit(aten.constant_pad_nd.default, node, [0, missing])
        return self._emit(aten.reshape.default, node, [parts, -1])

    def unpadded(self, node: fx.Node, local: list[int]) -> fx.Node:
        """Cut the padding off ``node``, and give the remaining elements the shape ``local``."""
        node = self._emit(aten.view.default, node, [-1])
        return self._emit(aten.view.default, self._emit(aten.slice.Tensor, node, 0, 0, prod(local)), local)

    def _slice(
        self, node: fx.Node, axis: str, target: Shard | Flat, now: Placements, shape: tuple[int, ...]
    ) -> fx.Node:
        group = self._groups[axis]
        if isinstance(target, Flat):
            before = self._local(shape, unflattened(now))
            node = self._emit(aten.select.int, self._in_rows(node, before, group.size), 0, group.index)
            return self._emit(aten.view.default, node, list(flat_shape(tuple(before), group.size)))
        cut, dim = self._cut(axis, target, now, shape), target.dim
        begin, end = cut.span(group.index)
        if cut.blocks == 1:
            return self._emit(aten.slice.Tensor, node, dim, begin, end)
        local = self._local(shape, now)
        node = self._emit(aten.reshape.default, node, [*local[:dim], cut.blocks, cut.block, *local[dim + 1 :]])
        node = self._emit(aten.slice.Tensor, node, dim + 1, begin, end)
        return self._emit(
            aten.reshape.default, node, [*local[:dim], cut.blocks * (end - begin), *local[dim + 1 :]]
        )  # fmt: skip


def local_part(value: torch.Tensor, placements: Placements, groups: dict[str, AxisGroup]) -> torch.Tensor:
    """This rank's part of a whole tensor (a view, if it is a single block without padding)."""
    shape = tuple(value.shape)
    now: Placements = {}

    def emit(target: Any, *args: Any) -> Any:
        return target(*args)

    resharder = Resharder(emit, groups)
    cuts: list[tuple[str, Placement | None]] = [(axis, placements.get(axis)) for axis in groups]
    cuts.sort(key=lambda cut: isinstance(cut[1], Flat))  # Flat is last: it divides what the shards leave
    for axis, placement in cuts:
        if isinstance(placement, Shard | Flat):
            value = resharder._slice(value, axis, placement, now, shape)  # type: ignore[arg-type,assignment]
            now[axis] = placement
    return value
