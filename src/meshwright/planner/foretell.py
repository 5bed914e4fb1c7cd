"""Predict the step of a plan: simulate its schedule, and find the peak memory of every pipeline rank."""

import msgspec

from meshwright.cost.occupancy import RankMemory, box_of, num_peers, peak_memory, room_of
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.cost.program import step_work
from meshwright.cost.work import Compute, StepWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import interval, step_deviation
from meshwright.ir.part import memory_of
from meshwright.ir.plan import Plan, Prediction
from meshwright.ir.program import Lower
from meshwright.ir.schedule import Schedule
from meshwright.ir.software import Spread
from meshwright.ir.summary import exposed_share, summarize
from meshwright.ir.trace import Trace
from meshwright.schedules.pipeline import schedule_of
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Faults
from meshwright.simulate.played import PlayedStep


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step of a plan. ``digest`` identifies the plan. ``memory`` has one entry for each pipeline rank.
    ``host_share`` is the fraction of the step in which the device waits for its host, on the rank with the longest such
    wait. ``device_bytes`` has the memory of the smallest device of each pipeline rank. ``room_bytes`` is the part of it
    that live tensors may use (``cost.occupancy.room_of``). ``spread`` describes the uncertainty of the step's time."""

    digest: str
    work: StepWork
    played: PlayedStep
    memory: tuple[RankMemory, ...]
    device_bytes: tuple[int, ...]
    room_bytes: tuple[int, ...]
    spread: Spread
    host_share: float = 0.0

    @property
    def peak(self) -> RankMemory:
        """The memory of the rank with the highest peak."""
        return max(self.memory, key=lambda memory: memory.peak_bytes)

    def fullest(self, memory_bytes: float | None = None) -> tuple[RankMemory, float]:
        """The memory of the rank that uses the largest part of its limit, and this limit: ``memory_bytes`` if given,
        else the memory of its device."""
        limits = [memory_bytes or own for own in self.device_bytes]
        pairs = zip(self.memory, limits, strict=True)
        return max(pairs, key=lambda pair: pair[0].peak_bytes / pair[1])

    def fits(self, memory_bytes: float | None = None) -> bool:
        """Whether every rank stays within ``memory_bytes``. Without this limit, each rank must stay within the room of
        its device."""
        pairs = zip(self.memory, self.room_bytes, strict=True)
        return all(memory.peak_bytes <= (memory_bytes or room) for memory, room in pairs)

    def trace(self) -> Trace:
        """The predicted trace: the actions of every rank over time, and the memory of the rank."""
        return msgspec.structs.replace(self.played.trace(), plan=self.digest)

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm of the step's time."""
        one_of_each = self.played.trace(self.played.classes.first)  # all ranks of a class have equal times
        return step_deviation(self.spread, exposed_share(summarize(one_of_each)), self.host_share)

    @property
    def prediction(self) -> Prediction:
        """The predicted step time, with its interval, and the peak memory."""
        between = interval(self.played.step_s, self.deviation)
        return Prediction(step_s=self.played.step_s, peak_memory_bytes=self.peak.peak_bytes, interval_s=between)


def foretell(
    lower: Lower,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    threads: int = 1,
    contention: bool = False,
    faults: Faults | None = None,
    work: StepWork | None = None,
) -> Foretold:
    """Lower ``plan``, and simulate a training step on ``cluster``, with ``threads`` threads per device.

    ``work``: the work of the step, if it is already known from a plan that differs only in its schedule. ``plan`` is
    not lowered in this case.

    Raises:
        ClusterError: the cluster is too small.
    """
    done = work or step_work(lower(plan), plan, cluster, optimizer=optimizer, clips=clips, threads=threads)
    schedule = schedule_of(plan)
    overlap = contention or cluster.device.kind != "cpu"  # on CPUs, the cores that compute also copy and add
    played = play(schedule, done, plan.mesh, cluster, overlap=overlap, contention=contention, faults=faults)
    peers = num_peers(plan.mesh.sizes, box_of(cluster))
    ranks = [plan.mesh.stage_ranks(rank) for rank in range(plan.mesh.num_stages)]
    return Foretold(
        digest=plan.digest,
        work=done,
        played=played,
        memory=peak_memory(done, schedule),
        device_bytes=tuple(memory_of(cluster, each) for each in ranks),
        room_bytes=tuple(room_of(cluster, each, peers) for each in ranks),
        spread=cluster.software.spread,
        host_share=_host_s(done, schedule, cluster.software.step_s) / played.step_s,
    )


def _host_s(work: StepWork, schedule: Schedule, outside_s: float) -> float:
    """The seconds in which the device waits for its host, on the rank with the longest such wait."""
    waits = []
    for actions in schedule.ranks:
        piece_lists = [work.stages[action.stage].pieces.get(action.kind.value, ()) for action in actions]
        for stage in {action.stage for action in actions}:
            piece_lists += [work.stages[stage].before, work.stages[stage].after]
        waits.append(sum(piece.host_s for pieces in piece_lists for piece in pieces if isinstance(piece, Compute)))
    return max(waits) + outside_s
