"""Attention's table: which pairs a band shows, what a kernel computes of them, and which algorithms support a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.attention import (
    ATTENTIONS,
    BLOCK,
    CUDNN,
    EFFICIENT,
    FLASH,
    PLAIN,
    AttentionForm,
    Band,
    algorithms_of,
    computed_fraction,
)

BANDS = st.builds(
    Band, st.integers(1, 9), st.integers(1, 9), st.just(True), st.one_of(st.just(0), st.integers(1, 10)),
    st.integers(-9, 9),
)  # fmt: skip


def pairs(band: Band) -> set[tuple[int, int]]:
    """The visible pairs, one by one."""
    every = ((i, j) for i in range(band.queries) for j in range(band.keys))
    if not band.causal:
        return set(every)
    window = band.window or 1000
    return {(i, j) for i, j in every if i + band.first - window < j <= i + band.first}


@given(BANDS)
def test_pairs_are_counted(band: Band) -> None:
    assert band.pairs == len(pairs(band))
    assert Band(band.queries, band.keys).pairs == band.queries * band.keys


@given(BANDS)
def test_what_is_cut_away_shows_nothing_and_the_rest_is_the_same_band(band: Band) -> None:
    rows, columns, inner = band.seen()
    moved = {(i + rows.start, j + columns.start) for i, j in pairs(inner)}
    assert moved == pairs(band)
    if inner.queries:
        assert inner.queries == rows.stop - rows.start
        assert inner.keys == columns.stop - columns.start
        assert {i for i, _ in moved} == set(range(rows.start, rows.stop)), "every query that is left sees a key"
        assert {j for _, j in moved} == set(range(columns.start, columns.stop))
        assert inner.causal == (len(moved) < inner.queries * inner.keys), "a whole band needs no mask"
        assert not inner.causal or inner.first >= max(0, inner.keys - inner.queries)


@given(BANDS)
def test_a_triangle_is_the_causal_mask_of_queries_beside_the_first_key(band: Band) -> None:
    triangle = pairs(Band(band.queries, band.keys, True))
    if band.is_triangle:
        assert pairs(band) == triangle
    if band.is_whole:
        assert len(pairs(band)) == band.queries * band.keys


@given(st.integers(1, 5000), st.booleans(), st.integers(0, 5000))
def test_a_kernel_computes_what_is_visible_and_parts_of_blocks(length: int, on_cpu: bool, window: int) -> None:
    band = Band(length, length, True, window)
    fraction = computed_fraction(band.pairs, length, length, on_cpu)
    assert band.pairs / length**2 <= fraction <= 1.0
    assert fraction <= band.pairs / length**2 + BLOCK[on_cpu] / length
    assert computed_fraction(length * length, length, length, on_cpu) == 1.0


HALF = AttentionForm("bfloat16", 64, 64, 128, 256)


@pytest.mark.parametrize(
    ("form", "on_cpu", "expected"),
    [
        (HALF, False, (FLASH, CUDNN, EFFICIENT, PLAIN)),
        (HALF._replace(dtype="float16", masked=True), False, (CUDNN, EFFICIENT, PLAIN)),
        (HALF._replace(shifted=True), False, (FLASH, EFFICIENT, PLAIN)),
        (HALF._replace(width=256, values=256), False, (FLASH, EFFICIENT, PLAIN)),
        (HALF._replace(width=192), False, (EFFICIENT, PLAIN)),
        (HALF._replace(values=32), False, (CUDNN, EFFICIENT, PLAIN)),
        (HALF._replace(width=4, values=4), False, (PLAIN,)),
        (HALF._replace(keys=130), False, (FLASH, EFFICIENT, PLAIN)),
        (HALF._replace(dropout=True), False, (PLAIN,)),
        (HALF._replace(dtype="float32"), False, (EFFICIENT, PLAIN)),
        (HALF._replace(dtype="float64"), False, (PLAIN,)),
        (HALF, True, (FLASH, PLAIN)),
        (HALF._replace(dtype="float64", masked=True, shifted=True), True, (FLASH, PLAIN)),
        (HALF._replace(dtype="float16"), True, (PLAIN,)),
        (HALF._replace(values=32), True, (PLAIN,)),
        (HALF._replace(dropout=True), True, (PLAIN,)),
    ],
)
def test_the_algorithms_of_a_call(form: AttentionForm, on_cpu: bool, expected: tuple[str, ...]) -> None:
    assert algorithms_of(form, on_cpu) == expected
    assert set(expected) <= set(ATTENTIONS)
