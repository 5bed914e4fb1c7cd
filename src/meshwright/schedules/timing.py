"""The time at which every action runs: ranks run their lists in order and wait only for each other."""

import math
from collections import deque
from collections.abc import Callable

import msgspec

from meshwright.errors import ScheduleError
from meshwright.ir.schedule import Action, ActionKind, Schedule

Times = tuple[tuple[float, float], ...]
"""(start, end) of each of a rank's actions, in the order of its list."""

PARTNER = {
    ActionKind.SEND_F: (1, ActionKind.RECV_F),
    ActionKind.RECV_F: (-1, ActionKind.SEND_F),
    ActionKind.SEND_B: (-1, ActionKind.RECV_B),
    ActionKind.RECV_B: (1, ActionKind.SEND_B),
}
"""Maps a kind of transfer to its partner: the distance to the partner's stage, and the partner's kind."""
_COSTS = {
    ActionKind.F: "forward", ActionKind.B: "backward", ActionKind.I: "backward_input", ActionKind.W: "backward_weight",
}  # fmt: skip


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time that each kind of action takes on a rank, for one micro-batch and all chunks together, in any unit.
    Communication takes no time.

    Raises:
        ScheduleError: a cost is not a positive number.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if not 0 < getattr(self, key) < math.inf:
                raise ScheduleError(
                    f"{key} takes {getattr(self, key)}", where=f"costs: {key}", remedy="give a positive number"
                )

    def of(self, kind: ActionKind) -> float:
        """The cost of one kind of action."""
        cost: float = getattr(self, _COSTS[kind]) if kind in _COSTS else 0.0
        return cost


def communicates(schedule: Schedule) -> bool:
    """Whether the schedule has sends or receives. Without them, an action waits directly for the computing of the other
    rank."""
    return any(action.kind.transfers for actions in schedule.ranks for action in actions)


def awaited(action: Action, schedule: Schedule, *, explicit: bool) -> tuple[Action, ...]:
    """Alternative actions, possibly on other ranks: ``action`` waits until one of them has ended. Most actions wait for
    none.

    ``explicit``: the schedule communicates, so only receives wait.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if explicit:
        if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            further, sends = PARTNER[kind]
            return (Action(stage + further, sends, microbatch),)
    elif kind is ActionKind.F and stage > 0:
        return (Action(stage - 1, ActionKind.F, microbatch),)
    elif kind in (ActionKind.B, ActionKind.I) and stage < schedule.num_stages - 1:
        return (Action(stage + 1, ActionKind.B, microbatch), Action(stage + 1, ActionKind.I, microbatch))
    return ()


def run(schedule: Schedule, costs: Costs | Callable[[Action], float]) -> tuple[Times, ...]:
    """The times of every rank's actions. A rank with fewer times than actions is stuck after its last time.

    Receives block; sends do not. With v chunks every action takes 1/v of its ``Costs``. If ``costs`` is a function, it
    returns the time of each action, which is not divided.
    """
    cost = (lambda action: costs.of(action.kind)) if isinstance(costs, Costs) else costs
    chunks = schedule.num_chunks if isinstance(costs, Costs) else 1
    explicit = communicates(schedule)
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    ends: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        for action in schedule.ranks[rank].actions[len(times[rank]) :]:
            needed = awaited(action, schedule, explicit=explicit)
            there = [ends[dependency] for dependency in needed if dependency in ends]
            if needed and not there:
                for dependency in needed:
                    waiting.setdefault(dependency, []).append(rank)
                break
            start = max(times[rank][-1][1] if times[rank] else 0.0, *there, 0.0)
            # Add undivided costs and divide by the number of chunks once at the end: whole numbers stay exact.
            ends[action] = start + cost(action)
            times[rank].append((start, ends[action]))
            ready.extend(waiting.pop(action, ()))
    return tuple(tuple((start / chunks, end / chunks) for start, end in each) for each in times)
