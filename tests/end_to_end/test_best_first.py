"""Pipelines of few ranks, searched in the order of lower bounds, beside all pipelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest
import torch

import meshwright as mw
from benchmarks.unlike import slowed
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout, ZeroStage
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.part import part_of
from meshwright.ir.pipeline import ScheduleName
from meshwright.lower.plans import PlanLowering
from meshwright.models import MLP, classification_loss
from meshwright.planner.candidates import Space
from meshwright.planner.inter_op.best_first import BestFirst
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.stage_homes import REFUSED, PlacedPipeline, StageHomes, of_sizes
from meshwright.planner.time_limit import TimeLimit
from meshwright.schedules.pipeline import least_microbatches

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zb-h1", "gpipe")
ZEROS: tuple[ZeroStage, ...] = (0, 1)
BATCH, RANKS, MUCH = 2, 4, 1e12


@cache
def graph() -> Graph:
    with torch.device("meta"):
        batch = {"inputs": torch.zeros(BATCH, 64), "label": torch.zeros(BATCH, dtype=torch.int64)}
        return mw.capture(MLP((64, 256, 64, 8)), classification_loss, batch)


def cluster(name: str, *, unlike: bool) -> Cluster:
    """Two boxes of two devices; with ``unlike``, the second box is half as fast."""
    one = mw.Cluster.load(name, 2)
    box = Level(name="box", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-9)
    devices = (one.device, slowed(one.device, 2.0) if unlike else one.device)
    members = tuple(LevelMembers(count=1, device=device, levels=(box,)) for device in devices) if unlike else ()
    network = Level(name="network", fan_out=2, alpha_s=1e-5, beta_s_per_byte=2e-9, members=members)
    levels = (network,) if unlike else (box, network)
    return msgspec.structs.replace(one, num_devices=RANKS, levels=levels, collectives=(), open_ended=False)


def homes_on(cluster: Cluster, memory_bytes: float) -> StageHomes:
    slowest = part_of(cluster, range(RANKS))
    chain = chain_of(graph(), slowest, RANKS)
    lower = PlanLowering(chain.graph)
    prices = LayerPrices(chain, slowest, lower, ADAMW, False, RANKS)
    return StageHomes(cluster, RANKS, Pipelines(prices, memory_bytes), lower, memory_bytes)


def search_on(homes: StageHomes) -> BestFirst:
    clock = TimeLimit(None, lambda what: None)
    space = Space(schedules=SCHEDULES, zero=ZEROS)
    return BestFirst(homes, BATCH, space, clock, most_tp=RANKS, most_ranks=RANKS)


def every_pipeline(homes: StageHomes) -> Iterator[PlacedPipeline]:
    """All pipelines that fit: numbers of ranks x dp and tp x cuts x micro-batches x schedules x ZeRO stages."""
    layers = len(homes.of_all.chain.layers)
    own = [(dp, tp) for dp, tp in itertools.product(range(1, RANKS), repeat=2) if dp * tp < RANKS and BATCH % dp == 0]
    for pp in range(2, min(RANKS, layers) + 1):
        for sizes in itertools.product(own, repeat=pp):
            if sum(dp * tp for dp, tp in sizes) != RANKS:
                continue
            for count, schedule, zero in itertools.product((1, BATCH), SCHEDULES, ZEROS):
                divides = all(BATCH % (dp * count) == 0 for dp, _ in sizes)
                if not divides or count < least_microbatches(schedule, pp) or (zero and max(sizes)[0] == 1):
                    continue
                layout = of_sizes(Layout(microbatches=count, schedule=schedule, zero=zero), sizes)
                for cut in itertools.combinations(range(1, layers), pp - 1):
                    stages = [range(first, end) for first, end in itertools.pairwise([0, *cut, layers])]
                    try:
                        placed = homes.lightest(layout, stages)
                    except REFUSED:
                        continue
                    if placed is not None:
                        yield placed


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("name", ["cpu-local", "v100-16gb-p3-eth25"])
def test_the_fastest_of_all_pipelines_is_found(name: str, unlike: bool) -> None:
    homes = homes_on(cluster(name, unlike=unlike), MUCH)
    search = search_on(homes)
    simulated = list(search.pipelines(math.inf))
    every = list(every_pipeline(homes))
    assert min(placed.step_s for placed in simulated) == pytest.approx(min(placed.step_s for placed in every))
    assert len(simulated) < 0.8 * len(every)
    for placed in every:
        assert search.bound_s(placed.layout, placed.stages) <= placed.step_s, (placed.layout, placed.stages)
    for placed in every:  # with the prices that the search did not need
        assert search_on(homes).bound_s(placed.layout, placed.stages) <= placed.step_s, (placed.layout, placed.stages)


def test_nothing_is_simulated_if_a_known_step_is_shorter_than_all_bounds() -> None:
    homes = homes_on(cluster("cpu-local", unlike=False), MUCH)
    best_s = min(placed.step_s for placed in every_pipeline(homes))
    search = search_on(homes)
    assert not search.options(best_s / 100)
    assert not search.simulated


def test_where_memory_is_short_stages_recompute_or_share_their_state() -> None:
    roomy = homes_on(cluster("cpu-local", unlike=False), MUCH)
    peaks = sorted(roomy.option(placed).peak_bytes for placed in every_pipeline(roomy))
    homes = homes_on(cluster("cpu-local", unlike=False), peaks[len(peaks) // 8])
    every = [placed.step_s for placed in every_pipeline(homes)]
    found = search_on(homes).options(math.inf)
    assert found[0].step_s == pytest.approx(min(every), rel=1e-9)
    assert found[0].peak_bytes <= peaks[len(peaks) // 8]
