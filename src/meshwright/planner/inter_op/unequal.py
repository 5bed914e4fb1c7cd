"""Pipelines whose stages have different numbers of ranks, on one or several kinds of devices.

Equal devices form a pool of neighbouring ranks. The layers are priced once for each pool. The dynamic program of
``stages`` then chooses the layers and ranks of every stage, and how these ranks are divided into dp and tp. Stages
follow the order of the ranks, so that values pass from one pool to another only once.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost.work import Compute
from meshwright.ir.layout import Layout, Recompute, ZeroStage
from meshwright.ir.pipeline import ScheduleName
from meshwright.ir.schedule import ActionKind
from meshwright.planner.candidates import Space, divisors
from meshwright.planner.inter_op.option import REFUSALS, Option, with_zeros
from meshwright.planner.inter_op.pipelines import ALIKE, Pipelines
from meshwright.planner.inter_op.stage_homes import StageHomes, of_sizes
from meshwright.planner.inter_op.stage_prices import Assignment, StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from meshwright.planner.inter_op.works import LayerWorks
from meshwright.schedules.pipeline import least_microbatches

SIMULATED = 3
"""The number of pipelines that are assembled and simulated. They have the shortest steps in the dynamic program."""
SMALL_BOX = 4
"""Largest number of devices of a box in which a stage may have any number of ranks. In larger boxes, stages have 1, 2,
4, ... ranks, or whole boxes."""


class _Variant(NamedTuple):
    dp: int
    tp: int
    recompute: Recompute
    zero: ZeroStage
    works: LayerWorks


class _Candidate(NamedTuple):
    assignment: Assignment
    microbatches: int
    variants: list[list[_Variant]]

    @property
    def chosen(self) -> list[_Variant]:
        """The variant of each stage."""
        return [self.variants[stage.submesh][stage.variant] for stage in self.assignment.stages]


class UnequalStages:
    """Finds the fastest pipelines over the pools of ``homes``, which together are the whole cluster.

    If ``known_only`` is set, only divisions of stages that are already priced are considered. A stage has at most
    ``most_ranks`` ranks. Of ``space``, the schedules must have one chunk.
    """

    def __init__(
        self, homes: StageHomes, batch_size: int, space: Space, *, known_only: bool = False, most_ranks: int
    ) -> None:
        self.homes, self.pools, self.batch_size = homes, homes.pools, batch_size
        self.space, self.zeros, self.known_only = space, space.zero, known_only
        self.chain = homes.of_all.chain
        self.limits = [homes.limit_bytes(pool.ranks) for pool in self.pools]
        self.submeshes = [
            Submesh.of(number, devices)
            for number, pool in enumerate(self.pools)
            for devices in _sizes(len(pool.ranks), pool.box)
            if devices <= most_ranks
        ]

    def options(self, microbatches: Sequence[int]) -> Iterator[Option]:
        """The fastest pipelines with these numbers of micro-batches that fit in memory, under each schedule, and with
        ZeRO if dividing the update may make them faster."""
        candidates = [candidate for count in microbatches if (candidate := self._fastest(count)) is not None]
        candidates.sort(key=lambda candidate: candidate.assignment.step_s)
        for candidate in candidates[:SIMULATED]:
            for schedule in self.space.schedules:
                if candidate.microbatches < least_microbatches(schedule, len(candidate.assignment.stages)):
                    continue
                option = self._option(candidate, schedule)
                if option is None:
                    continue
                yield option
                saves = not option.layout.zero and self._saved_s(option) > ALIKE * option.step_s
                for zero in [zero for zero in self.zeros if zero][: int(saves)]:
                    if (divided := self._option(candidate, schedule, divides=zero)) is not None:
                        yield divided

    def _fastest(self, microbatches: int) -> _Candidate | None:
        """The fastest stages in the dynamic program. Recomputation is considered only if no stages fit without it, and
        ZeRO, as if it took no time, only if no stages fit with recomputation. Then a stage has as little ZeRO as it can
        without recomputing more."""
        every, least = self.homes.of_all.kinds, self.zeros[:1]
        lighter = [(self.zeros[:number], every) for number in range(2, len(self.zeros) + 1)]
        for zeros, kinds in [(least, every[:1]), (least, every), *lighter]:
            variants = [list(self._variants(submesh, microbatches, kinds, zeros)) for submesh in self.submeshes]
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

    def _variants(
        self, submesh: Submesh, microbatches: int, kinds: Sequence[Recompute], zeros: Sequence[ZeroStage]
    ) -> Iterator[_Variant]:
        pool = self.pools[submesh.pool]
        for dp in divisors(submesh.devices):
            tp = submesh.devices // dp
            if self.batch_size % (dp * microbatches) or tp > pool.box or not self._may_hold(dp, tp):
                continue
            for kind in kinds:
                plain = self.space.least(Layout(dp=dp, tp=tp, pp=2, microbatches=microbatches))
                layout = msgspec.structs.replace(plain, recompute=kind)
                if self.known_only and not pool.pipelines.prices.knows(layout):
                    continue
                try:
                    works = pool.pipelines.prices.of(layout)
                except REFUSALS:
                    continue
                for zero in zeros if dp > 1 else zeros[:1]:
                    divided = pool.pipelines.divided(works, msgspec.structs.replace(layout, zero=zero))
                    yield _Variant(dp, tp, kind, zero, divided)

    def _may_hold(self, dp: int, tp: int) -> bool:
        """Whether a stage with these sizes belongs to the space, with any number of stages."""
        most = self.homes.world_size
        return any(self.space.holds(Layout(dp=dp, tp=tp, pp=pp)) for pp in range(2, most + 1))

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

    def _option(self, candidate: _Candidate, schedule: ScheduleName, divides: ZeroStage = 0) -> Option | None:
        """The option with the candidate's stages; None if it turns out to be impossible, or not to fit in memory. If
        ``divides`` is given, all stages have at least this ZeRO stage."""
        stages, chosen = candidate.assignment.stages, candidate.chosen
        sizes = [(variant.dp, variant.tp) for variant in chosen]
        if divides and max(dp for dp, _ in sizes) == 1:
            return None
        shape = of_sizes(self.space.least(Layout()), sizes)
        if not self.space.holds_stages(shape):
            return None
        layout = msgspec.structs.replace(shape, microbatches=candidate.microbatches, schedule=schedule)
        layout = with_zeros(layout, [max(variant.zero, divides) for variant in chosen])
        ranges = [range(stage.first, stage.last + 1) for stage in stages]
        try:
            placed = self.homes.placed(layout, ranges, [variant.recompute for variant in chosen])
        except REFUSALS:
            return None
        return self.homes.option(placed) if placed is not None else None

    def _saved_s(self, option: Option) -> float:
        """The largest number of seconds that a step can save if ranks divide the update of parameters."""
        if not self.homes.of_all.prices.optimizer.divides:
            return 0.0
        return max(
            (1 - 1 / option.layout.of_stage(number).dp)
            * sum(piece.seconds for piece in stage.after if isinstance(piece, Compute))
            for number, stage in enumerate(option.work.stages)
        )


def _sizes(devices: int, box: int) -> list[int]:
    """The numbers of ranks that a stage may have in a pool: parts of a box, and whole boxes."""
    inside = range(1, box) if box <= SMALL_BOX else [2**power for power in range(box.bit_length()) if 2**power < box]
    return [*(size for size in inside if size <= devices), *range(box, devices + 1, box)]
