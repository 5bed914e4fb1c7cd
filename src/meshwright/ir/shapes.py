"""Shapes of several tensors as one list of numbers, because operators of torch.library need it."""

from collections.abc import Iterable, Sequence


def flat_shapes(shapes: Iterable[Sequence[int]]) -> list[int]:
    """The shapes as one list: for each shape, the number of dims, then the dims."""
    return [number for shape in shapes for number in (len(shape), *shape)]


def shapes_of(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The inverse of ``flat_shapes``."""
    shapes, at = [], 0
    while at < len(numbers):
        shapes.append(tuple(numbers[at + 1 : at + 1 + numbers[at]]))
        at += 1 + numbers[at]
    return shapes
