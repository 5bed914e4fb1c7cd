"""Layouts: which sizes go together, and the mesh that they make."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import LayoutError
from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text


def test_the_text_says_that_parameters_or_stages_differ_in_their_zero_stage() -> None:
    assert layout_text(Layout(dp=2, zero=-1)) == "dp2, zero by parameter"
    assert layout_text(Layout(dp=2, pp=2, zero=3, stage_zero=(3, 0))) == "dp2 x pp2, zero3/0, 1f1b"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"zero": 1}, "layout: zero=1 with dp=1: there is no rank to share with\n  -> give dp of 2 or more"),
        ({"tp": 2, "zero": 3}, "layout: zero=3 with dp=1: there is no rank to share with"),
        ({"dp": 4, "zero": 2, "zero_ranks": 1}, "layout: zero=2 with zero_ranks=1: there is no rank to share with"),
        ({"dp": 4, "zero": 2, "zero_ranks": 3}, "layout: zero_ranks=3 does not divide dp=4\n  -> give a divisor of dp"),
        ({"dp": 4, "zero_ranks": 2}, "layout: zero_ranks=2 with zero=0\n  -> give zero 1, 2 or 3"),
        ({"dp": 4, "ep": 2, "zero": 1, "zero_ranks": 2}, "layout: zero_ranks with ep\n  -> leave one of them out"),
        (
            {"pp": 2, "zero": 1, "zero_ranks": 2, "stage_sizes": ({"dp": 2}, {"tp": 2})},
            "layout: zero_ranks with stage_sizes\n  -> leave zero_ranks out",
        ),
        ({"dp": 2, "stage_sizes": ({"dp": 2},)}, "layout: stage_sizes: stage_sizes with pp=1\n  -> give pp of"),
        ({"dp": 2, "zero": 4}, "layout: zero is 4\n  -> use -1 or 0 or 1 or 2 or 3"),
        (
            {"dp": 2, "pp": 2, "zero": 3, "stage_zero": (3, 1, 0)},
            "layout: stage_zero: 3 ZeRO stages for 2 pipeline stages\n  -> give a ZeRO stage for every pipeline stage",
        ),
        (
            {"dp": 2, "pp": 2, "zero": 1, "stage_zero": (3, 1)},
            "layout: stage_zero: (3, 1) with zero=1\n  -> give zero=3",
        ),
        ({"zero": -1}, "layout: zero=-1 with dp=1: there is no rank to share with"),
        (
            {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": -1},
            "layout: zero=-1 with sequence_parallel\n  -> give zero",
        ),
    ],
)
def test_zero_that_cannot_be_is_refused(sizes: dict[str, Any], message: str) -> None:
    def resolve() -> None:
        layout = Layout(**sizes)
        layout.resolved(layout.num_ranks)

    with pytest.raises(LayoutError) as caught:
        resolve()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("layout", "mesh", "axis"),
    [
        (Layout(dp=2, tp=2), "dp=2 x tp=2", ""),
        (Layout(dp=2, tp=2, zero=1), "dp=2 x tp=2", "dp"),
        (Layout(dp=4, zero=3, zero_ranks=2), "dp=2 x dp_shard=2 x tp=1", "dp_shard"),
        (Layout(dp=4, zero=3, zero_ranks=4), "dp=4 x tp=1", "dp"),
        (Layout(dp=4, ep=2, zero=2), "dp=2 x ep=2 x tp=1", "dp"),
        (Layout(dp=2, ep=2, zero=2), "dp=1 x ep=2 x tp=1", "ep"),
    ],
)
def test_zero_cuts_over_ranks_that_share_the_batch(layout: Layout, mesh: str, axis: str) -> None:
    """Neighbours, where only some of them are to share: a box."""
    assert (str(layout.resolved(layout.num_ranks).mesh()), layout.zero_axis) == (mesh, axis)


def test_text() -> None:
    unlike = Layout(dp=2, pp=2, microbatches=4, stage_sizes=({"dp": 2}, {"tp": 2}))
    assert layout_text(unlike) == "pp2, 4 micro-batches, 1f1b, stages of dp2 and tp2"
    assert layout_text(Layout(dp=2, zero=3)) == "dp2, zero3"
    hybrid = Layout(dp=4, zero=1, zero_ranks=2, microbatches=4)
    assert layout_text(hybrid) == "dp4, zero1 in groups of 2, 4 micro-batches"


# --- grids of tensor-parallel ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "mesh", "axis", "zero"),
    [
        (Layout(tp=(2, 2, 1)), "dp=1 x tz=1 x ty=2 x tx=2", "", 0),
        (Layout(tp=[2, 2, 1]), "dp=1 x tz=1 x ty=2 x tx=2", "", 0),  # type: ignore[arg-type]
        (Layout(dp=2, tp=(1, 2, 4)), "dp=2 x tz=4 x ty=2 x tx=1", "tz", 3),
        (Layout(dp=2, tp=(1, 2, 4), zero=2), "dp=2 x tz=4 x ty=2 x tx=1", "tz", 2),
        (Layout(dp=2, tp=(2, 1, 1), zero=1), "dp=2 x tz=1 x ty=1 x tx=2", "dp", 1),
        (Layout(dp=4, tp=(2, 1, 1), zero=3, zero_ranks=2), "dp=2 x dp_shard=2 x tz=1 x ty=1 x tx=2", "dp_shard", 3),
        (Layout(pp=2, dp=-1, tp=(3, 1, 1)), "pp=2 x dp=2 x tz=1 x ty=1 x tx=3", "", 0),
    ],
)
def test_a_grid_has_three_axes(layout: Layout, mesh: str, axis: str, zero: int) -> None:
    resolved = layout.resolved(12 if layout.dp == -1 else layout.num_ranks)
    assert (str(resolved.mesh()), resolved.zero_axis, resolved.zero) == (mesh, axis, zero)
    assert resolved.resolved(resolved.num_ranks) == resolved


def test_a_grid_divides_features_and_samples() -> None:
    layout = Layout(dp=2, tp=(2, 3, 4))
    assert (layout.num_ranks, layout.feature_ranks, layout.depth, layout.data_ranks) == (48, 6, 4, 8)
    assert (Layout(tp=4).grid, Layout(tp=4).feature_ranks, Layout(tp=4).data_ranks) == ((1, 4, 1), 4, 1)
    assert layout_text(layout) == "dp2 x tp 2x3x4"
    assert layout_text(Layout(tp=(1, 2, 1))) == "tp 1x2x1"


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ({"tp": (2, 2, 2), "dp": 2}, 8, "layout: dp=2 x tp=[2, 2, 2] needs 16 ranks, there are 8\n  -> choose sizes"),
        ({"tp": (2, 0, 1)}, 2, "layout: tp: tp=[2, 0, 1]\n  -> give three sizes of 1 or more"),
        ({"tp": (2, -1, 1)}, 2, "layout: tp: tp=[2, -1, 1]\n  -> give three sizes of 1 or more"),
        ({"tp": (2, 2)}, 4, "layout: tp is (2, 2)\n  -> Expected array of length 3"),
        ({"tp": (2, 1, 1), "mixed": (2,)}, 4, "layout: tp: tp=[2, 1, 1] with mixed\n  -> leave mixed out"),
        ({"tp": (2, 1, 1), "spatial": (2,)}, 4, "layout: tp: tp=[2, 1, 1] with spatial\n  -> leave spatial out"),
        ({"tp": (2, 1, 1), "cp": 2}, 4, "layout: tp: tp=[2, 1, 1] with cp\n  -> leave cp out"),
        ({"tp": (2, 1, 1), "dp": 2, "ep": 2}, 4, "layout: tp: tp=[2, 1, 1] with ep\n  -> leave ep out"),
        (
            {"tp": (2, 1, 1), "pp": 2, "stage_sizes": ({"dp": 2}, {"tp": 2})}, 4,
            "layout: tp: tp=[2, 1, 1] with stage_sizes\n  -> leave stage_sizes out",
        ),
        ({"tp": (2, 1, 1), "sequence_parallel": True}, 2, "layout: tp: tp=[2, 1, 1] with sequence_parallel\n"),
        ({"tp": (1, 1, 2), "dp": 2, "zero": 3, "zero_ranks": 2}, 4, "layout: tp: tp=[1, 1, 2] with zero_ranks=2\n"),
    ],
)  # fmt: skip
def test_grids_that_cannot_be_are_refused(sizes: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(**sizes).resolved(ranks)
    assert str(caught.value).startswith(message)
