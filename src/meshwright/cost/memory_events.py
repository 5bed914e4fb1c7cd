"""The moments of a schedule at which the memory of a rank may peak, for any sizes of its values."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.message_driven import with_most_in_flight

BEFORE, HELD, AFTER, UPDATE = "before", "held", "after", "update"
"""Events beside the actions: a stage's prologue; the moment at which all prologues of a rank have ended; the end of a
stage's step; and the update of a rank."""
_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)
_TAKES = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
"""Maps a computing action to the action that receives its values."""
_HANDS = {
    ActionKind.F: (1, ActionKind.RECV_F), ActionKind.B: (-1, ActionKind.RECV_B), ActionKind.I: (-1, ActionKind.RECV_B),
}  # fmt: skip
"""Maps a computing action to the distance of the stage that reads its values, and to what that stage receives."""
_TEXTS = {BEFORE: "prologue", HELD: "", AFTER: "the end of the step", UPDATE: "update"}

MOST_KEPT = 128
"""Largest number of schedules whose events are kept."""
_KEPT: dict[int, tuple[Schedule, "MemoryEvents"]] = {}
"""Maps the id of a schedule to the schedule, which keeps the id from being used again, and to its events."""

Slot = tuple[int, int, str]
"""A rank, a stage and an event or kind of action. Events of one slot change memory by equal numbers of bytes."""


class MemoryEvents(NamedTuple):
    """The events of all ranks, one rank after the other. ``slots`` has the index of each event in ``distinct``. Rank r
    has the ``stages[r]``, the ``actions[r]`` and the events from ``begins[r]`` up to ``begins[r + 1]``."""

    distinct: tuple[Slot, ...]
    slots: NDArray[np.int64]
    microbatches: tuple[int | None, ...]
    begins: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    def name(self, event: int) -> str:
        """The text of an event: its action, or what happens."""
        _, stage, kind = self.distinct[self.slots[event]]
        if kind in _TEXTS:
            return _TEXTS[kind]
        return str(Action(stage, ActionKind(kind), self.microbatches[event]))


def events_of(schedule: Schedule) -> MemoryEvents:
    """The events of a schedule. They are kept for the next call."""
    known = _KEPT.get(id(schedule))
    if known is None:
        if len(_KEPT) >= MOST_KEPT:
            _KEPT.clear()
        known = _KEPT[id(schedule)] = schedule, _listed(schedule)
    return known[1]


def _listed(schedule: Schedule) -> MemoryEvents:
    places: dict[Slot, int] = {}
    slots: list[int] = []
    microbatches: list[int | None] = []
    begins, stages, every = [0], [], []
    for rank, actions in enumerate(map(tuple, with_most_in_flight(schedule))):
        own = tuple(sorted({action.stage for action in actions}))
        for stage, kind, microbatch in _events(own, actions):
            slots.append(places.setdefault((rank, stage, kind), len(places)))
            microbatches.append(microbatch)
        begins.append(len(slots))
        stages.append(own)
        every.append(actions)
    return MemoryEvents(
        tuple(places), np.array(slots, dtype=np.int64), tuple(microbatches), tuple(begins), tuple(stages), tuple(every)
    )


def _events(stages: tuple[int, ...], actions: tuple[Action, ...]) -> list[tuple[int, str, int | None]]:
    """The events of one rank: the stage, the event or kind of action, and the micro-batch."""
    events: list[tuple[int, str, int | None]] = [(stage, BEFORE, None) for stage in stages]
    events += [(stage, HELD, None) for stage in stages[-1:]]
    received: set[tuple[int, int | None, ActionKind]] = set()

    def come(stage: int, microbatch: int | None, receive: ActionKind) -> None:
        """A micro-batch's value arrives, once."""
        if (stage, microbatch, receive) not in received:
            received.add((stage, microbatch, receive))
            events.append((stage, receive.value, microbatch))

    for action in actions:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind in _RECEIVES:
            come(stage, microbatch, kind)
            continue
        if kind is not ActionKind.REDUCE_GRAD and not kind.computes:
            continue
        if kind in _TAKES:
            come(stage, microbatch, _TAKES[kind])
        events.append((stage, kind.value, microbatch))
        if kind in _HANDS:  # to a stage of the same rank, without a message
            further, receive = _HANDS[kind]
            if stage + further in stages:
                come(stage + further, microbatch, receive)
    events += [(stage, AFTER, None) for stage in stages]
    events.append((stages[-1] if stages else -1, UPDATE, None))
    return events
