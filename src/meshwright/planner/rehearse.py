"""Rehearse a step: compute the time of every action of its pipeline schedule from the costs of the stages."""

from collections.abc import Callable
from functools import lru_cache

from meshwright.cost.memory import layer_activation_bytes, stage_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import KnownCosts, StageSeconds, StepTimes, step_pieces
from meshwright.errors import ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.pipeline import CHUNKED, Pipeline
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.ir.trace import MemorySample, Span, Trace
from meshwright.schedules import pipeline, timing
from meshwright.schedules.message_driven import reordered
from meshwright.schedules.timing import ActionOrder, order_of

LONGEST = 200_000
"""Upper limit on the number of actions of a schedule that is rehearsed. Rehearsing so many actions takes about a
second."""


KEPT = 12_500
"""Largest number of actions of a schedule that is kept. Setups of a search, and what-if questions about one model, have
few different schedules."""


def rehearse(setup: Setup, cluster: Cluster, known: KnownCosts | None = None) -> float | None:
    """The seconds of a step of ``setup``: its pipeline, computed action by action, plus the reduction of gradients and
    the optimizer after the pipeline. None if the schedule cannot be built, or has more than ``LONGEST`` actions.
    ``known``: costs on this cluster that are kept for other setups."""
    costed = _costed(setup, cluster, known)
    if costed is None:
        return None
    schedule, order, pieces, seconds = costed
    ends = order.ends([seconds(*each) for each in order.distinct], [0.0] * len(schedule.ranks))
    return max(ends) + pieces.after_s


def rehearsed_trace(setup: Setup, cluster: Cluster) -> Trace | None:
    """The rehearsed step as a trace that has one rank for each pipeline rank. Spans have the names of the schedule's
    actions. The memory of a rank rises with each forward and falls with each backward. The result is None if
    ``rehearse`` returns None."""
    costed = _costed(setup, cluster)
    if costed is None:
        return None
    schedule, order, pieces, seconds = costed
    each_s = (seconds(action.stage, action.kind) for action in order.actions)
    times = order.times(each_s, len(schedule.ranks))
    spans, memory = [], []
    end_s = max(rank[-1][1] for rank in times)
    for rank, (actions, each) in enumerate(zip(schedule.ranks, times, strict=True)):
        held = stage_memory(setup, rank, cluster)
        saved = layer_activation_bytes(setup, cluster.software) * setup.stage_layers[rank] / setup.chunks
        states = held.parameters_bytes + held.gradients_bytes + held.optimizer_bytes
        now = states + held.buffers_bytes + held.context_bytes + held.peers_bytes
        now += held.fragmentation_bytes + held.ends_bytes
        memory.append(MemorySample(rank, 0.0, int(now)))
        for action, (start_s, done_s) in zip(actions, each, strict=True):
            spans.append(Span(rank, "compute", str(action), start_s, done_s))
            if action.kind is ActionKind.F:
                now += saved
                memory.append(MemorySample(rank, start_s, int(now)))
            elif action.kind in (ActionKind.B, ActionKind.I):
                memory.append(MemorySample(rank, start_s, int(now + held.workspace_bytes)))
            if action.kind in (ActionKind.B, ActionKind.W):
                now -= saved
                memory.append(MemorySample(rank, done_s, int(now)))
        spans.append(Span(rank, "compute", "gradients and optimizer", end_s, end_s + pieces.after_s))
        memory.append(MemorySample(rank, end_s + pieces.after_s, int(now)))
    return Trace(source="simulated", spans=tuple(spans), memory=tuple(memory))


def _costed(
    setup: Setup, cluster: Cluster, known: KnownCosts | None = None
) -> tuple[Schedule, ActionOrder, StepTimes, Callable[[int, ActionKind], float]] | None:
    """The schedule with its order, the costs of its stages, and the seconds of an action by its stage and kind. None if
    the schedule cannot be rehearsed."""
    actions = 2 * setup.pp * setup.chunks * setup.microbatches
    if actions > LONGEST:
        return None
    name = "none" if setup.pp == 1 else setup.schedule
    chunks = setup.chunks if name in CHUNKED else 1
    try:
        schedule, order = (_kept if actions <= KEPT else _built)(name, setup.pp, setup.microbatches, chunks)
    except ScheduleError:
        return None  # the schedule is not defined for this number of micro-batches; only the closed form remains
    pieces = step_pieces(setup, cluster, known)
    costs = _costs(pieces.stages, pieces.send_s, setup.pipeline)

    def seconds(stage: int, kind: ActionKind) -> float:
        return costs[stage].of(kind)

    if schedule.in_flight:
        schedule = reordered(schedule, lambda action: seconds(action.stage, action.kind))
        order = order_of(schedule, keep=False)
    return schedule, order, pieces, seconds


def _built(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[Schedule, ActionOrder]:
    schedule = pipeline.build(name, num_ranks, num_microbatches, num_chunks)
    return schedule, order_of(schedule, keep=False)


_kept = lru_cache(maxsize=32)(_built)


def _costs(stages: tuple[StageSeconds, ...], send_s: float, places: Pipeline) -> list[timing.Costs]:
    """The seconds of each kind of action, for each stage. ``send_s`` is the seconds of a message to the next stage and
    of the message back. A rank waits for its own message, which takes half of ``send_s``."""
    costs = []
    for index, stage in enumerate(stages):
        sends_back = index > 0 and places.rank_of(index - 1) != places.rank_of(index)
        sends_on = index < len(stages) - 1 and places.rank_of(index + 1) != places.rank_of(index)
        back_s = send_s / 2 if sends_back else 0.0
        weight_s = max(stage.backward.weight_s, 1e-12)
        costs.append(
            timing.Costs(
                forward=stage.forward.total_s + (send_s / 2 if sends_on else 0.0),
                backward=stage.backward.total_s + back_s,
                backward_input=max(stage.backward.total_s - weight_s, 1e-12) + back_s,
                backward_weight=weight_s,
            )
        )
    return costs
