"""Pipeline schedules: closed forms, pictures, the passes, and the validator beside a simulation of all orders."""

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from meshwright.ir.pipeline import V_SHAPED, Pipeline
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules import picture
from meshwright.schedules.check import ScheduleReport, check
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import NAMES, build, forwards, least_microbatches
from meshwright.schedules.timing import Costs, run
from tests.tries import tries

GOLDEN = Path(__file__).parents[1] / "golden"

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 16)
CHUNKS = st.integers(1, 4)
RECEIVES = {ActionKind.RECV_F: (-1, ActionKind.SEND_F), ActionKind.RECV_B: (1, ActionKind.SEND_B)}
TRIED = tries(15)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that is defined, of up to 8 ranks, 4 chunks and 16 micro-batches."""
    name = draw(st.sampled_from(NAMES))
    num_ranks = 1 if name == "none" else draw(RANKS)
    num_chunks = draw(CHUNKS) if name == "interleaved" else 2 if name in V_SHAPED else 1
    num_microbatches = max(draw(MICROBATCHES), least_microbatches(name, num_ranks))
    if name == "interleaved" and num_chunks > 1 and not divides_into_rounds(num_ranks, num_microbatches):
        num_microbatches = num_ranks * draw(st.integers(1, 2))
    return build(name, num_ranks, num_microbatches, num_chunks)


def divides_into_rounds(num_ranks: int, num_microbatches: int) -> bool:
    rounds = num_microbatches // num_ranks
    return rounds > 0 and num_microbatches % rounds == 0


def complete(schedule: Schedule) -> Schedule:
    return add_reduction(add_communication(schedule))


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule.ranks]


# ------------------------------------------------------------------------------------------------------- closed forms


@TRIED
@given(schedules())
def test_every_schedule_can_run_and_communication_costs_no_time(schedule: Schedule) -> None:
    alone, whole = check(schedule), check(complete(schedule))
    assert (alone.bubble, alone.duration, alone.borders) == (whole.bubble, whole.duration, whole.borders)
    assert [rank.live_activations for rank in alone.ranks] == [rank.live_activations for rank in whole.ranks]


@TRIED
@given(RANKS, MICROBATCHES, st.sampled_from(["gpipe", "1f1b", "message-driven"]))
def test_bubble_of_gpipe_1f1b_and_message_driven(p: int, m: int, name: str) -> None:
    report = check(build(name, p, m))
    assert report.bubble == pytest.approx((p - 1) / m, abs=1e-12)
    assert [rank.bubble for rank in report.ranks] == pytest.approx([(p - 1) / m] * p, abs=1e-12)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, v: int) -> None:
    for m in range(1, 17):
        if v == 1 or divides_into_rounds(p, m):
            assert check(build("interleaved", p, m, v)).bubble == pytest.approx((p - 1) / (v * m), abs=1e-12)


@TRIED
@given(RANKS, st.integers(0, 8))
def test_zero_bubble_h1_keeps_p_micro_batches_and_a_third_of_the_bubble(p: int, more: int) -> None:
    report = check(build("zb-h1", p, p + more))
    assert report.bubble == pytest.approx((p - 1) / (3 * (p + more)), abs=1e-12)
    assert [rank.live_microbatches for rank in report.ranks] == [p] * p


@TRIED
@given(RANKS, st.integers(0, 8))
def test_zero_bubble_h2_waits_only_before_its_first_action_and_after_its_last(p: int, more: int) -> None:
    report = check(build("zb-h2", p, m := 2 * p - 1 + more))
    assert [rank.gaps for rank in report.ranks] == [0] * p
    assert [rank.times[0][0] for rank in report.ranks] == list(range(p))
    assert report.bubble == pytest.approx((p - 1) / (3 * m), abs=1e-12)
    assert [rank.live_microbatches for rank in report.ranks] == [2 * p - 1] * p


@TRIED
@given(RANKS, st.integers(0, 8))
def test_zero_bubble_v_does_so_with_half_the_wait_and_the_memory_of_1f1b(p: int, more: int) -> None:
    report = check(build("zb-v", p, m := 2 * p - 1 + more, 2))
    assert [rank.gaps for rank in report.ranks] == [0] * p
    assert [rank.times[0][0] for rank in report.ranks] == [rank / 2 for rank in range(p)]
    assert report.bubble == pytest.approx((p - 1) / (6 * m), abs=1e-12)
    assert [rank.live_microbatches for rank in report.ranks] == [p] * p


@TRIED
@given(RANKS, st.integers(0, 8))
def test_dual_pipe_v_keeps_one_chunk_more_and_waits_as_long(p: int, more: int) -> None:
    report = check(build("dualpipe-v", p, m := 2 * p + more, 2))
    assert [rank.gaps for rank in report.ranks] == pytest.approx([(p - 1 - r) / (6 * m) for r in range(p)], abs=1e-12)
    assert report.bubble == pytest.approx((p - 1) / (6 * m), abs=1e-12)
    assert [rank.live_microbatches for rank in report.ranks] == [p + 1 / 2] * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("together", [9, 12, 16])
def test_dual_pipe_v_has_the_published_bubble_if_a_forward_and_a_backward_are_one_pass(p: int, together: int) -> None:
    """(p - 1) (F&B + B - 3 W), of passes of one chunk (DeepSeek's DualPipe, table of bubbles, for PP = 2 p). Values of
    an F&B are there at its end. If F and B run one after the other in it, all ranks wait equally long."""
    schedule = build("dualpipe-v", p, 2 * p + 3, 2)
    paired: dict[Action, float] = {}
    for actions in schedule.ranks:
        for action, following in itertools.pairwise(actions):
            if (action.kind, following.kind) == (ActionKind.F, ActionKind.B):
                paired |= {action: together, following: 0}
    alone = {"F": 4, "B": 8, "I": 4, "W": 4}
    ends = run(schedule, lambda action: paired.get(action, alone[action.kind.value]))
    duration = max(times[-1][1] for times in ends)
    idle = [duration - sum(end - start for start, end in times) for times in ends]
    assert idle[-1] == (p - 1) * (together + 8 - 3 * 4)
    if together == 4 + 8:
        assert idle == [idle[-1]] * p


@TRIED
@given(RANKS, st.integers(0, 8), *[st.integers(1, 9)] * 3)
def test_more_memory_makes_zero_bubble_schedules_faster(p: int, more: int, f: int, i: int, w: int) -> None:
    """The search takes zb-h2 for its time alone, and zb-h1 and 1f1b for their memory."""
    costs, m = Costs(forward=f, backward=i + w, backward_input=i, backward_weight=w), 2 * p - 1 + more
    eager, h1, h2 = (check(build(name, p, m), costs).duration for name in ("1f1b", "zb-h1", "zb-h2"))
    assert m * (f + i + w) + (p - 1) * f <= h2 <= h1 <= eager


def test_stages_of_a_v_come_back() -> None:
    assert [rank.stages for rank in check(build("zb-v", 3, 5, 2)).ranks] == [(0, 5), (1, 4), (2, 3)]
    assert [rank.stages for rank in check(build("interleaved", 3, 6, 2)).ranks] == [(0, 3), (1, 4), (2, 5)]
    assert [rank.sent_per_microbatch for rank in check(build("zb-v", 3, 5, 2)).ranks] == [2, 4, 2]


@TRIED
@given(schedules())
def test_stages_lie_where_the_pipeline_says(schedule: Schedule) -> None:
    pipeline = Pipeline(len(schedule.ranks), schedule.name, schedule.num_chunks)
    assert schedule.homes == {stage: pipeline.rank_of(stage) for stage in range(schedule.num_stages)}
    assert [rank.stages for rank in check(schedule).ranks] == [*map(pipeline.stages_of, range(pipeline.num_ranks))]
    assert pipeline.last_rank == schedule.homes[pipeline.num_stages - 1]


@TRIED
@given(RANKS, MICROBATCHES)
def test_live_micro_batches_of_gpipe_and_1f1b(p: int, m: int) -> None:
    assert [rank.live_microbatches for rank in check(build("gpipe", p, m)).ranks] == [m] * p
    assert [rank.live_microbatches for rank in check(build("1f1b", p, m)).ranks] == [
        min(m, p - rank) for rank in range(p)
    ]


@TRIED
@given(RANKS, st.integers(2, 4), st.integers(2, 3))
def test_live_micro_batches_of_interleaved(p: int, v: int, rounds: int) -> None:
    report = check(build("interleaved", p, rounds * p, v))
    assert report.live_microbatches == pytest.approx(p + (p - 1) / v)  # p·(1 + (p-1)/(p·v)), Narayanan et al. 2021
    expected = [(v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p)]
    assert [rank.live_activations for rank in report.ranks] == expected


@TRIED
@given(RANKS, MICROBATCHES, st.integers(1, 9), st.integers(1, 9))
def test_bubble_does_not_depend_on_the_costs(p: int, m: int, forward: int, backward: int) -> None:
    costs = Costs(forward=forward / 4, backward=backward / 4)
    for name in ("gpipe", "1f1b"):
        report = check(build(name, p, m), costs)
        assert report.bubble == pytest.approx((p - 1) / m)
        assert report.duration == pytest.approx((m + p - 1) * (forward + backward) / 4)


def test_one_rank_accumulates_gradients() -> None:
    assert complete(build("none", 1, 3)).to_text() == "0F0 0B0 0F1 0B1 0F2 0B2 0REDUCE_GRAD\n"
    assert build("1f1b", 1, 3).ranks == build("none", 1, 3).ranks
    report = check(build("none", 1, 3))
    assert (report.bubble, report.live_microbatches, report.borders) == (0, 1, ())


def test_chunks_of_one_rank_need_no_sends() -> None:
    schedule = add_communication(build("interleaved", 1, 2, 2))
    assert schedule.to_text() == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1\n"
    (rank,) = check(schedule).ranks
    assert (rank.stages, rank.sent_per_microbatch) == ((0, 1), 0)


@TRIED
@given(schedules())
def test_sends_of_a_micro_batch_are_those_that_stand_in_the_schedule(schedule: Schedule) -> None:
    sends = (ActionKind.SEND_F, ActionKind.SEND_B)
    for actions, rank in zip(complete(schedule).ranks, check(schedule).ranks, strict=True):
        counts = Counter(action.microbatch for action in actions if action.kind in sends)
        assert [counts[microbatch] for microbatch in range(schedule.num_microbatches)] == (
            [rank.sent_per_microbatch] * schedule.num_microbatches
        )


def test_sends_grow_with_the_chunks() -> None:
    assert [rank.sent_per_microbatch for rank in check(build("1f1b", 4, 8)).ranks] == [1, 2, 2, 1]
    assert [rank.sent_per_microbatch for rank in check(build("interleaved", 4, 8, 2)).ranks] == [3, 4, 4, 3]
    (border,) = check(build("1f1b", 2, 2)).borders
    assert (border.stage, border.rank, border.next_rank, border.activations, border.gradients) == (0, 0, 1, 1, 1)


# ------------------------------------------------------------------------------------------------------------- passes


def test_communication_stands_where_values_are_made_and_come() -> None:
    assert complete(build("1f1b", 2, 3)).to_text() == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD\n"
    )
    assert complete(build("zb-h1", 2, 2)).to_text() == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1 0REDUCE_GRAD\n"
        "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 1REDUCE_GRAD\n"
    )


@TRIED
@given(schedules())
def test_passes_keep_the_computing_and_may_change_places(schedule: Schedule) -> None:
    complete_schedule = complete(schedule)
    assert complete_schedule == add_communication(add_reduction(schedule))
    assert [[action for action in actions if action.kind.computes] for actions in complete_schedule.ranks] == [
        *map(list, schedule.ranks)
    ]


@TRIED
@given(schedules())
def test_a_rank_receives_in_the_order_in_which_another_sends(schedule: Schedule) -> None:
    with_messages = add_communication(schedule)
    rank_of = {action.stage: rank for rank, actions in enumerate(with_messages.ranks) for action in actions}
    for sender, actions in enumerate(with_messages.ranks):
        for receiver, others in enumerate(with_messages.ranks):
            sent = [action for action in actions if action.kind.transfers and action.kind not in RECEIVES]
            to = [
                action
                for action in sent
                if rank_of[action.stage + (1 if action.kind is ActionKind.SEND_F else -1)] == receiver
            ]
            come = [other for other in others if other.kind in RECEIVES and rank_of[partner(other).stage] == sender]
            assert to == [partner(action) for action in come]


def partner(receive: Action) -> Action:
    step, kind = RECEIVES[receive.kind]
    return Action(receive.stage + step, kind, receive.microbatch)


@TRIED
@given(st.integers(2, 8), MICROBATCHES, CHUNKS, st.sampled_from(["interleaved", "zb-v", "dualpipe-v"]))
def test_forwards_alone_run_for_any_number_of_microbatches(p: int, m: int, v: int, name: str) -> None:
    """Each once, without deadlock, and between two ranks what is sent first is received first."""
    v = 2 if name in V_SHAPED else v
    pipeline = Pipeline(p, name, v)
    schedule = forwards(pipeline, m)
    assert [len(times) for times in run(schedule, Costs())] == [len(actions) for actions in schedule.ranks]
    computed = Counter(action for actions in schedule.ranks for action in actions if action.kind is ActionKind.F)
    assert computed == Counter(
        Action(stage, ActionKind.F, microbatch) for stage in range(p * v) for microbatch in range(m)
    )
    assert schedule.homes == {stage: pipeline.rank_of(stage) for stage in range(p * v)}
    sent: dict[tuple[int, int], list[tuple[int, int | None]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, int | None]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind is ActionKind.SEND_F:
                sent[rank, pipeline.rank_of(action.stage + 1)].append((action.stage + 1, action.microbatch))
            elif action.kind is ActionKind.RECV_F:
                received[pipeline.rank_of(action.stage - 1), rank].append((action.stage, action.microbatch))
    assert received == sent
    assert all(sender != receiver for sender, receiver in sent)


def test_passes_are_for_schedules_that_do_not_have_it_yet() -> None:
    schedule = complete(build("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match=r"^rank 0, position 1: `0SEND_F0`: the schedule communicates already\n"):
        add_communication(schedule)
    with pytest.raises(
        ScheduleError, match=r"^rank 0, position 8: `0REDUCE_GRAD`: the schedule reduces gradients alre"
    ):
        add_reduction(schedule)


# ----------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zb-v", 2),
        ("dualpipe-v", 2),
        ("message-driven", 1),
    ],
    ids=lambda value: str(value),
)
def test_pictures(name: str, num_chunks: int) -> None:
    schedule = build(name, 4, 8, num_chunks)
    drawn = picture.timeline(schedule, times(check(schedule)))
    assert drawn == (GOLDEN / f"schedule_{name}.txt").read_text(encoding="utf-8")
    assert picture.timeline(complete(schedule), times(check(complete(schedule)))) == drawn


def times(report: ScheduleReport) -> tuple[tuple[tuple[float, float], ...], ...]:
    return tuple(rank.times for rank in report.ranks)


@TRIED
@given(schedules(), st.sampled_from([Costs(), Costs(backward=1.7), Costs(forward=3, backward_input=2)]))
def test_pictures_fit_on_a_page_and_show_every_action(schedule: Schedule, costs: Costs) -> None:
    drawn = picture.timeline(schedule, times(check(schedule, costs)))
    assert max(map(len, drawn.splitlines())) <= picture.WIDTH
    with_stage = schedule.num_chunks > 1
    for rank, actions in enumerate(schedule.ranks):
        row = "".join(
            line[len(f"rank {rank}  ") :] + " " for line in drawn.splitlines() if line.startswith(f"rank {rank} ")
        )
        cells = [cell.rstrip("-") for cell in row.split() if cell.strip("-.")]
        assert cells == [
            str(action) if with_stage else str(action).removeprefix(str(action.stage)) for action in actions
        ]


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f2b", 2, 2),
            "schedule: there is no schedule '1f2b'\n  -> did you mean `1f1b`? schedules: none, gpipe, 1f1b",
        ),
        (("gpipe", 0, 2), "schedule gpipe: num_ranks is 0\n  -> give 1 or more"),
        (("gpipe", 2, 0), "schedule gpipe: num_microbatches is 0\n  -> give 1 or more"),
        (
            ("gpipe", 2, 2, 2),
            "schedule gpipe: gpipe has one chunk a rank, and 2 are asked for\n  -> take `interleaved`",
        ),
        (
            ("none", 2, 2),
            "schedule none: without a pipeline there is 1 rank, and 2 are asked for\n  -> take `1f1b`, or 1",
        ),
        (
            ("interleaved", 4, 2, 2),
            (
                "schedule interleaved: num_microbatches is 2, too few for 4 ranks\n"
                "  -> use 4, or any multiple of 4; `1f1b` takes any number"
            ),
        ),
        (
            ("interleaved", 4, 9, 2),
            (
                "schedule interleaved: num_microbatches is 9, which does not divide into equal rounds on 4 ranks\n"
                "  -> use 8 or 10, or any multiple of 4"
            ),
        ),
        (
            ("zb-h1", 4, 3),
            "schedule zb-h1: num_microbatches is 3, too few for 4 ranks\n  -> use 4 or more; `1f1b` takes any number",
        ),
        (
            ("zb-h2", 4, 6),
            "schedule zb-h2: num_microbatches is 6, too few for 4 ranks\n  -> use 7 or more; `1f1b` takes any number",
        ),
        (
            ("zb-h2", 4, 8, 2),
            "schedule zb-h2: zb-h2 has one chunk a rank, and 2 are asked for\n  -> take `interleaved`",
        ),
        (
            ("zb-v", 4, 1, 2),
            "schedule zb-v: num_microbatches is 1, too few for 4 ranks\n  -> use 7 or more; `1f1b` takes any number",
        ),
        (("zb-v", 4, 8), "schedule zb-v: zb-v has two chunks a rank, and 1 are asked for\n  -> take 2 chunks"),
        (
            ("dualpipe-v", 4, 7, 2),
            "schedule dualpipe-v: num_microbatches is 7, too few for 4 ranks\n  -> use 8 or more; `1f1b` takes any",
        ),
        (
            ("dualpipe-v", 4, 8, 3),
            "schedule dualpipe-v: dualpipe-v has two chunks a rank, and 3 are asked for\n  -> take 2 chunks",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(*arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("v", [2, 3])
def test_an_error_says_which_numbers_of_micro_batches_work(v: int) -> None:
    for p in range(2, 9):
        for m in range(1, 3 * p):
            if not divides_into_rounds(p, m):
                with pytest.raises(ScheduleError) as caught:
                    build("interleaved", p, m, v)
                numbers = caught.value.remedy.partition(",")[0].removeprefix("use ").split(" or ")
                assert all(check(build("interleaved", p, int(number), v)) for number in numbers)


DEADLOCK = """\
0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1
1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


def test_a_deadlock_is_told_with_its_cycle() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.from_text(DEADLOCK, name="deadlock"))
    assert f"{caught.value}\n" == (GOLDEN / "schedule_deadlock.txt").read_text(encoding="utf-8")


