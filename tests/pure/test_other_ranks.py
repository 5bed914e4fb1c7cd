"""A run on other numbers of ranks than its layout takes."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import config
from meshwright.ir.run import Run


def a_run(batch: int = 8, ranks: int | str = "auto", **layout: Any) -> Run:
    raw = {
        "model": {"name": "mlp"},
        "data": {"kind": "random", "shape": [64], "batch_size": batch},
        "layout": layout,
        "train": {"ranks": ranks},
    }
    return config.make(raw, where="test")


@pytest.mark.parametrize(
    ("run", "num_ranks", "dp"),
    [
        (a_run(dp=4), 3, 2),
        (a_run(dp=4), 1, 1),
        (a_run(dp=8, tp=2), 8, 4),
        (a_run(dp=2, pp=2, microbatches=4), 2, 1),
        (a_run(batch=12, dp=4), 3, 3),
    ],
)
def test_data_parallel_ranks_are_given_up_first(run: Run, num_ranks: int, dp: int) -> None:
    smaller_run = run.within(num_ranks)
    fixed = run.layout.num_ranks // run.layout.dp
    assert smaller_run.layout.dp == -1
    assert smaller_run.num_ranks(num_ranks) == dp * fixed
    assert smaller_run.layout.tp == run.layout.tp
    assert smaller_run.layout.pp == run.layout.pp


@pytest.mark.parametrize(
    ("run", "num_ranks"),
    [
        (a_run(tp=4, dp=1), 2),
        (a_run(tp=2, pp=2, dp=1), 3),
        (a_run(dp=4, ep=4), 2),
        (a_run(dp=4, precision="bfloat16", tp=2), 1),
    ],
)
def test_otherwise_the_planner_searches(run: Run, num_ranks: int) -> None:
    smaller_run = run.within(num_ranks)
    assert smaller_run.layout.searched
    assert smaller_run.layout.precision == run.layout.precision
    assert smaller_run.num_ranks(num_ranks) <= num_ranks


@pytest.mark.parametrize("run", [a_run(), a_run(dp=2), a_run(plan="auto"), a_run(dp=1, tp=2), a_run(ranks=2)])
def test_a_run_that_has_room_stays_as_it_is(run: Run) -> None:
    assert run.within(2) is run


def test_an_explicit_number_of_ranks_is_that_of_the_beginning() -> None:
    run = a_run(ranks=4)
    assert run.num_ranks(1) == 4
    assert run.within(2).num_ranks(2) == 2
