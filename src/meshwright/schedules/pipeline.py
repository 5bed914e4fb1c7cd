"""Builds pipeline schedules, which list the actions of every rank in one step, and the schedule of a plan."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from meshwright.errors import Problem, ScheduleError, refuse
from meshwright.ir import files
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.passes import add_communication, add_reduction

MOST_ACTIONS = 1_000_000
"""Upper limit on forwards and backwards of a schedule; to build and check this many takes some minutes."""


def build(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule ``name`` for p ranks, m micro-batches and v chunks; stage s lives on rank s % p.

    The schedule has only forwards and backwards; ``passes`` adds communication. If F takes 1 and B takes 2 (I and W
    take 1 each):

    =========== ===================================== ================= ============================================
    name        source                                bubble / ideal    micro-batches alive on rank r
    =========== ===================================== ================= ============================================
    none        one rank accumulates gradients        0                 1
    gpipe       Huang et al. 2019, figure 2           (p-1)/m           m
    1f1b        Narayanan et al. 2021, figure 4       (p-1)/m           min(m, p-r)
    interleaved Narayanan et al. 2021, section 2.2    (p-1)/(v·m)       at most (v-1)·k/v + (2·(p-1-r) + 1)/v
    zb-h1       Qi et al. 2024, section 2.2           (p-1)/(3·m)       p
    =========== ===================================== ================= ============================================

    ``interleaved`` works through rounds of k = m / (m // p) micro-batches (k = p if p divides m); with one chunk it is
    ``1f1b``. ``zb-h1`` splits the backward B into I (for inputs) and W (for weights), and puts W where 1f1b idles.

    Raises:
        ScheduleError: the name is unknown; a count is less than 1; the schedule allows only one chunk or one rank; it
            is not defined for m (the error suggests values); or it has more than ``MOST_ACTIONS`` actions.
    """
    refuse(ScheduleError, _problems(name, num_ranks, num_microbatches, num_chunks))
    builder = _BUILDERS[name]
    ranks = [builder(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)]
    stages = num_ranks * num_chunks
    return Schedule.of(name, ranks, num_stages=stages, num_microbatches=num_microbatches, num_chunks=num_chunks)


