"""Pipelines of few ranks, searched in the order of lower bounds, beside all pipelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec
import pytest
import torch

import meshwright as mw
from benchmarks.unlike import slowed
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout, ZeroStage
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.part import part_of
from meshwright.ir.pipeline import ScheduleName
from meshwright.lower.plans import PlanLowering
from meshwright.models import MLP, classification_loss
from meshwright.planner.candidates import Space, divisors, runs
from meshwright.planner.inter_op import best_first
from meshwright.planner.inter_op.best_first import MOST_MICROBATCHES, BestFirst
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import REFUSALS, Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import periods
from meshwright.planner.inter_op.stage_bounds import StageBounds
from meshwright.planner.inter_op.stage_homes import PlacedPipeline, StageHomes, of_sizes
from meshwright.planner.inter_op.unequal import UnequalStages
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from meshwright.planner.unlike_stages import NOT_ALL, UnlikeStages
from meshwright.schedules.pipeline import least_microbatches

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zb-h1", "gpipe")
ZEROS: tuple[ZeroStage, ...] = (0, 1)
BATCH, RANKS, MUCH = 2, 4, 1e12


@cache
def graph(size: int = BATCH) -> Graph:
    with torch.device("meta"):
        batch = {"inputs": torch.zeros(size, 64), "label": torch.zeros(size, dtype=torch.int64)}
        return mw.capture(MLP((64, 256, 64, 8)), classification_loss, batch)


def cluster(name: str, *, unlike: bool) -> Cluster:
    """Two boxes of two devices; with ``unlike``, the second box is half as fast."""
    catalog_cluster = mw.Cluster.load(name, 2)
    box = Level(name="box", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-9)
    devices = (catalog_cluster.device, slowed(catalog_cluster.device, 2.0) if unlike else catalog_cluster.device)
    members = tuple(LevelMembers(count=1, device=device, levels=(box,)) for device in devices) if unlike else ()
    network = Level(name="network", fan_out=2, alpha_s=1e-5, beta_s_per_byte=2e-9, members=members)
    levels = (network,) if unlike else (box, network)
    return msgspec.structs.replace(catalog_cluster, num_devices=RANKS, levels=levels, collectives=(), open_ended=False)


def measured_times(cluster: Cluster) -> Cluster:
    """The cluster with measured times that its levels do not imply: fast messages, and large all-reduces that take
    much longer than a reduce-scatter and an all-gather."""
    times = {
        "send": (1e-8, 1e-8),
        "all_reduce": (1e-7, 0.2),
        "reduce_scatter": (1e-7, 1e-7),
        "all_gather": (1e-7, 1e-7),
    }
    rows = [
        CollectiveTiming(operation=name, algorithm="ring", level=level, ranks=2, bytes=size, time_s=seconds)  # type: ignore[arg-type]
        for name, each in times.items() for level in ("box", "network")
        for size, seconds in zip((2**8, 2**24), each, strict=True)
    ]  # fmt: skip
    return msgspec.structs.replace(cluster, collectives=tuple(rows))


def homes_on(cluster: Cluster, memory_bytes: float, size: int = BATCH) -> StageHomes:
    ranks = cluster.num_devices
    slowest = part_of(cluster, range(ranks))
    chain = chain_of(graph(size), slowest, ranks)
    lower = PlanLowering(chain.graph)
    prices = LayerPrices(chain, slowest, lower, ADAMW, False, ranks)
    return StageHomes(cluster, ranks, Pipelines(prices, memory_bytes), lower, memory_bytes)


SPACE = Space(schedules=SCHEDULES, zero=ZEROS)


def search_on(homes: StageHomes, space: Space = SPACE) -> BestFirst:
    clock, ranks = TimeLimit(None, lambda what: None), homes.world_size
    return BestFirst(homes, homes.of_all.chain.graph.batch_size, space, clock, most_tp=ranks, most_ranks=ranks)


def every_pipeline(homes: StageHomes, schedules: tuple[ScheduleName, ...] = SCHEDULES) -> Iterator[PlacedPipeline]:
    """All pipelines that fit: numbers of ranks x dp and tp x cuts x micro-batches x schedules x ZeRO stages."""
    layers, ranks, batch = len(homes.of_all.chain.layers), homes.world_size, homes.of_all.chain.graph.batch_size
    own = [(dp, tp) for dp, tp in itertools.product(range(1, ranks), repeat=2) if dp * tp < ranks and batch % dp == 0]
    for pp in range(2, min(ranks, layers) + 1):
        for sizes in itertools.product(own, repeat=pp):
            if sum(dp * tp for dp, tp in sizes) != ranks:
                continue
            for count, schedule, zero in itertools.product(divisors(batch), schedules, ZEROS):
                divides = all(batch % (dp * count) == 0 for dp, _ in sizes)
                if not divides or count < least_microbatches(schedule, pp) or (zero and max(sizes)[0] == 1):
                    continue
                layout = of_sizes(Layout(microbatches=count, schedule=schedule, zero=zero), sizes)
                for cut in itertools.combinations(range(1, layers), pp - 1):
                    stages = [range(first, end) for first, end in itertools.pairwise([0, *cut, layers])]
                    try:
                        placed = homes.lightest(layout, stages)
                    except REFUSALS:
                        continue
                    if placed is not None:
                        yield placed


def check_bounds(placed: Sequence[PlacedPipeline], search: BestFirst) -> None:
    for each in placed:
        assert search.bound_s(each.layout, each.stages) <= each.step_s, (each.layout, each.stages)


@pytest.mark.parametrize(
    ("name", "unlike", "measured"),
    [
        ("cpu-local", False, False), ("cpu-local", False, True), ("cpu-local", True, False),
        ("v100-16gb-p3-eth25", False, False), ("v100-16gb-p3-eth25", True, False),
    ],
)  # fmt: skip
def test_the_fastest_of_all_pipelines_is_found(name: str, unlike: bool, measured: bool) -> None:
    devices = cluster(name, unlike=unlike).without_graphs()
    devices = measured_times(devices) if measured else devices
    homes = homes_on(devices, MUCH)
    search = search_on(homes)
    simulated = list(search.pipelines(math.inf))
    every = list(every_pipeline(homes))
    assert not search.stopped
    assert min(placed.step_s for placed in simulated) == pytest.approx(min(placed.step_s for placed in every))
    assert len(simulated) < 0.8 * len(every)
    check_bounds(every, search)
    check_bounds(every, search_on(homes))  # with the prices that the search did not need
    check_bounds(every, search_on(homes_on(devices, MUCH)))  # without prices


def test_the_fastest_of_all_pipelines_with_many_micro_batches_is_found() -> None:
    v100s = mw.Cluster.load("v100-16gb-p3-eth25", 3)
    homes = homes_on(v100s, MUCH, 8)
    schedules: tuple[ScheduleName, ...] = ("1f1b", "zb-h2")
    search = search_on(homes, Space(schedules=schedules, zero=ZEROS))
    fastest_s = min(placed.step_s for placed in search.pipelines(math.inf))
    every = list(every_pipeline(homes, schedules))
    assert {placed.layout.microbatches for placed in every} == {1, 2, 4, 8}
    assert fastest_s == pytest.approx(min(placed.step_s for placed in every))
    check_bounds(every, search_on(homes_on(v100s, MUCH, 8)))


@pytest.mark.parametrize("size", [1, 3])
def test_stages_have_bounds_if_the_batch_is_odd(size: int) -> None:
    bounds = StageBounds(homes_on(cluster("cpu-local", unlike=False), MUCH, size), Space())
    assert bounds.of(range(1), 1, 1, 1, ("F", "B")).before[-1] > 0


def test_messages_may_cross_an_outer_level_that_is_faster() -> None:
    """Ranks 0 to 2 send to rank 3: rank 2 is in its box, but the other two boxes' links may be faster."""
    slow_box = cluster("cpu-local", unlike=False)
    levels = (msgspec.structs.replace(slow_box.levels[0], alpha_s=1e-3), slow_box.levels[1])
    homes = homes_on(msgspec.structs.replace(slow_box, levels=levels), MUCH)
    assert StageBounds(homes, Space())._send_s(1.0, range(3), 3, uniform=False) < 1e-4
    check_bounds(list(every_pipeline(homes)), search_on(homes))