def test_a_cycle_is_told_without_the_ranks_that_only_wait_for_it() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1\n3F1 3F0 3B0 3B1"
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.from_text(text, name="crossed"))
    assert str(caught.value).startswith(
        "rank 2, position 1: deadlock: rank 2 waits at `2B0` for `3B0` of rank 3, which waits at `3F1` for `2F1` of "
        "rank 2\n"
    )
    assert caught.value.remedy == (
        "break the circle: rank 2, for one, must come to `2F1` (position 2) before it waits at `2B0`"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0B0 0F0",
            "rank 0, position 0: `0B0` needs `0F0` before it, which stands at position 1\n\n  rank 0: >0B0< 0F0\n",
        ),
        ("0F0 0F0 0B0", "rank 0, position 1: `0F0` stands at position 0 already\n"),
        ("0F0 1B0\n1F0 0B0", "rank 1, position 0: `1F0`: stage 1 is on rank 0 too\n"),
        ("0F0 0B0\n2F0 2B0", "schedule: stage 1 is on no rank\n"),
        ("0F0 0B0\n\n1F0 1B0", "rank 1: it computes nothing\n"),
        ("0F0 0B0 0F1", "rank 0, position 3: `0B1` is missing\n\n  rank 0:  0F0  0B0  0F1 >?<\n"),
        ("0F0 0I0", "rank 0, position 2: `0W0` is missing\n"),
        ("0F0 0W0 0I0", "rank 0, position 1: `0W0` needs `0I0` before it, which stands at position 2\n"),
        ("0F0 0B0 0I0 0W0", "rank 0, position 1: `0B0`, and `0I0` of the same backward\n"),
        ("0F0 1F0 0B0 1B0", "rank 0, position 2: `0B0` needs `1B0` before it, which stands at position 3\n"),
        ("0F0 0SEND_F0 0B0", "rank 0, position 1: `0SEND_F0` has no other rank to meet: there is no stage 1\n"),
        (
            "0F0 0SEND_F0 1F0 1B0 0B0",
            "rank 0, position 1: `0SEND_F0` has no other rank to meet: stage 1 is on this rank",
        ),
        (
            "0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0",
            "rank 0, position 2: `0B0` needs `0RECV_B0` before it, which is nowhere\n",
        ),
        (
            "0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            "rank 1, position 0: `1RECV_F0` has no `0SEND_F0` on rank 0\n",
        ),
        (
            "0F0 0REDUCE_GRAD 0B0",
            "rank 0, position 1: `0REDUCE_GRAD` needs `0B0` before it, which stands at position 2\n",
        ),
        ("0F0 0B0 0REDUCE_GRAD\n1F0 1B0", "rank 1, position 2: `1REDUCE_GRAD` is missing\n"),
    ],
)
def test_what_cannot_run_is_refused_with_rank_position_and_action(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.from_text(text, name="faulty"))
    assert str(caught.value).startswith(message)
    assert caught.value.remedy


