"""The benchmarks measure what they say: sides compute the same, take turns, and are compared fairly."""

from __future__ import annotations

import pytest

import meshwright as mw
from benchmarks import foundation, kills, matrix
from meshwright.bench.repeat import WARMUP_STEPS, alternate
from meshwright.ir.statistics import ratio
from meshwright.models import GPT, GPTConfig
from tests.distributed.oracle import Case
from tests.distributed.pool import Ranks


def tiny() -> GPT:
    return GPT(GPTConfig(layers=1, width=16, heads=2, vocabulary=256, sequence_length=8))


def test_sides_take_turns() -> None:
    calls = []
    sides = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = alternate(sides, rounds=5, steps=2)
    assert "".join(calls[: 3 * WARMUP_STEPS]) == "a" * WARMUP_STEPS + "b" * WARMUP_STEPS + "c" * WARMUP_STEPS
    assert "".join(calls[3 * WARMUP_STEPS :]) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc" + "bbccaa"
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 5)


def test_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    one = ratio([1.0, 1.1, 9.0, 1.2, 1.0], [2.0, 2.2, 2.1, 30.0, 2.0])
    assert one.value == pytest.approx(1.1 / 2.1)
    assert one.low < one.value < one.high
    same = ratio([3.0] * 5, [4.0] * 5)
    assert (same.low, same.value, same.high) == (0.75, 0.75, 0.75)


@pytest.mark.parametrize(
    ("layout", "peers"),
    [
        (mw.Layout(), foundation.EAGER),
        (mw.Layout(dp=2), foundation.DDP),
        (mw.Layout(tp=2), foundation.PARALLELIZE_MODULE),
    ],
    ids=["eager", "dp2", "tp2"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_peers_train_the_same_model(ranks: Ranks, layout: mw.Layout, peers: dict[str, dict[str, bool]]) -> None:
    """Four steps from the same weights over the same batches give the same losses."""
    comparison = foundation.Comparison("tiny", layout, tiny, peers, 1.0)
    for seconds, losses in ranks(comparison.num_ranks, foundation.measure, comparison, 1, 1):
        assert list(seconds) == list(losses) == [foundation.OURS, *peers]
        assert all(len(values) == 1 for values in seconds.values())
        for found in losses.values():
            assert found == pytest.approx(losses[foundation.OURS], abs=foundation.LOSS_SPREAD)
        assert len(set(losses[foundation.OURS])) == foundation.NUM_BATCHES, "it trains"


def test_matrix_table_shows_failures() -> None:
    case = Case("MLP", "dp2", "SGD", "whole", "full")
    rows = [
        matrix.Row(case, 2e-16, 1e-9),
        matrix.Row(Case("MLP", "tp2", "SGD", "whole", "full"), 1e-3, 1e-9),
        matrix.Row(Case("MLP", "dp2 x tp2", "SGD", "whole", "full"), float("inf"), 1e-9, "ValueError: no"),
    ]
    assert [row.passed for row in rows] == [True, False, False]
    last = matrix.table(rows).splitlines()[-1]
    assert last == "| MLP | SGD | whole | full | 2e-16 | **1e-03** | **failed**: ValueError: no |"


def test_a_disturbed_run_is_judged_by_its_largest_difference() -> None:
    alone = {1: 2.0, 2: 1.5}
    assert kills.difference({1: 2.0, 2: 1.5}, alone) == 0.0
    assert kills.difference({1: 2.0, 2: 1.5 + 2**-50}, alone) == 2**-50
    assert kills.difference({1: 2.0}, alone) == float("inf")
    row = kills.Row("killed", {"step": 2, "cut": 1}, 2, 2**-50, 0.0, 4.0)
    assert not row.passed
    assert str(row) == (
        "FAIL  killed: 3 kills (2 step, 1 cut; the launcher gave up 0 times) in 2 steps, 4.0 s a kill; "
        "largest difference 9e-16, allowed 0e+00"
    )