def test_slow_sums_of_gradients_do_not_exclude_pipelines_with_zero() -> None:
    homes = homes_on(measured_times(cluster("cpu-local", unlike=False)), MUCH)
    every = [placed for placed in every_pipeline(homes) if (placed.layout.dp, placed.layout.pp) == (2, 2)]
    steps = [min(placed.step_s for placed in every if placed.layout.zero == zero) for zero in ZEROS]
    assert steps[1] < steps[0] / 2
    space = Space(schedules=SCHEDULES, zero=ZEROS, holds=lambda shape: (shape.dp, shape.pp) == (2, 2))
    options = search_on(homes, space).options(steps[1])
    assert options[0].layout.zero == 1
    assert options[0].step_s == pytest.approx(steps[1])


def test_nothing_is_simulated_if_a_known_step_is_shorter_than_all_bounds() -> None:
    homes = homes_on(cluster("cpu-local", unlike=False), MUCH)
    best_s = min(placed.step_s for placed in every_pipeline(homes))
    search = search_on(homes)
    assert not search.options(best_s / 100)
    assert not search.simulated


def without_tp(homes: StageHomes) -> list[PlacedPipeline]:
    def tp(layout: Layout) -> set[object]:
        return {layout.of_stage(number).tp for number in range(layout.pp)}

    return [placed for placed in every_pipeline(homes) if tp(placed.layout) == {1}]