def test_long_schedules_are_drawn_around_the_fault() -> None:
    schedule = build("1f1b", 3, 40)
    lists = [list(actions) for actions in schedule.ranks]
    lists[1].append(lists[1].pop(lists[1].index(Action(1, ActionKind.F, 30))))
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.of("late", lists))
    rows = [line for line in str(caught.value).splitlines() if line.startswith("  rank ")]
    assert len(rows) == 3
    assert max(map(len, rows)) <= picture.WIDTH
    assert [">1B30<" in row for row in rows] == [False, True, False]
    assert all(re.match(r"  rank [0-2], from [0-9]+: ", row) for row in rows)


@pytest.mark.parametrize("cost", [0.0, -1.0, float("inf"), float("nan")])
def test_costs_are_positive(cost: float) -> None:
    with pytest.raises(ScheduleError, match=r"^costs: backward_weight: backward_weight takes "):
        Costs(backward_weight=cost)


# -------------------------------------------------------------------------------- the validator beside brute force


def can_run(schedule: Schedule) -> bool:
    """The simplest thing that says so: ranks with memories of values, mailboxes, any rank that can move moves.

    Sends leave a value in a mailbox, receives wait for it. Without sends, values appear at the neighbour. The order in
    which ranks move does not matter, as nobody can take what another waits for; a shuffled one is tried.
    """
    explicit = any(action.kind.transfers for actions in schedule.ranks for action in actions)
    last = schedule.num_stages - 1
    has: list[set[tuple[str, int, int]]] = [set() for _ in schedule.ranks]
    mail: set[tuple[str, int, int]] = set()
    used: Counter[Action] = Counter()
    homes: dict[int, int] = {}
    queues = [list(actions) for actions in schedule.ranks]
    for rank, queue in enumerate(queues):
        for action in queue:
            if homes.setdefault(action.stage, rank) != rank:
                return False
    if len(homes) != schedule.num_stages or not all(queues):
        return False

    def at_hand(rank: int, value: tuple[str, int, int], origin: int) -> bool:
        return value in has[rank] or (not explicit and origin in homes and value in has[homes[origin]])

    def step(rank: int, action: Action) -> bool | None:
        """Whether the action could run; None: it waits."""
        kind, s, m = action.kind.value, action.stage, action.microbatch
        if m is None:
            done = {earlier.microbatch for earlier in used if earlier.stage == s and earlier.kind.value in "BW"}
            return len(done) == schedule.num_microbatches
        needs = {
            "F": [] if s == 0 else [("x", s, m)],
            "B": [("kept", s, m), *([] if s == last else [("g", s, m)])],
            "I": [("kept", s, m), *([] if s == last else [("g", s, m)])],
            "W": [("half", s, m)],
            "SEND_F": [("x", s + 1, m)],
            "SEND_B": [("g", s - 1, m)],
        }
        if kind in ("RECV_F", "RECV_B"):
            value = ("x" if kind == "RECV_F" else "g", s, m)
            origin = s - 1 if kind == "RECV_F" else s + 1
            if homes.get(origin, rank) == rank:
                return False
            if value in mail:
                mail.remove(value)
                has[rank].add(value)
                return True
            return None
        if kind in ("SEND_F", "SEND_B"):
            (value,) = needs[kind]
            target = s + 1 if kind == "SEND_F" else s - 1
            if homes.get(target, rank) == rank or value not in has[rank]:
                return False
            mail.add(value)
            return True
        for value in needs[kind]:
            origin = s - 1 if value[0] == "x" else s + 1 if value[0] == "g" else s
            if not at_hand(rank, value, origin):
                return None if not explicit and homes[origin] != rank else False
        if kind == "F":
            has[rank] |= {("kept", s, m), ("x", s + 1, m)}
        else:
            has[rank] -= {("kept", s, m)} if kind in "BI" else {("half", s, m)}
            has[rank] |= {("g", s - 1, m)} if kind in "BI" else set()
            has[rank] |= {("half", s, m)} if kind == "I" else set()
        return True

    while any(queues):
        moved = False
        for rank in random.Random(0).sample(range(len(queues)), len(queues)):
            while queues[rank]:
                result = step(rank, queues[rank][0])
                if result is False:
                    return False
                if result is None:
                    break
                used[queues[rank].pop(0)] += 1
                moved = True
        if not moved:
            return False
    forwards = {(action.stage, action.microbatch) for action in used if action.kind is ActionKind.F}
    backwards = {(action.stage, action.microbatch) for action in used if action.kind in (ActionKind.B, ActionKind.W)}
    reductions = {action.stage for action in used if action.kind is ActionKind.REDUCE_GRAD}
    every = {
        (stage, microbatch) for stage in range(schedule.num_stages) for microbatch in range(schedule.num_microbatches)
    }
    halves = any(name == "half" for values in has for name, _, _ in values)
    return (
        forwards == backwards == every
        and not mail
        and not halves
        and max(used.values()) == 1
        and len(reductions) in (0, schedule.num_stages)
    )


