"""Who is to blame when ranks wait: told from what their flight recorders hold, and compared with runs of programs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.flight import Condition, Event, Flight, FlightGroup, Notes, Seen, ranks_of, ranks_text
from meshwright.ir.hang import Hang, explain

NOW_S = 100.0


@dataclass
class Rank:
    """A rank that is described by hand."""

    number: int
    events: list[Event] = field(default_factory=list)
    groups: dict[str, FlightGroup] = field(default_factory=dict)
    condition: Condition = "runs"
    ended_s: float = 0.0
    ending: str = ""
    box: str = "here"
    notes: Notes = field(default_factory=Notes)

    def does(
        self, group: str, ranks: tuple[int, ...], what: str = "all_reduce", *, waits: float = 0.0, done: float = 0.0,
        sequence: int = 0, signature: int = 0,
    ) -> Rank:  # fmt: skip
        known = self.groups.get(group, FlightGroup(name=group, ranks=ranks))
        sequence = sequence or known.begun + 1
        self.groups[group] = FlightGroup(name=group, ranks=ranks, begun=sequence)
        self.events.append(
            Event(
                number=len(self.events) + 1, group=group, sequence=sequence, what=f"{what} ({group})", begun_s=1.0,
                waits_s=waits, done_s=done, signature=signature or hash(what) % 1000 + 1,
            )
        )  # fmt: skip
        return self

    @property
    def seen(self) -> Seen:
        return Seen(
            Flight(
                rank=self.number, num_ranks=4, process=1000 + self.number, host="host", box=self.box, now_s=NOW_S,
                day_s=0.0, beat_s=NOW_S, ended_s=self.ended_s, ending=self.ending, groups=self.groups,
                events=tuple(self.events), notes=self.notes,
            ),
            self.condition,
        )  # fmt: skip


def hang_of(*ranks: Rank) -> Hang:
    hang = explain({rank.number: rank.seen for rank in ranks})
    assert hang is not None
    return hang


def waiting(number: int, *, others: tuple[int, ...] = (0, 1, 2), since: float = 90.0) -> Rank:
    return Rank(number).does("dp", others, waits=since)


def test_a_slow_rank_is_named_with_its_last_operation_and_its_stack() -> None:
    slow = Rank(2, notes=Notes(time_s=95.0, stack=("train.py:7 in load",))).does(
        "dp", (0, 1, 2), "broadcast", waits=1.0, done=40.0
    )
    others = [Rank(number).does("dp", (0, 1, 2), "broadcast", done=39.0) for number in (0, 1)]
    for rank in others:
        rank.does("dp", (0, 1, 2), waits=90.0)
    hang = hang_of(*others, slow)
    assert (hang.kind, hang.causes, hang.is_certain) == ("slow", (2,), False)
    assert hang.lines == (
        "rank 2: it runs, and has not communicated since 60.0 s; the last that it did was #1 broadcast (dp)",
        "  ranks 0 and 1 have waited 10.0 s for #2 all_reduce (dp); rank 2 has not begun it",
        "  rank 2 is at\n      train.py:7 in load",
    )


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("stopped", "its process is stopped by a signal (kill -CONT 1002 lets it go on)"),
        ("ended", "its process has ended"),
        ("silent", "it has given no sign of life for 0.0 s"),
    ],
)
def test_a_rank_that_cannot_come_is_told_from_a_slow_one(condition: Condition, problem: str) -> None:
    gone = Rank(2, condition=condition)
    hang = hang_of(waiting(0), waiting(1), gone)
    assert hang.kind == condition
    assert hang.causes == (2,)
    assert hang.problem.startswith(problem)


def test_the_rank_at_the_end_of_a_chain_is_the_cause() -> None:
    first = Rank(0).does("0>1", (0, 1)).does("1>0", (1, 0), "message", waits=90.0)
    second = Rank(1).does("2>1", (2, 1), "message", waits=80.0)
    hang = hang_of(first, second, Rank(2))
    assert hang.causes == (2,)
    assert [wait.missing for wait in hang.waits] == [(1,), (2,)]


def test_ranks_that_call_in_another_order_wait_in_a_circle() -> None:
    first = Rank(0).does("a", (0, 1), waits=90.0)
    second = Rank(1).does("b", (0, 1), waits=90.0)
    hang = hang_of(first, second, Rank(2))
    assert (hang.kind, hang.causes, hang.is_certain) == ("circle", (0, 1), True)
    assert hang.problem == (
        "they wait for each other in a circle: rank 0 waits for rank 1 in #1 all_reduce (a); rank 1 waits for rank 0 "
        "in #1 all_reduce (b)"
    )


def test_a_rank_that_takes_what_comes_first_is_in_no_circle() -> None:
    first = Rank(0).does("1>0", (1, 0), waits=90.0).does("2>0", (2, 0), waits=90.0)
    second = Rank(1).does("0>1", (0, 1), waits=90.0)
    assert hang_of(first, second, Rank(2)).causes == (2,)


def test_the_fewest_ranks_that_call_something_else_are_blamed() -> None:
    ranks = [waiting(0), waiting(1), Rank(2).does("dp", (0, 1, 2), "all_gather", waits=95.0)]
    hang = hang_of(*ranks)
    assert (hang.kind, hang.causes, hang.is_certain) == ("mismatch", (2,), True)
    assert hang.problem == "it is in #1 all_gather (dp), where ranks 0 and 1 are in #1 all_reduce (dp)"


@pytest.mark.parametrize("condition", ["ended", "stopped"])
def test_a_rank_that_cannot_go_on_is_the_cause_even_if_it_had_come(condition: Condition) -> None:
    hang = hang_of(waiting(0), waiting(1), Rank(2, condition=condition).does("dp", (0, 1, 2), waits=90.0))
    assert (hang.kind, hang.causes) == (condition, (2,))
    circle = Rank(0).does("a", (0, 1), waits=90.0), Rank(1, condition=condition).does("b", (0, 1), waits=90.0)
    hang = hang_of(*circle)
    assert (hang.kind, hang.causes) == (condition, (1,))


def test_what_a_rank_noted_before_it_went_on_is_not_told() -> None:
    old = Notes(time_s=10.0, stack=("train.py:7 in load",), pytorch=("PyTorch's recorder: group 0 #1: barrier",))
    slow = Rank(2, notes=old).does("dp", (0, 1, 2), "broadcast", waits=1.0, done=40.0)
    hang = hang_of(waiting(0).does("dp", (0, 1, 2), waits=90.0), slow)
    assert "train.py" not in "".join(hang.lines)
    assert "barrier" not in "".join(hang.lines)


def test_a_waiting_rank_is_shown_with_the_line_of_the_program_that_waits() -> None:
    frames = (
        "train.py:9 in main: meet()",
        "/x/site-packages/torch/d.py:1 in barrier",
        "/x/meshwright/comm/a.py:3 in b",
    )
    first = waiting(0)
    first.notes = Notes(time_s=91.0, stack=frames)
    assert "  rank 0 waits in train.py:9 in main: meet()" in hang_of(first, waiting(1), Rank(2)).lines


def test_a_rank_that_has_begun_and_computes_is_waited_for() -> None:
    hang = hang_of(waiting(0), waiting(1), Rank(2).does("dp", (0, 1, 2)))
    assert (hang.kind, hang.causes) == ("slow", (2,))
    assert "rank 2 has begun it and does something else" in hang.lines[1]


@pytest.mark.parametrize(("boxes", "where"), [("one", "of this host"), ("two", "between host")])
def test_links_are_blamed_when_all_have_come(boxes: str, where: str) -> None:
    ranks = [waiting(0), waiting(1), waiting(2)]
    ranks[2].box = "here" if boxes == "one" else "there"
    hang = hang_of(*ranks)
    assert hang.kind == "link"
    assert hang.problem.endswith(f"does not arrive: look at the links {where}")


def test_what_ranks_waited_for_when_they_ended_stays_known() -> None:
    failed = Rank(0, condition="ended", ended_s=95.0, ending="it has failed").does("dp", (0, 1), waits=90.0, done=-94.0)
    hang = hang_of(failed, Rank(1, condition="ended", ended_s=97.0, ending="it has left"))
    assert (hang.kind, hang.causes) == ("ended", (1,))
    assert hang.problem == "its process has ended: it has left"
    assert "rank 0 has waited 4.0 s for #1 all_reduce (dp); rank 1 has not begun it" in hang.lines[1]


def test_nobody_waits() -> None:
    assert explain({0: Rank(0).does("dp", (0, 1), done=5.0).seen, 1: Seen(None, "unknown")}) is None


# --- programs, run step by step ---------------------------------------------------------------------------------------

GROUPS = {"a": (0, 1, 2, 3), "b": (0, 1), "c": (1, 2), "d": (2, 3, 0)}


@st.composite
def programs(draw: st.DrawFn) -> list[list[str]]:
    """What each rank calls: for each group the same number of operations on all its ranks, in any order."""
    counts = {name: draw(st.integers(0, 2)) for name in GROUPS}
    return [
        draw(st.permutations([name for name, ranks in GROUPS.items() if rank in ranks for _ in range(counts[name])]))
        for rank in range(4)
    ]


@given(programs(), st.none() | st.tuples(st.integers(0, 3), st.integers(0, 6)))
def test_a_hang_is_certain_exactly_where_programs_cannot_go_on(
    calls: list[list[str]], pause: tuple[int, int] | None
) -> None:
    """``pause``: a rank that computes for ever before a call of this number."""
    at = [0] * 4

    def current(rank: int) -> tuple[str, int] | None:
        if at[rank] == len(calls[rank]) or (rank, at[rank]) == pause:
            return None
        name = calls[rank][at[rank]]
        return name, calls[rank][: at[rank] + 1].count(name)

    def can_go_on() -> str:
        for name, members in GROUPS.items():
            if len({current(rank) for rank in members}) == 1 and (now := current(members[0])) and now[0] == name:
                return name
        return ""

    while name := can_go_on():
        for rank in GROUPS[name]:
            at[rank] += 1
    ranks = [Rank(number) for number in range(4)]
    for each, names in zip(ranks, calls, strict=True):
        for index, name in enumerate(names[: at[each.number] + (current(each.number) is not None)]):
            waits = index == at[each.number]
            each.does(name, GROUPS[name], waits=90.0 if waits else 0.0, done=0.0 if waits else 50.0)
    hang = explain({each.number: each.seen for each in ranks})
    stuck = [rank for rank in range(4) if current(rank) is not None]
    assert (hang is not None) == bool(stuck)
    if hang is None:
        return
    blocked: set[int] = set()  # the ranks for which a paused rank is at the end of every chain
    if pause is not None:
        blocked = {pause[0]}
        while more := {
            rank for rank in stuck if rank not in blocked and any(other in blocked for other in _missing(hang, rank))
        }:
            blocked |= more
    if set(stuck) - blocked:
        assert hang.kind == "circle"
        assert set(hang.causes) <= set(stuck)
    elif hang.kind == "slow":
        assert pause is not None
        assert hang.causes == (pause[0],)
    else:
        assert hang.kind == "circle", hang


def _missing(hang: Hang, rank: int) -> tuple[int, ...]:
    return next(wait.missing for wait in hang.waits if wait.rank == rank)


# --- ranks as texts --------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 300)))
def test_ranks_are_read_as_they_are_written(ranks: set[int]) -> None:
    assert ranks_of(ranks_text(sorted(ranks))) == tuple(sorted(ranks))


def test_regular_ranks_take_little_room() -> None:
    assert ranks_text(range(0, 256, 8)) == "0:256:8"
    assert ranks_text([3]) == "3"
