"""Builds pipeline schedules, which list the actions of every rank in one step, and the schedule of a plan."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import msgspec

from meshwright.errors import Problem, ScheduleError, refuse
from meshwright.ir import files
from meshwright.ir.pipeline import CHUNKED, V_SHAPED, Pipeline
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.message_driven import most_in_flight, ordered, reordered
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.timing import Costs

MOST_ACTIONS = 1_000_000
"""Upper limit on forwards and backwards of a schedule; to build and check this many takes some minutes."""


@lru_cache(maxsize=32)
def build(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule ``name`` for p ranks, m micro-batches and v chunks; ``ir.pipeline.Pipeline`` places the stages.

    The schedule has only forwards and backwards; ``passes`` adds communication. If F takes 1 and B takes 2 (I and W
    take 1 each):

    ============== ===================================== ================= ============================================
    name           source                                bubble / ideal    micro-batches alive on rank r
    ============== ===================================== ================= ============================================
    none           one rank accumulates gradients        0                 1
    gpipe          Huang et al. 2019, figure 2           (p-1)/m           m
    1f1b           Narayanan et al. 2021, figure 4       (p-1)/m           min(m, p-r)
    interleaved    Narayanan et al. 2021, section 2.2    (p-1)/(v·m)       at most (v-1)·k/v + (2·(p-1-r) + 1)/v
    zb-h1          Qi et al. 2024, section 2.2           (p-1)/(3·m)       p
    zb-h2          Qi et al. 2024, section 2.3           (p-1)/(3·m)       2·p-1
    zb-v           Qi et al. 2024b, V-ZB (v = 2)         (p-1)/(6·m)       p
    dualpipe-v     DeepSeek-AI 2024, one half (v = 2)    (p-1)/(6·m)       p + 1/2
    message-driven Singh, Bhatele 2022 (AxoNN)           (p-1)/m           at most min(m, 2·p), on the last rank 1
    ============== ===================================== ================= ============================================

    ``interleaved`` works through rounds of k = m / (m // p) micro-batches (k = p if p divides m); with one chunk it is
    ``1f1b``. ``zb-h1`` splits the backward B into I (for inputs) and W (for weights), and puts W where 1f1b idles.
    ``zb-h2`` and ``zb-v`` are idle only before a rank's first action and after its last action. The papers call this
    zero bubble, because their ranks begin the next step immediately. ``zb-h2`` is shorter than ``zb-h1`` if I takes
    longer than W. ``message-driven`` is a rule (``message_driven.py``). The schedule has the order that results from
    these costs. ``dualpipe-v`` splits few backwards. On rank r, it is also idle for (p-1-r)/(6·m) between two actions.
    Qi et al. 2024 is "Zero Bubble Pipeline Parallelism"; 2024b is "Pipeline Parallelism with Controllable Memory".
    DeepSeek-AI 2024 is DualPipe in "DeepSeek-V3 Technical Report", section 3.2.1; ``dualpipe-v`` needs only
    half of its ranks.

    Raises:
        ScheduleError: the name is unknown; a count is less than 1; the schedule allows only one chunk or one rank; it
            is not defined for m (the error suggests values); or it has more than ``MOST_ACTIONS`` actions.
    """
    refuse(ScheduleError, _problems(name, num_ranks, num_microbatches, num_chunks))
    builder = _BUILDERS[name]
    ranks = [builder(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)]
    stages = num_ranks * num_chunks
    return Schedule.of(
        name, ranks, num_stages=stages, num_microbatches=num_microbatches, num_chunks=num_chunks,
        in_flight=most_in_flight(num_ranks) if name == "message-driven" else 0,
    )  # fmt: skip


