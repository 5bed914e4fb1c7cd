"""Shapes of several tensors as one list of numbers, as operators of torch.library take them."""

from collections.abc import Iterable, Sequence


def flat_shapes(shapes: Iterable[Sequence[int]]) -> list[int]:
    """Shapes as one list: of each, the number of dims and the dims."""
    return [number for shape in shapes for number in (len(shape), *shape)]


def shapes_of(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The inverse of ``flat_shapes``."""
    shapes, at = [], 0
    while at < len(numbers):
        shapes.append(tuple(numbers[at + 1 : at + 1 + numbers[at]]))
        at += 1 + numbers[at]
    return shapes
