"""From one placement to another: which collective, on which part, started early and finished at first use."""

from collections.abc import Callable, Generator
from math import prod
from typing import Any

import torch
from torch import fx

from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import (
    Flat,
    Partial,
    Placement,
    Placements,
    Shard,
    flat_shape,
    local_shape,
    unflattened,
)
from meshwright.ir.resharding import moves
from meshwright.ops import collectives

aten = torch.ops.aten
Emit = Callable[..., fx.Node]
Steps = Generator[None, None, fx.Node]
"""Emits what can be started now, yields, and emits the rest when resumed; returns the resharded node."""


class Resharder:
    """Emits resharding into one per-rank graph."""

    def __init__(self, emit: Emit, groups: dict[str, AxisGroup]) -> None:
        self._emit = emit
        self._groups = groups
        self._sizes = {axis: group.size for axis, group in groups.items()}

    def steps(
        self, node: fx.Node, shape: tuple[int, ...], have: Placements, want: Placements, owned: bool, label: str = ""
    ) -> Steps:
        """Reshard ``node`` (global ``shape``) from ``have`` to ``want``.

        The moves and their order are those of ``ir.resharding.moves``. ``owned`` says that nobody else reads the node's
        memory, so that it may be reduced in place; ``label`` names the tensor in errors.
        """
        for move in moves(have, want, self._sizes):
            group, placement, before = self._groups[move.axis], move.placement, move.before
            if isinstance(placement, Partial):
                if not owned:
                    node = self._emit(aten.clone.default, node)
                node = self._emit(collectives.ALL_REDUCE, node, placement.op, group.name, group.algorithm, label=label)
                yield
                node = self._emit(collectives.WAIT, node)
            elif move.kind == "reduce_scatter":
                node = yield from self._reduce_scatter(node, move.axis, placement, move.after, shape, label)
            elif move.kind == "all_gather":
                node = yield from self._all_gather(node, move.axis, placement, before, shape, label)
            else:
                node = self._slice(node, move.axis, placement, before, shape)
            owned = True
        return node

    def _blocks(self, axis: str, shard: Shard, now: Placements) -> int:
        """How many equal blocks this rank's dim holds around the cut: ``outer`` over what other axes took of it."""
        blocks = shard.outer
        for other, placement in now.items():
            if (
                other != axis
                and isinstance(placement, Shard)
                and placement.dim == shard.dim
                and placement.outer < shard.outer
            ):
                blocks //= self._groups[other].size
        return blocks

    def _local(self, shape: tuple[int, ...], now: Placements) -> list[int]:
        return list(local_shape(shape, now, self._sizes))

    def _all_gather(
        self, node: fx.Node, axis: str, shard: Shard | Flat, now: Placements, shape: tuple[int, ...], label: str
    ) -> Steps:
        group = self._groups[axis]
        local = self._local(shape, now)
        rest = {other: placement for other, placement in now.items() if other != axis}
        node = self._emit(collectives.ALL_GATHER, node, group.name, group.size, group.algorithm, label=label)
        yield
        node = self._emit(collectives.WAIT, node)
        if isinstance(shard, Flat):
            return self.unpadded(node, self._local(shape, rest))
        blocks = self._blocks(axis, shard, now)
        lead = 1
        for size in local[: shard.dim]:
            lead *= size
        whole = self._local(shape, rest)
        if lead * blocks > 1:
            # [parts, lead, blocks, block, tail] -> [lead, blocks, parts, block, tail]
            node = self._emit(aten.view.default, node, [group.size, lead * blocks, -1])
            node = self._emit(aten.transpose.int, node, 0, 1)
        return self._emit(aten.reshape.default, node, whole)

    def _reduce_scatter(
        self, node: fx.Node, axis: str, target: Shard | Flat, after: Placements, shape: tuple[int, ...], label: str
    ) -> Steps:
        group = self._groups[axis]
        rest = {other: placement for other, placement in after.items() if other != axis}
        local = self._local(shape, rest)
        if isinstance(target, Flat):
            node = self._in_rows(node, local, group.size)
        else:
            blocks = self._blocks(axis, target, rest)
            lead = prod(local[: target.dim])
            node = self._emit(aten.reshape.default, node, [lead * blocks, group.size, -1])
            node = self._emit(aten.transpose.int, node, 0, 1)
        node = self._emit(collectives.REDUCE_SCATTER, node, "sum", group.name, group.size, group.algorithm, label=label)
        yield
        node = self._emit(collectives.WAIT, node)
        return self._emit(aten.reshape.default, node, self._local(shape, after))

    def _in_rows(self, node: fx.Node, local: list[int], parts: int) -> fx.Node:
        """A tensor of shape ``local`` as [parts, elements], padded with zeros where it must be."""
        missing = prod(flat_shape(tuple(local), parts)) * parts - prod(local)
        if missing:
            node = self._emit(aten.reshape.default, node, [-1])
            node = self._emit(aten.constant_pad_nd.default, node, [0, missing])
        return self._emit(aten.reshape.default, node, [parts, -1])

    def unpadded(self, node: fx.Node, local: list[int]) -> fx.Node:
        """The tensor of shape ``local`` whose elements, and then padding, ``node`` holds."""
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
        blocks = self._blocks(axis, target, now)
        local = self._local(shape, now)
        dim, size = target.dim, local[target.dim]
        part = size // blocks // group.size
        if blocks == 1:
            return self._emit(aten.slice.Tensor, node, dim, group.index * part, (group.index + 1) * part)
        split = [*local[:dim], blocks, size // blocks, *local[dim + 1 :]]
        node = self._emit(aten.reshape.default, node, split)
        node = self._emit(aten.slice.Tensor, node, dim + 1, group.index * part, (group.index + 1) * part)
        return self._emit(aten.reshape.default, node, [*local[:dim], size // group.size, *local[dim + 1 :]])


def local_part(value: torch.Tensor, placements: Placements, groups: dict[str, AxisGroup]) -> torch.Tensor:
    """This rank's part of a whole tensor (a view where one block is cut out, and nothing is padded)."""
    shape = tuple(value.shape)
    now: Placements = {}

    def emit(target: Any, *args: Any) -> Any:
        return target(*args)

    resharder = Resharder(emit, groups)
    cuts: list[tuple[str, Placement | None]] = [(axis, placements.get(axis)) for axis in groups]
    cuts.sort(key=lambda cut: isinstance(cut[1], Flat))  # last
    for axis, placement in cuts:
        if isinstance(placement, Shard | Flat):
            value = resharder._slice(value, axis, placement, now, shape)  # type: ignore[arg-type,assignment]
            now[axis] = placement
    return value