def forwards(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """The schedule of an evaluation: forwards with their sends and receives, for any number of micro-batches.

    Rounds of p micro-batches (the last may be smaller) go through chunk 0, then 1, ...: on 2 ranks with 2 chunks and 3
    micro-batches, rank 0 runs 0F0 0F1 2F0 2F1, 0F2 2F2.
    """
    each, last = pipeline.num_ranks, pipeline.num_stages - 1
    ranks = []
    for rank in range(each):
        actions = []
        for first in range(0, num_microbatches, each):
            for stage in pipeline.stages_of(rank):
                receives = stage > 0 and pipeline.rank_of(stage - 1) != rank
                sends = stage < last and pipeline.rank_of(stage + 1) != rank
                for microbatch in range(first, min(first + each, num_microbatches)):
                    kinds = [ActionKind.RECV_F] * receives + [ActionKind.F] + [ActionKind.SEND_F] * sends
                    actions += [Action(stage, kind, microbatch) for kind in kinds]
        ranks.append(actions)
    return Schedule.of(
        "forwards", ranks, num_stages=last + 1, num_microbatches=num_microbatches, num_chunks=pipeline.num_chunks
    )


def _gpipe(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    return [*_all(rank, ActionKind.F, num_microbatches), *_all(rank, ActionKind.B, num_microbatches)]


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    forwards, backwards = (_all(rank, kind, num_microbatches) for kind in (ActionKind.F, ActionKind.B))
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
    return _with_late_weights(rank, num_microbatches, num_warmup=num_ranks - 1 - rank, delay=rank)


def _zero_bubble_h2(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """zb-h1 with twice as many forwards ahead, and W twice as late."""
    return _with_late_weights(rank, num_microbatches, num_warmup=2 * (num_ranks - 1 - rank), delay=2 * rank)


def _with_late_weights(stage: int, num_microbatches: int, num_warmup: int, delay: int) -> list[Action]:
    """``num_warmup`` forwards, then F and I in turn; each W comes ``delay`` micro-batches after its I."""
    forwards, backwards, weights = (
        _all(stage, kind, num_microbatches) for kind in (ActionKind.F, ActionKind.I, ActionKind.W)
    )
    actions = []
    for action in _alternated(forwards, backwards, num_warmup):
        actions.append(action)
        if action.kind is ActionKind.I and action.microbatch is not None and action.microbatch >= delay:
            actions.append(weights[action.microbatch - delay])
    return [*actions, *weights[num_microbatches - delay :]]


def _zero_bubble_v(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Forwards of chunk 0 until chunk 1 begins, then F, I and W of both chunks in turn. At the end, low ranks receive
    gradients late, and run each W immediately. High ranks first run each I that their neighbours wait for, then each
    W."""
    left = num_ranks - rank
    return _in_v(
        rank, num_ranks,
        (2 * left - 1, "F0"), (rank, "F1 F0"), (left, "F1 I1 W1"),
        (num_microbatches - num_ranks - left + 1, "F0 I0 W0 F1 I1 W1"), (left - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"), (left, "I0 W0"), (rank, "W1"), (rank, "W0"),
    )  # fmt: skip


def _dual_pipe_v(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Forwards of one chunk run together with whole backwards of the other chunk. Backwards are split only at the
    beginning and at the end, where neighbours wait."""
    left, (half, odd) = num_ranks - rank, divmod(rank + 1, 2)
    return _in_v(
        rank, num_ranks,
        (2 * left - 2, "F0"), (rank + 1, "F0 F1"), (left - 1, "I1 W F1"),
        (num_microbatches - num_ranks - left + 1, "F0 B1 F1 B0"), (left - 1, "B1 F1 B0"),
        (half, "B1 B0"), (odd, "B1 I0"), (half, "I1 I0"), (left - 1, "W I0"), (rank + 1, "W"),
    )  # fmt: skip


def _message_driven(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """The order that results from the rule if F takes 1, B takes 2, and communication takes no time."""
    return _all_message_driven(num_ranks, num_microbatches)[rank]


@lru_cache(maxsize=32)
def _all_message_driven(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    costs = Costs()
    return ordered(num_ranks, num_microbatches, most_in_flight(num_ranks), lambda action: costs.of(action.kind))


def _in_v(rank: int, num_ranks: int, *runs: tuple[int, str]) -> list[Action]:
    """The actions of a rank with two chunks. Each of ``runs`` repeats words: ``F0`` is the next forward of chunk 0,
    ``I1`` and ``B1`` are the next backward of chunk 1, ``W1`` is the oldest pending W of chunk 1, and ``W`` is the
    oldest pending W of any chunk."""
    stages = Pipeline(num_ranks, "zb-v", 2).stages_of(rank)
    words = {word for _, text in runs for word in text.split()}
    read = {word: (ActionKind(word[0]), stages[int(word[1:])] if word[1:] else None) for word in words}
    done: Counter[tuple[bool, int]] = Counter()
    due: list[Action] = []
    actions = []
    for word in [word for times, text in runs for word in text.split() * times]:
        kind, stage = read[word]
        if stage is None or kind is ActionKind.W:
            place = next(place for place, action in enumerate(due) if stage is None or action.stage == stage)
            actions.append(due.pop(place))
            continue
        counted = (kind is ActionKind.F, stage)
        actions.append(Action(stage, kind, done[counted]))
        if kind is ActionKind.I:
            due.append(Action(stage, ActionKind.W, done[counted]))
        done[counted] += 1
    return actions


def _all(stage: int, kind: ActionKind, num_microbatches: int) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in range(num_microbatches)]


def _alternated(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> list[Action]:
    """``num_warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    actions = list(forwards[:num_warmup])
    rest = iter(forwards[num_warmup:])
    for backward in backwards:
        actions += [*([forward] if (forward := next(rest, None)) is not None else []), backward]
    return actions


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
    if name not in CHUNKED and num_chunks != 1:
        remedy = "take `interleaved`, or 1 chunk"
        yield where, f"{name} has one chunk a rank, and {num_chunks} are asked for", remedy
    if name in V_SHAPED and num_chunks != 2:
        yield where, f"{name} has two chunks a rank, and {num_chunks} are asked for", "take 2 chunks"
    if name == "none" and num_ranks != 1:
        yield where, f"without a pipeline there is 1 rank, and {num_ranks} are asked for", "take `1f1b`, or 1 rank"

    least = least_microbatches(name, num_ranks)

    def fits(count: int) -> bool:
        return count >= least and (name != "interleaved" or _fills_rounds(num_ranks, count, num_chunks))

    if not fits(num_microbatches):
        below = next(filter(fits, range(num_microbatches - 1, 0, -1)), None)
        above = next(filter(fits, range(num_microbatches + 1, max(least, num_microbatches + num_ranks) + 1)))
        nearest = f"{above}" if below is None else f"{below} or {above}"
        always = f", or any multiple of {num_ranks}" if name == "interleaved" else " or more"
        few = below is None
        fault = "too few for" if few else "which does not divide into equal rounds on"
        problem = f"num_microbatches is {num_microbatches}, {fault} {num_ranks} ranks"
        yield where, problem, f"use {nearest}{always}{'; `1f1b` takes any number' if few else ''}"


_BUILDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "none": _one_f_one_b,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-h2": _zero_bubble_h2,
    "zb-v": _zero_bubble_v,
    "dualpipe-v": _dual_pipe_v,
    "message-driven": _message_driven,
}
"""Maps a schedule's name to the function (rank, p, m, v) that returns the rank's actions."""
NAMES = tuple(_BUILDERS)


def least_microbatches(name: str, num_ranks: int) -> int:
    """The smallest number of micro-batches for which a schedule is defined."""
    return {"zb-h1": num_ranks, "zb-h2": 2 * num_ranks - 1, "zb-v": 2 * num_ranks - 1, "dualpipe-v": 2 * num_ranks}.get(
        name, 1
    )


@lru_cache(maxsize=512)
def training_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, in_flight: int = 0
) -> Schedule:
    """The schedule ``name`` of a training step, with its communication and the reduction of gradients. A single rank
    has the schedule ``none``. ``in_flight``: the limit of a message-driven schedule, if it differs from the limit of
    ``build``."""
    schedule = build(name if num_ranks > 1 else "none", num_ranks, num_microbatches, num_chunks)
    if in_flight:
        costs = Costs()
        schedule = reordered(
            msgspec.structs.replace(schedule, in_flight=in_flight), lambda action: costs.of(action.kind)
        )
    return add_reduction(add_communication(schedule, built=True))


def schedule_of(plan: Plan, *, backward: bool = True) -> Schedule:
    """The schedule of a plan's training step; without ``backward``, the schedule of an evaluation, which has only
    forwards."""
    if not backward:
        return forwards(plan.pipeline, plan.microbatches)
    return training_schedule(
        plan.schedule, plan.pipeline.num_ranks, plan.microbatches, plan.chunks, plan.layout.in_flight
    )