def test_only_stages_whose_memory_needs_it_have_more_zero() -> None:
    """One of two stages is too full without ZeRO."""
    layout = Layout(dp=2, pp=2, microbatches=1, schedule="gpipe")
    plain = homes_on(cluster("cpu-local", unlike=False), MUCH)
    count = len(plain.of_all.chain.layers)
    stages = [range(1), range(1, count)]
    without = plain.lightest(layout, stages)
    assert without is not None
    first, last = (memory.peak_bytes for memory in peak_memory(without.work, periods(layout)[0]))
    assert first != last
    homes = homes_on(cluster("cpu-local", unlike=False), max(first, last) - 1)
    placed = homes.lightest(msgspec.structs.replace(layout, zero=3), stages, 0)
    assert placed is not None
    assert placed.layout.stage_zero == ((3, 0) if first > last else (0, 3))
    assert homes.option(placed).peak_bytes < max(first, last)


def test_where_memory_is_short_stages_recompute_or_share_their_state() -> None:
    """The limit is below the peak of all pipelines without ZeRO and recomputation, if tp may not divide the state."""
    roomy = homes_on(cluster("cpu-local", unlike=False), MUCH)
    limit = min(roomy.option(placed).peak_bytes for placed in without_tp(roomy) if not placed.layout.zero) - 1
    homes = homes_on(cluster("cpu-local", unlike=False), limit)
    space = Space(schedules=SCHEDULES, zero=ZEROS, holds=lambda shape: shape.tp == 1)
    options = search_on(homes, space).options(math.inf)
    assert options[0].step_s == pytest.approx(min(placed.step_s for placed in without_tp(homes)), rel=1e-9)
    assert options[0].peak_bytes <= limit
    assert options[0].layout.zero or set(options[0].recompute) != {"none"}


# --- the space, and limits on the work -------------------------------------------------------------------------------


