"""Memory per rank over a schedule: its peak, and whether it fits a limit, before anything is allocated."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost import memory_events
from meshwright.cost.memory_events import BEFORE, HELD, UPDATE, MemoryEvents
from meshwright.cost.work import ActionBytes, StepWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import COVERED, NINE_OF_TEN
from meshwright.ir.part import memory_of
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.ir.software import Software

Occupancy = Literal["fits", "marginal", "does not fit"]
MOST_AXES = 3
"""The largest number of axes along which a rank has neighbours: dp, tp and pp."""
SURE = (1 + COVERED) / 2
"""A peak counts as fitting if the chance of staying within the limit is at least this; it counts as not fitting if the
chance is below one half."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank at its peak: held for the whole step, saved for the micro-batches in flight, and workspace of
    the ``action`` at which the peak occurs."""

    rank: int
    held_bytes: int
    saved_bytes: int
    workspace_bytes: int
    action: str

    @property
    def peak_bytes(self) -> int:
        """The sum of the three parts."""
        return self.held_bytes + self.saved_bytes + self.workspace_bytes


def peak_memory(work: StepWork, schedule: Schedule) -> tuple[RankMemory, ...]:
    """The peak of every pipeline rank, over its actions in their order and over the moments before and after them.

    A micro-batch's values live on a stage from its F until the end of its B or W, as in the schedule's validator
    (``schedules/check.py``). A received value lives from its RECV on. If the order of actions is a rule, the order with
    the most micro-batches in flight counts."""
    events = memory_events.events_of(schedule)
    held_bytes = [
        sum(work.held_bytes(stage, actions) for stage in stages)
        for stages, actions in zip(events.stages, events.actions, strict=True)
    ]
    memory = [_memory(work, stage, kind) for _, stage, kind in events.distinct]
    taken, most, left = np.array([(each.taken_bytes, each.most_bytes, each.left_bytes) for each in memory]).T
    most = np.maximum(taken, most)
    change = np.where([kind == BEFORE for _, _, kind in events.distinct], 0, left - taken)[events.slots]
    live = np.cumsum(change) - change
    held = np.cumsum(_held_changes(work, events, held_bytes)[events.slots])
    peaks = []
    for rank, (begin, end) in enumerate(pairwise(events.begins)):
        slots = events.slots[begin:end]
        before = live[begin:end] - live[begin] - taken[slots]
        now = held[begin:end] - (held[begin - 1] if rank else 0)
        peak = int(np.argmax(now + before + most[slots]))
        slot, others, whole = slots[peak], int(before[peak]), int(now[peak])
        saved = others + int(min(most[slot], max(taken[slot], left[slot])))
        workspace = others + int(most[slot]) - saved
        if whole + saved + workspace <= held_bytes[rank]:
            peaks.append(
                RankMemory(rank=rank, held_bytes=held_bytes[rank], saved_bytes=0, workspace_bytes=0, action="")
            )
            continue
        action = events.name(begin + peak)
        peaks.append(
            RankMemory(rank=rank, held_bytes=whole, saved_bytes=saved, workspace_bytes=workspace, action=action)
        )
    return tuple(peaks)


def _memory(work: StepWork, stage: int, kind: str) -> ActionBytes:
    """The memory of an event of a stage."""
    return ActionBytes() if kind in (HELD, UPDATE) else work.memory_of(stage, kind)


def _held_changes(work: StepWork, events: MemoryEvents, held_bytes: Sequence[int]) -> NDArray[np.int64]:
    """For each slot, the change of the bytes that live for the whole step, before its event. Values that the prologue
    passes to micro-batches come one stage after the other, and go when the gradients of their stage are reduced. Inputs
    go before the update."""
    changes = []
    for rank, stage, kind in events.distinct:
        stages = [work.stages[each] for each in events.stages[rank]]
        place = events.stages[rank].index(stage) if stages else 0
        match kind:
            case memory_events.BEFORE if place == 0:
                changes.append(held_bytes[rank] - sum(each.passing_bytes for each in stages))
            case memory_events.BEFORE:
                changes.append(stages[place - 1].passing_bytes)
            case memory_events.HELD:
                changes.append(stages[place].passing_bytes)
            case ActionKind.REDUCE_GRAD:
                changes.append(-stages[place].passing_bytes)
            case memory_events.UPDATE:
                changes.append(-sum(each.inputs_bytes for each in stages))
            case _:
                changes.append(0)
    return np.array(changes, dtype=np.int64)


def num_peers(sizes: Mapping[str, int], box: int) -> int:
    """The number of neighbours for which a rank has buffers, from the sizes of its groups by axis. Around a ring or
    along a pipeline, a rank receives from one neighbour. In an all-to-all (``ep``), it receives from every other rank
    in its box of ``box`` devices. Messages between boxes share one buffer."""
    return sum(max(1, min(size, box) - 1) if axis == "ep" else 1 for axis, size in sizes.items() if size > 1)


def most_peers(num_ranks: int) -> int:
    """The largest number of neighbours in a layout of dp, tp and pp over this number of ranks: one neighbour for each
    axis."""
    factors, rest = 0, num_ranks
    for prime in range(2, num_ranks + 1):
        while rest % prime == 0 and factors < MOST_AXES:
            factors, rest = factors + 1, rest // prime
        if factors == MOST_AXES or rest == 1:
            break
    return factors


def taken_bytes(live_bytes: float, software: Software, kind: str, peers: int = 0) -> float:
    """The bytes in use on a device of this ``kind`` if live tensors take ``live_bytes``. They include the allocator's
    fragmentation, the device's context, and the buffers for ``peers`` neighbours. On a CPU the result is
    ``live_bytes``, which already includes the losses of the heap."""
    return live_bytes if kind == "cpu" else (1 + software.fragmentation) * live_bytes + _beside_bytes(software, peers)


def room_of(cluster: Cluster, ranks: range, peers: int | None = None) -> int:
    """The bytes that the live tensors of each rank may take, so that ``taken_bytes`` stays within the device's memory
    with the chance ``SURE``. Without ``peers``, before a layout is chosen, ranks are assumed to have the most buffers
    that a layout of dp, tp and pp needs (``most_peers``)."""
    software, kind = cluster.software, cluster.device.kind
    surely_bytes = memory_of(cluster, ranks) * math.exp(-NINE_OF_TEN * software.spread.memory)
    if kind == "cpu":
        return int(surely_bytes)
    beside_bytes = _beside_bytes(software, most_peers(len(ranks)) if peers is None else peers)
    return max(0, int((surely_bytes - beside_bytes) / (1 + software.fragmentation)))


def box_of(cluster: Cluster) -> int:
    """The number of devices in a box, the unit of the innermost level."""
    if not cluster.levels:
        return 1
    members = cluster.levels[0].members
    inner = members[0].levels if members else ()
    return (inner or cluster.levels)[0].fan_out


def _beside_bytes(software: Software, peers: int) -> float:
    """Bytes of a GPU that are in use outside of the allocator."""
    return software.context_bytes + peers * software.peer_bytes


def fit_chance(peak_bytes: float, limit_bytes: float, deviation: float) -> float:
    """The chance (0 to 1) that a rank with this predicted peak stays within ``limit_bytes``. ``deviation`` is the
    standard deviation of the logarithm of the peak (``Spread.memory``)."""
    room = math.log(limit_bytes / peak_bytes) if peak_bytes > 0 else math.inf
    if deviation == 0:
        return float(room >= 0)
    return 0.5 * math.erfc(-room / (deviation * math.sqrt(2)))


def memory_verdict(peak_bytes: float, limit_bytes: float, deviation: float) -> Occupancy:
    """Whether a rank with this predicted peak stays within ``limit_bytes`` (see ``fit_chance``)."""
    chance = fit_chance(peak_bytes, limit_bytes, deviation)
    return "does not fit" if chance < 0.5 else "fits" if chance >= SURE else "marginal"
