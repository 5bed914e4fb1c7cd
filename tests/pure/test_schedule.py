"""The schedule: the text form of actions, files, and errors that name rank and position."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FileFormatError, ScheduleError
from meshwright.ir import files
from meshwright.ir.schedule import Action, ActionKind, ActionList, Schedule

ONE_F_ONE_B = """\
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD
"""

ACTIONS = st.builds(
    lambda stage, kind, microbatch: Action(stage, kind, microbatch if kind.has_microbatch else None),
    st.integers(0, 99),
    st.sampled_from(ActionKind),
    st.integers(0, 99),
)
SCHEDULES = st.lists(st.lists(ACTIONS, max_size=6), max_size=5).map(lambda ranks: Schedule.of("any", ranks))


def test_actions_are_written_as_in_pytorch() -> None:
    assert str(Action(2, ActionKind.F, 0)) == "2F0"
    assert str(Action(2, ActionKind.I, 0)) == "2I0"
    assert str(Action(2, ActionKind.W, 10)) == "2W10"
    assert str(Action(12, ActionKind.B, 3)) == "12B3"
    assert str(Action(1, ActionKind.SEND_F, 0)) == "1SEND_F0"
    assert str(Action(3, ActionKind.REDUCE_GRAD)) == "3REDUCE_GRAD"


@given(ACTIONS)
def test_an_action_computes_or_transfers_or_is_for_the_whole_step(action: Action) -> None:
    assert [action.kind.computes, action.kind.transfers, not action.kind.has_microbatch].count(True) == 1


@given(ACTIONS)
def test_an_action_is_read_as_it_was_written(action: Action) -> None:
    assert Action.from_text(str(action)) == action


@pytest.mark.parametrize("separator", [" ", ","])
@given(schedule=SCHEDULES)
def test_a_schedule_is_read_as_it_was_written_as_text(separator: str, schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text(separator), name="any") == schedule


@given(SCHEDULES)
def test_a_schedule_is_read_as_it_was_written_as_json(schedule: Schedule) -> None:
    assert files.decode(files.encode_json(schedule), Schedule, where="any.json") == schedule


def test_json_holds_one_string_for_each_rank() -> None:
    assert files.encode_json(Schedule.from_text("0F0 0B0\n1F0 1B0", name="tiny")).decode() == (
        "{\n"
        ' "version": 1,\n'
        ' "name": "tiny",\n'
        ' "num_stages": 2,\n'
        ' "num_microbatches": 1,\n'
        ' "num_chunks": 1,\n'
        ' "in_flight": 0,\n'
        ' "ranks": ["0F0 0B0", "1F0 1B0"]\n'
        "}\n"
    )


def test_counts_that_are_not_given_are_read_from_the_actions() -> None:
    schedule = Schedule.from_text(ONE_F_ONE_B, name="1f1b")
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (2, 2, 1)
    assert Schedule.from_text("0F0 2F0\n1F0 3F0", name="interleaved").num_chunks == 2


def test_a_rank_is_a_sequence_of_actions() -> None:
    first, second = Schedule.from_text(ONE_F_ONE_B, name="1f1b").ranks
    assert len(first) == 9
    assert first[0] == Action(0, ActionKind.F, 0)
    assert [action.microbatch for action in second if action.kind is ActionKind.B] == [0, 1]
    assert [str(action) for action in second if action.kind.computes] == ["1F0", "1B0", "1F1", "1B1"]
    assert first == ActionList(first)
    assert hash(first) == hash(ActionList(first))


def test_idle_cells_of_a_csv_are_left_out() -> None:
    assert Schedule.from_text("0F0,,0B0\n,1F0,1B0,", name="csv").to_text() == "0F0 0B0\n1F0 1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0 0B0\n1F0 1X0",
            (
                "rank 1, position 1: `1X0` is not an action\n  -> write stage, kind, micro-batch, as in `2F0`; "
                "kinds: F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD"
            ),
        ),
        ("0F0 0B", "rank 0, position 1: `0B` needs a micro-batch\n  -> write `0B0`"),
        ("2REDUCE_GRAD1", "rank 0, position 0: `2REDUCE_GRAD1` has no micro-batch\n  -> write `2REDUCE_GRAD`"),
    ],
)
def test_bad_text_is_named_with_rank_and_position(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_text(text, name="bad")
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "F0", "0f0", "-1F0", "0F0x", "0F 0", "0OVERLAP_F_B", "(0F0;1B0)OVERLAP_F_B"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.from_text(text)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            '["0F0 4F0"]',
            (
                "s.json: rank 0, position 1: `4F0`: there is no stage 4\n"
                "  -> this schedule has 2, counted from 0; correct the action or the count"
            ),
        ),
        (
            '["0F0", "1F0 1B3"]',
            (
                "s.json: rank 1, position 1: `1B3`: there is no micro-batch 3\n"
                "  -> this schedule has 2, counted from 0; correct the action or the count"
            ),
        ),
        ('["0F0", "1F0 1B"]', "s.json: ranks[1], position 1: `1B` needs a micro-batch\n  -> write `1B0`"),
    ],
)
def test_a_bad_file_is_named_with_rank_and_position(ranks: str, message: str) -> None:
    text = f'{{"name": "s", "num_stages": 2, "num_microbatches": 2, "ranks": {ranks}}}'
    with pytest.raises(ScheduleError) as caught:
        files.decode(text.encode(), Schedule, where="s.json")
    assert str(caught.value) == message


def test_a_schedule_without_stages_or_with_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"^num_chunks: num_chunks is 0\n  -> give 1 or more$"):
        Schedule.of("none", [], num_chunks=0)
    (tmp_path / "new.json").write_text('{"version": 2, "name": "s"}')
    with pytest.raises(FileFormatError, match=r"new.json: version: version is 2, this Meshwright reads version 1"):
        files.load(tmp_path / "new.json", Schedule)