def test_every_stage_belongs_to_the_space() -> None:
    homes = homes_on(cluster("cpu-local", unlike=False), MUCH, 8)
    space = Space(
        schedules=SCHEDULES, zero=ZEROS, fewest=2, batch_statistics="microbatch", holds=lambda shape: shape.tp == 1
    )
    assert space.holds_stages(Layout(pp=2, stage_sizes=({"dp": 1}, {"dp": 3})))
    assert not space.holds_stages(Layout(pp=2, stage_sizes=({"dp": 1}, {"tp": 3})))
    unequal = UnequalStages(homes, 8, space, most_ranks=RANKS)
    for options in (search_on(homes, space).options(math.inf), list(unequal.options([2, 4]))):
        assert options
        for option in options:
            assert option.layout.microbatches >= 2
            assert option.layout.batch_statistics == "microbatch"
            assert {option.layout.of_stage(number).tp for number in range(option.layout.pp)} == {1}


def unlike_stages(space: Space) -> UnlikeStages:
    devices, clock = cluster("cpu-local", unlike=False), TimeLimit(None, lambda what: None)
    search = Search(graph(), RANKS, devices, PlanLowering, ADAMW, False, MUCH, "intra", False, clock, space=space)
    return UnlikeStages(devices, RANKS, search.lighter, search.of_chain, RANKS, "intra", None, clock, space)


def test_gpipe_is_a_schedule_of_unequal_stages_only() -> None:
    assert "gpipe" not in {run.schedule for run in runs(Layout(pp=2), 8)}
    assert unlike_stages(Space())._with_one_chunk.schedules[-1] == "gpipe"
    assert unlike_stages(Space(schedules=("1f1b", "zb-v")))._with_one_chunk.schedules == ("1f1b",)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_cuts_of_one_layout_the_faster_is_kept(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """A search that a limit ends may know only a slower cut of a layout."""
    unlike, cuts = unlike_stages(Space()), list[Option]()
    layout, layers = Layout(dp=1, tp=2, pp=2, microbatches=BATCH), len(unlike.pipelines.chain.layers)
    for end in (1, 2):
        placed = unlike.homes.lightest(layout, [range(end), range(end, layers)])
        assert placed is not None
        cuts.append(unlike.homes.option(placed))
    assert cuts[0].step_s != cuts[1].step_s
    monkeypatch.setattr(UnlikeStages, "_best_first", lambda self, best: [cuts[1 - first]])
    kept = {option.name: option for option in unlike.options([cuts[first]])}[cuts[0].name]
    assert kept.step_s == min(cut.step_s for cut in cuts)


def test_the_number_of_micro_batches_is_limited() -> None:
    search = search_on(homes_on(cluster("cpu-local", unlike=False), MUCH))
    search.batch_size = 4 * MOST_MICROBATCHES
    assert max(run.microbatches for run in search._runs()) == MOST_MICROBATCHES


def test_bounds_take_no_longer_than_the_time_limit() -> None:
    search = search_on(homes_on(cluster("cpu-local", unlike=False), MUCH))
    search.clock.stop = lambda: search.homes.num_lowered > 0
    assert not search.options(math.inf)
    assert search.stopped
    assert search.homes.num_lowered == 1


def test_a_limit_on_its_work_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_first, "MOST_GROWN", 1)
    search = search_on(homes_on(cluster("cpu-local", unlike=False), MUCH))
    assert not search.options(math.inf)
    assert search.stopped


@pytest.mark.parametrize("stopped", [False, True])
def test_a_plan_says_if_a_limit_has_ended_the_search(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    def best(self: BestFirst, best_s: float) -> list[Option]:
        self.stopped = stopped
        return []

    monkeypatch.setattr(BestFirst, "options", best)
    assert (NOT_ALL in mw.plan(graph(), cluster("cpu-local", unlike=False), devices=RANKS).notes) is stopped
