"""Placements: how a tensor lies over the ranks of each mesh axis: Shard, Flat, Replicate or Partial."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeGuard

import msgspec

from meshwright.ir.layout import TIME
from meshwright.ir.mesh import members
from meshwright.ir.rule import ONE_AXIS, RING, Dim, Factor, PatternOperand, Rule

LINEAR = "^"
"""The caret. If a strategy's choice for an axis consists of carets, the operator reads partial sums and makes partial
sums, without a reduction. The choice has as many carets as the rule's pattern has before the Partial operands."""


class Shard(msgspec.Struct, frozen=True, tag="shard"):
    """Every rank of the axis holds a part of dim ``dim``.

    The dim consists of ``outer`` equal blocks. The axis cuts each block in whole units of ``unit`` indices. Parts
    differ by at most one unit: of n units over k ranks, the first n mod k ranks get one unit more. ``unit`` is 1 if all
    parts are equal.

        S(0) of 7 over 2                  0 1 2 3 | 4 5 6
        S(0 by 2) of 6 over 2             0 1 2 3 | 4 5            three heads of two, flattened
        S(0/2 by 2) of 12 over 2          0 1 2 3  6 7 8 9 | 4 5  10 11
    """

    dim: int
    outer: int = 1
    unit: int = 1

    def __str__(self) -> str:
        blocks = f"/{self.outer}" if self.outer > 1 else ""
        return f"S({self.dim}{blocks} by {self.unit})" if self.unit > 1 else f"S({self.dim}{blocks})"


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    """Every rank of the axis holds an equal part of the tensor.

    If other axes split the tensor too, the axis divides the part that remains after their splits. The parts are rows of
    the first dim if the size of the axis divides this dim. Else they are elements in order, padded with zeros. Flat is
    for storage, not for computing. It can cut any tensor, and one collective can gather the parts of many tensors. A
    tensor is Flat over at most one axis."""

    def __str__(self) -> str:
        return "flat"


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """Every rank of the axis holds a term. The tensor is the ``op`` (sum, max or min) of all terms."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Shard | Flat | Replicate | Partial
Placements = dict[str, Placement]
"""Maps each mesh axis to a placement. An axis without an entry is Replicate."""

REPLICATE = Replicate()


def is_split(placement: Placement | None) -> TypeGuard[Shard | Flat]:
    """Whether the placement is Shard or Flat: every rank of the axis holds a part of the tensor."""
    return isinstance(placement, Shard | Flat)


def flat_axis(placements: Placements) -> str:
    """The axis over which a tensor is Flat; empty if there is no such axis."""
    return next((axis for axis, placement in placements.items() if isinstance(placement, Flat)), "")


def unflattened(placements: Placements) -> Placements:
    """The placements on all axes that are not Flat."""
    return {axis: placement for axis, placement in placements.items() if not isinstance(placement, Flat)}


def is_linear(choice: str) -> bool:
    """Whether a strategy's choice for an axis (``"^"``, ``"^^"``) keeps inputs and outputs Partial."""
    return choice.startswith(LINEAR)


def factor_placement(dims: tuple[Dim, ...], sizes: dict[str, int], *names: str, parts: int = 1) -> Shard | None:
    """The Shard that a tensor with these dims has if all axes together split a factor into ``parts`` parts.

    The factor is the first of ``names`` that the dims contain. If there is no such name, the result is None."""
    for name in names:
        for index, dim in enumerate(dims):
            outer = 1
            for position, factor in enumerate(dim):
                if factor.name == name:
                    if sizes[name] % parts == 0:
                        return Shard(index, outer)
                    return Shard(index, outer, prod(_size(inner, sizes) for inner in dim[position + 1 :]))
                outer *= _size(factor, sizes)
    return None


def _size(factor: Factor, sizes: dict[str, int]) -> int:
    return factor.size if factor.size is not None else sizes[factor.name]


def input_placements(rule: Rule, strategy: Mapping[str, str], operand: int, sizes: Mapping[str, int]) -> Placements:
    """The placements that an operator needs for its input number ``operand`` under ``strategy``.

    ``strategy`` maps an axis to a factor or to carets. ``sizes`` maps an axis to its size."""
    pattern = rule.parsed.inputs[operand]
    result: Placements = {}
    for axis, choice in strategy.items():
        if is_linear(choice):
            if pattern.linear == len(choice):
                result[axis] = Partial("sum")
        else:
            shard = _shard(rule, pattern, strategy, choice, sizes)
            if shard is not None:
                result[axis] = shard
    return result


