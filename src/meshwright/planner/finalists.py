"""Compare the best options of a search by the programs of the whole model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling, Layout
from meshwright.ir.plan import Note, Plan
from meshwright.ir.program import Lower
from meshwright.planner.ahead import with_graphs
from meshwright.planner.codecs import AUTO
from meshwright.planner.cut import choose_cut
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import Foretold, foretell
from meshwright.planner.inter_op.option import REFUSALS, Option
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.kept_blocks import keep_what_fits
from meshwright.planner.reasons import complexity, nothing_fits
from meshwright.planner.time_limit import TimeLimit

SURE = 2
"""The number of fastest options that are always simulated."""
RECOMPUTING, NEARLY = 2, 1.1
"""Number of options that recompute that are simulated in addition, if they take at most ``NEARLY`` times as long as the
fastest by their estimates: how many blocks they can keep is only estimated."""
NUM_CUT_AGAIN = 2
"""The number of fastest pipelines that are also simulated with the stages of a layout by hand."""
FEW_OPERATORS = 5000
"""Upper limit on a model's operators for an additional plan. For a larger model, another plan takes about ten
seconds."""


@dataclass
class WholeModel:
    """Plans options for the whole model, lowers the plans, and simulates them."""

    graph: Graph
    world_size: int
    cluster: Cluster
    lower: Lower
    optimizer: OptimizerCost
    clips: bool
    limit_bytes: float
    memory_bytes: float | None = None
    """The requested memory limit of a rank; None: the memory of its device."""
    codec: str = ""
    """``Layout.codec`` of all plans. With ``auto``, they get the best codecs for their gradients."""
    float8: Float8Scaling = ""
    """``Layout.float8`` of all plans."""

    def __post_init__(self) -> None:
        self._ask = Ask(optimizer=self.optimizer, lower=self.lower, room_bytes=self.limit_bytes)

    def planned(self, option: Option, *, explains: bool) -> tuple[Plan, Foretold]:
        """The plan of an option, and its simulated step. With ``explains``, the plan has the best bucket sizes, and
        notes on the costs of other strategies. With codecs, it always has the best bucket sizes."""
        ask = replace(
            self._ask, explains=explains, fits_buckets=explains or self.codec == AUTO, firsts=option.firsts,
            recompute=option.recompute, memory_bytes=option.memory_bytes,
        )  # fmt: skip
        layout = msgspec.structs.replace(option.layout, codec=self.codec, float8=self.float8)
        plan = plan_layout(self.graph, layout, world_size=self.world_size, cluster=self.cluster, ask=ask)
        if not ask.fits_buckets:
            plan = with_graphs(self.lower, plan, self.cluster, self.optimizer, self.limit_bytes)
        for what, kinds in (("recompute", option.recompute), ("ZeRO", option.layout.stage_zero)):
            if len(set(kinds)) > 1:
                split = f"{what} {', '.join(map(str, kinds))}"
                note = Note(module="(stages)", split=split, reason="each stage as much as its memory needs")
                plan = msgspec.structs.replace(plan, notes=(note, *plan.notes))
        return plan, foretell(self.lower, plan, self.cluster, optimizer=self.optimizer, clips=self.clips)

    def keeping_what_fits(self, plan: Plan, foretold: Foretold, clock: TimeLimit) -> tuple[Plan, Foretold]:
        """Return the plan with fewer recomputed blocks, as far as memory and time allow, and its simulated step."""

        def simulated(other: Plan) -> Foretold:
            return foretell(self.lower, other, self.cluster, optimizer=self.optimizer, clips=self.clips)

        return keep_what_fits(plan, foretold, self.graph, self.memory_bytes, simulated, lambda: clock.over)

    def fitting_or_error(self, options: Sequence[Option], refused: list[str]) -> list[Option]:
        """The options that fit although their estimates do not fit.

        Raises:
            LayoutError: no option fits; the message names the option that needs the least memory.
        """
        real = []
        for option in options:
            try:
                _, foretold = self.planned(option, explains=False)
            except REFUSALS as error:
                refused.append(f"{option.name}: {error.problem}")
                continue
            real.append(msgspec.structs.replace(option, memory=foretold.peak, step_s=foretold.played.step_s))
        fitting = [option for option in real if option.peak_bytes <= self.limit_bytes]
        if not fitting:
            raise nothing_fits(self.graph, real, refused, self.world_size, self.limit_bytes)
        return fitting


@dataclass
class Finalists:
    """Simulates the options that fit by their estimates, the fastest first, and chooses the best. ``step_s`` maps the
    name of an option to its estimate and, once it is simulated, to the simulated seconds (infinite if it does not fit
    after all). The first ``at_least`` options are always simulated. Others are simulated only if these turn out slower
    than estimated.

    If the model has few operators, the fastest option is also simulated before a simpler option replaces it. The times
    of the whole model then decide whether both are equally fast. The fastest pipelines are also simulated with the
    stages of layouts by hand (``NUM_CUT_AGAIN``).

    Stages that recompute keep as many blocks as fit, if ``keeps``.

    If the best option has no ZeRO, and an option with the same layout and ZeRO exists, both are compared with the best
    bucket sizes, because ZeRO depends most on them. The faster is taken, also within ``ALIKE``: the two run the same
    kernels, so the errors of their times are equal, and ZeRO needs less memory."""

    model: WholeModel
    options: Sequence[Option]
    at_least: int
    clock: TimeLimit
    refused: list[str]
    keeps: bool
    step_s: dict[str, float] = field(default_factory=dict)
    real: dict[str, tuple[Plan, Foretold]] = field(default_factory=dict)
    stopped: bool = False
    """Whether the time limit ended the search before all options that could be the best were simulated."""

    def _in_any_case(self) -> list[Option]:
        """The options that are always simulated. Grids do not count: if the first option is a grid, the first option
        without a grid is simulated too."""
        grids = [option for option in self.options if isinstance(option.layout.tp, tuple)]
        others = [option for option in self.options if isinstance(option.layout.tp, int)]
        most = self.at_least or int(bool(grids) and self.options[0] is grids[0])
        chosen = {option.name for option in (*others[:most], *grids[:most])}
        return [option for option in self.options if option.name in chosen]

    def best(self) -> tuple[Option, Plan, Foretold]:
        """The simplest option within ``ALIKE`` of the fastest, with its plan and simulated step.

        Raises:
            LayoutError: no option fits.
        """
        self.step_s |= {option.name: option.likely_s for option in self.options}
        for option in self._in_any_case():
            if self._any_fits and self.clock.over:
                self.stopped = True
                break
            self._simulate(option)
        if len(self.model.graph.operators) <= FEW_OPERATORS:
            for _ in range(SURE):
                fastest = min(self.options, key=lambda option: self.step_s[option.name])
                if fastest.name in self.real or (self._any_fits and self.clock.over):
                    break
                self._simulate(fastest)
            near = NEARLY * min(option.likely_s for option in self.options)
            recomputing = [option for option in self.options if option.gain and option.likely_s <= near]
            for option in recomputing[:RECOMPUTING]:
                if option.name not in self.real and not self.clock.over:
                    self._simulate(option)
        while True:
            best = self._simplest(self.options)
            if best.name in self.real:
                break
            if self._any_fits and self.clock.over:
                self.stopped = True
                best = self._simplest([option for option in self.options if option.name in self.real])
                break
            self._simulate(best)
        known = [option for option in self.options if option.name in self.real]
        if self.at_least:  # plans have had no explanations so far
            self.real[best.name] = self._planned(best, explains=True)
            self.step_s[best.name] = self.real[best.name][1].played.step_s
            known = [best]
        if len(self.model.graph.operators) <= FEW_OPERATORS:
            self._cut_as_by_hand(known)
            best = self._simplest(known)
        plan, foretold = self.real[best.name]
        other = self._with_zero(best.layout)
        self.stopped |= other is not None and self.clock.over
        if other is not None and not self.clock.over:
            self._simulate(other, explains=True)
            if self.step_s[other.name] < self.step_s[best.name]:
                return other, *self.real[other.name]
        return best, plan, foretold

    def _cut_as_by_hand(self, known: Sequence[Option]) -> None:
        """Simulate the fastest pipelines again with the stages that their layouts have if a user names them. An option
        takes the faster plan: estimates, which choose stages, do not know the best buckets."""
        graph, cluster = self.model.graph, self.model.cluster
        pipelines = [option for option in known if option.firsts and not option.layout.stage_sizes]
        for option in sorted(pipelines, key=lambda option: self.step_s[option.name])[:NUM_CUT_AGAIN]:
            firsts = choose_cut(graph, option.layout.pipeline.num_stages, cluster)
            if firsts == option.firsts or len(set(option.recompute)) > 1 or self.clock.over:
                continue
            self.clock.say(f"simulating {option.name} with the usual stages")
            try:
                plan, foretold = self._planned(msgspec.structs.replace(option, firsts=firsts), explains=True)
            except REFUSALS:
                continue
            if foretold.fits(self.model.memory_bytes) and foretold.played.step_s < self.step_s[option.name]:
                self.real[option.name], self.step_s[option.name] = (plan, foretold), foretold.played.step_s

    def _with_zero(self, layout: Layout) -> Option | None:
        """The fastest option that has ``layout`` plus ZeRO stage 1 or 2."""
        for option in self.options if not layout.zero else ():
            if option.layout.zero in (1, 2) and msgspec.structs.replace(option.layout, zero=0) == layout:
                return option
        return None

    @property
    def _any_fits(self) -> bool:
        return any(self.step_s[name] < math.inf for name in self.real)

    def _simplest(self, options: Sequence[Option]) -> Option:
        left = [option for option in options if self.step_s[option.name] < math.inf]
        if not left:
            raise self._error()
        near = (1 + ALIKE) * min(self.step_s[option.name] for option in left)
        return min(
            (option for option in left if self.step_s[option.name] <= near),
            key=lambda option: (complexity(option.layout), self.step_s[option.name]),
        )

    def _simulate(self, option: Option, *, explains: bool = False) -> None:
        self.clock.say(f"simulating {option.name}")
        try:
            self.real[option.name] = self._planned(option, explains=explains or not self.at_least)
        except REFUSALS as error:
            self.refused.append(f"{option.name}: {error.problem}")
            self.step_s[option.name] = math.inf
            return
        foretold = self.real[option.name][1]
        fits = foretold.fits(self.model.memory_bytes)
        self.step_s[option.name] = foretold.played.step_s if fits else math.inf

    def _planned(self, option: Option, *, explains: bool) -> tuple[Plan, Foretold]:
        plan, foretold = self.model.planned(option, explains=explains)
        fits = self.keeps and foretold.fits(self.model.memory_bytes)
        return self.model.keeping_what_fits(plan, foretold, self.clock) if fits else (plan, foretold)

    def _error(self) -> LayoutError:
        model = self.model
        real = [
            msgspec.structs.replace(option, memory=self.real[option.name][1].peak)
            for option in self.options if option.name in self.real
        ]  # fmt: skip
        return nothing_fits(model.graph, real, self.refused, model.world_size, model.limit_bytes)
