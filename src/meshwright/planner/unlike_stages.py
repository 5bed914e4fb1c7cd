"""Make options whose stages differ in dp, tp, number of ranks or devices, starting from the fastest layouts."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np

from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.pipeline import CHUNKED
from meshwright.ir.plan import Note
from meshwright.ir.program import Lower
from meshwright.planner.candidates import EVERYTHING, Only, Space, divisors
from meshwright.planner.inter_op.balance import balanced, busiest
from meshwright.planner.inter_op.best_first import MOST_MICROBATCHES, MOST_RANKS, BestFirst
from meshwright.planner.inter_op.chunked import ChunkedStages
from meshwright.planner.inter_op.option import REFUSALS, Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.recut import Recut
from meshwright.planner.inter_op.rounds import passes, simulated_s
from meshwright.planner.inter_op.stage_homes import Pool, StageHomes
from meshwright.planner.inter_op.unequal import UnequalStages
from meshwright.planner.lighter import Lighter
from meshwright.planner.time_limit import TimeLimit

AKIN = 3
"""The number of fastest layouts from which such options are made."""
NUM_LARGER = 16
"""The number of fastest options that are also estimated with larger buckets."""
MOST_UNEQUAL = 128
"""The largest number of ranks for which stages with different numbers of ranks are considered."""
NOT_ALL = Note(
    module="(stages)", split="not all were compared",
    reason="stages with other numbers of ranks may be faster: their search ended at a limit on its work",
)  # fmt: skip
"""The note in a plan if the search for stages with any numbers of ranks ended before its time."""


@dataclass
class UnlikeStages:
    """Finds options whose stages differ. ``lower`` lowers the graph of the chain of layers. The other fields have the
    same meaning as in the search. ``stopped``: not all stages that could be the fastest were compared
    (``BestFirst.stopped``)."""

    cluster: Cluster
    world_size: int
    lighter: Lighter
    lower: Lower
    most_tp: float
    only: Only
    memory_bytes: float | None
    clock: TimeLimit
    space: Space = EVERYTHING
    stopped: bool = field(default=False, init=False)

    def options(self, fastest: Sequence[Option]) -> list[Option]:
        """``fastest``, the options of the search with the fastest first, and others that may be faster, sorted again.
        Of options with equal layouts, the fastest is kept. A pipeline that was compared by simulation replaces an
        estimate if it is no slower in the simulation. The ``NUM_LARGER`` fastest are estimated with the best of several
        sizes of buckets."""
        cut = [] if self.cluster.homogeneous else self._cut_for_devices(fastest)
        options = [*fastest, *self._uneven(fastest[:AKIN]), *cut, *self._unequal(fastest[:AKIN])]
        options.sort(key=lambda option: option.likely_s)
        simulated = self._best_first(options[0])
        simulated += self._chunked(sorted([*simulated, *options], key=lambda option: option.likely_s))
        named = {option.name: option for option in reversed(options)}
        for option in simulated:
            known = named.get(option.name)
            if known is None or option.step_s <= simulated_s(known.layout, known.work, self.cluster):
                named[option.name] = option
        every = sorted(named.values(), key=lambda option: option.likely_s)
        for place, option in enumerate(every[:NUM_LARGER]):
            every[place] = option if self.clock.over else self.homes.with_larger_buckets(option)
        return sorted(every, key=lambda option: option.likely_s)

    @cached_property
    def homes(self) -> StageHomes:
        """The prices of layers wherever a stage may lie."""
        return StageHomes(self.cluster, self.world_size, self.pipelines, self.lower, self.memory_bytes)

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
                holds = self.space.holds(Layout(dp=dp, tp=ranks // dp, pp=layout.pp))
                if holds and self.batch % (dp * layout.microbatches) == 0 and own.feature_ranks <= self.most_tp:
                    with suppress(*REFUSALS):
                        works[own.dp, own.feature_ranks] = self.pipelines.prices.of(own)
            uneven = self.pipelines.uneven(option, works) if len(works) > 1 else None
            if uneven is not None and uneven.peak_bytes <= self.pipelines.limit_bytes:
                yield uneven

    def _cut_for_devices(self, fastest: Sequence[Option]) -> Iterator[Option]:
        """Yield the ``AKIN`` fastest layouts of each schedule, and the ``AKIN`` layouts that are probably the fastest
        on their own devices, also with ZeRO if the update is long. They are cut again, with the prices of the devices
        of their stages. Layouts in which a stage has different devices are left out."""
        kinds: dict[tuple[str, int], dict[str, tuple[float, Option]]] = defaultdict(dict)
        placed = [option for option in fastest if option.layout.pp > 1 and self._pools_of(option.layout)]
        speeds = self._relative_s(placed[0].layout) if placed else {}
        for option in placed:
            if option.memory_bytes is None:  # with a memory limit, strategies differ from those of the priced layers
                plain = layout_text(msgspec.structs.replace(option.layout, zero=0, stage_zero=()))
                kind = kinds[option.layout.schedule, option.layout.chunks]
                kind.setdefault(plain, (self._on_own_devices_s(option, speeds), option))
        for options in kinds.values():
            every = list(options.values())
            nearest = dict.fromkeys([*range(len(every))[:AKIN], *np.argsort([each[0] for each in every])[:AKIN]])
            for option in self._zeroed([every[number][1] for number in nearest]):
                if not self.clock.over:
                    with suppress(*REFUSALS):
                        yield from self._cut_anew(option, self._pools_of(option.layout))

    def _pools_of(self, layout: Layout) -> list[Pool]:
        """The pool of each pipeline rank; empty if a stage has different devices."""
        ranks = [set(layout.mesh().stage_ranks(rank)) for rank in range(layout.pp)]
        pools = [pool for each in ranks for pool in self.homes.pools if each.issubset(pool.ranks)]
        return pools if len(pools) == layout.pp else []

    def _relative_s(self, layout: Layout) -> dict[range, float]:
        """For each pool, the time that its devices take for the layers of a layout, relative to the slowest devices."""
        plain = msgspec.structs.replace(layout, zero=0, stage_zero=(), recompute=self.pipelines.kinds[0])

        def seconds(pipelines: Pipelines) -> float:
            return sum(pipelines.prices.seconds(pipelines.prices.of(plain), passes(plain)))

        return {pool.ranks: seconds(pool.pipelines) / seconds(self.pipelines) for pool in self.homes.pools}

    def _on_own_devices_s(self, option: Option, speeds: Mapping[range, float]) -> float:
        """A rough estimate of the step if the stages were cut for their own devices. As much shorter as the busiest
        rank becomes, and as ZeRO may make it, if it may. It needs no prices of layers on these devices."""
        layout, chain = option.layout, self.pipelines.chain
        pools, places = self._pools_of(layout), list(map(layout.pipeline.rank_of, range(len(option.recompute))))
        works = list(map(self.pipelines.prices.of, option.stage_layouts))
        slow = [self.pipelines.busy_s(layout, each) for each in works]
        own = [busy * speeds[pools[place].ranks] for busy, place in zip(slow, places, strict=True)]
        before = chain.stages_of(option.firsts)
        after = balanced([stage.start for stage in before], places, own)
        shorter = busiest(after, places, own) / busiest(before, places, slow)
        sketches = self.lighter.faster_by_zero(option) if not layout.zero else []
        return shorter * min([option.step_s, *(sketch.bound_s for sketch in sketches)])

    def _zeroed(self, options: Sequence[Option]) -> Iterator[Option]:
        """Yield each option, and again with ZeRO if dividing the update may make it faster."""
        for option in options:
            yield option
            for sketch in self.lighter.faster_by_zero(option) if not option.layout.zero else ():
                yield msgspec.structs.replace(option, layout=sketch.layout)

    def _cut_anew(self, option: Option, pools: Sequence[Pool]) -> Iterator[Option]:
        """The option with a new cut. If the new cut does not fit in memory, the option keeps its old cut. ``pools`` has
        the pool of each rank."""
        layout, pipeline = option.layout, option.layout.pipeline
        places = list(map(pipeline.rank_of, range(pipeline.num_stages)))
        works, busy = [], []
        for rank, own in zip(places, option.stage_layouts, strict=True):
            pipelines = pools[rank].pipelines
            works.append(pipelines.prices.of(own))
            busy.append(pipelines.busy_s(layout, works[-1]))
        limits = [self.homes.limit_bytes(pool.ranks) for pool in pools]
        anew = Recut(self.pipelines, self.cluster, option, works, limits)
        for stages in (balanced([stage.start for stage in anew.before], places, busy), anew.before):
            best_option = anew.best(stages)
            if best_option is not None:
                yield best_option
                return

    def _unequal(self, fastest: Sequence[Option]) -> Iterator[Option]:
        """Options whose stages differ in their number of ranks. If all devices are equal, only divisions of stages that
        are already priced are considered, with the numbers of micro-batches of the fastest layouts with stages."""
        if self.only == "intra" or self.clock.over or self.world_size == 1:
            return
        alike = self.cluster.homogeneous
        if alike:
            plain = [option.layout for option in fastest if option.layout.pp > 1 and option.layout.is_plain]
            counts = sorted({layout.microbatches for layout in plain if not layout.zero})
        else:
            fewest = max(2, self.space.fewest)
            counts = [count for count in divisors(self.batch) if fewest <= count <= MOST_MICROBATCHES]
        if self.world_size > MOST_UNEQUAL or not counts:
            return
        self.clock.say("simulating unequal stages")
        space = self._with_one_chunk
        unequal = UnequalStages(self.homes, self.batch, space, known_only=alike, most_ranks=self._most_ranks)
        yield from (option for option in unequal.options(counts) if not alike or option.layout.stage_sizes)

    def _best_first(self, best: Option) -> list[Option]:
        """On few ranks: options with any stages, if they may be faster than ``best`` or as fast."""
        few = 1 < self.world_size <= MOST_RANKS
        space = self._with_one_chunk
        if self.only == "intra" or not few or not space.schedules or self.clock.over:
            return []
        self.clock.say("simulating stages with any numbers of ranks")
        search = BestFirst(self.homes, self.batch, space, self.clock, most_tp=self.most_tp, most_ranks=self._most_ranks)
        options = search.options(simulated_s(best.layout, best.work, self.cluster))
        self.stopped = search.stopped
        return options

    def _chunked(self, fastest: Sequence[Option]) -> list[Option]:
        """Options of unequal stages with several chunks for each rank, made from the fastest with one chunk."""
        if self.only == "intra" or self.clock.over or not set(CHUNKED) & set(self.space.schedules):
            return []
        self.clock.say("simulating unequal stages with several chunks")
        return ChunkedStages(self.homes, self.batch, self.space, self.clock).options(fastest)

    @property
    def _most_ranks(self) -> int:
        """The largest number of ranks of a stage."""
        return 1 if self.only == "inter" else self.world_size

    @property
    def _with_one_chunk(self) -> Space:
        """The space without schedules with several stages for each rank. On unequal stages, ``gpipe`` may be faster
        than ``1f1b``."""
        names = (name for name in self.space.schedules if name not in CHUNKED and name != "message-driven")
        return replace(self.space, schedules=tuple(names))
