"""Memory per rank over a schedule: its peak, and whether it fits a limit, before anything is allocated."""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from meshwright.cost.work import ActionBytes, StepWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import COVERED, NINE_OF_TEN
from meshwright.ir.part import memory_of
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.ir.software import Software
from meshwright.schedules.message_driven import with_most_in_flight

Occupancy = Literal["fits", "marginal", "does not fit"]
MOST_AXES = 3
"""The largest number of axes along which a rank has neighbours: dp, tp and pp."""
SURE = (1 + COVERED) / 2
"""A peak counts as fitting if the chance of staying within the limit is at least this; it counts as not fitting if the
chance is below one half."""
_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)
_TAKES = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
"""Maps a computing action to the action that receives its values."""
_HANDS = {
    ActionKind.F: (1, ActionKind.RECV_F), ActionKind.B: (-1, ActionKind.RECV_B), ActionKind.I: (-1, ActionKind.RECV_B),
}  # fmt: skip
"""Maps a computing action to the distance of the stage that reads its values, and to what that stage receives."""


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
    return tuple(_Rank(work, rank, tuple(actions)).peak() for rank, actions in enumerate(with_most_in_flight(schedule)))


class _Rank:
    """Plays the memory of one rank. ``held`` are the bytes that live for the whole step, ``live`` those of values."""

    def __init__(self, work: StepWork, rank: int, actions: tuple[Action, ...]) -> None:
        self.work, self.rank, self.actions = work, rank, actions
        self.stages = sorted({action.stage for action in actions})
        self.held, self.live = sum(work.held_bytes(stage, actions) for stage in self.stages), 0
        self.received: set[tuple[int, int | None, str]] = set()
        self.known: dict[tuple[int, str], ActionBytes] = {}
        self.highest = RankMemory(rank=rank, held_bytes=self.held, saved_bytes=0, workspace_bytes=0, action="")

    def peak(self) -> RankMemory:
        """The moment with the most bytes."""
        passing = [self.work.stages[stage].passing_bytes for stage in self.stages]
        self.held -= sum(passing)
        for stage, num_bytes in zip(self.stages, passing, strict=True):
            self._look(self._memory(stage, "before"), "prologue")
            self.held += num_bytes
        for action in self.actions:
            self._play(action)
        for stage in self.stages:
            self._run(self._memory(stage, "after"), "the end of the step")
        self.held -= sum(self.work.stages[stage].inputs_bytes for stage in self.stages)
        self._look(ActionBytes(), "update")
        return self.highest

    def _memory(self, stage: int, action: str) -> ActionBytes:
        if (stage, action) not in self.known:
            self.known[stage, action] = self.work.memory_of(stage, action)
        return self.known[stage, action]

    def _play(self, action: Action) -> None:
        stage, kind, key = action.stage, action.kind, (action.stage, action.microbatch)
        if kind in _RECEIVES:
            self._come(*key, kind)
            return
        if kind is ActionKind.REDUCE_GRAD:
            self.held -= self.work.stages[stage].passing_bytes
        elif not kind.computes:
            return
        if kind in _TAKES:
            self._come(*key, _TAKES[kind])
        self._run(self._memory(stage, kind.value), str(action))
        if kind in _HANDS:  # to a stage of the same rank, without a message
            further, receive = _HANDS[kind]
            if stage + further in self.stages:
                self._come(stage + further, action.microbatch, receive)

    def _come(self, stage: int, microbatch: int | None, receive: ActionKind) -> None:
        """Allocate what a micro-batch receives, once."""
        if (stage, microbatch, receive.value) not in self.received:
            self.received.add((stage, microbatch, receive.value))
            self._run(self._memory(stage, receive.value), f"{stage}{receive.value}{microbatch}")

    def _run(self, each: ActionBytes, action: str) -> None:
        self._look(each, action)
        self.live += each.left_bytes - each.taken_bytes

    def _look(self, each: ActionBytes, action: str) -> None:
        """Note the moment if it is the highest so far."""
        most = max(each.most_bytes, each.taken_bytes)
        saved = self.live - each.taken_bytes + min(most, max(each.taken_bytes, each.left_bytes))
        workspace = self.live - each.taken_bytes + most - saved
        if self.held + saved + workspace > self.highest.peak_bytes:
            self.highest = RankMemory(
                rank=self.rank, held_bytes=self.held, saved_bytes=saved, workspace_bytes=workspace, action=action
            )


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
