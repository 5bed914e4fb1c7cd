"""Order of a rank's actions in a message-driven pipeline: the messages that have arrived decide the next action."""

import time
from collections.abc import Callable, Iterator, Sequence

from meshwright.comm.record import WAIT, current
from meshwright.comm.transport.arrival import wait_for_any
from meshwright.comm.transport.base import Arrival
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.message_driven import RankProgress, next_action

F, B = ActionKind.F, ActionKind.B
_RECEIVES, _SENDS = {F: ActionKind.RECV_F, B: ActionKind.RECV_B}, {F: ActionKind.SEND_F, B: ActionKind.SEND_B}


def by_rule(schedule: Schedule, stage: int, arrivals: Callable[[Action], Sequence[Arrival]]) -> Iterator[Action]:
    """Yield the actions of the rank that holds ``stage``. Each must be run before the next is requested. ``arrivals``
    returns the messages of a receive action that was run.

    The receives of the next activation and the next gradient are always posted in advance. If only one of these
    messages can lead to an action, that action is next, and the rank waits for the message as under a static schedule.
    Otherwise the rank waits for the message that arrives first.
    """
    progress = RankProgress(stage, schedule.num_stages, schedule.num_microbatches, schedule.in_flight)
    here = {F: stage > 0, B: stage < schedule.num_stages - 1}
    for kind in (F, B):
        if here[kind]:
            yield Action(stage, _RECEIVES[kind], 0)
    while not progress.done:
        coming = {
            kind: arrivals(Action(stage, _RECEIVES[kind], number))
            for kind, number in ((F, progress.forwards), (B, progress.backwards))
            if progress.waits(kind) and number < progress.num_microbatches
        }
        for kind, messages in coming.items():
            if all(message.has_come() for message in messages):
                progress = progress.received(kind)
        action = next_action(progress)
        if action is None:
            useful = [kind for kind in coming if progress.needs(kind)]
            if len(useful) > 1:
                _wait([coming[kind] for kind in useful], stage)
                continue
            progress = progress.received(useful[0])
            action = next_action(progress)
            assert action is not None
        kind, number = action.kind, action.microbatch
        assert number is not None
        if here[kind] and number + 1 < schedule.num_microbatches:
            yield Action(stage, _RECEIVES[kind], number + 1)
        yield action
        if here[B if kind is F else F]:
            yield Action(stage, _SENDS[kind], number)
        progress = progress.after(action)
    yield from (action for action in schedule.ranks[stage] if action.kind is ActionKind.REDUCE_GRAD)


def _wait(groups: Sequence[Sequence[Arrival]], stage: int) -> None:
    """Wait for the next activation or gradient, whichever arrives first."""
    begun = time.perf_counter()
    wait_for_any(groups)
    if (note := current()) is not None:
        note.span(WAIT, f"{stage}RECV", begun, time.perf_counter())