def mutations(schedule: Schedule) -> Iterator[Schedule]:
    """Every schedule with one action dropped, doubled, or swapped with another of its rank or of the next."""
    lists = [list(actions) for actions in schedule.ranks]

    def with_lists(changed: list[list[Action]]) -> Schedule:
        return Schedule.of(
            "mutated", changed, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches
        )

    for rank, actions in enumerate(lists):
        for at in range(len(actions)):
            rest = [*lists[:rank], actions[:at] + actions[at + 1 :], *lists[rank + 1 :]]
            yield with_lists(rest)
            yield with_lists([*lists[:rank], [*actions[: at + 1], *actions[at:]], *lists[rank + 1 :]])
            for other in range(at + 1, len(actions)):
                swapped = list(actions)
                swapped[at], swapped[other] = swapped[other], swapped[at]
                yield with_lists([*lists[:rank], swapped, *lists[rank + 1 :]])
            if rank + 1 < len(lists):
                for other in range(len(lists[rank + 1])):
                    both = [list(queue) for queue in lists]
                    both[rank][at], both[rank + 1][other] = both[rank + 1][other], both[rank][at]
                    yield with_lists(both)


TINY = [
    ("gpipe", 2, 2, 1), ("1f1b", 2, 2, 1), ("1f1b", 3, 2, 1), ("zb-h1", 2, 2, 1), ("interleaved", 2, 2, 2),
    ("zb-v", 2, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["computing", "communicating"])
@pytest.mark.parametrize("arguments", TINY, ids=lambda arguments: f"{arguments[0]}-{arguments[1]}")
def test_mutated_schedules_are_refused_unless_they_still_run(arguments: tuple[str, int, int, int], whole: bool) -> None:
    schedule = build(*arguments)
    schedule = complete(schedule) if whole else schedule
    assert can_run(schedule)
    verdicts: Counter[bool] = Counter()
    for mutated in mutations(schedule):
        try:
            check(mutated)
            accepted = True
        except ScheduleError:
            accepted = False
        assert accepted == can_run(mutated), texts(mutated)
        verdicts[accepted] += 1
    assert min(verdicts[False], verdicts[True]) > 0


@TRIED
@given(st.data())
def test_shuffled_schedules_are_refused_unless_they_still_run(data: st.DataObject) -> None:
    schedule = complete(build(*data.draw(st.sampled_from(TINY))))
    lists = [list(actions) for actions in schedule.ranks]
    for _ in range(data.draw(st.integers(1, 4))):
        actions = data.draw(st.sampled_from(lists))
        at, to = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions.insert(to, actions.pop(at))
    mutated = Schedule.of("shuffled", lists)
    if can_run(mutated):
        check(mutated)
    else:
        with pytest.raises(ScheduleError):
            check(mutated)
