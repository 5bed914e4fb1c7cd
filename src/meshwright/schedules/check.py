"""Checks whether a schedule can run, and counts idle time, live activations and sends."""

from collections.abc import Iterator, Mapping

import msgspec

from meshwright.errors import ScheduleError
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules import picture
from meshwright.schedules.timing import PARTNER, Costs, Times, awaited, communicates, run

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the grammar's letter


class Border(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The border between ``stage`` and the next stage: the number of sends of activations, and of gradients, per
    micro-batch."""

    stage: int
    rank: int
    next_rank: int
    activations: int
    gradients: int


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The stages of one rank, and the cost of its actions in a step.

    ``busy`` is the computing time, and ``bubble`` is idle time / computing time. ``gaps`` counts only idle time between
    the rank's first and last action, as if the rank began the next step immediately. ``live_activations`` is the
    largest number of (stage, micro-batch) pairs between their F and the end of their B or W. ``live_microbatches`` is
    the same number in whole micro-batches: with v chunks per rank, a pair counts as 1/v. ``sent_per_microbatch`` counts
    sends to other ranks, forward and backward.
    """

    stages: tuple[int, ...]
    times: Times
    busy: float
    bubble: float
    gaps: float
    live_activations: int
    live_microbatches: float
    sent_per_microbatch: int


class ScheduleReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cost of a schedule that can run, in the unit of ``Costs``. ``bubble`` is computed over all ranks together."""

    duration: float
    bubble: float
    live_microbatches: float
    ranks: tuple[RankReport, ...]
    borders: tuple[Border, ...]


def check(schedule: Schedule, costs: Costs | None = None) -> ScheduleReport:
    """Check that the schedule can run. Return its cost, assuming that communication takes no time.

    The rules: A stage lives on one rank. For every micro-batch, each stage runs forward once, then backward once (B, or
    I and then W). The values that an action needs from neighbouring stages come before it: from an earlier action on
    the same rank, or from another rank by a receive with a matching send. Gradients are reduced either for no stage or
    for every stage, once, after its last backward. Ranks do not wait for each other in a circle; a receive blocks its
    rank, a send does not. A schedule without sends and receives is checked as if every value were sent.

    Sends and receives are matched by stage and micro-batch, not by order. ``UNSHARD`` and ``RESHARD`` are ignored.

    Raises:
        ScheduleError: a rule is broken. The error names the rank, the position in its list (both from 0) and the
            action, and draws the schedule with the action marked.
    """
    return _Validator(schedule).report(costs or Costs())


class _Validator:
    """One schedule with the place (rank, position) of every action."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.explicit = communicates(schedule)
        self.places: dict[Action, tuple[int, int]] = {}
        self.rank_of: dict[int, int] = {}

    def report(self, costs: Costs) -> ScheduleReport:
        self._find_places()
        for action in self.places:
            self._check_before(action)
        self._check_complete()
        times = run(self.schedule, costs)
        self._check_finished(times)
        return self._report(times)

    def _find_places(self) -> None:
        """Find the place of every action. Check that every action has one place, every stage one rank, and every rank
        at least one computing action."""
        placed = [
            (rank, position, action)
            for rank, actions in enumerate(self.schedule.ranks)
            for position, action in enumerate(actions)
        ]
        for rank, position, action in placed:
            home = self.rank_of.setdefault(action.stage, rank)
            if home != rank:
                remedy = f"keep all actions of stage {action.stage} on one rank"
                raise self._fault(f"`{action}`: stage {action.stage} is on rank {home} too", {rank: position}, remedy)
            if action in self.places and action.kind not in (ActionKind.UNSHARD, ActionKind.RESHARD):
                problem = f"`{action}` stands at position {self.places[action][1]} already"
                raise self._fault(problem, {rank: position}, "take one of the two out")
            self.places[action] = rank, position
        for stage in range(self.schedule.num_stages):
            if stage not in self.rank_of:
                raise ScheduleError(
                    f"stage {stage} is on no rank",
                    where="schedule",
                    remedy="add its actions to a rank; stages are numbered from 0, without gaps",
                )
        for rank, actions in enumerate(self.schedule.ranks):
            if not any(action.kind.computes for action in actions):
                raise ScheduleError(
                    "it computes nothing", where=f"rank {rank}", remedy="take the rank out, or give it a stage"
                )

    def _check_before(self, action: Action) -> None:
        """Check that the actions that ``action`` needs on its own rank precede it, and that no other action contradicts
        it."""
        stage, kind = action.stage, action.kind
        rank, position = self.places[action]
        if kind in PARTNER:
            other = stage + PARTNER[kind][0]
            if self.rank_of.get(other, rank) == rank:
                why = f"stage {other} is on this rank too" if other in self.rank_of else f"there is no stage {other}"
                raise self._wrong(action, f"has no other rank to meet: {why}", "take it out of the schedule")
        if kind is B and (split := Action(stage, I, action.microbatch)) in self.places:
            raise self._fault(
                f"`{action}`, and `{split}` of the same backward", {rank: position}, "write B, or I and W"
            )
        for alternatives in self._needed(action):
            needed = next((alternative for alternative in alternatives if alternative in self.places), None)
            if needed is None:
                missing = " or ".join(f"`{alternative}`" for alternative in alternatives)
                raise self._wrong(
                    action, f"needs {missing} before it, which is nowhere", f"add {missing} before `{action}`"
                )
            if (at := self.places[needed][1]) > position:
                problem = f"needs `{needed}` before it, which stands at position {at}"
                raise self._wrong(action, problem, f"move `{needed}` before `{action}`")

    def _needed(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """Yield tuples of alternative actions. One action of each tuple must precede ``action`` on its rank."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind in _AFTER:
            yield tuple(Action(stage, before, microbatch) for before in _AFTER[kind])
        if kind is F and stage > 0:
            yield from self._received(action, stage - 1, ActionKind.RECV_F, (F,))
        elif kind in (B, I) and stage < self.schedule.num_stages - 1:
            yield from self._received(action, stage + 1, ActionKind.RECV_B, (B, I))
        elif kind is ActionKind.REDUCE_GRAD:
            for index in range(self.schedule.num_microbatches):
                yield (Action(stage, B, index), Action(stage, W, index))

    def _received(
        self, action: Action, other: int, receive: ActionKind, makers: tuple[ActionKind, ...]
    ) -> Iterator[tuple[Action, ...]]:
        if self.rank_of[other] == self.rank_of[action.stage]:
            yield tuple(Action(other, maker, action.microbatch) for maker in makers)
        elif self.explicit:
            yield (Action(action.stage, receive, action.microbatch),)

    def _check_complete(self) -> None:
        """Check that no computing action, no partner of a send or receive, and no reduction is missing."""
        for stage, rank in sorted(self.rank_of.items()):
            for microbatch in range(self.schedule.num_microbatches):
                split = Action(stage, I, microbatch) in self.places
                for kind in (F, I, W) if split else (F, B):
                    if Action(stage, kind, microbatch) not in self.places:
                        raise self._missing(rank, Action(stage, kind, microbatch))
        for action in self.places:
            if action.kind not in PARTNER:
                continue
            further, kind = PARTNER[action.kind]
            partner = Action(action.stage + further, kind, action.microbatch)
            if partner not in self.places:
                home, remedy = self.rank_of[partner.stage], f"add `{partner}` there, or take `{action}` out"
                raise self._wrong(action, f"has no `{partner}` on rank {home}", remedy)
        reduced = {action.stage for action in self.places if action.kind is ActionKind.REDUCE_GRAD}
        for stage, rank in sorted(self.rank_of.items()):
            if reduced and stage not in reduced:
                raise self._missing(rank, Action(stage, ActionKind.REDUCE_GRAD))

    def _check_finished(self, times: tuple[Times, ...]) -> None:
        """Check that every rank reached its end. If a rank is stuck, follow the waits from rank to rank to find the
        circle."""
        ranks = self.schedule.ranks
        stuck = {rank: len(done) for rank, done in enumerate(times) if len(done) < len(ranks[rank])}
        if not stuck:
            return
        path: list[int] = []
        wanted: dict[int, Action] = {}
        rank = next(iter(stuck))
        while rank not in path:
            path.append(rank)
            needed = awaited(ranks[rank][stuck[rank]], self.schedule, explicit=self.explicit)
            wanted[rank] = next(action for action in needed if action in self.places)
            rank = self.places[wanted[rank]][0]
        cycle = path[path.index(rank) :]
        cycle = cycle[cycle.index(min(cycle)) :] + cycle[: cycle.index(min(cycle))]
        steps = [
            f"waits at `{ranks[waiter][stuck[waiter]]}` for `{wanted[waiter]}` of rank {after}"
            for waiter, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        ]
        late, here = wanted[cycle[-1]], ranks[cycle[0]][stuck[cycle[0]]]
        raise self._fault(
            f"deadlock: rank {cycle[0]} {', which '.join(steps)}",
            {waiter: stuck[waiter] for waiter in cycle},
            f"break the circle: rank {cycle[0]}, for one, must come to `{late}` (position {self.places[late][1]}) "
            f"before it waits at `{here}`",
        )

    def _report(self, times: tuple[Times, ...]) -> ScheduleReport:
        schedule, rank_of = self.schedule, self.rank_of
        duration = max(end for each in times for _, end in each)
        borders = []
        for stage in range(schedule.num_stages - 1):
            rank, other = rank_of[stage], rank_of[stage + 1]
            crosses = int(rank != other)
            borders.append(Border(stage=stage, rank=rank, next_rank=other, activations=crosses, gradients=crosses))
        ranks = []
        for rank, each in enumerate(times):
            busy = sum(end - start for start, end in each)
            live = most = 0
            for action in schedule.ranks[rank]:
                live += (action.kind is F) - (action.kind in (B, W))
                most = max(most, live)
            ranks.append(
                RankReport(
                    stages=tuple(sorted(stage for stage, home in rank_of.items() if home == rank)),
                    times=each,
                    busy=busy,
                    bubble=(duration - busy) / busy,
                    gaps=(each[-1][1] - each[0][0] - busy) / busy,
                    live_activations=most,
                    live_microbatches=most / schedule.num_chunks,
                    sent_per_microbatch=sum(
                        border.activations * (border.rank == rank) + border.gradients * (border.next_rank == rank)
                        for border in borders
                    ),
                )
            )
        busy = sum(stats.busy for stats in ranks)
        return ScheduleReport(
            duration=duration,
            bubble=(duration * len(ranks) - busy) / busy,
            live_microbatches=max(stats.live_microbatches for stats in ranks),
            ranks=tuple(ranks),
            borders=tuple(borders),
        )

    def _missing(self, rank: int, action: Action) -> ScheduleError:
        position = len(self.schedule.ranks[rank])
        return self._fault(f"`{action}` is missing", {rank: position}, f"add `{action}` to rank {rank}")

    def _wrong(self, action: Action, problem: str, remedy: str) -> ScheduleError:
        rank, position = self.places[action]
        return self._fault(f"`{action}` {problem}", {rank: position}, remedy)

    def _fault(self, problem: str, marks: Mapping[int, int], remedy: str) -> ScheduleError:
        rank, position = next(iter(marks.items()))
        drawn = picture.grid(self.schedule, marks)
        return ScheduleError(f"{problem}\n\n{drawn}\n", where=f"rank {rank}, position {position}", remedy=remedy)


_AFTER = {B: (F,), I: (F,), W: (I,), ActionKind.SEND_F: (F,), ActionKind.SEND_B: (B, I)}
"""Maps a kind of action to alternative kinds. An action of one of these kinds, for the same stage and micro-batch, must
precede it."""
