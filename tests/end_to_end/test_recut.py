"""Options that are cut anew: borders of stages move as long as the simulated step becomes shorter."""

from __future__ import annotations

import itertools
from functools import cache

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.cost.occupancy import room_of
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.graph import Graph
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.recut import Recut, may_recut, moved, recut

CLUSTER = mw.Cluster.load("h100-box4-ndr400x1", 8).without_graphs()


@cache
def model() -> Graph:
    """Four layers, and a head that takes longer than a layer."""
    config = GPTConfig(layers=4, width=1024, heads=8, vocabulary=2**16, sequence_length=512, tied_head=False)
    with torch.device("meta"):
        tokens = torch.zeros(16, config.sequence_length, dtype=torch.int64)
        return mw.capture(
            GPT(config).to(torch.bfloat16), language_model_loss, {"tokens": tokens, "targets": tokens}
        )  # fmt: skip


@cache
def pipelines() -> Pipelines:
    graph = model()
    lower = PlanLowering(graph)
    chain = chain_of(graph, CLUSTER, 8)
    of_chain = lower if chain.graph is graph else PlanLowering(chain.graph)
    prices = LayerPrices(chain, CLUSTER, of_chain, ADAMW, False, 8)
    return Pipelines(prices, room_of(CLUSTER, range(8)))


def option(layout: mw.Layout) -> Option:
    return pipelines().option(layout, ("none",))


def recut_of(option: Option, limit: float | None = None) -> Recut:
    works = [pipelines().prices.of(option.layout)] * len(option.recompute)
    return Recut(pipelines(), CLUSTER, option, works, [limit or pipelines().limit_bytes] * option.layout.pp)


def test_a_border_moves_or_two_together() -> None:
    stages = [range(3), range(3, 5), range(5, 6)]
    assert list(moved(stages, (1,))) == [
        [range(2), range(2, 5), range(5, 6)],
        [range(4), range(4, 5), range(5, 6)],
        [range(3), range(3, 4), range(4, 6)],
        [range(2), range(2, 4), range(4, 6)],
    ]


@pytest.mark.parametrize(
    "layout",
    [
        mw.Layout(dp=4, pp=2, microbatches=2),
        mw.Layout(dp=4, pp=2, microbatches=4, schedule="zb-h1", zero=1),
        mw.Layout(dp=2, pp=4, microbatches=4),
        mw.Layout(dp=4, pp=2, microbatches=2, schedule="interleaved", chunks=2),
    ],
    ids=lambda layout: f"{layout.schedule} of {layout.pp * layout.chunks}",
)
def test_the_cut_is_the_best_of_all(layout: mw.Layout) -> None:
    before = option(layout)
    anew = recut_of(before)
    best = anew.best(anew.before)
    assert best is not None
    count = len(pipelines().chain.layers)
    seconds = {}
    for borders in itertools.combinations(range(1, count), layout.pp * layout.chunks - 1):
        stages = [range(first, end) for first, end in itertools.pairwise([0, *borders, count])]
        other = anew.at(stages)
        assert other is not None
        seconds[borders] = other.step_s
    assert best.step_s <= (1 + 0.01) * min(seconds.values())
    as_is = anew.at(anew.before)
    assert as_is is not None
    assert best.step_s <= as_is.step_s


def test_a_cut_that_does_not_fit_is_left_out() -> None:
    before = option(mw.Layout(dp=4, pp=2, microbatches=2))
    free = recut_of(before).best(recut_of(before).before)
    assert free is not None
    tight = recut_of(before, limit=free.peak_bytes - 1)
    best = tight.best(tight.before)
    assert best is None or best.peak_bytes < free.peak_bytes


def test_long_steps_and_stages_that_differ_keep_their_cuts() -> None:
    layout = mw.Layout(dp=4, pp=2, microbatches=4)
    assert may_recut(layout)
    assert recut(option(layout), pipelines()).step_s <= option(layout).step_s * (1 + 1e-9)
    assert not may_recut(msgspec.structs.replace(layout, microbatches=16))
    assert not may_recut(layout, memory_bytes=1e9)
    assert not may_recut(mw.Layout(dp=8))
    assert not may_recut(mw.Layout(pp=2, microbatches=4, stage_sizes=({"dp": 4, "tp": 1}, {"dp": 2, "tp": 2})))


def test_the_whole_model_takes_as_long_as_its_layers() -> None:
    before = option(mw.Layout(dp=4, pp=2, microbatches=2))
    best = recut_of(before).best(recut_of(before).before)
    assert best is not None
    lower = PlanLowering(model())
    ask = Ask(explains=False, fits_buckets=False, lower=lower, firsts=best.firsts)
    plan = plan_layout(model(), msgspec.structs.replace(best.layout), world_size=8, cluster=CLUSTER, ask=ask)
    assert foretell(lower, plan, CLUSTER).played.step_s == pytest.approx(best.step_s, rel=0.045)
