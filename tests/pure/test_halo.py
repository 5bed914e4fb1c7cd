"""Halos: which rows parts read of each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.halo import fetched, most_rows, outside, overlap, owned, window_ranges
from meshwright.ir.halo import given as given_rows
from meshwright.ir.placement import bounds
from tests.tries import tries

WINDOWS = st.fixed_dictionaries(
    {"stride": st.integers(1, 4), "window": st.integers(1, 9), "padding": st.integers(-2, 9)}
)


def test_a_window_of_three_reads_one_row_on_each_side() -> None:
    ranges = window_ranges((0, 4, 8, 12), stride=1, window=3, padding=1)
    assert ranges == ((-1, 5), (3, 9), (7, 13))
    assert fetched(ranges, (0, 4, 8, 12), 1) == [(0, (3, 4)), (2, (8, 9))]
    assert fetched(ranges, (0, 4, 8, 12), 0) == [(1, (4, 5))]
    assert most_rows(ranges, (0, 4, 8, 12)) == 2


def test_a_stride_of_two_reads_one_row_before() -> None:
    ranges = window_ranges((0, 2, 4), stride=2, window=3, padding=1)
    assert ranges == ((-1, 4), (3, 8))
    assert (fetched(ranges, (0, 4, 8), 0), fetched(ranges, (0, 4, 8), 1)) == ([], [(0, (3, 4))])


def test_thin_parts_read_of_several_neighbours() -> None:
    ranges = window_ranges(range(5), stride=1, window=7, padding=3)
    assert [other for other, _ in fetched(ranges, range(5), 0)] == [1, 2, 3]
    assert most_rows(ranges, range(5)) == 3


def test_parts_that_are_not_equal_read_as_far() -> None:
    ranges = window_ranges((0, 3, 4), stride=2, window=3, padding=1)
    assert ranges == ((-1, 6), (5, 8))
    assert (fetched(ranges, (0, 4, 7), 0), fetched(ranges, (0, 4, 7), 1)) == ([(1, (4, 6))], [])


@tries(15)
@given(WINDOWS, st.integers(1, 13), st.integers(1, 5), st.integers(1, 30))
def test_what_one_gets_another_gives(windows: dict[str, int], count: int, parts: int, length: int) -> None:
    ranges, rows = window_ranges(bounds(count, [parts]), **windows), bounds(length, [parts])
    received = {(part, other, span) for part in range(parts) for other, span in fetched(ranges, rows, part)}
    sent = {(other, part, span) for part in range(parts) for other, span in given_rows(ranges, rows, part)}
    assert received == sent
    for part in range(parts):
        before, after = outside(ranges[part], owned(rows, part))
        kept = overlap(ranges[part], owned(rows, part))
        sizes = [max(0, high - low) for low, high in (before, kept, after)]
        assert sum(sizes) == ranges[part][1] - ranges[part][0]
        assert min(high - low for low, high in (before, after)) >= 0
