"""Placements: what a strategy asks of an operator's inputs and makes of its outputs."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.layout import TIME
from meshwright.ir.placement import (
    REPLICATE,
    Flat,
    Partial,
    Placements,
    Replicate,
    Shard,
    axis_cut,
    bounds,
    describe,
    factor_placement,
    input_placements,
    is_linear,
    local_shape,
    misfit,
    output_placements,
)
from meshwright.ir.rule import Factor, Rule

MATMUL = Rule(pattern="^b s k, ^^k f -> b s f", sizes={"b": 4, "s": 6, "k": 8, "f": 10})
PROJECTION = Rule(pattern="^b s k, ^^k (3 h d) -> b s (3 h d)", sizes={"b": 4, "s": 6, "k": 8, "h": 2, "d": 5})
SOFTMAX = Rule(pattern="b !v -> b !v", sizes={"b": 4, "v": 8}, decompositions={"v": "gather"})
MAXIMUM = Rule(pattern="b k -> b", sizes={"b": 4, "k": 8}, reduction="max")
NORM_BACKWARD = Rule(pattern="^b !k, b !k, b 1 -> b !k, !k", sizes={"b": 4, "k": 8}, decompositions={"k": "sum"})


def placed(
    rule: Rule, strategy: dict[str, str], sizes: dict[str, int] | None = None
) -> tuple[list[Placements], list[Placements]]:
    """Of every input, and of every output; without sizes, over two ranks on each axis."""
    parsed, sizes = rule.parsed, sizes or dict.fromkeys(strategy, 2)
    inputs = [input_placements(rule, strategy, index, sizes) for index in range(len(parsed.inputs))]
    return inputs, [output_placements(rule, strategy, index, sizes) for index in range(len(parsed.outputs))]


@pytest.mark.parametrize(
    ("factor", "left", "right", "output"),
    [
        ("b", Shard(0), None, Shard(0)),
        ("s", Shard(1), None, Shard(1)),
        ("k", Shard(2), Shard(0), Partial("sum")),
        ("f", None, Shard(1), Shard(2)),
        ("^", Partial("sum"), None, Partial("sum")),
        ("^^", None, Partial("sum"), Partial("sum")),
    ],
)
def test_splits_of_a_matrix_product(
    factor: str, left: Shard | Partial | None, right: Shard | None, output: Shard | Partial
) -> None:
    def on_axis(placement: Shard | Partial | None) -> Placements:
        return {} if placement is None else {"tp": placement}

    assert placed(MATMUL, {"tp": factor}) == ([on_axis(left), on_axis(right)], [on_axis(output)])


def test_heads_of_a_fused_projection_are_cut_in_three_blocks() -> None:
    assert placed(PROJECTION, {"tp": "h"}) == ([{}, {"tp": Shard(1, 3)}], [{"tp": Shard(2, 3)}])


def test_the_width_of_a_head_is_cut_in_every_head() -> None:
    assert placed(PROJECTION, {"tp": "d"})[1] == [{"tp": Shard(2, 6)}]


def test_what_does_not_divide_is_cut_in_whole_units() -> None:
    heads = Rule(pattern="^k, ^^k (3 h d) -> (3 h d)", sizes={"k": 8, "h": 3, "d": 4})
    assert placed(heads, {"tp": "h"})[1] == [{"tp": Shard(0, 3, unit=4)}]
    assert placed(heads, {"tp": "h"}, {"tp": 3})[1] == [{"tp": Shard(0, 3)}]
    assert placed(heads, {"dp": "h", "tp": "h"}, {"dp": 3, "tp": 2})[1] == [
        {"dp": Shard(0, 3, unit=4), "tp": Shard(0, 3, unit=4)}
    ]


def test_what_cannot_be_cut_is_named() -> None:
    ring = Rule(
        pattern="s, !t -> s",
        sizes={"s": 8, "t": 8},
        decompositions={"st": "ring"},
        joint={"st": ("s", "t")},
        equal=("st",),
    )
    assert misfit(MATMUL, {"dp": "b", "tp": "f"}, {"dp": 3, "tp": 3}) is None
    assert misfit(MATMUL, {"dp": "b"}, {"dp": 5}) == ("b", 5), "a rank would have nothing"
    assert misfit(MATMUL, {"dp": "b", TIME: "b"}, {"dp": 3, TIME: 1}) == ("b", 3), "micro-batches are equal"
    assert misfit(ring, {"cp": "st"}, {"cp": 4}) is None
    assert misfit(ring, {"cp": "st"}, {"cp": 3}) == ("s", 3), "whole parts go round"
    assert misfit(ring, {"cp": "st", "dp": "st"}, {"cp": 2, "dp": 2}) == ("st", 4), "a ring lies along one axis"


def test_two_axes_may_split_two_factors_of_one_dim() -> None:
    assert placed(PROJECTION, {"dp": "h", "tp": "d"})[1] == [{"dp": Shard(2, 3), "tp": Shard(2, 6)}]


def test_axes_are_independent() -> None:
    assert placed(MATMUL, {"dp": "b", "tp": "k"}) == (
        [{"dp": Shard(0), "tp": Shard(2)}, {"tp": Shard(0)}],
        [{"dp": Shard(0), "tp": Partial("sum")}],
    )


def test_a_maximum_over_a_split_dim_is_partial_in_its_own_way() -> None:
    assert placed(MAXIMUM, {"tp": "k"})[1] == [{"tp": Partial("max")}]


def test_a_decomposition_leaves_nothing_partial() -> None:
    assert placed(SOFTMAX, {"tp": "v"}) == ([{"tp": Shard(1)}], [{"tp": Shard(1)}])
    assert placed(NORM_BACKWARD, {"tp": "k"})[1] == [{"tp": Shard(1)}, {"tp": Shard(0)}]
    assert placed(NORM_BACKWARD, {"dp": "b"})[1] == [{"dp": Shard(0)}, {"dp": Partial("sum")}]


def test_outer_is_the_product_of_what_stands_before() -> None:
    dims = ((Factor("", size=3), Factor("h"), Factor("d")),)
    sizes = {"h": 4, "d": 8}
    assert factor_placement(dims, sizes, "h") == Shard(0, 3)
    assert factor_placement(dims, sizes, "d") == Shard(0, 12)
    assert factor_placement(dims, sizes, "z") is None


def test_local_shape_divides_every_split_dim() -> None:
    placements: Placements = {"dp": Shard(0), "tp": Shard(2, 3), "cp": Partial("sum"), "pp": REPLICATE}
    assert local_shape((8, 5, 24), placements, {"dp": 2, "tp": 4, "cp": 2, "pp": 2}) == (4, 5, 6)
    assert local_shape((8,), {"dp": Shard(0), "tp": Shard(0)}, {"dp": 2, "tp": 2}) == (2,)


def test_uneven_parts_differ_by_one_unit() -> None:
    sizes = {"dp": 2, "tp": 3}

    def lengths(length: int, placements: Placements) -> list[int]:
        places = [{"dp": dp, "tp": tp} for dp in range(2) for tp in range(3)]
        return [local_shape((length,), placements, sizes, at)[0] for at in places]

    assert lengths(7, {"dp": Shard(0)}) == [4, 4, 4, 3, 3, 3]
    assert lengths(7, {"tp": Shard(0)}) == [3, 2, 2] * 2
    assert lengths(7, {"tp": Shard(0), "dp": Shard(0)}) == [2, 1, 1, 1, 1, 1], "the outer axis cuts first"
    assert lengths(24, {"dp": Shard(0, 1, 8)}) == [16] * 3 + [8] * 3, "three heads of eight"
    assert lengths(24, {"dp": Shard(0, 1, 8), "tp": Shard(0, 3)}) == [6, 6, 4, 3, 3, 2], "and each of them in 3, 3, 2"
    assert lengths(1, {"dp": Shard(0)}) == [1, 1, 1, 0, 0, 0]
    assert local_shape((7,), {"dp": Shard(0)}, sizes) == (4,), "the largest"


def test_flat_cuts_rows_of_what_other_axes_leave_or_else_elements() -> None:
    sizes = {"dp": 4, "tp": 2}
    assert local_shape((8, 5), {"dp": Flat()}, sizes) == (2, 5)
    assert local_shape((8, 5), {"dp": Flat(), "tp": Shard(0)}, sizes) == (1, 5)
    assert local_shape((6, 5), {"dp": Flat()}, sizes) == (8, 1), "30 elements and 2 of padding"
    assert local_shape((6,), {"dp": Flat()}, sizes) == (2,)
    assert local_shape((), {"dp": Flat()}, sizes) == ()
    assert local_shape((0, 5), {"dp": Flat()}, sizes) == (0, 5)


def test_text() -> None:
    every = (Shard(1), Shard(1, 3), Shard(1, 3, 16), Flat(), Replicate(), Partial("max"))
    assert [str(placement) for placement in every] == [
        "S(1)",
        "S(1/3)",
        "S(1/3 by 16)",
        "flat",
        "R",
        "P(max)",
    ]
    assert describe({"dp": Shard(0), "tp": Partial()}) == "dp:S(0) tp:P(sum)"
    assert describe({"dp": REPLICATE}) == describe({}) == "R"


def test_carets_are_linear_and_factors_are_not() -> None:
    assert [is_linear(choice) for choice in ("^", "^^", "b", "")] == [True, True, False, False]


@st.composite
def fused(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Sizes of the factors of one dim, one of them, and a number of parts."""
    parts = draw(st.integers(2, 4))
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return tuple(sizes), draw(st.integers(0, len(sizes) - 1)), parts


@given(fused())
def test_a_shard_holds_what_chunking_its_factor_would(case: tuple[tuple[int, ...], int, int]) -> None:
    """``Shard(dim, outer)`` of the joined dim is the plain cut of the factor before it was joined."""
    sizes, chosen, parts = case
    dim = tuple(Factor(f"f{index}") for index in range(len(sizes)))
    named = {f"f{index}": size for index, size in enumerate(sizes)}
    shard = factor_placement((dim,), named, f"f{chosen}", parts=parts)
    assert shard is not None
    length, inner = prod(sizes), prod(sizes[chosen + 1 :])
    edges = bounds(sizes[chosen], [parts])
    cut = axis_cut((length,), "tp", {}, shard, {"tp": parts}, {})
    assert cut.blocks == shard.outer
    assert max(cut.units) - min(cut.units) <= 1
    for part in range(parts):
        begin, end = cut.span(part)
        indices = [index for index in range(length) if begin <= index % cut.block < end]
        units = range(edges[part], edges[part + 1])
        assert indices == [index for index in range(length) if index // inner % sizes[chosen] in units]
        assert len(indices) == local_shape((length,), {"tp": shard}, {"tp": parts}, {"tp": part})[0]
