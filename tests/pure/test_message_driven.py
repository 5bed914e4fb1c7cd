"""Message-driven pipelines: under the rule, any times and any delays give a schedule that can run, within its limit."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.memory import in_flight
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.work import Communicate, Compute, StageWork, StepWork
from meshwright.errors import LayoutError, MeshwrightError, ScheduleError
from meshwright.ir.layout import Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Action, ActionKind, ActionList, Schedule
from meshwright.ir.trace import Trace
from meshwright.schedules.check import check
from meshwright.schedules.message_driven import RankProgress, most_in_flight, next_action, ordered, with_most_in_flight
from meshwright.schedules.pipeline import build, training_schedule
from meshwright.schedules.timing import run
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Faults
from meshwright.simulate.played import PlayedStep
from tests.pure.test_cost import setup
from tests.pure.test_simulate import FREE, cluster, work
from tests.tries import tries

F, B = ActionKind.F, ActionKind.B
RANKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)
TRIED = tries(15)


def limited(num_ranks: int, num_microbatches: int, limit: int) -> Schedule:
    return training_schedule("message-driven", num_ranks, num_microbatches, in_flight=limit)


def executed(trace: Trace, num_ranks: int) -> Schedule:
    """The forwards and backwards of a simulated step, in the order in which they ran."""
    ranks: list[list[str]] = [[] for _ in range(num_ranks)]
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        if span.stream == "compute":
            ranks[span.rank].append(span.what)
    return Schedule.of("executed", [ActionList.from_text(" ".join(actions)) for actions in ranks])


def assert_obeys(schedule: Schedule, limit: int, num_microbatches: int) -> None:
    """Each F and B once and in order, every F before its B, no deadlock, and no more than the limit in flight."""
    report = check(schedule)
    last = len(schedule.ranks) - 1
    for rank, actions in enumerate(schedule.ranks):
        for kind in (F, B):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(num_microbatches))
        assert report.ranks[rank].live_activations <= (1 if rank == last else min(limit, num_microbatches))


# --- the rule --------------------------------------------------------------------------------------------------------


def test_a_backward_that_is_ready_goes_first() -> None:
    progress = RankProgress(1, 3, 4, 4, activations=3, gradients=1, forwards=2)
    assert next_action(progress) == Action(1, B, 0)
    assert next_action(progress._replace(backwards=1)) == Action(1, F, 2)


def test_a_forward_waits_for_room() -> None:
    progress = RankProgress(0, 2, 4, 2, forwards=2)
    assert next_action(progress) is None
    assert next_action(progress.received(B)) == Action(0, B, 0)
    assert next_action(RankProgress(0, 2, 4, 2, gradients=1, forwards=2, backwards=1)) == Action(0, F, 2)


def test_a_rank_that_has_run_all_has_nothing_to_do() -> None:
    progress = RankProgress(1, 2, 1, 1, activations=1)
    for action in (Action(1, F, 0), Action(1, B, 0)):
        assert next_action(progress) == action
        progress = progress.after(action)
    assert progress.done
    assert next_action(progress) is None


@tries(50)
@given(RANKS, MICROBATCHES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_times_and_delays_end_in_a_schedule_that_obeys(p: int, m: int, limit: int, draws: random.Random) -> None:
    times: dict[Action, float] = {}

    def drawn(action: Action) -> float:
        return times.setdefault(action, draws.choice((0.1, 1.0, 1.0, 5.0)))

    ranks = ordered(p, m, limit, drawn, lambda action: draws.choice((0.0, 0.0, 0.5, 20.0)))
    assert Counter(map(len, ranks)) == {2 * m: p}
    schedule = Schedule.of("executed", ranks, num_stages=p)
    assert_obeys(schedule, limit, m)


@TRIED
@given(RANKS, MICROBATCHES, st.integers(1, 9), st.integers(1, 9))
def test_its_bubble_without_delays_is_that_of_1f1b(p: int, m: int, forward: int, backward: int) -> None:
    def cost(action: Action) -> float:
        return float(forward if action.kind is F else backward)

    ranks = ordered(p, m, most_in_flight(p), cost)
    times = run(Schedule.of("executed", ranks, num_stages=p), cost)
    assert max(end for each in times for _, end in each) == (m + p - 1) * (forward + backward)


@TRIED
@given(st.integers(2, 6), MICROBATCHES, st.integers(1, 9))
def test_memory_is_counted_for_the_most_that_may_be_in_flight(p: int, m: int, limit: int) -> None:
    schedule = limited(p, m, limit)
    worst = Schedule.of("worst", with_most_in_flight(schedule), num_stages=p)
    live = [rank.live_activations for rank in check(training_schedule("gpipe", p, m)).ranks]
    assert live == [m] * p
    for rank, memory in enumerate(peak_memory(work(p, saved_bytes=7), schedule)):
        most = 1 if rank == p - 1 else min(m, limit)
        assert memory.saved_bytes == 7 * most
        lives = [0]
        for action in worst.ranks[rank]:
            lives.append(lives[-1] + (action.kind is F) - (action.kind is B))
        assert max(lives) == most
        if limit == most_in_flight(p):
            assert in_flight(setup(pp=p, schedule="message-driven", global_batch=m), rank) == most


# --- in the simulator ------------------------------------------------------------------------------------------------


def played(schedule: Schedule, *, jitter: float = 0.0, seed: int = 0, **options: object) -> PlayedStep:
    p = len(schedule.ranks)
    faults = Faults(jitter=jitter, seed=seed)
    return play(schedule, work(p), Mesh.of(pp=p), FREE, faults=faults, **options)  # type: ignore[arg-type]


@TRIED
@given(st.integers(2, 6), MICROBATCHES, st.integers(1, 9))
def test_without_jitter_the_simulator_plays_the_order_of_the_rule(p: int, m: int, limit: int) -> None:
    schedule = limited(p, m, limit)
    alone = ordered(p, m, limit, lambda action: 1.0 if action.kind is F else 2.0)
    assert [*executed(played(schedule).trace(), p).ranks] == [ActionList(actions) for actions in alone]


@TRIED
@given(st.integers(2, 5), MICROBATCHES, st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_with_jitter_the_simulator_obeys_the_rule(p: int, m: int, limit: int, seed: int, contention: bool) -> None:
    network = cluster(8, alpha_s=0.1, beta_s_per_byte=1e-4)
    step = work(p, sent_up_bytes=3000, sent_down_bytes=3000)
    faults = Faults(jitter=0.5, seed=seed, slow={0: 1.5})
    step_of = play(limited(p, m, limit), step, Mesh.of(pp=p), network, faults=faults, contention=contention)
    assert_obeys(executed(step_of.trace(), p), limit, m)


def test_contention_changes_nothing_where_links_are_not_shared() -> None:
    network = cluster(8, alpha_s=0.25, beta_s_per_byte=1e-4)
    schedule, step = training_schedule("message-driven", 4, 8), work(4, sent_up_bytes=2500, sent_down_bytes=2500)
    faults = Faults(jitter=0.3)
    times = [
        play(schedule, step, Mesh.of(pp=4), network, faults=faults, contention=contention).step_s
        for contention in (False, True)
    ]
    assert times[0] == pytest.approx(times[1])


def mean_s(name: str, jitter: float, limit: int = 0) -> float:
    schedule = training_schedule(name, 4, 16, in_flight=limit)
    return sum(played(schedule, jitter=jitter, seed=seed).step_s for seed in range(40)) / 40


def test_jitter_costs_what_the_docs_say() -> None:
    """docs/theory.md: less than under 1f1b and gpipe with a limit of 2 p, and more with a limit of p."""
    text = (Path(__file__).parents[2] / "docs/theory.md").read_text()
    rows = [line.split() for line in text.splitlines() if re.fullmatch(r"0\.[0136]( +[0-9.]+){6}", line)]
    assert [row[0] for row in rows] == ["0.0", "0.1", "0.3", "0.6"]
    for row in rows[1:3]:
        jitter = float(row[0])
        means_s = [mean_s(name, jitter) for name in ("gpipe", "1f1b", "zb-h1")]
        means_s += [mean_s("message-driven", jitter, limit) for limit in (4, 8, 16)]
        assert means_s == pytest.approx([float(cell) for cell in row[1:]], abs=0.051)
        assert means_s[4] < 0.96 * means_s[1] < means_s[3]


def test_a_rank_that_dies_leaves_the_others_waiting_for_it() -> None:
    faults = Faults(deaths_s={1: 4.0})
    halted = play(training_schedule("message-driven", 3, 6), work(3), Mesh.of(pp=3), FREE, faults=faults).halted
    assert halted.keys() == {0, 2}
    assert halted[0].startswith("0RECV_B")
    assert halted[2].startswith("2RECV_F")


def test_replicas_decide_for_themselves() -> None:
    """A slow replica changes the order of its own pipeline alone; ranks that behave alike are simulated once."""
    mesh, schedule, faults = Mesh.of(pp=2, dp=4), training_schedule("message-driven", 2, 4), Faults(slow={0: 3.0})
    folded, whole = (play(schedule, work(2), mesh, FREE, faults=faults, fold=fold) for fold in (True, False))
    assert len(folded.timelines) == 4
    orders = {}
    for rank in range(mesh.world_size):
        spans = [(span.what, span.start_s) for span in folded.trace([rank]).spans if span.stream == "compute"]
        assert spans == [(span.what, span.start_s) for span in whole.trace([rank]).spans if span.stream == "compute"]
        orders[rank] = [what for what, _ in spans]
    assert orders[1] == orders[2] == orders[3] == ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"]
    assert orders[0] == ["0F0", "0F1", "0B0", "0B1", "0F2", "0F3", "0B2", "0B3"]


def test_collectives_in_a_micro_batch_are_refused() -> None:
    meeting = Communicate("sum", "all_reduce", "tp", 8)
    stage = StageWork(pieces={"F": (Compute("f", 1.0), meeting), "B": (Compute("b", 2.0),)})
    with pytest.raises(ScheduleError, match="`0F0 sum` is a collective over tp in every micro-batch"):
        play(training_schedule("message-driven", 2, 2), StepWork((stage, stage)), Mesh.of(pp=2, tp=2), FREE)


def test_stages_of_different_numbers_of_ranks_are_refused() -> None:
    mesh = Mesh.of_stages([{"dp": 1}, {"dp": 2}])
    with pytest.raises(ScheduleError, match="stages have different numbers of ranks, which meet in every micro-batch"):
        play(training_schedule("message-driven", 2, 2), work(2), mesh, FREE)


def test_setups_by_sizes_refuse_axes_that_meet_in_every_micro_batch() -> None:
    with pytest.raises(MeshwrightError, match="message-driven beside tp, cp, ep or zero 2 and 3"):
        setup(pp=2, tp=2, schedule="message-driven")


def test_built_schedules_say_their_limit() -> None:
    assert build("message-driven", 4, 8).in_flight == 8
    assert training_schedule("message-driven", 4, 8).in_flight == 8
    assert build("1f1b", 4, 8).in_flight == 0
    assert limited(4, 8, 5).in_flight == 5
    assert_obeys(
        Schedule.of("drawn", [[a for a in actions if a.kind.computes] for actions in limited(4, 8, 3).ranks]), 3, 8
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, in_flight=4),
        Layout(in_flight=4, schedule="message-driven"),
        Layout(pp=2, in_flight=-1, schedule="message-driven"),
    ],
)
def test_a_limit_without_the_rule_is_refused(layout: Layout) -> None:
    with pytest.raises(LayoutError, match=f"in_flight={layout.in_flight} with schedule '{layout.schedule}'"):
        layout.resolved(layout.pp)
