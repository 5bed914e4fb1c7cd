"""Workspace: divisions and shares equal trying everything, and the published test of µ-cuDNN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.planner.integer_program import GAP
from meshwright.planner.workspace import Division, KernelChoice, divided, pareto, share

MIB = 2**20
SIZES = [2**power for power in range(9)]
PUBLISHED = [
    *(KernelChoice("fast", size, (0.1 * size + 0.01) * 1e-3, size * MIB) for size in SIZES),
    *(KernelChoice("slow", size, (10 * size + 0.1) * 1e-3, size) for size in SIZES),
]
"""The table of µ-cuDNN's own test (test/dp.cpp): a fast kernel with b MiB, a slow kernel with b bytes."""


def all_divisions(choices: Sequence[KernelChoice], samples: int) -> Iterator[tuple[KernelChoice, ...]]:
    """Every way to fill ``samples`` with pieces; the order of pieces does not count."""
    if samples == 0:
        yield ()
    for number, choice in enumerate(choices):
        if choice.samples <= samples:
            for rest in all_divisions(choices[number:], samples - choice.samples):
                yield (choice, *rest)


def costs(pieces: Sequence[KernelChoice]) -> tuple[float, int]:
    return sum(piece.seconds for piece in pieces), max(piece.workspace_bytes for piece in pieces)


def undominated(pairs: set[tuple[float, int]]) -> list[tuple[float, int]]:
    return sorted(
        pair
        for pair in pairs
        if not any(other != pair and other[0] <= pair[0] and other[1] <= pair[1] for other in pairs)
    )


@st.composite
def tables(draw: st.DrawFn) -> list[KernelChoice]:
    """Some kernels, with whole seconds, so that sums are exact."""
    each = st.builds(
        KernelChoice, st.sampled_from(("gemm", "fft", "direct")), st.integers(1, 5), st.integers(0, 9).map(float),
        st.integers(0, 9),
    )  # fmt: skip
    return draw(st.lists(each, min_size=1, max_size=6))


def test_the_published_test_of_ucudnn_has_its_15_points() -> None:
    points = pareto(PUBLISHED, 256, 64 * MIB - 1)
    assert len(points) == 15
    first, last = points[0], points[-1]
    assert (round(first.seconds * 1e3, 9), first.workspace_bytes, len(first.pieces)) == (25.68, 32 * MIB, 8)
    assert (round(last.seconds * 1e3, 9), last.workspace_bytes, len(last.pieces)) == (2585.6, 1, 256)
    for point in points[:6]:  # the fast kernel in halves, quarters, ...
        assert point.seconds * 1e3 == pytest.approx(25.6 + 0.01 * len(point.pieces))
        assert point.workspace_bytes == 256 // len(point.pieces) * MIB
    for point in points[6:]:
        assert point.seconds * 1e3 == pytest.approx(2560 + 0.1 * len(point.pieces))
        assert point.workspace_bytes == 256 // len(point.pieces)


@given(tables(), st.integers(1, 12), st.integers(1, 10))
def test_divisions_equal_trying_everything(choices: list[KernelChoice], samples: int, limit: int) -> None:
    fitting = {costs(pieces) for pieces in all_divisions(choices, samples)}
    within = undominated({pair for pair in fitting if pair[1] <= limit})
    if not within:
        least = min((size for _, size in fitting), default=None)
        expected = "are not a sum of the sizes" if least is None else f"give at least {least:,} bytes"
        with pytest.raises(LayoutError, match=expected):
            divided(choices, samples, limit)
        with pytest.raises(LayoutError, match=expected):
            pareto(choices, samples, limit)
        return
    points = pareto(choices, samples, limit)
    assert [(point.seconds, point.workspace_bytes) for point in points] == within
    assert divided(choices, samples, limit) == points[0]
    for point in points:
        assert costs(point.pieces) == (point.seconds, point.workspace_bytes)
        assert sum(piece.samples for piece in point.pieces) == samples
        assert set(point.pieces) <= set(choices)
    whole = [choice.seconds for choice in choices if choice.samples == samples and choice.workspace_bytes <= limit]
    assert points[0].seconds <= min(whole, default=points[0].seconds)


@given(st.lists(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=4), max_size=5),
       st.integers(1, 120))  # fmt: skip
def test_a_budget_is_shared_as_trying_everything_shares_it(sets: list[list[tuple[int, int]]], total: int) -> None:
    named = {
        f"conv{number}": [
            Division((KernelChoice("gemm", 1, seconds / 7, size),), seconds / 7, size) for seconds, size in each
        ]
        for number, each in enumerate(sets)
    }
    fitting = [
        taken for taken in itertools.product(*named.values()) if sum(each.workspace_bytes for each in taken) <= total
    ]
    if not fitting:
        least = sum(min(each.workspace_bytes for each in divisions) for divisions in named.values())
        with pytest.raises(LayoutError, match=f"give at least {least} bytes"):
            share(named, total)
        return
    shared = share(named, total)
    assert list(shared) == list(named)
    assert all(shared[name] in divisions for name, divisions in named.items())
    assert sum(each.workspace_bytes for each in shared.values()) <= total
    best = min(sum(each.seconds for each in taken) for taken in fitting)
    assert sum(each.seconds for each in shared.values()) == pytest.approx(best, rel=GAP)


def test_a_budget_is_kept_to_the_byte() -> None:
    """The solver's own tolerance would let a gibibyte be exceeded by a kibibyte."""
    slow, fast = (
        Division((KernelChoice("gemm", 1, seconds, size),), seconds, size) for seconds, size in ((2.0, 0), (1.0, 2**29))
    )
    budget = {"conv1": [slow, fast], "conv2": [slow, fast]}
    assert share(budget, 2**30) == {"conv1": fast, "conv2": fast}
    shared = share(budget, 2**30 - 1)
    assert sorted(each.seconds for each in shared.values()) == [1.0, 2.0]


def test_a_budget_for_no_operators_is_shared_by_nobody() -> None:
    assert share({}, 1) == {}


def test_bad_input_is_refused() -> None:
    pair = [KernelChoice("gemm", 4, 1.0, 10), KernelChoice("fft", 6, 1.0, 20)]
    with pytest.raises(LayoutError, match="7 samples are not a sum of the sizes with a kernel: 4, 6"):
        divided(pair, 7, 100)
    with pytest.raises(LayoutError, match=r"10 samples within 15 bytes.*\n.*at least 20 bytes"):
        divided(pair, 10, 15)
    with pytest.raises(LayoutError, match="no kernels"):
        pareto([], 4, 100)
    for limit in (0, -1):
        with pytest.raises(LayoutError, match=f"a limit is {limit} bytes"):
            divided(pair, 4, limit)
        with pytest.raises(LayoutError, match=f"a limit is {limit} bytes"):
            share({}, limit)
    with pytest.raises(LayoutError, match="samples is 0"):
        divided(pair, 0, 100)
    with pytest.raises(LayoutError, match="workspace of conv1: it has no divisions"):
        share({"conv1": []}, 10)
    for bad in ((0, 1.0, 1), (1, float("nan"), 1), (1, float("inf"), 1), (1, -1.0, 1), (1, 1.0, -1)):
        with pytest.raises(LayoutError, match="kernel gemm"):
            KernelChoice("gemm", *bad)
