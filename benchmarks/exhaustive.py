"""The planner beside brute force, on random small models, clusters and stage prices.

Run as part of ``make bench-planning``; nothing is timed. The search estimates layouts from priced layers, cuts by
dynamic programming, and leaves out what bounds exclude. Here nothing is left out: layouts x cuts into stages x
submeshes x recomputation of each stage x ZeRO stages, of two stages each with its own. These plans are simulated with
the prices of layers, and the fastest of them are lowered and simulated as whole models, like the finalists of the
search. Strategies of operators are those of the integer program, which ``tests/pure/test_intra_op.py`` compares with
brute force. Three quarters of the clusters with two boxes have unlike boxes. ``tests/end_to_end/test_exhaustive.py``
asserts the same of a few. It takes more than half an hour of one core. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks import report
from benchmarks.unlike import slowed
from meshwright.cost.closed_form import predict_step
from meshwright.cost.fabric import Fabric
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.work import StepWork
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES, Layout, Recompute
from meshwright.ir.layout_text import layout_text
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.result import Check
from meshwright.lower.plans import PlanLowering
from meshwright.models import classification_loss
from meshwright.planner.candidates import axes_of, runs, shapes, variations
from meshwright.planner.foretell import Foretold
from meshwright.planner.inter_op.assemble import assemble
from meshwright.planner.inter_op.option import REFUSALS, Option, with_zeros
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.inter_op.rounds import simulated_s
from meshwright.planner.inter_op.stage_homes import StageHomes, with_transfers
from meshwright.planner.inter_op.stage_prices import StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from meshwright.planner.inter_op.works import LayerWorks
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from meshwright.schedules.pipeline import training_schedule
from tests.pure.test_stages_search import ANY, brute_force

COMMAND = "python -m benchmarks.exhaustive"
CASES = 200
MUCH = 1e15
"""Bytes of memory that are always enough."""
EQUAL, LEAST_WORK = 1e-6, 0.5
LOWERED = 4
"""Brute force lowers this number of plans: the fastest by the prices of layers."""


@dataclass(frozen=True)
class StagedStep:
    """One plan: where it is cut, what each stage recomputes, its estimated seconds, the bytes of the fullest rank."""

    layout: Layout
    cut: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    step_s: float
    peak_bytes: float

    @property
    def name(self) -> str:
        """The plan as text."""
        return f"{layout_text(self.layout)}, cut at {self.cut}, recompute {' '.join(self.recompute)}"


class Residual(nn.Module):
    """Two products and an addition."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def random_graph(random: np.random.Generator) -> Graph:
    """The step of a small model of one to three layers of random widths: equal blocks, unlike blocks, or products."""
    kind, layers, batch = random.integers(3), int(random.integers(1, 4)), int(random.choice([2, 4, 8, 16]))
    widths = [int(width) for width in random.choice([16, 32, 64, 128, 256], layers + 1)]
    modules: list[nn.Module] = []
    for index in range(layers):
        if kind == 0:
            modules.append(Residual(widths[0], widths[1]))
        elif kind == 1:
            modules.append(Residual(widths[0], widths[index]))
        else:
            modules += [nn.Linear(widths[index], widths[index + 1]), nn.ReLU()]
    last = widths[-1] if kind == 2 else widths[0]
    with torch.device("meta"):
        model = nn.Sequential(*modules, nn.Linear(last, 8))
        inputs = {"inputs": torch.zeros(batch, widths[0]), "label": torch.zeros(batch, dtype=torch.int64)}
    return mw.capture(model, classification_loss, inputs)