def output_placements(rule: Rule, strategy: Mapping[str, str], output: int, sizes: Mapping[str, int]) -> Placements:
    """The placements that an operator gives to its output number ``output`` under ``strategy``.

    ``strategy`` maps an axis to a factor or to carets. ``sizes`` maps an axis to its size."""
    pattern = rule.parsed.outputs[output]
    result: Placements = {}
    for axis, choice in strategy.items():
        if is_linear(choice):
            result[axis] = Partial("sum")
        else:
            shard = _shard(rule, pattern, strategy, choice, sizes)
            if shard is not None:
                result[axis] = shard
            elif rule.sums(choice):
                if not rule.owns(choice, output):
                    result[axis] = Partial(rule.reduction)
            elif axis == TIME and rule.decomposition(choice) == "sum":
                # Micro-batches exchange nothing: each has a term of the sum that the decomposition would compute.
                result[axis] = Partial("sum")
    return result


def _shard(
    rule: Rule, operand: PatternOperand, strategy: Mapping[str, str], choice: str, sizes: Mapping[str, int]
) -> Shard | None:
    for letter in rule.members(choice):
        parts = parts_of(rule, strategy, letter, sizes)
        shard = factor_placement(operand.dims, rule.sizes, letter, parts=parts)
        if shard is not None:
            return shard
    return None


def parts_of(rule: Rule, strategy: Mapping[str, str], letter: str, sizes: Mapping[str, int]) -> int:
    """The number of parts into which all axes of a strategy together cut the letter (factor) ``letter``."""
    parts, joint = 1, rule.joint
    for axis, choice in strategy.items():
        if choice == letter or (joint and letter in joint.get(choice, ())):
            parts *= sizes.get(axis, 1)
    return parts