def forwards(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of an evaluation: forwards with their sends and receives, for any number of micro-batches.

    Rounds of p micro-batches (the last may be smaller) go through chunk 0, then 1, ...: on 2 ranks with 2 chunks and 3
    micro-batches, rank 0 runs 0F0 0F1 2F0 2F1, 0F2 2F2.
    """
    last = num_ranks * num_chunks - 1
    ranks = []
    for rank in range(num_ranks):
        actions = []
        for first in range(0, num_microbatches, num_ranks):
            for stage in range(rank, last + 1, num_ranks):
                for microbatch in range(first, min(first + num_ranks, num_microbatches)):
                    kinds = [ActionKind.RECV_F] * (stage > 0) + [ActionKind.F] + [ActionKind.SEND_F] * (stage < last)
                    actions += [Action(stage, kind, microbatch) for kind in kinds]
        ranks.append(actions)
    return Schedule.of("forwards", ranks, num_stages=last + 1, num_microbatches=num_microbatches, num_chunks=num_chunks)


def _gpipe(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    return [*_all(rank, ActionKind.F, num_microbatches), *_all(rank, ActionKind.B, num_microbatches)]


def _one_f_one_b(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, backward: ActionKind = ActionKind.B
) -> list[Action]:
    forwards, backwards = (_all(rank, kind, num_microbatches) for kind in (ActionKind.F, backward))
    return _alternated(forwards, backwards, num_warmup=num_ranks - 1 - rank)


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Rounds of k micro-batches: forward through chunk 0, then 1, ...; backward through the last chunk first.

    For 2 ranks, 2 chunks, 4 micro-batches, rank 0: forwards 0F0 0F1 2F0 2F1, 0F2 0F3 2F2 2F3; backwards 2B0 2B1 0B0
    0B1, 2B2 2B3 0B2 0B3. The first (v-1)·k + 2·(p-1-rank) forwards come before the first backward.
    """
    if num_chunks == 1:
        return _one_f_one_b(rank, num_ranks, num_microbatches, num_chunks)
    per_round = num_microbatches // (num_microbatches // num_ranks)
    rounds = [range(first, first + per_round) for first in range(0, num_microbatches, per_round)]
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    forwards = [Action(stage, ActionKind.F, microbatch) for each in rounds for stage in stages for microbatch in each]
    backwards = [
        Action(stage, ActionKind.B, microbatch) for each in rounds for stage in reversed(stages) for microbatch in each
    ]
    return _alternated(forwards, backwards, (num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank))


def _zero_bubble_h1(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """1f1b with I in place of B. Rank r runs each W r micro-batches after its I, so that p micro-batches stay alive on
    every rank."""
    weights = _all(rank, ActionKind.W, num_microbatches)
    actions = []
    for action in _one_f_one_b(rank, num_ranks, num_microbatches, num_chunks, ActionKind.I):
        actions.append(action)
        if action.kind is ActionKind.I and action.microbatch is not None and action.microbatch >= rank:
            actions.append(weights[action.microbatch - rank])
    return [*actions, *weights[num_microbatches - rank :]]


def _all(stage: int, kind: ActionKind, num_microbatches: int) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in range(num_microbatches)]


def _alternated(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> list[Action]:
    """``num_warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    actions = list(forwards[:num_warmup])
    rest = iter(forwards[num_warmup:])
    for backward in backwards:
        actions += [*([forward] if (forward := next(rest, None)) is not None else []), backward]
    return actions


def _fills_pipeline(num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    return num_microbatches >= num_ranks


def _fills_rounds(num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether m divides into m // p equal rounds, each of at least p micro-batches. One chunk fits any m."""
    fills = num_microbatches >= num_ranks and num_microbatches % (num_microbatches // num_ranks) == 0
    return fills or num_chunks == 1


def _problems(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[Problem]:
    if name not in _BUILDERS:
        remedy = files.did_you_mean(name, _BUILDERS, f"schedules: {', '.join(_BUILDERS)}")
        yield "schedule", f"there is no schedule {name!r}", remedy
    where = f"schedule {name}"
    for key, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("num_chunks", num_chunks)):
        if count < 1:
            yield where, f"{key} is {count}", "give 1 or more"
    if (actions := 2 * num_ranks * num_microbatches * num_chunks) > MOST_ACTIONS:
        counts = f"{num_ranks} ranks, {num_microbatches} micro-batches and {num_chunks} chunks"
        problem = f"{counts} are {actions:,} forwards and backwards, more than {MOST_ACTIONS:,}"
        yield where, problem, "give fewer micro-batches: the bubble falls as 1 / micro-batches"
    if name != "interleaved" and num_chunks != 1:
        remedy = "take `interleaved`, or 1 chunk"
        yield where, f"{name} has one chunk a rank, and {num_chunks} are asked for", remedy
    if name == "none" and num_ranks != 1:
        yield where, f"without a pipeline there is 1 rank, and {num_ranks} are asked for", "take `1f1b`, or 1 rank"

    def fits(count: int) -> bool:
        return name not in _FITS or _FITS[name](num_ranks, count, num_chunks)

    if not fits(num_microbatches):
        below = next(filter(fits, range(num_microbatches - 1, 0, -1)), None)
        above = next(filter(fits, range(num_microbatches + 1, num_microbatches + num_ranks + 1)))
        nearest = f"{above}" if below is None else f"{below} or {above}"
        always = f", or any multiple of {num_ranks}" if name == "interleaved" else " or more"
        few = num_microbatches < num_ranks
        fault = "too few for" if few else "which does not divide into equal rounds on"
        problem = f"num_microbatches is {num_microbatches}, {fault} {num_ranks} ranks"
        yield where, problem, f"use {nearest}{always}{'; `1f1b` takes any number' if few else ''}"


_BUILDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "none": _one_f_one_b,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
}
"""Maps a schedule's name to the function (rank, p, m, v) that returns the rank's actions."""
_FITS = {"interleaved": _fills_rounds, "zb-h1": _fills_pipeline}
"""Maps a schedule's name to a function that says whether it is defined for (p, m, v); others are always defined."""
NAMES = tuple(_BUILDERS)


@lru_cache(maxsize=512)
def training_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule ``name`` of a training step, with its communication and the reduction of gradients. One rank has the
    schedule ``none``."""
    schedule = build(name if num_ranks > 1 else "none", num_ranks, num_microbatches, num_chunks)
    return add_reduction(add_communication(schedule))


def schedule_of(plan: Plan, *, backward: bool = True) -> Schedule:
    """The schedule of a plan's training step; without ``backward``, the schedule of an evaluation, which has only
    forwards."""
    num_ranks = plan.mesh.num_stages
    if not backward:
        return forwards(num_ranks, plan.microbatches, plan.chunks)
    return training_schedule(plan.schedule, num_ranks, plan.microbatches, plan.chunks)
