"""Options whose stages differ in dp, in tp, or in their number of ranks, made from the fastest layouts of a search."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from meshwright.ir.cluster import Cluster
from meshwright.ir.part import part_of, pools_of
from meshwright.ir.program import Lower
from meshwright.planner.candidates import Only, divisors
from meshwright.planner.finalists import REFUSALS
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.pipelines import Option, Pipelines
from meshwright.planner.inter_op.unequal import Pool, UnequalStages
from meshwright.planner.time_limit import TimeLimit

MOST_UNEQUAL, MOST_MICROBATCHES = 128, 64
"""Largest number of ranks, and of micro-batches, for which unequal stages are considered."""


@dataclass(frozen=True)
class UnlikeStages:
    """Finds options whose stages differ. ``lower`` lowers the graph of the chain of layers; the other fields are those
    of the search."""

    cluster: Cluster
    world_size: int
    pipelines: Pipelines
    lower: Lower
    most_tp: float
    only: Only
    memory_bytes: float | None
    clock: TimeLimit

    def options(self, fastest: Sequence[Option]) -> list[Option]:
        """The options that may be faster than ``fastest``, the fastest layouts with equal stages."""
        return [*self._uneven(fastest), *self._unequal(fastest)]

    @property
    def batch(self) -> int:
        """The number of samples of a step."""
        return self.pipelines.chain.graph.batch_size

    def _uneven(self, fastest: Sequence[Option]) -> Iterator[Option]:
        """Options whose stages differ in dp and tp, of the fastest layouts with stages."""
        for option in fastest:
            layout = option.layout
            if layout.pp == 1 or layout.chunks > 1 or layout.zero or not layout.is_plain or self.clock.over:
                continue
            ranks, works = layout.dp * layout.tp, {}
            for dp in divisors(ranks):
                own = msgspec.structs.replace(layout, dp=dp, tp=ranks // dp, recompute=self.pipelines.kinds[0])
                if self.batch % (dp * layout.microbatches) == 0 and own.tp <= self.most_tp:
                    with suppress(*REFUSALS):
                        works[own.dp, own.tp] = self.pipelines.prices.of(own)
            uneven = self.pipelines.uneven(option, works) if len(works) > 1 else None
            if uneven is not None and uneven.peak_bytes <= self.pipelines.limit_bytes:
                yield uneven

    def _unequal(self, fastest: Sequence[Option]) -> Iterator[Option]:
        """Options whose stages differ in their number of ranks. If devices are equal, only divisions of stages that are
        priced already are considered, and as many micro-batches as the fastest layouts with stages have."""
        if self.only == "intra" or self.clock.over or self.world_size == 1:
            return
        alike = self.cluster.homogeneous
        if alike:
            plain = [option.layout for option in fastest if option.layout.pp > 1 and option.layout.is_plain]
            counts = sorted({layout.microbatches for layout in plain if not layout.zero})
        else:
            counts = [count for count in divisors(self.batch) if 1 < count <= MOST_MICROBATCHES]
        if self.world_size > MOST_UNEQUAL or not counts:
            return
        self.clock.say("simulating unequal stages")
        pools, of_all = [], self.pipelines.prices
        for ranks in pools_of(self.cluster) if not alike else (range(self.world_size),):
            part = part_of(self.cluster, ranks)
            box = min(len(ranks), part.levels[0].fan_out) if part.levels else 1
            prices = LayerPrices(of_all.chain, part, self.lower, of_all.optimizer, of_all.clips, len(ranks))
            own = self.pipelines if alike else Pipelines(prices, self.pipelines.limit_bytes, self.pipelines.kinds)
            pools.append(Pool(ranks, box, own))
        most_ranks = 1 if self.only == "inter" else self.world_size
        unequal = UnequalStages(
            self.cluster, pools, self.batch, self.memory_bytes, known_only=alike, most_ranks=most_ranks
        )
        yield from (option for option in unequal.options(counts) if not alike or option.layout.stage_sizes)
