"""Texts of patterns: letters for the dims of a tensor, and the text of an operand."""

from collections.abc import Sequence


def letters(count: int, prefix: str = "_", fixed: tuple[int, ...] = ()) -> list[str]:
    """``count`` neutral letters (``_0 _1``); those at a position in ``fixed`` are marked ``!``. A neutral letter takes
    the name of the class that it joins."""
    return [f"{'!' if index in fixed else ''}{prefix}{index}" for index in range(count)]


def named(shape: Sequence[int]) -> list[str]:
    """A neutral letter for each dim of a shape, ``1`` where the size is 1."""
    return [name if size != 1 else "1" for name, size in zip(letters(len(shape)), shape, strict=True)]


def aligned(names: Sequence[str], whole: Sequence[int], shape: Sequence[int]) -> list[str]:
    """The letters of a tensor that is broadcast to the shape ``whole``, whose dims have the letters ``names``. A
    broadcast dim is ``1``."""
    offset = len(whole) - len(shape)
    return [names[offset + dim] if size == whole[offset + dim] else "1" for dim, size in enumerate(shape)]


def operand(names: Sequence[str]) -> str:
    """The text of an operand in a pattern, given the text of each dim."""
    return " ".join(names) or "."


def normalize_dim(dim: int, rank: int) -> int:
    """The index of a dim counted from the front; a negative index counts from the back."""
    return dim + rank if dim < 0 else dim
