"""Find the best layout of a captured model.

Layers are priced once for each division of a stage's ranks and each size of micro-batch (``inter_op.layer_work``). The
prices give the best cut into stages and the time of a layout (``inter_op.pipelines``). Layouts are visited in the order
of lower bounds, so most of them are never cut. The fastest are planned, lowered and simulated for the whole model.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling, Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.part import part_of
from meshwright.ir.plan import Plan
from meshwright.ir.program import Lower
from meshwright.planner.candidates import (
    EVERYTHING,
    Only,
    Space,
    axes_of,
    grids_of,
    has_one_more,
    more_microbatches,
    shapes,
    variations,
)
from meshwright.planner.finalists import Finalists, WholeModel
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import REFUSALS, Option
from meshwright.planner.inter_op.pipelines import ALIKE, Pipelines
from meshwright.planner.inter_op.recut import recut
from meshwright.planner.lighter import Lighter, Sketch
from meshwright.planner.queue import Entry, Queue
from meshwright.planner.reasons import alternative, complexity, needs_memory
from meshwright.planner.time_limit import TimeIsOverError, TimeLimit
from meshwright.planner.unlike_stages import NOT_ALL, UnlikeStages

PLAYED = 6
"""The number of layouts that are compared by simulation. These are the layouts with the shortest estimates."""
SHOWN = 8
"""The most slower layouts that a plan lists. It lists at most half as many that need too much memory."""
AHEAD = 16
"""The number of entries of the queue for which other processes may price layouts in advance."""
EVERY_VARIATION = 24
"""Largest number of divisions of the ranks with context, expert or sequence parallelism that are all considered. If
there are more, only variations of the fastest layouts, and the most promising with expert parallelism, are considered,
unless no layout fits."""
AKIN = 3
"""The number of fastest plain layouts whose variations are considered. Variations of fast variations are considered."""
FILLED = 4
"""With this number of micro-batches per stage, a pipeline is full enough to compare divisions of ranks."""


@dataclass
class Search:
    """The search for the fastest layout.

    ``options`` has the estimated layouts that fit. ``too_large`` maps the name of a layout that does not fit to its
    option and its smallest variant. ``count`` is the number of layouts in the space. ``weighed`` of them were
    estimated, or excluded by a lower bound. ``stopped``: the time limit ended the search. ``limit`` is the memory limit
    of every rank, and ``memory_bytes`` the limit that the user requested.

    If devices differ, layouts are estimated as if all devices were like the slowest. The fastest layouts are then cut
    again for the devices of their stages, together with pipelines whose stages differ (``unlike_stages``).

    With ``codec="auto"``, layouts are compared with the best codecs for their gradients. All layouts have ``float8``
    (``Layout.float8``). ``space`` restricts the layouts. ``before`` has the model and the prices of layers of an
    earlier search (see ``within``)."""

    graph: Graph
    world_size: int
    cluster: Cluster
    lowering: Callable[[Graph], Lower]
    optimizer: OptimizerCost
    clips: bool
    limit: float
    only: Only
    offload: bool
    clock: TimeLimit
    memory_bytes: float | None = None
    codec: str = ""
    float8: Float8Scaling = ""
    space: Space = EVERYTHING
    before: tuple[WholeModel, LayerPrices] | None = None
    options: list[Option] = field(default_factory=list)
    too_large: dict[str, tuple[Option, Option]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    weighed: int = 0
    count: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        graph, self.slowest = self.graph, part_of(self.cluster, range(self.world_size))
        self.model, self.prices = self.before or self._priced()
        self.of_chain, self.whole = self.prices.lower, self.prices.chain.graph is graph
        self.pipelines = Pipelines(self.prices, self.limit, self.space.recompute)
        self.lighter = Lighter(self.pipelines, self.model, self.whole, self.offload, self.space.zero)
        self.axes = axes_of(graph)
        # On unlike devices, cuts are improved at the end (``unlike_stages``).
        self._queue = Queue(recuts=self.cluster.homogeneous)
        self._seen, self._lightened = set[str](), set[str]()

    def _priced(self) -> tuple[WholeModel, LayerPrices]:
        """The whole model, and its layers without prices."""
        graph, lower = self.graph, self.lowering(self.graph)
        chain = chain_of(graph, self.slowest, self.world_size, self.world_size if self.only == "inter" else 0)
        asked, room = (self.optimizer, self.clips), (self.limit, self.memory_bytes)
        model = WholeModel(graph, self.world_size, self.cluster, lower, *asked, *room, self.codec, self.float8)
        of_chain = lower if chain.graph is graph else self.lowering(chain.graph)
        return model, LayerPrices(chain, self.slowest, of_chain, *asked, self.world_size, self.codec, self.float8)

    def within(self, only: Only, space: Space) -> "Search":
        """A new search for the same model in another space. The two searches share the prices of layers, unless the new
        search needs more stages than there are layers."""
        short = only == "inter" and len(self.prices.chain.layers) < self.world_size
        return Search(
            self.graph, self.world_size, self.cluster, self.lowering, self.optimizer, self.clips, self.limit, only,
            self.offload, self.clock, self.memory_bytes, self.codec, self.float8, space,
            before=None if short else (self.model, self.prices),
        )  # fmt: skip

    # --- the order of the search -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Estimate layouts until the fastest are known, or the time limit is reached."""
        try:
            space = self.batch, self.world_size, self.axes, self.most_tp
            plain, every = (self.space.within(kind(*space), self.only) for kind in (shapes, variations))
            cut = [shape for shape in every if shape.cp > 1 and self._needs_cp(shape)]
            self._push_every([*plain, *(every if len(every) <= EVERY_VARIATION else cut)])
            if len(every) > EVERY_VARIATION:
                self._push_every(self._nearest(every))
            self._climb(every if len(every) > EVERY_VARIATION else [])
            if not self.options:
                self._push_every(every)
                self._climb([])
        except TimeIsOverError:
            self.stopped = True

    @property
    def batch(self) -> int:
        """The number of samples of a step."""
        return self.graph.batch_size

    @property
    def most_tp(self) -> float:
        """The largest tp: the size of a box, because tensor parallelism communicates the most. There is no limit if the
        cluster has no boxes. There is none either if stages are not possible, because parameters may then need a larger
        tp."""
        levels = self.slowest.levels
        boxed = len(levels) > 1 and self.world_size > levels[0].fan_out and self.only != "intra"
        return levels[0].fan_out if boxed else math.inf

    def _needs_cp(self, shape: Layout) -> bool:
        """Whether cp divides ranks that cannot divide the batch."""
        return self.batch % (shape.dp * shape.cp) != 0 and shape.ep == 1 and not shape.sequence_parallel

    def _push(self, shape: Layout) -> None:
        """Add all runs of a division of ranks to the queue, with their lower bounds. Without stages, several
        micro-batches only save memory, so a larger number is added only if the smaller number does not fit. If time is
        limited and no layout that fits is known, the first run is estimated at once, so that the search always has a
        result."""
        text = layout_text(shape)
        if text in self._seen:
            return
        self._seen.add(text)
        self.clock.check()
        every = self.space.runs(shape, self.batch)
        for layout in every if shape.pp > 1 else every[:1]:
            if layout == shape and not self.options and (self.clock.seconds is not None or not self._queue):
                self._weigh(layout)
                if not self.options and self.clock.seconds is not None:
                    self._lighten_first()
            else:
                self._bound(layout)

    def _bound(self, layout: Layout) -> None:
        """Add a run to the queue with its lower bound."""
        try:
            self._queue.put(self.pipelines.bound_s(layout), layout)
        except REFUSALS as error:
            self._refuse(layout, error)

    def _refuse(self, layout: Layout, error: MeshwrightError) -> None:
        self.weighed += 1
        self.refused.append(f"{layout_text(layout)}: {error.problem}")
        self._push_next(layout)

    def _push_next(self, layout: Layout) -> None:
        """A run does not fit: add the run with the next larger number of micro-batches."""
        if (larger := more_microbatches(layout, self.batch)) is not None:
            self.count += 1
            self._bound(larger)

    def _climb(self, every: list[Layout]) -> None:
        """Take the entries with the smallest bounds or estimates from the queue, until ``PLAYED`` estimates were taken
        or no other layout can be among the fastest."""
        taken = akin = 0
        while self._queue and taken < PLAYED and not self._decided:
            entry = self._queue.pop()
            self.prices.expect(self._next_to_price())
            if isinstance(entry, Layout):
                self.clock.check()
                self._weigh_or_price(entry)
            elif isinstance(entry, Sketch):
                self.clock.check()
                self._lighten(entry)
            elif self._queue.may_recut(entry):
                self.clock.check()
                self._cut_anew(entry)
            else:
                taken += isinstance(entry.layout.tp, int)  # grids do not count
                akin += entry.layout.is_plain
                if taken == 1:
                    self._push_every(self.space.within(grids_of(entry.layout, self.most_tp), self.only))
                if not entry.layout.mixed and (akin <= AKIN or not entry.layout.is_plain):
                    self._push_every([shape for shape in every if has_one_more(shape, entry.layout)])
        self.weighed = self.count

    def _next_to_price(self) -> Iterator[Layout]:
        """The layouts that other processes may price now, while the search prices the layouts of the current entry."""
        yield from itertools.chain.from_iterable(map(self._priced_for, self._queue.first(AHEAD)))

    def _priced_for(self, entry: Entry) -> list[Layout]:
        """The layouts whose prices an entry will probably need."""
        if not isinstance(entry, Sketch):
            return [entry] if isinstance(entry, Layout) else []
        # Prices of all kinds of recomputation without ZeRO decide whether a variant with ZeRO can fit.
        layout = entry.plain.layout if entry.ideal is None else entry.layout
        kinds = self.space.recompute[1:] if entry.ideal is None else entry.recompute
        return [msgspec.structs.replace(layout, recompute=kind) for kind in kinds]

    @property
    def _decided(self) -> bool:
        """Whether all other layouts are slower than the fastest by more than ``ALIKE``. If a model's layers are all
        priced separately, ``PLAYED`` layouts are always compared."""
        if self.whole or not self.options:
            return False
        return self._queue.least_s > (1 + ALIKE) * min(option.likely_s for option in self.options)

    def _nearest(self, every: list[Layout]) -> list[Layout]:
        """The ``AKIN`` layouts with the smallest lower bounds among those with expert parallelism and without tp. They
        may be fast even if no plain layout with the same number of stages is fast."""
        bounds = []
        for number, shape in enumerate(every):
            runs = self.space.runs(shape, self.batch) if shape.ep > 1 and shape.tp == shape.cp == 1 else []
            most = max((run.microbatches for run in runs if run.microbatches <= FILLED * run.pp), default=0)
            most = most or min((run.microbatches for run in runs), default=0)
            for run in (run for run in runs if run.microbatches == most):
                self.clock.check()
                with suppress(*REFUSALS):
                    bounds.append((self.pipelines.bound_s(run), number))
        nearest = dict.fromkeys(number for _, number in sorted(bounds))
        return [every[number] for number in list(nearest)[:AKIN]]

    def _push_every(self, every: list[Layout]) -> None:
        """Add the runs of all divisions of ranks that were not added before."""
        fresh = [shape for shape in every if layout_text(shape) not in self._seen]
        self.count += sum(len(self.space.runs(shape, self.batch)) for shape in fresh)
        for number, shape in enumerate(fresh):
            self.prices.expect(map(self.prices.largest, fresh[number + 1 :]))
            self._push(shape)

    def _weigh_or_price(self, layout: Layout) -> None:
        """Estimate a layout. If it is not priced yet, price it, and return it to the queue with its exact bound."""
        if self.prices.knows(layout):
            self._weigh(layout)
            return
        try:
            self.prices.of(layout)
        except REFUSALS as error:
            self._refuse(layout, error)
            return
        self._bound(layout)

    def _weigh(self, layout: Layout) -> None:
        """Estimate a layout. If it does not fit, its variants with less memory are tried later. They are slower, except
        for the update of parameters, which ZeRO divides. If it fits and its update is long, its variant with ZeRO is
        tried later."""
        self.clock.say(f"{layout_text(layout)}, layout {self.weighed + 1} of {self.count}")
        try:
            option = self.pipelines.option(layout, self.space.recompute[:1])
        except REFUSALS as error:
            self._refuse(layout, error)
            return
        self.weighed += 1
        if self.lighter.fits(option):
            self._keep(option)
            sketches = self.lighter.faster_by_zero(option)
        else:
            sketches = self.lighter.first_sketches(option)
            self._push_next(layout)
        for sketch in sketches:
            self._queue.put(sketch.bound_s, sketch)

    def _lighten(self, sketch: Sketch) -> None:
        """Try a variant of a layout that does not fit: first with ideal ZeRO, and if it fits then, with real prices.
        The variant with the next ZeRO stage is added if it can be faster."""
        if sketch.plain.name in self._lightened:
            return
        try:
            waits = self._idealize(sketch) if sketch.ideal is None else self._price(sketch)
        except REFUSALS as error:
            self.refused.append(f"{sketch.plain.name}: {error.problem}")
            waits = sketch.ideal is not None and not self.lighter.fits_plainly(sketch)
        if not waits and (more := self.lighter.next_sketch(sketch)) is not None:
            self._queue.put(more.bound_s, more)

    def _idealize(self, sketch: Sketch) -> bool:
        """If a variant may fit, return it to the queue with its ideal option. Returns whether the next ZeRO stage can
        wait until this variant is priced."""
        last = sketch.zero == self.lighter.last_zero(sketch.plain.layout)
        if not last and self.lighter.holds_too_much(sketch):
            return False
        sketch = self.lighter.idealized(sketch)
        assert sketch.ideal is not None
        if self.lighter.may_fit(sketch):
            self._queue.put(sketch.bound_s, sketch)
        else:
            self._note_size(sketch, sketch.ideal)
        return self.lighter.fits_plainly(sketch)

    def _price(self, sketch: Sketch) -> bool:
        """Estimate a variant, and keep it if it fits. Returns true if the next ZeRO stage is useless, or was added to
        the queue with this variant."""
        option = self.lighter.priced(sketch)
        if self.lighter.fits(option):
            self._keep(option)
        else:
            self._note_size(sketch, option)
        if self.lighter.is_free(option):
            self._lightened.add(sketch.plain.name)
            return True
        return not self.lighter.fits_plainly(sketch)

    def _note_size(self, sketch: Sketch, option: Option) -> None:
        """Record that the smallest variant of a layout does not fit. It is the variant with the last ZeRO stage."""
        if not self.lighter.fits(sketch.plain) and sketch.zero == self.lighter.last_zero(sketch.plain.layout):
            self.too_large[sketch.plain.name] = sketch.plain, option

    def _lighten_first(self) -> None:
        """Estimate the variants of a layout that does not fit before their turn."""
        while not self.options and (sketch := self._queue.pop_sketch()) is not None:
            self._lighten(sketch)

    def _keep(self, option: Option) -> None:
        """Add an option that fits. Variants with different ZeRO stages may have the same stages."""
        alike = option.name, option.firsts, option.recompute
        if any((known.name, known.firsts, known.recompute) == alike for known in self.options):
            return
        self.options.append(option)
        self.clock.note_layout(option.name, option.likely_s, option.peak_bytes)
        self._queue.put(option.likely_s, option)

    def _cut_anew(self, option: Option) -> None:
        """Return an option to the queue with the best cut that was found."""
        better = recut(option, self.pipelines)
        self.options = [better if each is option else each for each in self.options]
        self._queue.put_cut(better)

    # --- the result --------------------------------------------------------------------------------------------------

    def best(self) -> Plan:
        """The plan of the best layout, with the next-best layouts."""
        if not self.options:
            smallest = sorted((each for _, each in self.too_large.values()), key=lambda option: option.peak_bytes)
            self.options = self.model.fitting_or_error(smallest[:PLAYED], self.refused)
        fitting = sorted(self.options, key=lambda option: (option.likely_s, complexity(option.layout)))
        unlike = UnlikeStages(
            self.cluster, self.world_size, self.lighter, self.of_chain, self.most_tp, self.only, self.memory_bytes,
            self.clock, self.space,
        )  # fmt: skip
        fitting = unlike.options(fitting) if self.space.unlike else fitting
        played = PLAYED if self.whole else 0
        finalists = Finalists(self.model, fitting, played, self.clock, self.refused, self.pipelines.may_keep)
        best, plan, foretold = finalists.best()
        step_s = finalists.step_s | {best.name: foretold.played.step_s}
        timed = [msgspec.structs.replace(option, step_s=step_s[option.name]) for option in fitting]
        winner = next(option for option in timed if option.name == best.name)
        others = [option for option in timed if option.name != best.name and option.step_s < math.inf]
        lost = [alternative(option, winner) for option in sorted(others, key=lambda other: other.step_s)[:SHOWN]]
        nearest = sorted(self.too_large.values(), key=lambda each: each[0].step_s)[: SHOWN // 2]
        lost += [needs_memory(plain, self.limit, smallest) for plain, smallest in nearest]
        if self.stopped or finalists.stopped or (unlike.stopped and self.clock.over):
            note = self.clock.stopped(self.weighed, self.count, len(finalists.real))
            plan = msgspec.structs.replace(plan, notes=(note, *plan.notes))
        elif unlike.stopped:
            plan = msgspec.structs.replace(plan, notes=(*plan.notes, NOT_ALL))
        return msgspec.structs.replace(plan, alternatives=tuple(lost), prediction=foretold.prediction)
