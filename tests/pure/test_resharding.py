"""Moves between placements: they arrive, they cost nothing where nothing differs, and they come in one order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.placement import REPLICATE, Flat, Partial, Placement, Placements, Replicate, Shard
from meshwright.ir.resharding import moves

SIZES = {"dp": 2, "tp": 2}
SUM = Partial("sum")


def text(have: Placements, want: Placements) -> str:
    return " ".join(f"{move.axis}:{move.kind}" for move in moves(have, want, SIZES))


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        ({}, {}, ""),
        ({"tp": Shard(0)}, {"tp": Shard(0)}, ""),
        ({"tp": REPLICATE}, {}, ""),
        ({"tp": SUM}, {"tp": SUM}, ""),
        ({"tp": SUM}, {}, "tp:all_reduce"),
        ({"tp": SUM}, {"tp": Shard(1)}, "tp:reduce_scatter"),
        ({"tp": Partial("max")}, {"tp": Shard(1)}, "tp:all_reduce tp:slice"),
        ({"tp": Shard(0)}, {}, "tp:all_gather"),
        ({"tp": Shard(0)}, {"tp": Shard(1)}, "tp:all_gather tp:slice"),
        ({}, {"tp": Shard(1)}, "tp:slice"),
        ({"dp": SUM, "tp": SUM}, {}, "dp:all_reduce tp:all_reduce"),
        ({"dp": SUM, "tp": Shard(0)}, {}, "dp:all_reduce tp:all_gather"),
        # one dim over both axes: the inner axis is gathered first, for the outer parts lie around it
        ({"dp": Shard(0), "tp": Shard(0)}, {}, "tp:all_gather dp:all_gather"),
        ({"dp": Shard(0), "tp": Shard(0)}, {"tp": Shard(0)}, "tp:all_gather dp:all_gather tp:slice"),
        # tp cannot scatter between the parts that dp has cut of a factor further in
        ({"dp": Shard(0, 3), "tp": SUM}, {"dp": Shard(0, 3), "tp": Shard(0)}, "tp:all_reduce tp:slice"),
        # flat: gathered before all else, and cut last, or first where nothing else changes
        ({"dp": Flat()}, {}, "dp:all_gather"),
        ({"dp": SUM}, {"dp": Flat()}, "dp:reduce_scatter"),
        ({}, {"dp": Flat()}, "dp:slice"),
        ({"dp": Partial("max")}, {"dp": Flat()}, "dp:all_reduce dp:slice"),
        ({"dp": Flat(), "tp": Shard(0)}, {"tp": Shard(0)}, "dp:all_gather"),
        ({"dp": Flat(), "tp": Shard(0)}, {"dp": Flat()}, "dp:all_gather tp:all_gather dp:slice"),
        ({"dp": SUM, "tp": Shard(0)}, {"dp": Flat(), "tp": Shard(0)}, "dp:reduce_scatter"),
        ({"dp": SUM, "tp": SUM}, {"dp": Flat()}, "dp:reduce_scatter tp:all_reduce"),
        ({"dp": SUM, "tp": SUM}, {"dp": Flat(), "tp": Shard(0)}, "tp:reduce_scatter dp:reduce_scatter"),
        ({"dp": Shard(0)}, {"dp": Flat()}, "dp:all_gather dp:slice"),
    ],
)
def test_moves_come_in_one_order(have: Placements, want: Placements, expected: str) -> None:
    assert text(have, want) == expected


PLACEMENTS: st.SearchStrategy[Placement] = st.one_of(
    st.just(REPLICATE),
    st.builds(Partial, st.sampled_from(["sum", "max", "min"])),
    st.builds(Shard, st.integers(0, 2), st.sampled_from([1, 2, 4])),
    st.just(Flat()),
)


def by_axis(placements: st.SearchStrategy[Placement]) -> st.SearchStrategy[Placements]:
    """At most one axis is flat."""
    found = st.dictionaries(st.sampled_from(sorted(SIZES)), placements)
    return found.filter(lambda one: list(one.values()).count(Flat()) < 2)


BY_AXIS = by_axis(PLACEMENTS)


def explicit(placements: Placements) -> Placements:
    return {axis: one for axis, one in placements.items() if not isinstance(one, Replicate)}


@given(BY_AXIS, by_axis(PLACEMENTS.filter(lambda one: one != SUM)))
def test_each_move_begins_where_the_one_before_ends_and_the_last_arrives(have: Placements, want: Placements) -> None:
    want = {axis: one for axis, one in want.items() if not isinstance(one, Partial)}
    now = explicit(have)
    for move in moves(have, want, SIZES):
        assert move.before == now
        now = move.after
    assert explicit(now) == explicit(want)


@given(BY_AXIS)
def test_what_lies_right_does_not_move(placements: Placements) -> None:
    assert moves(placements, placements, SIZES) == ()
