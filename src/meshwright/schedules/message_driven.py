"""Message-driven pipelines: the order of actions is a rule instead of a list. Each rank runs the next micro-batch that
is ready.

The rule comes from AxoNN (Singh, Bhatele 2022, "AxoNN: An asynchronous, message-driven parallel framework for
extreme-scale deep learning"). A backward whose gradient has arrived precedes a forward whose activation has arrived,
and at most ``limit`` micro-batches are in flight. Here the gradients of two micro-batches are late. Under 1f1b, rank 1
waits for the first of these gradients, and then runs F2 before B1. With the rule, it runs F2 and F3 while it waits:

    1f1b            F0 F1 .  .  .  B0--- F2 B1--- F3
    message-driven  F0 F1 F2 F3 .  B0--- B1--- F4

A channel preserves the order of its messages. So each rank runs its forwards in the order of the micro-batches, and
also its backwards. Only the alternation of forwards and backwards depends on time. Sums over micro-batches are
therefore equal bit by bit to those of 1f1b. Ranks cannot wait for each other in a circle: a micro-batch that has
reached a rank is also in flight on the first rank, which has at most ``limit`` of them. So a later rank never has to
refuse it.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from meshwright.errors import Problem
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import Action, ActionKind, ActionList, Schedule

F, B = ActionKind.F, ActionKind.B


def most_in_flight(num_ranks: int) -> int:
    """The limit of the schedules that ``build`` makes: 2 p. AxoNN uses p, with which the first rank never has a lead.
    If F and B take 3 together, a micro-batch returns just when the first rank would run micro-batch p + 1, so each
    delay of any rank becomes a bubble."""
    return 2 * num_ranks


class RankProgress(NamedTuple):
    """The progress of a rank in a step. ``activations`` is the number of micro-batches that have arrived from the
    previous stage, and ``gradients`` the number that have arrived from the next stage. ``forwards`` and ``backwards``
    are the numbers that have run. At most ``limit`` may be between their forward and the end of their backward."""

    stage: int
    num_stages: int
    num_microbatches: int
    limit: int
    activations: int = 0
    gradients: int = 0
    forwards: int = 0
    backwards: int = 0

    @property
    def done(self) -> bool:
        """Whether all micro-batches have run."""
        return self.backwards == self.num_microbatches

    def needs(self, kind: ActionKind) -> bool:
        """Whether the next forward (or backward) may run as soon as its message arrives."""
        if kind is B:
            return self.backwards < self.forwards
        return self.forwards < self.num_microbatches and self.forwards - self.backwards < self.limit

    def waits(self, kind: ActionKind) -> bool:
        """Whether the message for the next forward (or backward) has not arrived yet. The first stage makes its own
        activations, and the last stage makes its own gradients."""
        if kind is B:
            return self.stage < self.num_stages - 1 and self.gradients == self.backwards
        return self.stage > 0 and self.activations == self.forwards

    def after(self, action: Action) -> "RankProgress":
        """The progress after an action has run."""
        if action.kind is B:
            return self._replace(backwards=self.backwards + 1)
        return self._replace(forwards=self.forwards + 1)

    def received(self, kind: ActionKind) -> "RankProgress":
        """The progress after another message for a forward (or backward) has arrived."""
        if kind is B:
            return self._replace(gradients=self.gradients + 1)
        return self._replace(activations=self.activations + 1)


def next_action(progress: RankProgress) -> Action | None:
    """The next forward or backward of a rank. None: the rank has nothing to run until a message arrives, or has
    finished."""
    for kind, number in ((B, progress.backwards), (F, progress.forwards)):
        if progress.needs(kind) and not progress.waits(kind):
            return Action(progress.stage, kind, number)
    return None


def ordered(
    num_ranks: int,
    num_microbatches: int,
    limit: int,
    seconds: Callable[[Action], float],
    delay: Callable[[Action], float] = lambda action: 0.0,
) -> list[list[Action]]:
    """For each rank, its forwards and backwards in running order, if each takes ``seconds``. A result reaches the next
    rank after ``delay`` seconds. Results of the same rank arrive in order."""
    progress = [RankProgress(rank, num_ranks, num_microbatches, limit) for rank in range(num_ranks)]
    ranks: list[list[Action]] = [[] for _ in progress]
    busy = [False] * num_ranks
    arrived: dict[tuple[int, ActionKind], float] = {}
    numbers = itertools.count()
    events: list[tuple[float, int, int, ActionKind | None]] = [
        (0.0, next(numbers), rank, None) for rank in range(num_ranks)
    ]
    while events:
        now, touched = events[0][0], dict[int, None]()
        while events and events[0][0] == now:
            _, _, rank, kind = heapq.heappop(events)
            touched[rank] = None
            if kind is None:
                busy[rank] = False
            else:
                progress[rank] = progress[rank].received(kind)
        for rank in touched:
            action = None if busy[rank] else next_action(progress[rank])
            if action is None:
                continue
            end, busy[rank] = now + seconds(action), True
            ranks[rank].append(action)
            progress[rank] = progress[rank].after(action)
            heapq.heappush(events, (end, next(numbers), rank, None))
            target = rank + 1 if action.kind is F else rank - 1
            if 0 <= target < num_ranks:
                arrival = arrived[target, action.kind] = max(
                    end + delay(action), arrived.get((target, action.kind), 0.0)
                )
                heapq.heappush(events, (arrival, next(numbers), target, action.kind))
    return ranks


def reordered(schedule: Schedule, seconds: Callable[[Action], float]) -> Schedule:
    """A message-driven schedule without communication, in the order that results if each action takes ``seconds``."""
    ranks = ordered(len(schedule.ranks), schedule.num_microbatches, schedule.in_flight, seconds)
    return msgspec.structs.replace(schedule, ranks=tuple(map(ActionList, ranks)))


def with_most_in_flight(schedule: Schedule) -> tuple[Iterable[Action], ...]:
    """The actions of each rank in the order with the most micro-batches in flight. If the schedule is static, this is
    its own order. Under the rule, every rank except the last may run forwards up to the limit before the first gradient
    arrives."""
    if not schedule.in_flight:
        return schedule.ranks
    return tuple(
        actions if rank == len(schedule.ranks) - 1 else list(_forwards_first(actions, schedule.in_flight))
        for rank, actions in enumerate(schedule.ranks)
    )


def _forwards_first(actions: Iterable[Action], limit: int) -> Iterator[Action]:
    forwards = [action for action in actions if action.kind is F]
    backwards = [action for action in actions if action.kind is B]
    yield from forwards[:limit]
    for number, backward in enumerate(backwards):
        yield backward
        yield from forwards[limit + number : limit + number + 1]


def runtime_problems(plan: Plan, meetings: Iterable[str], device: str) -> Iterator[Problem]:
    """Reasons why ranks cannot run the plan's message-driven schedule. ``meetings`` names the collectives in this
    rank's forwards and backwards. Ranks would reach such collectives in different orders, and would wait for each other
    for ever."""
    where, remedy = "schedule message-driven", "take another schedule, such as `1f1b`"
    without = f"{remedy}, or a layout without such collectives"
    if plan.uneven:
        yield where, "stages have different numbers of ranks, which meet in every micro-batch", remedy
    if device != "cpu":
        yield where, f"ranks compute on {device}, where messages between two ranks run in one order", remedy
    for axis, size in plan.mesh.sizes.items():
        if size > 1 and axis not in ("pp", "dp", "dp_shard"):
            yield where, f"ranks of axis {axis} meet in every micro-batch", without
    for meeting in meetings:
        yield where, f"`{meeting}` is a collective in every micro-batch", without
