"""Stragglers, jitter, deaths; and the time of runs that restart from checkpoints."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork
from meshwright.errors import LayoutError
from meshwright.ir.mesh import Mesh
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Checkpoints, Faults, RunTime, best_interval_s, draw_failures, run_time
from tests.pure.test_simulate import FREE

PIECES: dict[str, tuple[Piece, ...]] = {
    "F": (Compute("f", 1.0),),
    "B": (Compute("b", 2.0),),
    "REDUCE_GRAD": (Communicate("g", "all_reduce", "dp", 1),),
}
STEP = StepWork((StageWork(pieces=PIECES),) * 2)
SCHEDULE = add_reduction(add_communication(build("1f1b", 2, 4)))
MESH = Mesh.of(pp=2, dp=2)


def test_a_slow_rank_keeps_all_that_wait_for_it() -> None:
    played = play(SCHEDULE, STEP, MESH, FREE, faults=Faults(slow={2: 2.0}))
    assert play(SCHEDULE, STEP, MESH, FREE).step_s == 15.0
    # Rank 2 computes 24 s for four micro-batches, after 1 s of rank 0, which then has the last backward.
    assert played.step_s == 27.0


def test_jitter_is_drawn_from_the_seed() -> None:
    trace, same, other = (
        play(SCHEDULE, STEP, MESH, FREE, faults=Faults(jitter=0.1, seed=seed)).trace() for seed in (1, 1, 2)
    )
    assert trace == same != other
    assert trace.of_rank(0).spans != trace.of_rank(1).spans


def test_jitter_has_mean_one_and_the_deviation_asked_for() -> None:
    factor = Faults(jitter=0.2).noise(3)
    factors = [factor() for _ in range(20_000)]
    mean = sum(factors) / len(factors)
    assert mean == pytest.approx(1.0, abs=0.01)
    assert math.sqrt(sum((factor - mean) ** 2 for factor in factors) / len(factors)) == pytest.approx(0.2, abs=0.01)


def test_ranks_wait_for_ever_for_one_that_died() -> None:
    """Rank 3 (stage 1) dies in its first backward: rank 1 waits for its gradient, the others for the reduction."""
    played = play(SCHEDULE, STEP, MESH, FREE, faults=Faults(deaths_s={3: 3.0}))
    assert played.halted == {0: "0REDUCE_GRAD g", 1: "0RECV_B0", 2: "1REDUCE_GRAD g"}
    last = played.trace([3]).spans[-1]
    assert (last.what, last.start_s, last.end_s) == ("1B0", 2.0, 3.0)
    assert played.trace([1]).spans[-1].what == "0RECV_B0"


def test_a_rank_that_dies_after_its_last_action_stops_nobody() -> None:
    assert play(SCHEDULE, STEP, MESH, FREE, faults=Faults(deaths_s={3: 99.0})).halted == {}


def test_impossible_faults_are_refused() -> None:
    with pytest.raises(LayoutError, match="faults: slow: rank 1 has -1"):
        Faults(slow={1: -1.0})
    with pytest.raises(LayoutError, match=r"jitter is -0\.1"):
        Faults(jitter=-0.1)
    with pytest.raises(LayoutError, match=r"slow: rank 0 has 1e\+300\n  -> give ranks .* times from 0 to 1e\+09"):
        Faults(slow={0: 1e300})
    with pytest.raises(LayoutError, match=r"jitter is 1e\+300\n  -> give 0 to 100, such as 0\.05"):
        Faults(jitter=1e300)


# --- runs ------------------------------------------------------------------------------------------------------------


def _second_by_second(step_s: int, num_steps: int, checkpoints: Checkpoints, failures: set[int]) -> int:
    """The simplest version: seconds until the last step is done, for whole seconds."""
    now = done = saved = 0
    plan: list[str] = []
    while done < num_steps:
        if not plan:
            count = min(checkpoints.every_steps, num_steps - saved)
            plan = (["step"] * (step_s - 1) + ["stepped"]) * count
            if saved + count < num_steps and checkpoints.save_s:
                plan += ["save"] * (int(checkpoints.save_s) - 1)
                plan += ["saved"]
            done = saved
        what = plan.pop(0)
        now += 1
        done += what == "stepped"
        if not plan and what in ("stepped", "saved"):
            saved = done
        if now in failures and done < num_steps:
            plan, done = ["restart"] * int(checkpoints.restart_s), saved
    return now


@given(
    st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2), st.integers(0, 3),
    st.sets(st.integers(1, 60), max_size=4),
)  # fmt: skip
def test_the_time_of_a_run_is_that_of_the_simplest_version(
    step_s: int, num_steps: int, every: int, save_s: int, restart_s: int, failures: set[int]
) -> None:
    checkpoints = Checkpoints(every_steps=every, save_s=save_s, restart_s=restart_s)
    duration = run_time(step_s, num_steps, checkpoints, sorted(failures))
    assert duration.duration_s == _second_by_second(step_s, num_steps, checkpoints, failures)
    assert duration.useful_s == step_s * num_steps
    assert duration.saving_s == save_s * ((num_steps - 1) // every)


def test_without_failures_only_saves_are_added() -> None:
    assert run_time(2.0, 10, Checkpoints(every_steps=4, save_s=1.0)) == RunTime(
        useful_s=20.0, lost_s=0.0, saving_s=2.0, restarting_s=0.0, num_failures=0
    )


def test_a_failure_costs_what_was_done_since_the_save_and_the_restart() -> None:
    """Saved at 9 s; fails at 15 s, 3 steps later; restarts until 20 s, fails again at 18 s, restarts until 23 s."""
    duration = run_time(2.0, 10, Checkpoints(every_steps=4, save_s=1.0, restart_s=5.0), [15.0, 18.0])
    assert duration == RunTime(useful_s=20.0, lost_s=6.0, saving_s=2.0, restarting_s=8.0, num_failures=2)


def test_the_mean_time_is_that_of_the_closed_form() -> None:
    """Daly 2006, equation 13: with failures at any time alike, M e^(R/M) (e^((τ+δ)/M) - 1) for every interval."""
    step_s, mean_s, checkpoints = 1.0, 500.0, Checkpoints(every_steps=50, save_s=5.0, restart_s=20.0)
    runs = [
        run_time(step_s, 2001, checkpoints, draw_failures(10, 10 * mean_s, 10**5, seed)).duration_s
        for seed in range(200)
    ]
    interval = mean_s * math.exp(20 / mean_s) * (math.exp(55 / mean_s) - 1)
    assert sum(runs) / len(runs) == pytest.approx(40 * interval, rel=0.02)


def test_youngs_interval_is_near_the_best() -> None:
    failures = [draw_failures(1, 1000.0, 10**6, seed) for seed in range(60)]

    def mean_s(every: int) -> float:
        checkpoints = Checkpoints(every_steps=every, save_s=5.0)
        return sum(run_time(1.0, 3000, checkpoints, failure).duration_s for failure in failures) / len(failures)

    best = round(best_interval_s(5.0, 1000.0))
    assert best == 100
    assert mean_s(best) < mean_s(best // 4)
    assert mean_s(best) < mean_s(best * 5)