def random_cluster(random: np.random.Generator) -> Cluster:
    """2 or 4 devices on one level, or 2 x 2 on two, with links from much faster to much slower than the devices. In
    three quarters of the clusters with two levels, one box is 1.2 to 4 times as slow as the other."""
    cluster = mw.Cluster.load(str(random.choice(["cpu-local", "v100-16gb-p3-eth25"])), 2)
    fan_outs = [(2,), (4,), (2, 2)][random.integers(3)]
    levels = tuple(
        Level(
            name=("box", "network")[index], fan_out=fan_out, alpha_s=10 ** random.uniform(-7, -4),
            beta_s_per_byte=10 ** random.uniform(-11, -8),
        )
        for index, fan_out in enumerate(fan_outs)
    )  # fmt: skip
    if len(levels) > 1 and random.random() < 0.75:
        devices = [cluster.device, slowed(cluster.device, random.uniform(1.2, 4.0))][:: random.choice([-1, 1])]
        members = tuple(LevelMembers(count=1, device=device, levels=levels[:1]) for device in devices)
        levels = (msgspec.structs.replace(levels[-1], members=members),)
    count = int(np.prod(fan_outs))
    cluster = msgspec.structs.replace(cluster, num_devices=count, levels=levels, collectives=(), open_ended=False)
    return cluster.without_graphs()


# --- all plans --------------------------------------------------------------------------------------------------------


