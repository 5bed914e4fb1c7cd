"""Where the parts of a tensor live: Shard, Flat, Replicate or Partial on each mesh axis."""

from collections.abc import Mapping
from math import prod
from typing import TypeGuard

import msgspec

from meshwright.ir.layout import TIME
from meshwright.ir.rule import Dim, Rule

LINEAR = "^"


class Shard(msgspec.Struct, frozen=True, tag="shard"):
    """The dim is ``outer`` equal blocks, each cut over the axis as ``torch.chunk`` cuts."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}/{self.outer})"


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    """What the other axes leave of the tensor, in equal parts: rows of its first dim where the axis divides that, else
    its elements in order, padded with zeros to a multiple. A placement to store in, not to compute with: any tensor
    can be cut so, and parts of many can be gathered together. At most one axis of a tensor has it."""

    def __str__(self) -> str:
        return "flat"


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """Every rank of the axis holds a term; the tensor is their ``op`` (sum, max, min)."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Shard | Flat | Replicate | Partial
Placements = dict[str, Placement]
"""By mesh axis; an axis that is not named is Replicate."""

REPLICATE = Replicate()


def is_split(placement: Placement | None) -> TypeGuard[Shard | Flat]:
    """Whether every rank of the axis holds a part."""
    return isinstance(placement, Shard | Flat)


def flat_axis(placements: Placements) -> str:
    """The axis over which a tensor is Flat; empty where there is none."""
    return next((axis for axis, placement in placements.items() if isinstance(placement, Flat)), "")


def unflattened(placements: Placements) -> Placements:
    """The placements without Flat."""
    return {axis: placement for axis, placement in placements.items() if not isinstance(placement, Flat)}


def is_linear(choice: str) -> bool:
    """Whether a strategy's choice for an axis is a Partial passed through (``"^"``, ``"^^"``)."""
    return choice.startswith(LINEAR)


def factor_placement(dims: tuple[Dim, ...], sizes: dict[str, int], *names: str) -> Shard | None:
    """The Shard that splitting a factor gives a tensor of these dims, or None where it has no such factor; of several
    names the first that is there."""
    for name in names:
        for index, dim in enumerate(dims):
            outer = 1
            for factor in dim:
                if factor.name == name:
                    return Shard(index, outer)
                outer *= factor.size if factor.size is not None else sizes[factor.name]
    return None


def input_placements(rule: Rule, strategy: dict[str, str], operand: int) -> Placements:
    """What the operator needs of its input number ``operand`` under ``strategy`` (axis -> factor or carets)."""
    pattern = rule.parsed.inputs[operand]
    result: Placements = {}
    for axis, choice in strategy.items():
        if is_linear(choice):
            if pattern.linear == len(choice):
                result[axis] = Partial("sum")
        else:
            shard = factor_placement(pattern.dims, rule.sizes, *rule.members(choice))
            if shard is not None:
                result[axis] = shard
    return result


def output_placements(rule: Rule, strategy: dict[str, str], output: int) -> Placements:
    """What the operator gives as output number ``output`` under ``strategy`` (axis -> factor or carets)."""
    pattern = rule.parsed.outputs[output]
    result: Placements = {}
    for axis, choice in strategy.items():
        if is_linear(choice):
            result[axis] = Partial("sum")
        else:
            shard = factor_placement(pattern.dims, rule.sizes, *rule.members(choice))
            if shard is not None:
                result[axis] = shard
            elif rule.sums(choice):
                result[axis] = Partial(rule.reduction)
            elif axis == TIME and rule.decompositions[choice][0].startswith("sum"):
                # Micro-batches exchange nothing: what the decomposition would sum over them stays a term of the sum.
                result[axis] = Partial("sum")
    return result


def local_shape(shape: tuple[int, ...], placements: Placements, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one rank's part (all splits even, but that of Flat, which is padded)."""
    result = list(shape)
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            result[placement.dim] //= axis_sizes[axis]
    axis = flat_axis(placements)
    return flat_shape(tuple(result), axis_sizes[axis]) if axis else tuple(result)


def flat_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The shape of one of ``parts`` Flat parts, of as many dims as the whole: rows, or a column of elements."""
    if not shape:
        return shape
    if shape[0] % parts == 0:
        return (shape[0] // parts, *shape[1:])
    return (-(-prod(shape) // parts), *(1 for _ in shape[1:]))


def describe(placements: Placements) -> str:
    """``dp:S(0) tp:R`` for people."""
    shown = [f"{axis}:{placement}" for axis, placement in placements.items() if placement != REPLICATE]
    return " ".join(shown) or "R"
