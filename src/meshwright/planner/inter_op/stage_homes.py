"""Options whose stages lie on given ranks, with the prices of the devices and links of these ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from meshwright.cost.crossing import Crossed
from meshwright.cost.fabric import Fabric
from meshwright.cost.occupancy import box_of, num_peers, peak_memory, room_of
from meshwright.cost.work import StepWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import RECOMPUTE, Layout, Recompute
from meshwright.ir.mesh import Mesh
from meshwright.ir.part import part_of, pools_of
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.placement import Placements, Shard
from meshwright.ir.program import Lower
from meshwright.planner.buckets import BUCKET_BYTES
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import Option, stage_layout, with_zeros
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import periods, simulated_s
from meshwright.planner.inter_op.works import LayerWorks
from meshwright.planner.receivers import cheapest

BUCKETS = (BUCKET_BYTES, 4 * BUCKET_BYTES, 16 * BUCKET_BYTES)
"""The sizes of buckets for which the fastest options are estimated."""


@dataclass(frozen=True)
class Pool:
    """Neighbouring ranks with equal devices, in boxes of ``box`` ranks. ``pipelines`` has the prices of layers on these
    devices."""

    ranks: range
    box: int
    pipelines: Pipelines


class PlacedPipeline(NamedTuple):
    """A pipeline that fits in memory: the layers and the recomputation of its stages, and its simulated step."""

    layout: Layout
    stages: Sequence[range]
    recompute: tuple[Recompute, ...]
    work: StepWork
    step_s: float


@dataclass
class StageHomes:
    """The prices of layers wherever a stage may lie, and the options that are made of them.

    ``of_all`` has the prices of layers on the whole cluster, as if all its devices were the slowest. ``lower`` lowers
    the graph of the chain of layers. ``memory_bytes`` is the memory limit of each rank (None: the memory of its
    device).
    """

    cluster: Cluster
    world_size: int
    of_all: Pipelines
    lower: Lower
    memory_bytes: float | None
    _known: dict[bytes, Pipelines] = field(default_factory=dict)
    _homes: dict[range, Pipelines] = field(default_factory=dict)

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """All ranks, in pools of equal devices."""
        every = (range(self.world_size),) if self.cluster.homogeneous else pools_of(self.cluster)
        pools = []
        for ranks in every:
            home = self._priced_on(part_of(self.cluster, ranks))
            levels = home.cluster.levels
            pools.append(Pool(ranks, min(len(ranks), levels[0].fan_out) if levels else 1, home))
        return tuple(pools)

    def of(self, ranks: range) -> Pipelines:
        """The stages on neighbouring ranks. Layers are priced on request: once for each pool, and once more for ranks
        that do not fill boxes of a pool evenly, or join pools."""
        if ranks not in self._homes:
            pool = next((pool.ranks for pool in self.pools if set(ranks) <= set(pool.ranks)), None)
            if pool is None:
                part = part_of(self.cluster, ranks)
            else:
                inside = range(ranks.start - pool.start, ranks.stop - pool.start)
                part = part_of(part_of(self.cluster, pool), inside)
            self._homes[ranks] = self._priced_on(part)
        return self._homes[ranks]

    @property
    def num_lowered(self) -> int:
        """The number of layouts whose layers have been lowered for their prices, on all ranks together."""
        return sum(home.prices.num_lowered for home in (self.of_all, *self._known.values()))

    def _priced_on(self, part: Cluster) -> Pipelines:
        if part == self.of_all.cluster:
            return self.of_all
        key = msgspec.json.encode(part)
        if key not in self._known:
            prices = self.of_all.prices
            own = LayerPrices(
                prices.chain, part, self.lower, prices.optimizer, prices.clips, part.num_devices, prices.codec,
                prices.float8,
            )  # fmt: skip
            self._known[key] = Pipelines(own, self.of_all.limit_bytes, self.of_all.kinds)
        return self._known[key]

    def works(self, layout: Layout, stage: int, recompute: Recompute) -> LayerWorks:
        """The work of all layers on the ranks of a pipeline stage.

        Raises:
            LayoutError, PlanError: the stage does not fit the model.
        """
        ranks = layout.mesh().stage_ranks(layout.pipeline.rank_of(stage))
        return self.of(ranks).prices.of(stage_layout(layout, stage, recompute))

    def lightest(self, layout: Layout, stages: Sequence[range], least_zero: int = 3) -> PlacedPipeline | None:
        """The pipeline with these stages, in which a stage recomputes only if its memory needs it. Stages whose memory
        does not need the ZeRO stage of the layout have ``least_zero``, if that is less. None if the pipeline does not
        fit in memory even so.

        Raises: the errors of ``works``; ScheduleError: the schedule is not defined for the number of micro-batches.
        """
        every, zeros = self.of_all.kinds, [min(least_zero, layout.zero)] * len(stages)
        kinds = [every[0]] * len(stages)
        while True:
            own = with_zeros(layout, zeros)
            work = self._assembled(own, stages, kinds)
            full = self._too_full(own, work)
            if not full:
                return PlacedPipeline(own, stages, tuple(kinds), work, simulated_s(own, work, self.cluster))
            held = layout.pipeline.stages_of(full[0])
            whole = next((stage for stage in held if zeros[stage] != layout.zero), None)
            least = min(held, key=lambda stage: every.index(kinds[stage]))
            if whole is not None:
                zeros[whole] = layout.zero
            elif kinds[least] == every[-1]:
                return None
            else:
                kinds[least] = every[every.index(kinds[least]) + 1]

    def placed(self, layout: Layout, stages: Sequence[range], kinds: Sequence[Recompute]) -> PlacedPipeline | None:
        """The pipeline with these stages and kinds of recomputation; None if it does not fit in memory.

        Raises: the errors of ``lightest``.
        """
        work = self._assembled(layout, stages, kinds)
        if self._too_full(layout, work):
            return None
        return PlacedPipeline(layout, stages, tuple(kinds), work, simulated_s(layout, work, self.cluster))

    def option(self, placed: PlacedPipeline) -> Option:
        """A pipeline in the form in which searches compare layouts."""
        layout, work = placed.layout, placed.work
        return Option(
            layout=msgspec.structs.replace(layout, recompute=max(placed.recompute, key=RECOMPUTE.index)),
            firsts=self.of_all.chain.firsts_of(placed.stages),
            recompute=placed.recompute,
            work=work,
            predicted=self.of_all.predicted(layout, work, self.cluster),
            step_s=placed.step_s,
            memory=max(peak_memory(work, periods(layout)[0]), key=lambda rank: rank.peak_bytes),
        )

    def with_larger_buckets(self, option: Option) -> Option:
        """The option with an estimate for the fastest of the sizes of ``BUCKETS`` with which it fits in memory. All
        other estimates keep the first of these sizes."""
        layout, stages = option.layout, self.of_all.chain.stages_of(option.firsts)
        ranks = [layout.mesh().stage_ranks(layout.pipeline.rank_of(stage)) for stage in range(len(stages))]
        priced = zip(ranks, option.stage_layouts, strict=True)
        if not all(self.of(each).prices.knows(own) for each, own in priced):
            return option
        usual, *larger = [self._assembled(layout, stages, option.recompute, size) for size in BUCKETS]
        works = [usual, *(work for work in larger if not self._too_full(layout, work))]
        times = [simulated_s(layout, work, self.cluster) for work in works]
        return msgspec.structs.replace(option, step_s=option.step_s * (min(times) / times[0]))

    def _assembled(
        self, layout: Layout, stages: Sequence[range], kinds: Sequence[Recompute], bucket_bytes: int = BUCKET_BYTES
    ) -> StepWork:
        works = [self.works(layout, number, kind) for number, kind in enumerate(kinds)]
        work = self.of_all.assembled(layout, stages, works, bucket_bytes)
        if not layout.stage_sizes:
            return work
        ends = [(of.facts[layers[0]], of.facts[layers[-1]])
                for of, layers in zip(works, self.of_all.chain.priced(stages), strict=True)]  # fmt: skip
        return with_transfers(
            work, Fabric(self.cluster, layout.mesh()), layout.pipeline,
            [last.up_bytes for _, last in ends], [first.down_bytes for first, _ in ends],
        )  # fmt: skip

    def _too_full(self, layout: Layout, work: StepWork) -> list[int]:
        """The pipeline ranks that need more memory than they have."""
        mesh, schedule = layout.mesh(), periods(layout)[0]
        peers = num_peers(mesh.sizes, box_of(self.cluster))
        return [
            rank.rank
            for rank in peak_memory(work, schedule)
            if rank.peak_bytes > self.limit_bytes(mesh.stage_ranks(rank.rank), peers)
        ]

    def limit_bytes(self, ranks: range, peers: int | None = None) -> float:
        """The memory limit of each of these ranks. ``peers``: as in ``room_of``."""
        return room_of(self.cluster, ranks, peers) if self.memory_bytes is None else self.memory_bytes


def of_sizes(layout: Layout, sizes: Sequence[tuple[int, int]]) -> Layout:
    """The layout with these sizes of dp and tp for each stage."""
    if len(set(sizes)) == 1:
        return msgspec.structs.replace(layout, dp=sizes[0][0], tp=sizes[0][1], pp=len(sizes))
    return msgspec.structs.replace(layout, pp=len(sizes), stage_sizes=tuple({"dp": dp, "tp": tp} for dp, tp in sizes))


def with_transfers(
    work: StepWork, fabric: Fabric, pipeline: Pipeline, up_bytes: Sequence[int], down_bytes: Sequence[int]
) -> StepWork:  # fmt: skip
    """The work of the stages of ``pipeline`` on the fabric's mesh, including what passes between its ranks in the
    cheapest form (``planner.receivers``). ``up_bytes`` and ``down_bytes`` are the bytes of the whole tensors that each
    stage sends to the next and to the previous stage."""
    stages = list(work.stages)
    for number in range(len(stages) - 1):
        for source, target, size, sent, kinds in (
            (number, number + 1, up_bytes[number], "sent_up_bytes", ("F",)),
            (number + 1, number, down_bytes[number + 1], "sent_down_bytes", ("B", "I")),
        ):
            ranks = pipeline.rank_of(source), pipeline.rank_of(target)
            if ranks[0] == ranks[1]:  # the rank hands the value over
                continue
            _, crossing = cheapest(fabric, *ranks, [_batch(fabric.mesh, *ranks, size)])
            stages[source] = msgspec.structs.replace(stages[source], **{sent: crossing.sent_bytes})
            pieces = {
                kind: (*crossing.gathers, *each) if kind in kinds else each
                for kind, each in stages[target].pieces.items()
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
