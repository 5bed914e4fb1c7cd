"""Operators grouped into layers, beside brute force."""

from __future__ import annotations

import itertools
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.inter_op.layers import TOLERANCE, group_layers
from tests.tries import tries


def sizes_of(work: list[float], firsts: tuple[int, ...]) -> list[float]:
    borders = [0, *firsts, len(work)]
    return [sum(work[start:end]) for start, end in itertools.pairwise(borders)]


def brute_force(work: list[float], crossing: list[float], count: int, bound: float) -> tuple[float, float, float]:
    """The best (largest border, sum of borders, squared work) of all groupings within the bound."""
    scores = [
        (max(crossing[first] for first in firsts), sum(crossing[first] for first in firsts), sum(s**2 for s in sizes))
        for firsts in itertools.combinations(range(1, len(work)), count - 1)
        if max(sizes := sizes_of(work, firsts)) <= bound and all(crossing[first] < inf for first in firsts)
    ]
    return min(scores, default=(inf, inf, inf))


OPERATORS = st.lists(
    st.tuples(st.integers(0, 9).map(float), st.one_of(st.integers(1, 4).map(float), st.just(inf))),
    min_size=1,
    max_size=9,
)


@given(OPERATORS, st.integers(1, 5))
@tries(60)
def test_equal_to_brute_force(operators: list[tuple[float, float]], count: int) -> None:
    work, crossing = [first for first, _ in operators], [second for _, second in operators]
    possible = sum(bytes_ < inf for bytes_ in crossing[1:])
    firsts = group_layers(work, crossing, count)
    count = min(count, possible + 1)
    assert len(firsts) == count - 1
    assert list(firsts) == sorted(set(firsts))
    if count == 1:
        return
    sizes = sizes_of(work, firsts)
    bound = max((1 + TOLERANCE) * sum(work) / count, max(sizes))
    borders = [crossing[first] for first in firsts]
    score = max(borders), sum(borders), sum(size**2 for size in sizes)
    if max(sizes) <= (1 + TOLERANCE) * sum(work) / count:
        assert score == pytest.approx(brute_force(work, crossing, count, bound))
    else:  # an inseparable piece is too large: nothing keeps the bound
        assert brute_force(work, crossing, count, (1 + TOLERANCE) * sum(work) / count) == (inf, inf, inf)


def test_borders_are_between_blocks() -> None:
    """Blocks of an attention and an MLP: fewer bytes cross between blocks than inside."""
    work, crossing = [1.0, 2.0] * 8, [1.0, 3.0] * 8
    assert group_layers(work, crossing, 8) == (2, 4, 6, 8, 10, 12, 14)
    assert group_layers(work, crossing, 4) == (4, 8, 12)


def test_skips_push_the_borders_outwards() -> None:
    """A U-Net: the skips of the outer levels are live in the middle, so borders are as far out as the work allows."""
    crossing = [0.0, 2.0, 4.0, 6.0, 8.0, 6.0, 4.0, 2.0]
    assert group_layers([1.0] * 8, crossing, 3, tolerance=1.25) == (1, 7)
    assert group_layers([1.0] * 8, crossing, 3, tolerance=1.0) == (1, 6)
