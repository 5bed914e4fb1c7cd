"""Pipelines whose stages have different numbers of ranks, on one or several kinds of devices.

Equal devices form a pool of neighbouring ranks. The layers are priced once for each pool. The dynamic program of
``stages`` then chooses the layers and ranks of every stage, and how these ranks are divided into dp and tp. Stages
follow the order of the ranks, so that values pass from one pool to another only once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost.crossing import Crossed
from meshwright.cost.fabric import Fabric
from meshwright.cost.occupancy import RankMemory, box_of, num_peers, peak_memory, room_of
from meshwright.cost.work import StepWork
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import RECOMPUTE, Layout, Recompute
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Placements, Shard
from meshwright.ir.schedule import ActionKind
from meshwright.planner.candidates import divisors
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import simulated_s
from meshwright.planner.inter_op.stage_prices import Assignment, StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from meshwright.planner.inter_op.works import LayerWorks
from meshwright.planner.receivers import cheapest
from meshwright.schedules.pipeline import training_schedule

SIMULATED = 3
"""The number of pipelines that are assembled and simulated. They have the shortest steps in the dynamic program."""
SMALL_BOX = 4
"""Largest number of devices of a box in which a stage may have any number of ranks. In larger boxes, stages have 1, 2,
4, ... ranks, or whole boxes."""
_REFUSALS = (LayoutError, PlanError, ScheduleError)


@dataclass(frozen=True)
class Pool:
    """Neighbouring ranks with equal devices, in boxes of ``box`` ranks. ``pipelines`` has the prices of layers on these
    devices."""

    ranks: range
    box: int
    pipelines: Pipelines


class _Variant(NamedTuple):
    dp: int
    tp: int
    recompute: Recompute
    works: LayerWorks


class _Candidate(NamedTuple):
    assignment: Assignment
    microbatches: int
    variants: list[list[_Variant]]


class UnequalStages:
    """Finds the fastest pipelines over ``pools``, which together are the whole cluster.

    ``memory_bytes`` is the memory limit of each rank (None: the memory of its device). If ``known_only`` is set, only
    divisions of stages that are already priced are considered. A stage has at most ``most_ranks`` ranks.
    """

    def __init__(
        self, cluster: Cluster, pools: Sequence[Pool], batch_size: int, memory_bytes: float | None,
        *, known_only: bool = False, most_ranks: int,
    ) -> None:  # fmt: skip
        self.cluster, self.pools, self.batch_size = cluster, pools, batch_size
        self.known_only = known_only
        self.chain = pools[0].pipelines.chain
        self.limits = [memory_bytes or room_of(cluster, pool.ranks) for pool in pools]
        self.memory_bytes = memory_bytes
        self.submeshes = [
            Submesh.of(number, devices)
            for number, pool in enumerate(pools)
            for devices in _sizes(len(pool.ranks), pool.box)
            if devices <= most_ranks
        ]

    def options(self, microbatches: Sequence[int]) -> Iterator[Option]:
        """The fastest pipelines with these numbers of micro-batches that fit in memory."""
        candidates = [candidate for count in microbatches if (candidate := self._fastest(count)) is not None]
        candidates.sort(key=lambda candidate: candidate.assignment.step_s)
        for candidate in candidates[:SIMULATED]:
            option = self._made(candidate)
            if option is not None:
                yield option

    def _fastest(self, microbatches: int) -> _Candidate | None:
        """The fastest stages in the dynamic program. Recomputation is considered only if no stages fit without it."""
        every = self.pools[0].pipelines.kinds
        for kinds in (every[:1], every):
            variants = [list(self._variants(submesh, microbatches, kinds)) for submesh in self.submeshes]
            if not any(variants):
                continue
            assignment = assign_stages(
                self._prices(variants, microbatches),
                [len(pool.ranks) for pool in self.pools],
                microbatches,
                boxes=[pool.box for pool in self.pools],
                in_order=True,
            )
            if assignment is not None:
                return _Candidate(assignment, microbatches, variants)
        return None

    def _variants(self, submesh: Submesh, microbatches: int, kinds: Sequence[Recompute]) -> Iterator[_Variant]:
        pool = self.pools[submesh.pool]
        for dp in divisors(submesh.devices):
            tp = submesh.devices // dp
            if self.batch_size % (dp * microbatches) or tp > pool.box:
                continue
            for kind in kinds:
                layout = Layout(dp=dp, tp=tp, pp=2, microbatches=microbatches, recompute=kind)
                if self.known_only and not pool.pipelines.prices.knows(layout):
                    continue
                try:
                    yield _Variant(dp, tp, kind, pool.pipelines.prices.of(layout))
                except _REFUSALS:
                    continue

    def _prices(self, variants: list[list[_Variant]], microbatches: int) -> StagePrices:
        """The prices of all stages."""
        count = len(self.chain.layers)
        shape = (count, count, len(self.submeshes), max(map(len, variants)))
        seconds, most_after = np.full(shape, math.inf), np.full(shape, -1, dtype=np.int64)
        once = np.zeros(shape)
        for number, submesh in enumerate(self.submeshes):
            pipelines = self.pools[submesh.pool].pipelines
            for place, variant in enumerate(variants[number]):
                layout = Layout(pp=count, microbatches=microbatches, recompute=variant.recompute)
                most = pipelines.most_after(layout, variant.works, self.limits[submesh.pool])
                seconds[:, :, number, place] = self._seconds(pipelines, submesh, variant.works)
                once[:, :, number, place] = pipelines.stage_once_s(variant.works)
                most_after[:, :, number, place] = most
        return StagePrices(tuple(self.submeshes), seconds, most_after, once)

    def _seconds(self, pipelines: Pipelines, submesh: Submesh, works: LayerWorks) -> NDArray[np.float64]:
        """[i, j]: the seconds of layers i to j for one micro-batch, including messages to neighbouring stages."""
        facts, ranks = [works.facts[number] for number in self.chain.numbers], submesh.devices
        sent = [fact.up_bytes / ranks for fact in facts], [fact.down_bytes / ranks for fact in facts]
        return pipelines.stage_seconds(works, (ActionKind.F.value, ActionKind.B.value), *sent, ranks)

    # --- options -----------------------------------------------------------------------------------------------------

    def _made(self, candidate: _Candidate) -> Option | None:
        """The option with the candidate's stages; None if it turns out not to fit in memory."""
        stages = candidate.assignment.stages
        chosen = [candidate.variants[stage.submesh][stage.variant] for stage in stages]
        ranges = [range(stage.first, stage.last + 1) for stage in stages]
        recompute = tuple(variant.recompute for variant in chosen)
        sizes = [(variant.dp, variant.tp) for variant in chosen]
        layout = Layout(
            pp=len(stages), microbatches=candidate.microbatches, recompute=max(recompute, key=RECOMPUTE.index)
        )
        if len(set(sizes)) == 1:
            layout = msgspec.structs.replace(layout, dp=sizes[0][0], tp=sizes[0][1])
        else:
            layout = msgspec.structs.replace(layout, stage_sizes=tuple({"dp": dp, "tp": tp} for dp, tp in sizes))
        work = self.pools[0].pipelines.assembled(layout, ranges, [variant.works for variant in chosen])
        if layout.stage_sizes:
            ends = [(of.works.facts[layers[0]], of.works.facts[layers[-1]])
                    for of, layers in zip(chosen, self.chain.priced(ranges), strict=True)]  # fmt: skip
            work = with_transfers(
                work, Fabric(self.cluster, layout.mesh()),
                [last.up_bytes for _, last in ends], [first.down_bytes for first, _ in ends],
            )  # fmt: skip
        try:
            predicted = self.pools[0].pipelines.predicted(layout, work, self.cluster)
            step_s = simulated_s(layout, work, self.cluster)
        except ScheduleError:
            return None
        schedule = training_schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks, layout.in_flight)
        memory = peak_memory(work, schedule)
        if not self._fits(memory, layout):
            return None
        return Option(
            layout=layout,
            firsts=self.chain.firsts_of(ranges),
            recompute=recompute,
            work=work,
            predicted=predicted,
            step_s=step_s,
            memory=max(memory, key=lambda rank: rank.peak_bytes),
        )

    def _fits(self, memory: Sequence[RankMemory], layout: Layout) -> bool:
        mesh = layout.mesh()
        peers = num_peers(mesh.sizes, box_of(self.cluster))
        return all(
            rank.peak_bytes <= (self.memory_bytes or room_of(self.cluster, mesh.stage_ranks(rank.rank), peers))
            for rank in memory
        )


