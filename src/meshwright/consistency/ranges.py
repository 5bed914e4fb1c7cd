"""Ranges of the parameters: flat tensors, concatenated and cut into parts of equal length, one for each server."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from meshwright.errors import PlanError

Named = Sequence[Sequence[tuple[str, int]]]
"""The parameters of each flat tensor, in order: their names and numbers of elements."""


class ElementSpan(NamedTuple):
    """The elements from ``begin`` to ``end`` of a flat tensor."""

    flat: int
    begin: int
    end: int


def key_ranges(sizes: Sequence[int], servers: int) -> list[list[ElementSpan]]:
    """Cut flat tensors of these sizes into ``servers`` ranges. The lengths of two ranges differ by at most 1. A range
    may have parts of several tensors. It has no part if there are more servers than elements."""
    total = sum(sizes)
    bounds = [total * index // servers for index in range(servers + 1)]
    ranges: list[list[ElementSpan]] = []
    for low, high in pairwise(bounds):
        spans, before = [], 0
        for flat, size in enumerate(sizes):
            begin, end = max(low - before, 0), min(high - before, size)
            if begin < end:
                spans.append(ElementSpan(flat, begin, end))
            before += size
        ranges.append(spans)
    return ranges


def check_servers(servers: int, num_elements: int) -> None:
    """Check that each server gets a part of the parameters.

    Raises:
        PlanError: there are more servers than elements of parameters.
    """
    if servers > num_elements:
        problem = f"{servers} servers share {num_elements} elements of parameters"
        raise PlanError(problem, where="consistency", remedy=f"give at most {num_elements} servers")


def parts(flats: Sequence[Tensor], spans: Sequence[ElementSpan]) -> list[Tensor]:
    """The elements of a range, as views of the flat tensors."""
    return [flats[flat][begin:end] for flat, begin, end in spans]


def pieces(named: Named, spans: Sequence[ElementSpan], tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The parameters in a range: the name of each, and its part in the range, as a view of ``tensors``, the elements of
    the range."""
    for (flat, begin, end), tensor in zip(spans, tensors, strict=True):
        first = 0
        for name, size in named[flat]:
            low, high = max(first, begin), min(first + size, end)
            if low < high:
                yield name, tensor[low - begin : high - begin]
            first += size