def every_layout(graph: Graph, num_devices: int, most_tp: float) -> Iterator[Layout]:
    """All layouts, without recomputation: those whose stages have equal sizes, and those whose stages differ in dp, tp
    or the number of devices, which have the schedule ``gpipe`` too."""
    space = graph.batch_size, num_devices, axes_of(graph), most_tp
    for shape in (*shapes(*space), *variations(*space)):
        for run in runs(shape, graph.batch_size):
            yield from _with_zero(run, [run.dp] * run.pipeline.num_stages)
    own = [(dp, tp) for dp in range(1, num_devices) for tp in range(1, num_devices // dp + 1) if tp <= most_tp]
    for pp in range(2, num_devices):
        for sizes in itertools.product(own, repeat=pp):
            if len(set(sizes)) == 1 or sum(dp * tp for dp, tp in sizes) != num_devices:
                continue
            for run in runs(Layout(pp=pp), graph.batch_size):
                if all(graph.batch_size % (dp * run.microbatches) == 0 for dp, _ in sizes):
                    unequal = tuple({"dp": dp, "tp": tp} for dp, tp in sizes)
                    for schedule in ("1f1b", "gpipe") if run.schedule == "1f1b" else (run.schedule,):
                        other = msgspec.structs.replace(run, stage_sizes=unequal, schedule=schedule)
                        yield from _with_zero(other, [dp for dp, _ in sizes])


def _with_zero(layout: Layout, dps: Sequence[int]) -> Iterator[Layout]:
    """The layout with all ZeRO stages. Two stages may have different ones; ``dps`` has the dp of each stage."""
    shared = sum(dp > 1 for dp in dps)
    if layout.pipeline.num_stages == shared == 2:
        for zeros in itertools.product(ZERO_STAGES, repeat=2):
            yield with_zeros(layout, zeros)
        return
    for zero in ZERO_STAGES if shared else (0,):
        yield msgspec.structs.replace(layout, zero=zero)


class EveryPlan:
    """Simulates plans with the prices of layers. Each stage has the prices of its own devices and links
    (``StageHomes``)."""

    def __init__(self, search: Search) -> None:
        self.graph, self.cluster, self.most_tp = search.graph, search.cluster, search.most_tp
        self.chain, self.optimizer = search.prices.chain, search.prices.optimizer
        self.homes = StageHomes(search.cluster, search.world_size, search.pipelines, search.of_chain, None)

    def steps(self) -> Iterator[StagedStep]:
        """Every plan that can be made of the layers."""
        for layout in every_layout(self.graph, self.cluster.num_devices, self.most_tp):
            with suppress(MeshwrightError):  # the layout does not suit the model
                yield from self._of_layout(layout)

    def _of_layout(self, layout: Layout) -> Iterator[StagedStep]:
        num_layers, num_stages = len(self.chain.layers), layout.pp * layout.chunks
        schedule = training_schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
        works = {kind: self._works(layout, kind) for kind in RECOMPUTE}
        kinds = [
            kind for number, kind in enumerate(RECOMPUTE)
            if all([stage.works for stage in works[kind]] != [stage.works for stage in works[other]]
                   for other in RECOMPUTE[:number])
        ]  # fmt: skip
        for cut in itertools.combinations(range(1, num_layers), num_stages - 1):
            for chosen in itertools.product(kinds, repeat=num_stages):
                work = self._assembled(layout, cut, [works[kind][at] for at, kind in enumerate(chosen)])
                peak = max(memory.peak_bytes for memory in peak_memory(work, schedule))
                yield StagedStep(layout, cut, chosen, simulated_s(layout, work, self.cluster), peak)

    def option(self, step: StagedStep) -> Option:
        """A plan in the form in which the search lowers it."""
        layout = step.layout
        work = self._assembled(layout, step.cut, [
            self._works(layout, kind)[at] for at, kind in enumerate(step.recompute)
        ])  # fmt: skip
        schedule = training_schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
        return Option(
            layout=msgspec.structs.replace(layout, recompute=max(step.recompute, key=RECOMPUTE.index)),
            firsts=self.chain.firsts_of(self._stages(step.cut)),
            recompute=step.recompute,
            work=work,
            predicted=predict_step(work, schedule, layout.mesh(), self.cluster),
            step_s=step.step_s,
            memory=max(peak_memory(work, schedule), key=lambda memory: memory.peak_bytes),
        )

    def _works(self, layout: Layout, kind: Recompute) -> list[LayerWorks]:
        """The work of all layers, on the devices of each stage."""
        return [self.homes.works(layout, stage, kind) for stage in range(layout.pp * layout.chunks)]

    def _stages(self, cut: Sequence[int]) -> list[range]:
        borders = [0, *cut, len(self.chain.layers)]
        return [range(first, end) for first, end in itertools.pairwise(borders)]

    def _assembled(self, layout: Layout, cut: Sequence[int], works: Sequence[LayerWorks]) -> StepWork:
        stages = self.chain.priced(self._stages(cut))
        accumulates = layout.microbatches > 1
        work = assemble(works, stages, layout.pipeline, self.optimizer, accumulates=accumulates)
        if not layout.stage_sizes:
            return work
        facts = [(own.facts[layers[0]], own.facts[layers[-1]]) for own, layers in zip(works, stages, strict=True)]
        up, down = [last.up_bytes for _, last in facts], [first.down_bytes for first, _ in facts]
        return with_transfers(work, Fabric(self.cluster, layout.mesh()), layout.pipeline, up, down)


# --- the search -------------------------------------------------------------------------------------------------------


class Searched:
    """A search, as ``mw.plan`` makes it. ``lowered`` maps the names of the options that it lowered as whole models, and
    that fit, to their simulated seconds with the faster of the stages that it tried. ``chosen`` is the name of the
    option whose plan the search returns."""

    def __init__(self, graph: Graph, cluster: Cluster, limit_bytes: float) -> None:
        self.search = Search(
            graph, cluster.num_devices, cluster, PlanLowering, ADAMW, False, limit_bytes, "both", False,
            TimeLimit(None, lambda what: None), memory_bytes=limit_bytes,
        )  # fmt: skip
        self.lowered: dict[str, float] = {}
        self.chosen = ""

    def run(self) -> None:
        """Search, and note which options are lowered."""
        model, plan = self.search.model, None
        planned, options = model.planned, list[Option]()

        def noted(option: Option, *, explains: bool) -> tuple[mw.Plan, Foretold]:
            options.append(option)
            return planned(option, explains=explains)

        with patch.object(model, "planned", noted), closing(self.search.prices), suppress(LayoutError):
            self.search.run()
            plan = self.search.best()
        for option in {(option.name, option.firsts): option for option in options}.values():  # also as cut by hand
            if (seconds := self.lowered_s(option)) < self.lowered.get(option.name, inf):
                self.lowered[option.name] = seconds
        if plan is not None:  # it recomputes less than its option if blocks can be kept
            layout = msgspec.structs.replace(plan.layout, recompute="none")
            self.chosen = next(
                option.name for option in reversed(options)
                if msgspec.structs.replace(option.layout, recompute="none") == layout
            )  # fmt: skip

    def lowered_s(self, option: Option) -> float:
        """The simulated seconds of an option as a whole model, with buckets of 8 MiB; infinite if it does not fit."""
        try:
            _, prediction = self.search.model.planned(option, explains=False)
        except REFUSALS:
            return inf
        return prediction.played.step_s if prediction.fits(self.search.memory_bytes) else inf


@dataclass(frozen=True)
class SearchGap:
    """How much longer plans of a search take than the best of all ``plans``: the fastest plan that it lowers (``over``)
    and the plan that it chooses (``chosen``). ``equal``: the fastest, compared with plans whose stages have equal
    sizes. Infinite: the search finds nothing that fits, although a plan does."""

    over: float
    chosen: float
    equal: float
    plans: int
    ours: str
    best: str
    unlike: bool


def gap(seed: int, most_layers: int = 5) -> list[SearchGap]:
    """The gaps of a random model on a random cluster, with much memory and with little; empty if the model has more
    than ``most_layers`` layers."""
    random = np.random.default_rng(seed)
    graph, cluster = random_graph(random), random_cluster(random)
    every = EveryPlan(Searched(graph, cluster, MUCH).search)
    if len(every.chain.layers) > most_layers:
        return []
    steps = sorted(every.steps(), key=lambda step: step.step_s)
    peaks = sorted({step.peak_bytes for step in steps})
    limit = peaks[int(random.uniform(0, 1) * (len(peaks) - 1))]
    return [_gap(Searched(graph, cluster, limit_bytes), every, steps) for limit_bytes in (MUCH, limit)]


def _gap(searched: Searched, every: EveryPlan, steps: Sequence[StagedStep]) -> SearchGap:
    """The gap of a search. ``steps`` are all plans, the fastest first."""
    searched.run()
    fitting = [step for step in steps if step.peak_bytes <= searched.search.limit]
    known: dict[str, float] = {}

    def best_of(steps: Sequence[StagedStep]) -> tuple[float, str]:
        """The fastest as whole models. Of plans that take equally long by the prices, only the first is tried."""
        lowered = 0
        for step in reversed({step.step_s: step for step in reversed(steps)}.values()):
            if lowered == LOWERED:
                break
            if step.name not in known:
                known[step.name] = searched.lowered_s(every.option(step))
            lowered += known[step.name] < inf
        return min(((known[step.name], step.name) for step in steps if step.name in known), default=(inf, "nothing"))

    equal_s, _ = best_of([step for step in fitting if not step.layout.stage_sizes])
    best_s, best = best_of(fitting)
    ours_s, ours = min(((seconds, name) for name, seconds in searched.lowered.items()), default=(inf, "nothing"))
    return SearchGap(
        over=over(ours_s, best_s),
        chosen=over(searched.lowered.get(searched.chosen, inf), best_s),
        equal=over(ours_s, equal_s),
        plans=len(steps),
        ours=ours,
        best=best,
        unlike=not every.cluster.homogeneous,
    )


def over(seconds: float, best_s: float) -> float:
    """How much longer than ``best_s`` this is; 0 if there is no best plan, because none fits."""
    return seconds / best_s - 1 if best_s < inf else 0.0


# --- stages -----------------------------------------------------------------------------------------------------------


def stage_prices(random: np.random.Generator) -> tuple[StagePrices, tuple[int, ...], int]:
    """Random prices of stages, the pools of devices, and the number of micro-batches. Half of the cases have two pools
    of unlike devices."""
    pools = tuple(int(size) for size in random.integers(1, 5, random.integers(1, 3)))
    submeshes = [
        Submesh((0,) * pool + (devices,)) for pool, size in enumerate(pools) for devices in (1, 2, 4) if devices <= size
    ]
    submeshes += [Submesh((1, 1))] if len(pools) > 1 else []
    layers = int(random.integers(1, 6))
    work, seconds = 0.1 + random.random(layers), np.full((layers, layers, len(submeshes), 1), inf)
    speeds = random.uniform(0.2, 1.0, len(submeshes))
    for first, last in itertools.combinations_with_replacement(range(layers), 2):
        for number, submesh in enumerate(submeshes):
            seconds[first, last, number] = work[first : last + 1].sum() / submesh.devices ** speeds[number]
    after = np.where(random.random(seconds.shape) < 0.2, random.integers(-1, layers, seconds.shape), ANY)
    prices = StagePrices(tuple(submeshes), seconds, after, 0.3 * random.random(seconds.shape))
    return prices, pools, int(random.choice([1, 4, 16, 64]))


def stages_agree(count: int) -> tuple[int, float]:
    """How many of ``count`` random cases of the dynamic program agree with brute force, pruned and unpruned; and the
    part of the work that pruning leaves in cases with stages."""
    right, pruned, whole = 0, 0, 0
    for seed in range(count):
        prices, pools, microbatches = stage_prices(np.random.default_rng(seed))
        expected = brute_force(prices, pools, microbatches, 1.0)
        assignments = [assign_stages(prices, pools, microbatches, prunes=prunes) for prunes in (True, False)]
        steps = [inf if assignment is None else assignment.step_s for assignment in assignments]
        right += all(step == expected or abs(step - expected) <= 1e-9 * expected for step in steps)
        pruned, whole = (
            total + (assignment.entries if assignment else 0)
            for total, assignment in zip((pruned, whole), assignments, strict=True)
        )
    return right, pruned / whole


def findings(count: int) -> list[Check]:
    """The stages of ``count`` random cases, and the searches of ``count`` random models."""
    right, part = stages_agree(count)
    checks = [
        report.share(
            "stages on submeshes, unlike devices included: the dynamic program equals brute force, pruned and unpruned",
            right, count, f"{right} of {count} random cases",
        ),
        report.share(
            "pruning leaves out at least half of the work of the dynamic program", int(part <= LEAST_WORK), 1,
            f"it leaves {part:.1%} of the work", {"part": part},
        ),
    ]  # fmt: skip
    gaps: list[SearchGap] = []
    for seed in itertools.count():
        if len(gaps) >= 2 * count:  # each with much memory and with little
            break
        gaps += gap(seed)
    unlike = [gap for gap in gaps if gap.unlike]
    return [
        *checks,
        agreement("a plan that the search lowers is as fast as the best of all plans", gaps, lambda gap: gap.over),
        agreement("the same on unlike devices only", unlike, lambda gap: gap.over),
        agreement("the same, if only plans whose stages have equal sizes are tried", gaps, lambda gap: gap.equal),
        agreement(
            f"the plan that the search chooses takes at most {ALIKE:.0%} longer than the best of all plans", gaps,
            lambda gap: gap.chosen, ALIKE,
        ),
    ]  # fmt: skip


def agreement(
    target: str, gaps: Sequence[SearchGap], over_of: Callable[[SearchGap], float], within: float = EQUAL
) -> Check:
    """How many searches are at most ``within`` above the best plan, and by how much the others miss it."""
    finite = [over for over in map(over_of, gaps) if over < inf]
    near = [sum(over <= limit for over in finite) for limit in (EQUAL, 1e-3, ALIKE, 0.1)]
    measured = (
        f"of {len(gaps)} searches {near[0]} equal or better, {near[1]} within 0.1 %, {near[2]} within 2 %, {near[3]} "
        f"within 10 %; at most {max(finite, default=0.0):.1%} above; {len(gaps) - len(finite)} find nothing that fits, "
        "although a plan does"
    )
    passed = sum(over <= within for over in finite)
    notes = {"plans tried for each search, on average": sum(gap.plans for gap in gaps) / max(1, len(gaps))}
    return report.share(target, passed, len(gaps), measured, notes)


TEXT = f"""Nothing is timed. A case of the first two rows is a random table of prices of stages, on one or two pools of
devices. The other rows are random models of up to five layers on two or four devices, each searched with much memory
and with little. Brute force tries all layouts x cuts into stages x submeshes x recomputation of each stage x ZeRO
stages, with the prices of layers. It lowers the {LOWERED} fastest and simulates them as whole models, as it does with
the options that the search lowers. Strategies of operators are those of the integer program. Stages of unequal sizes
have all schedules, ``gpipe`` and those with several chunks included, and all ZeRO stages. The search decides by
estimates which options it lowers (docs/decisions/0040-layers-are-priced-once.md), and takes the simplest plan within
{ALIKE:.0%}."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many cases agree, and write the result."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES, help=f"cases of each kind; fewer than {CASES}: no file")
    count: int = parser.parse_args(arguments).cases
    results = findings(count)
    if count >= CASES:
        report.write("exhaustive", "Searches beside brute force", COMMAND, "nothing", {}, results, TEXT)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