def with_transfers(work: StepWork, fabric: Fabric, up_bytes: Sequence[int], down_bytes: Sequence[int]) -> StepWork:
    """The work of the stages of the fabric's mesh, including what passes between them in the cheapest form
    (``planner.receivers``). ``up_bytes`` and ``down_bytes`` are the bytes of the whole tensors that each stage sends to
    the next and to the previous stage."""
    stages = list(work.stages)
    for number in range(len(stages) - 1):
        for source, target, size, sent, kinds in (
            (number, number + 1, up_bytes[number], "sent_up_bytes", "F"),
            (number + 1, number, down_bytes[number + 1], "sent_down_bytes", "BI"),
        ):
            _, found = cheapest(fabric, source, target, [_batch(fabric.mesh, source, target, size)])
            stages[source] = msgspec.structs.replace(stages[source], **{sent: found.sent_bytes})
            pieces = {
                kind: (*found.gathers, *each) if kind in kinds else each for kind, each in stages[target].pieces.items()
            }
            stages[target] = msgspec.structs.replace(stages[target], pieces=pieces)
    return msgspec.structs.replace(work, stages=tuple(stages))


def _batch(mesh: Mesh, source: int, target: int, num_bytes: int) -> Crossed:
    """A tensor of at least ``num_bytes`` bytes, with a batch that is split over dp in both stages. Its bytes divide
    into equal parts and chunks."""
    first, second = mesh.submesh(source), mesh.submesh(target)
    unit = math.lcm(first.sizes.get("dp", 1), second.world_size)
    over_dp: Placements = {"dp": Shard(0)}
    return Crossed("the batch", (-(-num_bytes // unit) * unit,), 1, over_dp, over_dp)


def _sizes(devices: int, box: int) -> list[int]:
    """The numbers of ranks that a stage may have in a pool: parts of a box, and whole boxes."""
    inside = range(1, box) if box <= SMALL_BOX else [2**power for power in range(box.bit_length()) if 2**power < box]
    return [*(size for size in inside if size <= devices), *range(box, devices + 1, box)]
