"""Passes over schedules: they add sends and receives, and the reduction of gradients."""

from collections import deque
from collections.abc import Container

import msgspec

from meshwright.errors import ScheduleError
from meshwright.ir.schedule import Action, ActionKind, ActionList, Schedule
from meshwright.schedules.check import check
from meshwright.schedules.timing import PARTNER, Costs, run

_SENDS = {ActionKind.F: ActionKind.SEND_F, ActionKind.B: ActionKind.SEND_B, ActionKind.I: ActionKind.SEND_B}
"""Maps a kind of action to the kind that sends its value to another stage."""


def add_communication(schedule: Schedule, *, built: bool = False) -> Schedule:
    """Add the sends and receives between stages of different ranks to a schedule that only computes.

    A send directly follows the action that makes its value. A receive precedes the first computing action that begins
    after the value has arrived, according to the times of ``check``. An executor that reads the list in order can post
    the receive before that action, or even earlier. Receives from one rank are in the order of that rank's sends.

        rank 0   0F0 0SEND_F0 0F1 0SEND_F1          0RECV_B0 0B0 0RECV_B1 0B1
        rank 1       1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1          1B1 1SEND_B1

    No rank waits for a receive longer than it would wait for the value. So a schedule that could run before can still
    run, provided that receives block and sends do not. ``built``: ``pipeline.build`` made the schedule, so it is known
    that it can run.

    Raises:
        ScheduleError: the schedule already communicates, or ``check`` refuses it.
    """
    _refuse(schedule, PARTNER, "communicates", "give one that only computes")
    times = run(schedule, Costs()) if built else [rank.times for rank in check(schedule).ranks]
    rank_of = schedule.homes
    sends: dict[Action, Action] = {}
    arrivals: list[list[tuple[float, Action]]] = [[] for _ in schedule.ranks]
    for rank, actions in enumerate(schedule.ranks):
        for action, (_, end) in zip(actions, times[rank], strict=True):
            if action.kind not in _SENDS:
                continue
            send = _SENDS[action.kind]
            further, receive = PARTNER[send]
            stage = action.stage + further
            if rank_of.get(stage, rank) != rank:
                sends[action] = Action(action.stage, send, action.microbatch)
                arrivals[rank_of[stage]].append((end, Action(stage, receive, action.microbatch)))
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        coming = deque(sorted(arrivals[rank], key=lambda arrival: arrival[0]))
        merged: list[Action] = []
        for action, (start, _) in zip(actions, times[rank], strict=True):
            while action.kind.computes and coming and coming[0][0] <= start:
                merged.append(coming.popleft()[1])
            merged += [action, sends[action]] if action in sends else [action]
        ranks.append(merged)
    return _with_ranks(schedule, ranks)


def add_reduction(schedule: Schedule) -> Schedule:
    """Add the reduction of each stage's gradients after the stage's last backward and the sends that follow it.

    Raises:
        ScheduleError: the schedule already reduces gradients.
    """
    _refuse(schedule, (ActionKind.REDUCE_GRAD,), "reduces gradients", "give one that does not")
    ranks = []
    for actions in schedule.ranks:
        last = {action.stage: at for at, action in enumerate(actions) if action.kind in (ActionKind.B, ActionKind.W)}
        reduced: list[Action] = []
        due: list[Action] = []
        for position, action in enumerate(actions):
            if action.kind not in (ActionKind.SEND_F, ActionKind.SEND_B):
                reduced += due
                due = []
            reduced.append(action)
            if last.get(action.stage) == position:
                due.append(Action(action.stage, ActionKind.REDUCE_GRAD))
        ranks.append([*reduced, *due])
    return _with_ranks(schedule, ranks)


def _refuse(schedule: Schedule, kinds: Container[ActionKind], does: str, remedy: str) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.kind in kinds:
                problem = f"`{action}`: the schedule {does} already"
                raise ScheduleError(problem, where=f"rank {rank}, position {position}", remedy=remedy)


def _with_ranks(schedule: Schedule, ranks: list[list[Action]]) -> Schedule:
    return msgspec.structs.replace(schedule, ranks=tuple(map(ActionList, ranks)))
