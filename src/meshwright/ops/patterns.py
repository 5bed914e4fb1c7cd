"""Functions that write patterns: letters for the dims of a tensor, and the text of an operand."""

from collections.abc import Sequence


def letters(count: int, prefix: str = "_", fixed: tuple[int, ...] = ()) -> list[str]:
    """Return ``count`` neutral letters (``_0 _1``). Letters at a position in ``fixed`` have the mark ``!``. Capture
    renames a neutral letter after the factor class that it joins."""
    return [f"{'!' if index in fixed else ''}{prefix}{index}" for index in range(count)]


def named(shape: Sequence[int]) -> list[str]:
    """Return a neutral letter for each dim of a shape, but ``1`` for a dim of size 1."""
    return [name if size != 1 else "1" for name, size in zip(letters(len(shape)), shape, strict=True)]


def aligned(names: Sequence[str], whole: Sequence[int], shape: Sequence[int]) -> list[str]:
    """Return the letters of a tensor of shape ``shape`` that is broadcast to the shape ``whole``. ``names`` are the
    letters of ``whole``. A broadcast dim gets ``1``."""
    offset = len(whole) - len(shape)
    return [names[offset + dim] if size == whole[offset + dim] else "1" for dim, size in enumerate(shape)]


def operand(names: Sequence[str]) -> str:
    """Return the text of an operand in a pattern, given the text of each dim."""
    return " ".join(names) or "."


def normalize_dim(dim: int, rank: int) -> int:
    """Return the index of a dim, counted from the front. A negative ``dim`` counts from the back."""
    return dim + rank if dim < 0 else dim