def misfit(rule: Rule, strategy: Mapping[str, str], sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The first factor that cannot be cut as ``strategy`` asks, and the number of its parts; None if all can be cut.

    Parts may differ by one unit if the rule allows it. But no part may be empty, and micro-batches must be equal. A
    factor whose decomposition is in ``ONE_AXIS`` (ring, all-to-all) can be cut over one axis only. In a ring, the last
    letter of a joint factor goes from rank to rank, and cannot be cut over another axis."""
    for choice in strategy.values():
        if choice in rule.decompositions and rule.decomposition(choice) in ONE_AXIS:
            axes = [axis for axis, other in strategy.items() if other == choice]
            moved = rule.members(choice)[-1] if rule.decomposition(choice) == RING else ""
            if len(axes) > 1 or (moved and moved in strategy.values()):
                return choice, prod(sizes[axis] for axis in axes)
        for letter in rule.members(choice) if choice and not is_linear(choice) else ():
            parts, size = parts_of(rule, strategy, letter, sizes), rule.sizes[letter]
            if size % parts == 0:
                continue
            time = strategy.get(TIME, "")
            if size < parts or choice in rule.equal or letter in rule.members(time):
                return letter, parts
    return None


def bounds(units: int, parts: Sequence[int]) -> tuple[int, ...]:
    """The first unit of each part, followed by the end of the last part, when a dim of ``units`` units is cut.

    The dim is cut over ``parts[0]`` ranks, then each part is cut over ``parts[1]`` ranks, and so on. If a cut is
    uneven, its first parts are one unit larger.

    >>> bounds(7, (2, 2))
    (0, 2, 4, 6, 7)
    """
    sizes = [units]
    for count in parts:
        sizes = [size // count + (index < size % count) for size in sizes for index in range(count)]
    return (0, *accumulate(sizes))


class AxisCut(NamedTuple):
    """How one axis cuts a dim, or the part of the dim that remains after the cuts of other axes.

    This dim or part consists of ``blocks`` blocks. Each block is cut into parts, one for each index on the axis.
    Part ``i`` has ``units[i]`` units. A unit is ``unit`` indices of the dim. Equal parts are one unit each."""

    blocks: int
    units: tuple[int, ...]
    unit: int

    @property
    def even(self) -> bool:
        """Whether all parts are equal."""
        return self.units[0] == self.units[-1]

    @property
    def block(self) -> int:
        """The number of indices in a block."""
        return sum(self.units) * self.unit

    def length(self, index: int) -> int:
        """The number of indices that part ``index`` has in each block."""
        return self.units[index] * self.unit

    def span(self, index: int) -> tuple[int, int]:
        """The first index of part ``index`` within a block, and the index after its last index."""
        begin = sum(self.units[:index])
        return begin * self.unit, (begin + self.units[index]) * self.unit


def axis_cut(
    shape: Sequence[int], axis: str, others: Placements, shard: Shard, axis_sizes: Mapping[str, int],
    at: Mapping[str, int],
) -> AxisCut:  # fmt: skip
    """How ``axis`` (or joined axes) cuts a tensor of global shape ``shape`` on the rank at coordinates ``at``.

    ``others`` has the placements on the other axes. The function assumes that these axes cut before ``axis``."""
    blocks, units = shard.outer, shape[shard.dim] // shard.outer // shard.unit
    beside = {name: placement for name, placement in others.items() if name not in members(axis)}
    local = _local_length(shape, shard.dim, beside, axis_sizes, at)
    for cut, before, left in _cuts(shape, shard.dim, beside, axis_sizes, at):
        if cut.outer == shard.outer:
            units = left
        elif cut.outer < shard.outer:
            blocks = blocks * left // before if before else 0
    parts = [axis_sizes[member] for member in members(axis)]
    size = prod(parts)
    if units % size == 0:
        return AxisCut(blocks, (1,) * size, local // blocks // size if blocks else 0)
    unit = local // blocks // units if blocks and units else 0
    return AxisCut(blocks, tuple(end - begin for begin, end in pairwise(bounds(units, parts))), unit)


def _cuts(
    shape: Sequence[int], dim: int, placements: Placements, axis_sizes: Mapping[str, int], at: Mapping[str, int]
) -> Iterator[tuple[Shard, int, int]]:
    """The Shards of a dim, outer axes first, each with this rank's units of the factor before and after the cut."""
    units: dict[int, int] = {}
    for axis, parts in axis_sizes.items():
        shard = placements.get(axis)
        if isinstance(shard, Shard) and shard.dim == dim:
            before = units.get(shard.outer, shape[dim] // shard.outer // shard.unit)
            units[shard.outer] = before // parts + (at.get(axis, 0) < before % parts)
            yield shard, before, units[shard.outer]


def local_shape(
    shape: tuple[int, ...],
    placements: Placements,
    axis_sizes: Mapping[str, int],
    at: Mapping[str, int] | None = None,
) -> tuple[int, ...]:
    """The shape of the part of a tensor on the rank at coordinates ``at``.

    By default, this is the first rank, whose part is the largest. Flat parts are padded to equal size."""
    result = list(shape)
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            dim, parts = placement.dim, axis_sizes[axis]
            if result[dim] != shape[dim] or placement.unit > 1 or shape[dim] % (placement.outer * parts):
                result = [_local_length(shape, dim, placements, axis_sizes, at or {}) for dim in range(len(shape))]
                break
            result[dim] //= parts
    axis = flat_axis(placements)
    return flat_shape(tuple(result), axis_sizes[axis]) if axis else tuple(result)


def _local_length(
    shape: Sequence[int], dim: int, placements: Placements, axis_sizes: Mapping[str, int], at: Mapping[str, int]
) -> int:
    length = shape[dim]
    for _, before, left in _cuts(shape, dim, placements, axis_sizes, at):
        length = length * left // before if before else 0
    return length


def nested(first: Shard, parts: int, second: Shard, length: int) -> bool:
    """Whether two Shards of a dim (of ``length`` indices) can be combined.

    They can if they cut the same factor in equal units, or if they cut different factors and the parts of ``first``
    contain only whole blocks of ``second``."""
    if first.outer == second.outer:
        return first.unit == second.unit
    block = length // first.outer
    part = block // parts if block % (first.unit * parts) == 0 else first.unit
    return part % (length // second.outer) == 0


def flat_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The shape of one of ``parts`` Flat parts of a tensor: some of its rows, or a column of its elements."""
    if not shape:
        return shape
    if shape[0] % parts == 0:
        return (shape[0] // parts, *shape[1:])
    return (-(-prod(shape) // parts), *(1 for _ in shape[1:]))


def describe(placements: Placements) -> str:
    """The placements as text, without Replicate: ``dp:S(0) tp:P(sum)``; ``R`` if every axis is Replicate."""
    shown = [f"{axis}:{placement}" for axis, placement in placements.items() if placement != REPLICATE]
    return " ".join(shown) or "R"
