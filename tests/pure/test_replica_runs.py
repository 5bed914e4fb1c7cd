"""Curves of losses: means over samples, times to a loss, staleness, and times per batch."""

from __future__ import annotations

import pytest

from meshwright.ir.replica_runs import ReplicaRun, RuleRun, mean_curve, smoothed, time_to


def run_of(*replicas: ReplicaRun) -> RuleRun:
    return RuleRun(rule="local(2)", slow="", seed=0, seconds=10.0, replicas=replicas)


FAST = ReplicaRun(
    replica=0, samples=2, times_s=(1.0, 2.0, 3.0, 4.0), begun_s=(0.0, 1.0, 2.0, 3.0), computed_s=(0.9, 1.9, 2.9, 3.9),
    losses=(4.0, 3.0, 2.0, 1.0), held_out=1.5, sent_bytes=10,
)  # fmt: skip
SLOW = ReplicaRun(
    replica=1, samples=2, times_s=(2.5, 4.5), begun_s=(0.0, 2.5), computed_s=(2.4, 4.4), losses=(5.0, 3.0),
    held_out=2.5, sent_bytes=5,
)  # fmt: skip


def test_steps_of_all_replicas_are_in_the_order_of_time() -> None:
    run = run_of(FAST, SLOW)
    assert [end.loss for end in run.ends] == [4.0, 3.0, 5.0, 2.0, 1.0, 3.0]
    assert run.num_samples == 12
    assert run.sent_bytes == 15
    assert run.held_out == [1.5, 2.5]
    assert run.last_s == 4.5
    assert not run.diverged


def test_losses_are_means_over_the_last_samples() -> None:
    points = list(smoothed(run_of(FAST, SLOW).ends, 6))
    assert [(point.time_s, point.samples) for point in points] == [(2.5, 6), (3.0, 8), (4.0, 10), (4.5, 12)]
    assert [point.loss for point in points] == pytest.approx([4.0, 10 / 3, 8 / 3, 2.0])
    assert time_to(run_of(FAST, SLOW), 3.0, 6) == 4.0
    assert time_to(run_of(FAST, SLOW), 1.0, 6) is None
    assert list(smoothed(run_of(FAST).ends, 100)) == []


def test_staleness_is_how_many_steps_less_the_slowest_had_computed() -> None:
    # the fast one begins steps 0 to 3 when the slow one has computed 0, 0, 0 and 1; the slow one is never ahead
    assert run_of(FAST, SLOW).staleness == {0: 3, 1: 1, 2: 2}


def test_seconds_per_batch_are_those_of_parts_with_equally_many_steps() -> None:
    assert run_of(FAST, SLOW).seconds_a_batch(2, 8) == [2.5 * 8 / 6, 2.0 * 8 / 6]
    assert run_of(FAST, SLOW).seconds_a_batch(7, 8) == []


def test_curves_are_averaged_where_all_are() -> None:
    first, second = [(0.0, 4.0), (4.0, 0.0)], [(2.0, 3.0), (6.0, 3.0)]
    assert mean_curve([first, second], 3) == [(2.0, 2.5), (3.0, 2.0), (4.0, 1.5)]
    assert mean_curve([first, [(5.0, 1.0)]]) == []
    assert mean_curve([first, []]) == []
