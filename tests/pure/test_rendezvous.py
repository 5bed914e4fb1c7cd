"""Sends that block until they are received: all schedules end, and circles and mismatches are found."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from meshwright.ir.pipeline import V_SHAPED
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.pipeline import NAMES, training_schedule
from meshwright.schedules.rendezvous import Awaited, Message, StartedOperation, Stream, Unmatched, unmatched
from meshwright.schedules.timing import PARTNER

PIPELINES = [name for name in NAMES if name not in ("none", "message-driven")]


def streams_of(schedule: Schedule, *, directed: bool = True) -> dict[int, list[StartedOperation | Awaited]]:
    """The streams of a schedule: a message for each send and receive, which computing waits for as the executor does.
    ``directed``: each direction between two ranks has a communicator; otherwise both share one."""
    rank_of = {action.stage: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
    streams: dict[int, list[StartedOperation | Awaited]] = {}
    for rank, actions in enumerate(schedule.ranks):
        stream: list[StartedOperation | Awaited] = []
        coming: dict[Action, int] = {}
        sent = []
        for number, action in enumerate(actions):
            if action.kind.transfers:
                sends = action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
                peer = rank_of[action.stage + PARTNER[action.kind][0]]
                ends = (rank, peer) if sends else (peer, rank)
                name = f"{ends[0]} to {ends[1]}" if directed else f"{min(ends)} and {max(ends)}"
                stream.append(StartedOperation(number, name, f"{action}", (Message(sends, peer),)))
                if sends:
                    sent.append(number)
                else:
                    coming[action] = number
                continue
            kinds = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
            wanted = kinds.get(action.kind)
            awaited = coming.get(Action(action.stage, wanted, action.microbatch)) if wanted is not None else None
            if awaited is not None:
                stream.append(Awaited(awaited))
        stream += [Awaited(number) for number in sent]
        streams[rank] = stream
    return streams


@pytest.mark.parametrize("name", PIPELINES)
def test_every_schedule_ends_if_each_direction_has_a_communicator(name: str) -> None:
    ended = 0
    for pp, microbatches, chunks in itertools.product(range(2, 9), (1, 2, 4, 7, 8, 15, 16), (1, 2, 3)):
        if name in V_SHAPED and chunks != 2:
            continue
        try:
            schedule = training_schedule(name, pp, microbatches, chunks)
        except ScheduleError:
            continue  # it is not defined for these numbers
        assert unmatched(streams_of(schedule)) == (), (pp, microbatches, chunks)
        ended += 1
    assert ended >= 7, "for each number of ranks at least"


def test_with_one_communicator_for_two_ranks_1f1b_is_stuck() -> None:
    stuck = unmatched(streams_of(training_schedule("1f1b", 2, 4), directed=False))
    assert [(operation.rank, operation.what) for operation in stuck] == [(0, "0SEND_F2"), (1, "1SEND_B1")]
    assert stuck[0].why == "rank 1 never receives: rank 1 waits for 1RECV_F2"
    assert not any(operation.mismatch for operation in stuck)


def send(number: int, peer: int, elements: int = 4) -> StartedOperation:
    return StartedOperation(number, "p2p", f"send {number}", (Message(True, peer, "float32", elements),))


def receive(number: int, peer: int, elements: int = 4) -> StartedOperation:
    return StartedOperation(number, "p2p", f"receive {number}", (Message(False, peer, "float32", elements),))


def meeting(number: int, *ranks: int, elements: int = 4, kind: str = "all_reduce") -> StartedOperation:
    return StartedOperation(
        number, "all", f"meeting {number}", ranks=ranks, kind=kind, dtype="float32", elements=elements
    )


def test_opposite_sends_wait_for_ever_and_a_batch_does_not() -> None:
    apart = {0: [send(0, 1), receive(1, 1)], 1: [send(0, 0), receive(1, 0)]}
    assert [operation.rank for operation in unmatched(apart)] == [0, 1]
    both = {
        rank: [StartedOperation(0, "p2p", "", (*send(0, 1 - rank).messages, *receive(1, 1 - rank).messages))]
        for rank in (0, 1)
    }
    assert unmatched(both) == ()


def test_a_send_that_nobody_receives_is_found_although_nobody_waits_for_it() -> None:
    (operation,) = unmatched({0: [send(0, 1)], 1: []})
    assert operation == Unmatched(0, "send 0", "rank 1 never receives: rank 1 has ended its step")


def test_a_message_of_another_size_is_a_mismatch() -> None:
    (operation,) = unmatched({0: [send(0, 1, 4)], 1: [receive(0, 0, 8)]})
    assert operation.mismatch
    assert operation.what == "send 0: sends 4 x float32"
    assert operation.why == "rank 1 receives 8 x float32 (receive 0)"


def test_collectives_in_another_order_or_of_another_size_are_mismatches() -> None:
    (operation,) = unmatched({0: [meeting(0, 0, 1)], 1: [meeting(0, 0, 1, elements=5)]})
    assert (operation.mismatch, operation.why) == (True, "rank 1 is at meeting 0: all_reduce of 5 x float32")
    (operation,) = unmatched({0: [meeting(0, 0, 1)], 1: [meeting(0, 0, 1, kind="broadcast")]})
    assert operation.mismatch


def test_a_rank_that_does_not_come_is_named() -> None:
    stuck = unmatched({0: [meeting(0, 0, 1, 2)], 1: [meeting(0, 0, 1, 2)], 2: [receive(0, 0), Awaited(0)]})
    assert [each.rank for each in stuck] == [0, 1, 2]
    assert stuck[0].why == "rank 2 does not come: rank 2 waits for receive 0"


def test_an_operation_behind_a_wait_does_not_begin() -> None:
    circle: dict[int, Stream] = {
        0: [receive(0, 1), Awaited(0), meeting(1, 0, 1)],
        1: [meeting(0, 0, 1), Awaited(0), send(1, 0)],
    }
    assert {operation.rank for operation in unmatched(circle)} == {0, 1}
    assert unmatched({0: circle[0], 1: [send(0, 0), meeting(1, 0, 1), Awaited(1)]}) == ()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), max_size=30))
def test_a_common_order_of_messages_and_meetings_always_ends(steps: list[tuple[bool, int, int]]) -> None:
    """Each rank runs its part of one global order: no circle is possible."""
    streams: dict[int, list[StartedOperation | Awaited]] = {0: [], 1: [], 2: []}
    for number, (meets, source, target) in enumerate(steps):
        if meets or source == target:
            for stream in streams.values():
                stream += [meeting(number, 0, 1, 2), Awaited(number)]
        else:
            streams[source] += [send(number, target), Awaited(number)]
            streams[target] += [receive(number, source), Awaited(number)]
    assert unmatched(streams) == ()
