"""Provides an operator's rule with the shapes and splits on one rank, and emits the collectives that the rule
requests."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from meshwright.errors import PlanError, RuleError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.halo import Rows
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import bounds, input_placements, is_linear, local_shape, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.rule import Rule
from meshwright.lower.halo import Exchanged, HaloEmitter
from meshwright.ops import collectives
from meshwright.ops.base import Target
from meshwright.ops.library import mix


@dataclass
class Emitter:
    """State that all operators of one rank's graph share. ``emit`` adds a call. ``random_key`` is the node of the
    micro-batch's random key. ``drawn`` maps the name of a random draw to the factor that each axis splits.
    ``exchanged`` holds the halo exchanges so far."""

    graph: Graph
    groups: dict[str, AxisGroup]
    emit: Callable[..., fx.Node]
    random_key: fx.Node
    drawn: dict[str, dict[str, str]] = field(default_factory=dict)
    exchanged: Exchanged = field(default_factory=Exchanged)


class LocalCall:
    """One operator on this rank; implements :class:`meshwright.ops.base.Local`, which documents the methods."""

    def __init__(
        self,
        shared: Emitter,
        operator: Operator,
        strategy: Strategy,
        call: tuple[Target, tuple[Any, ...], dict[str, Any]],
        interior: bool = False,
        algorithm: str = "",
    ) -> None:
        """``interior``: the operator computes its interior rows while halos travel. ``algorithm``: the text of the
        operator's algorithm."""
        self.target, self.args, self.kwargs = call
        self.name, self.call = operator.name, shared.emit
        self._shared, self._graph, self._groups = shared, shared.graph, shared.groups
        self._operator, self._letters, self._strategy = operator, operator.letters, strategy
        self._sizes, self._at = sizes_of(shared.groups)
        self._exchanged, self._interior, self.algorithm = shared.exchanged, interior, algorithm

    @property
    def _rule(self) -> Rule:
        assert self._operator.rule is not None
        return self._operator.rule

    def shape(self, output: int = 0) -> list[int]:
        """The shape of an output on this rank, as the strategy places it."""
        name = self._operator.outputs[output]
        placements = output_placements(self._rule, self._strategy, output, self._sizes)
        return list(local_shape(self._graph.tensors[name].shape, placements, self._sizes, self._at))

    def input_shape(self, position: int) -> list[int]:
        """The shape of a tensor input on this rank, as the strategy places it."""
        placements = input_placements(self._rule, self._strategy, position, self._sizes)
        tensor = self._graph.tensors[self._operator.inputs[position]]
        return list(local_shape(tensor.shape, placements, self._sizes, self._at))

    def dtype(self, output: int = 0) -> torch.dtype:
        """The dtype of an output, from the graph."""
        dtype: torch.dtype = getattr(torch, self._graph.tensors[self._operator.outputs[output]].dtype)
        return dtype

    def _axes(self, factor: str) -> list[str]:
        """The mesh axes that split a factor, outermost first: in order of the factor's letters, then in the mesh's
        order."""
        became = self._letters.get(factor, ())
        axes = [axis for axis in self._groups if axis != TIME]
        return [axis for letter in became for axis in axes if self._strategy.get(axis) == letter]

    def is_split(self, factor: str) -> bool:
        """Whether any mesh axis splits the factor."""
        return bool(self._axes(factor))

    def coordinate(self, factor: str) -> tuple[int, int]:
        """(this rank's index, number of parts) of a factor, counted over the axes that split it, the outermost
        first."""
        index, count = 0, 1
        for axis in self._axes(factor):
            group = self._groups[axis]
            index, count = index * group.size + group.index, count * group.size
        return index, count

    def size(self, factor: str) -> int:
        """The size of a factor over all ranks, in one micro-batch."""
        return prod(self._rule.sizes[letter] for letter in self._letters[factor]) // self.times(factor)

    def length(self, factor: str) -> int:
        """The size of a factor on this rank, from the bounds of its part on each axis."""
        total = 1
        for letter in self._letters[factor]:
            total *= self._part(letter, self._rule.sizes[letter])[1]
        return total

    def bounds(self, factor: str, of: str = "") -> tuple[int, ...]:
        """The first index of each part of a factor, in order of the parts, then the end of the last part."""
        name = of or factor
        outermost, total = self._letters[name][0], self.size(name)
        units = self._rule.sizes[outermost]
        units //= self.times(name) if self._strategy.get(TIME) == outermost else 1
        edges = bounds(units, [self._sizes[axis] for axis in self._axes(factor)])
        unit = total // units if units else 0
        return tuple(edge * unit for edge in edges)

    def times(self, factor: str) -> int:
        """The number of micro-batches into which the factor is divided; 1 if it is not divided."""
        divided = self._strategy.get(TIME) in self._letters.get(factor, ())
        return self._groups[TIME].size if divided else 1

    def key(self, name: str = "") -> tuple[fx.Node, int]:
        """The micro-batch's random key, and a salt: a hash of the operator's name and the rank's coordinates in its
        splits."""
        self._require_random()
        coordinates = [
            self._groups[axis].index + 1
            for axis, choice in sorted(self._strategy.items())
            if not is_linear(choice) and axis != TIME  # the random key already depends on the micro-batch
        ]
        if name:
            split = {axis: factor for factor in self._letters for axis in self._axes(factor)}
            if (forward := self._shared.drawn.setdefault(name, split)) != split:
                raise PlanError(
                    f"it draws the numbers of its forward, which is split over {forward or 'nothing'}, "
                    f"but it is split over {split or 'nothing'}",
                    where=self.name,
                    remedy="split an operator that draws by parts and its gradient alike",
                )
        return self._shared.random_key, mix(zlib.crc32((name or self.name).encode()), *coordinates)

    def draw(
        self, name: str = "", factors: Sequence[str] = ()
    ) -> tuple[fx.Node, int, list[int], list[int], list[int], int, int]:
        """The last arguments of an operator that draws this rank's part of the first output, or of a tensor with these
        factors."""
        self._require_random()
        dims = [[(letter, self._rule.sizes[letter]) for letter in self._letters.get(factor, ())] for factor in factors]
        dims = dims or [
            [(factor.name, factor.size or self._rule.sizes[factor.name]) for factor in dim]
            for dim in self._rule.parsed.outputs[0].dims or ((),)
        ]
        letters = [letter for dim in dims for letter in dim]
        parts = [self._part(letter, size) for letter, size in letters]
        over_time = self._strategy.get(TIME) or TIME
        time = next((index for index, (letter, _) in enumerate(letters) if letter == over_time), -1)
        sizes, begins, lengths = [size for _, size in letters], [part[0] for part in parts], [part[1] for part in parts]
        salt = mix(zlib.crc32((name or self.name).encode()))
        return self._shared.random_key, salt, sizes, begins, lengths, max(1, len(dims[-1])), time

    def _part(self, letter: str, size: int) -> tuple[int, int]:
        """The first index of this rank's part of a letter, in the first micro-batch, and the part's length."""
        begin, length = 0, size
        for axis in (axis for axis in self._groups if letter and self._strategy.get(axis) == letter):
            edges = bounds(length, [self._sizes[axis]])
            begin, length = begin + edges[self._at[axis]], edges[self._at[axis] + 1] - edges[self._at[axis]]
        return begin, length

    def _require_random(self) -> None:
        """Raise a RuleError if the operator is in the prologue, which runs once a step: every micro-batch needs its own
        numbers."""
        if self._operator.prologue:
            raise RuleError(
                "its rule draws random numbers and does not say so",
                where=self.name,
                remedy="OperatorRule(random=True)",
            )

    def group(self, factor: str) -> tuple[str, int]:
        """The name and size of the group on the axis that splits the factor; exactly one axis must split it."""
        (axis,) = self._axes(factor)
        return self._groups[axis].name, self._groups[axis].size

    def outside(self, factor: str, other: str) -> bool:
        """Whether the axis of ``factor`` precedes the axis of ``other`` in the mesh."""
        order = list(self._groups)
        ((axis,), (other_axis,)) = self._axes(factor), self._axes(other)
        return order.index(axis) < order.index(other_axis)

    def all_reduce(self, node: fx.Node, factor: str, op: str = "sum") -> fx.Node:
        """Emit an all-reduce and its wait for each axis that splits the factor."""
        for axis in self._axes(factor):
            group = self._groups[axis]
            node = self.call(collectives.ALL_REDUCE, node, op, group.name, group.algorithm)
            node = self.call(collectives.WAIT, node)
        return node

    def reduce_scatter(self, node: fx.Node, factor: str) -> fx.Node:
        """Emit a reduce-scatter and its wait for the axis that splits the factor."""
        (axis,) = self._axes(factor)
        group = self._groups[axis]
        node = self.call(collectives.REDUCE_SCATTER, node, "sum", group.name, group.size, group.algorithm)
        return self.call(collectives.WAIT, node)

    def all_gather(self, node: fx.Node, factor: str) -> fx.Node:
        """Emit an all-gather and its wait for each axis that splits the factor, the innermost axis first."""
        for axis in reversed(self._axes(factor)):
            group = self._groups[axis]
            node = self.call(collectives.ALL_GATHER, node, group.name, group.size, group.algorithm)
            node = self.call(collectives.WAIT, node)
        return node

    def halo(
        self, value: fx.Node, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows], fill: float = 0.0
    ) -> fx.Node:
        """Emit the exchange of a halo; return the rows of this rank's range."""
        return self._halos(factor, dim, edges).extended(value, ranges, fill, self._exchanged)

    def interior_first(self, factor: str) -> bool:
        """Whether the plan computes interior rows first, and exactly one axis splits the factor."""
        return self._interior and len(self._axes(factor)) == 1

    def halo_begin(self, value: fx.Node, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]) -> Any:
        """Emit the start of a halo's exchange; return its state for ``halo_end``, or None if it cannot be started."""
        emitter = self._halos(factor, dim, edges)
        begun = emitter.begun(value, ranges, 0.0, self._exchanged)
        return (emitter, begun) if begun is not None else None

    def halo_end(self, begun: Any) -> tuple[fx.Node | None, fx.Node | None]:
        """Emit the wait for a halo's exchange; return the rows before and after this rank's part."""
        emitter, exchange = begun
        strips: tuple[fx.Node | None, fx.Node | None] = emitter.ended(exchange, self._exchanged)
        return strips

    def halo_return(
        self, strips: Sequence[fx.Node], factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]
    ) -> fx.Node:
        """Emit the start of sending ``strips``, terms for halo rows, to the rows' owners."""
        return self._halos(factor, dim, edges).returned(strips, ranges)

    def halo_sum(self, value: fx.Node, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]) -> fx.Node:
        """Emit the adjoint of ``halo``: the owner of a row adds up the terms of all ranks that have the row in their
        range."""
        return self._halos(factor, dim, edges).reduced(value, ranges)

    def _halos(self, factor: str, dim: int, edges: Sequence[int]) -> HaloEmitter:
        return HaloEmitter(self.call, [self._groups[axis] for axis in self._axes(factor)], dim, edges)
