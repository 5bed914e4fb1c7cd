"""Make options whose stages differ in dp, tp, number of ranks or devices, starting from the fastest layouts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from meshwright.cost.occupancy import room_of
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout_text import layout_text
from meshwright.ir.part import part_of, pools_of
from meshwright.ir.program import Lower
from meshwright.planner.candidates import Only, divisors
from meshwright.planner.finalists import REFUSALS
from meshwright.planner.inter_op.balance import balanced
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.recut import Recut
from meshwright.planner.inter_op.unequal import Pool, UnequalStages
from meshwright.planner.lighter import Lighter
from meshwright.planner.time_limit import TimeLimit

AKIN = 3
"""The number of fastest layouts from which such options are made."""
MOST_UNEQUAL, MOST_MICROBATCHES = 128, 64
"""The largest number of ranks, and of micro-batches, for which stages with different numbers of ranks are
considered."""


@dataclass(frozen=True)
class UnlikeStages:
    """Finds options whose stages differ. ``lower`` lowers the graph of the chain of layers. The other fields have the
    same meaning as in the search."""

    cluster: Cluster
    world_size: int
    lighter: Lighter
    lower: Lower
    most_tp: float
    only: Only
    memory_bytes: float | None
    clock: TimeLimit

    def options(self, fastest: Sequence[Option]) -> list[Option]:
        """Options that may be faster than the options of the search. ``fastest`` has the options of the search, the
        fastest first."""
        pools = self._pools() if self.world_size > 1 else []
        cut = [] if self.cluster.homogeneous else self._cut_for_devices(fastest, pools)
        return [*self._uneven(fastest[:AKIN]), *cut, *self._unequal(fastest[:AKIN], pools)]

    @property
    def pipelines(self) -> Pipelines:
        """Makes the stages of layouts, with the prices of the slowest devices."""
        return self.lighter.pipelines

    @property
    def batch(self) -> int:
        """The number of samples of a step."""
        return self.pipelines.chain.graph.batch_size

    def _uneven(self, fastest: Sequence[Option]) -> Iterator[Option]:
        """Yield options whose stages differ in dp and tp, made from the fastest layouts with stages."""
        for option in fastest:
            layout = option.layout
            if layout.pp == 1 or layout.chunks > 1 or layout.zero or not layout.is_plain or self.clock.over:
                continue
            if isinstance(layout.tp, tuple):
                continue
            ranks, works = layout.dp * layout.feature_ranks, {}
            for dp in divisors(ranks):
                own = msgspec.structs.replace(layout, dp=dp, tp=ranks // dp, recompute=self.pipelines.kinds[0])
                if self.batch % (dp * layout.microbatches) == 0 and own.feature_ranks <= self.most_tp:
                    with suppress(*REFUSALS):
                        works[own.dp, own.feature_ranks] = self.pipelines.prices.of(own)
            uneven = self.pipelines.uneven(option, works) if len(works) > 1 else None
            if uneven is not None and uneven.peak_bytes <= self.pipelines.limit_bytes:
                yield uneven

    def _pools(self) -> list[Pool]:
        """The pools of ranks with equal devices. The prices of layers in a pool are computed on request."""
        alike, pools, of_all = self.cluster.homogeneous, [], self.pipelines.prices
        for ranks in pools_of(self.cluster) if not alike else (range(self.world_size),):
            part = part_of(self.cluster, ranks)
            box = min(len(ranks), part.levels[0].fan_out) if part.levels else 1
            prices = LayerPrices(
                of_all.chain, part, self.lower, of_all.optimizer, of_all.clips, len(ranks), of_all.codec,
                of_all.float8,
            )  # fmt: skip
            own = self.pipelines if alike else Pipelines(prices, self.pipelines.limit_bytes, self.pipelines.kinds)
            pools.append(Pool(ranks, box, own))
        return pools

    def _cut_for_devices(self, fastest: Sequence[Option], pools: Sequence[Pool]) -> Iterator[Option]:
        """Yield the ``AKIN`` fastest layouts of each schedule, also with ZeRO if the update is long. They are cut
        again, with the prices of the devices of their stages. Layouts in which a stage has different devices are left
        out."""
        kinds: dict[tuple[str, int], dict[str, Option]] = defaultdict(dict)
        for option in fastest:
            if option.memory_bytes is None:  # with a memory limit, strategies differ from those of the priced layers
                plain = layout_text(msgspec.structs.replace(option.layout, zero=0))
                kinds[option.layout.schedule, option.layout.chunks].setdefault(plain, option)
        for option in (option for options in kinds.values() for option in self._zeroed([*options.values()][:AKIN])):
            layout = option.layout
            if layout.pp == 1 or self.clock.over:
                continue
            ranks = [set(layout.mesh().stage_ranks(rank)) for rank in range(layout.pp)]
            homes = [next((pool for pool in pools if each.issubset(pool.ranks)), None) for each in ranks]
            if None not in homes:
                with suppress(*REFUSALS):
                    yield from self._cut_anew(option, [home for home in homes if home is not None])

    def _zeroed(self, options: Sequence[Option]) -> Iterator[Option]:
        """Yield each option, and again with ZeRO if dividing the update may make it faster."""
        for option in options:
            yield option
            for sketch in self.lighter.faster_by_zero(option) if not option.layout.zero else ():
                yield msgspec.structs.replace(option, layout=sketch.layout)

    def _cut_anew(self, option: Option, homes: Sequence[Pool]) -> Iterator[Option]:
        """The option with a new cut. If the new cut does not fit in memory, the option keeps its old cut. ``homes`` has
        the pool of each rank."""
        layout, pipeline = option.layout, option.layout.pipeline
        places = list(map(pipeline.rank_of, range(pipeline.num_stages)))
        works, busy = [], []
        for rank, kind in zip(places, option.recompute, strict=True):
            pipelines = homes[rank].pipelines
            works.append(pipelines.prices.of(msgspec.structs.replace(layout, recompute=kind)))
            busy.append(pipelines.busy_s(layout, works[-1]))
        limits = [self.memory_bytes or room_of(self.cluster, home.ranks) for home in homes]
        anew = Recut(self.pipelines, self.cluster, option, works, limits)
        for stages in (balanced([stage.start for stage in anew.before], places, busy), anew.before):
            best_option = anew.best(stages)
            if best_option is not None:
                yield best_option
                return

    def _unequal(self, fastest: Sequence[Option], pools: Sequence[Pool]) -> Iterator[Option]:
        """Options whose stages differ in their number of ranks. If all devices are equal, only divisions of stages that
        are already priced are considered, with the numbers of micro-batches of the fastest layouts with stages."""
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
        most_ranks = 1 if self.only == "inter" else self.world_size
        unequal = UnequalStages(
            self.cluster, pools, self.batch, self.memory_bytes, known_only=alike, most_ranks=most_ranks
        )
        yield from (option for option in unequal.options(counts) if not alike or option.layout.stage_sizes)
