"""The time at which every action runs, if ranks run their lists in order and wait only for each other."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from meshwright.errors import ScheduleError
from meshwright.ir.schedule import Action, ActionKind, ActionList, Schedule

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
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    return any(kind.transfers for kind in kinds)


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


class ActionOrder(NamedTuple):
    """The actions of a schedule, in an order in which they can run for any durations of actions.

    ``ranks`` has the rank of each action. ``awaits`` has, for each action, the indices of the earlier actions of other
    ranks for which it waits. ``kinds`` has, for each action, the index of its stage and kind in ``distinct``.
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    awaits: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]
    distinct: tuple[tuple[int, ActionKind], ...]

    def ends(self, seconds: Sequence[float], begins: Sequence[float], late: Sequence[float] = ()) -> list[float]:
        """The end of each rank's last action. ``seconds`` has the time of each entry of ``distinct``, and ``begins``
        the time at which each rank begins. ``late`` has, for each entry of ``distinct``, the time after which an
        awaited action's result arrives; if it is empty, results arrive at once."""
        free, ends, late = [*begins], [0.0] * len(self.actions), late or [0.0] * len(self.distinct)
        for number, (rank, awaits, kind) in enumerate(zip(self.ranks, self.awaits, self.kinds, strict=True)):
            start = free[rank]
            for other in awaits:
                if ends[other] + late[kind] > start:
                    start = ends[other] + late[kind]
            free[rank] = ends[number] = start + seconds[kind]
        return free

    def times(self, seconds: Iterable[float], num_ranks: int) -> list[list[tuple[float, float]]]:
        """Start and end of each rank's actions. ``seconds`` has the time that each action takes."""
        times: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]
        free, ends = [0.0] * num_ranks, [0.0] * len(self.actions)
        for number, (rank, awaits, each) in enumerate(zip(self.ranks, self.awaits, seconds, strict=True)):
            start = free[rank]
            for other in awaits:
                start = max(start, ends[other])
            free[rank] = ends[number] = start + each
            times[rank].append((start, free[rank]))
        return times


MOST_ORDERS = 128
"""Largest number of schedules whose order is kept."""
_ORDERS: dict[tuple[int, bool], tuple[Schedule, ActionOrder]] = {}
"""Maps the id of a schedule, and whether its actions wait directly, to the schedule, which keeps the id from being used
again, and to its order."""


def order_of(schedule: Schedule, *, keep: bool = True, direct: bool = False) -> ActionOrder:
    """The order of a schedule. Actions that can never run are left out, together with all later actions of their
    rank. Without ``keep``, the order is not kept for the next call, as for a schedule that does not come again. With
    ``direct``, sends and receives are left out: an action waits for the action that computes what it needs."""
    if not keep:
        return _ordered(_computing(schedule) if direct else schedule)
    known = _ORDERS.get((id(schedule), direct))
    if known is None:
        if len(_ORDERS) >= MOST_ORDERS:
            _ORDERS.clear()
        known = _ORDERS[id(schedule), direct] = schedule, _ordered(_computing(schedule) if direct else schedule)
    return known[1]


def _computing(schedule: Schedule) -> Schedule:
    """The schedule without sends and receives."""
    ranks = (ActionList(action for action in actions if not action.kind.transfers) for actions in schedule.ranks)
    return msgspec.structs.replace(schedule, ranks=tuple(ranks))


def _ordered(schedule: Schedule) -> ActionOrder:
    ranks, slots, needs = _numbered(schedule)
    width = schedule.num_microbatches + 1
    actions: list[Action] = []
    run_ranks: list[int] = []
    run_slots: list[int] = []
    awaits: list[tuple[int, ...]] = []
    done, numbers = [0] * len(ranks), [-1] * (len(slots) * width)
    waiting: dict[int, list[int]] = {}
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        codes, theirs, first = ranks[rank], schedule.ranks[rank].actions, done[rank]
        position, end = first, len(codes)
        while position < end:
            code = codes[position]
            slot = code // width
            needed, there = needs[slot], ()  # type: tuple[int, ...] | None, tuple[int, ...]
            if needed is not None:
                there = tuple([number for offset in needed if (number := numbers[code + offset]) >= 0])
                if not there:
                    for offset in needed:
                        waiting.setdefault(code + offset, []).append(rank)
                    break
            numbers[code] = len(actions)
            actions.append(theirs[position])
            run_slots.append(slot)
            awaits.append(there)
            position += 1
            if code in waiting:
                ready.extend(waiting.pop(code))
        run_ranks += [rank] * (position - first)
        done[rank] = position
    places = {slot: place for place, slot in enumerate(dict.fromkeys(run_slots))}
    keys = tuple(slots)
    return ActionOrder(
        tuple(actions),
        tuple(run_ranks),
        tuple(awaits),
        tuple(map(places.__getitem__, run_slots)),
        tuple(keys[slot] for slot in places),
    )


def _numbered(
    schedule: Schedule,
) -> tuple[list[list[int]], dict[tuple[int, ActionKind], int], list[tuple[int, ...] | None]]:
    """The actions of each rank as numbers, which are faster to look up than actions.

    Each stage and kind has a slot. The number of an action is slot * (micro-batches + 1) + its micro-batch + 1, where
    an action of all micro-batches has 0 instead. The third result has, for each slot, what ``awaited`` says: the
    differences between the numbers of the awaited actions and the action's own number, or None if it waits for none.
    An awaited action that the schedule lacks has no number."""
    width = schedule.num_microbatches + 1
    slots: dict[tuple[int, ActionKind], int] = {}
    ranks = [
        [
            slots.setdefault((action.stage, action.kind), len(slots)) * width
            + (0 if action.microbatch is None else action.microbatch + 1)
            for action in actions
        ]
        for actions in schedule.ranks
    ]
    explicit = any(kind.transfers for _, kind in slots)
    needs: list[tuple[int, ...] | None] = []
    for (stage, kind), slot in slots.items():
        needed = awaited(Action(stage, kind, 0 if kind.has_microbatch else None), schedule, explicit=explicit)
        awaited_slots = [slots.get((other.stage, other.kind)) for other in needed]
        needs.append(tuple((there - slot) * width for there in awaited_slots if there is not None) if needed else None)
    return ranks, slots, needs


def run(schedule: Schedule, costs: Costs | Callable[[Action], float]) -> tuple[Times, ...]:
    """The times of every rank's actions. A rank with fewer times than actions is stuck after its last time.

    Receives block; sends do not. With v chunks every action takes 1/v of its ``Costs``. If ``costs`` is a function, it
    returns the time of each action, which is not divided.
    """
    cost = (lambda action: costs.of(action.kind)) if isinstance(costs, Costs) else costs
    chunks = schedule.num_chunks if isinstance(costs, Costs) else 1
    order = order_of(schedule, keep=False)  # a schedule is checked only once
    times = order.times(map(cost, order.actions), len(schedule.ranks))
    # Add undivided costs, and divide by the number of chunks once at the end, so that whole numbers stay exact.
    return tuple(tuple((start / chunks, end / chunks) for start, end in each) for each in times)
