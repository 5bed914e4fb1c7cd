"""Blocks that a plan keeps although its stages compute blocks again: as many as fit, and the same gradients."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.files import encode_json
from meshwright.ir.graph import Graph
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.candidates import Space
from meshwright.planner.foretell import Foretold, foretell
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.kept_blocks import keep_what_fits, recomputed_units
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from tests.end_to_end.test_partition import plan_of, run_alone

pytestmark = pytest.mark.usefixtures("without_workers")

LAYERS, FEW = 6, 4
CLUSTER, FOUR = (load_cluster("h100-box4-ndr400x1", count, "meshwright") for count in (2, 4))


@cache
def model(layers: int = LAYERS) -> Graph:
    config = GPTConfig(layers=layers, width=512, heads=8, vocabulary=512, sequence_length=512)
    with torch.device("meta"):
        tokens = torch.zeros(16, config.sequence_length, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": tokens}
        return mw.capture(GPT(config).to(torch.bfloat16), language_model_loss, batch)


@cache
def lowering(layers: int = LAYERS) -> PlanLowering:
    return PlanLowering(model(layers))


FORETOLD: dict[tuple[bytes, int], Foretold] = {}


def simulated(plan: mw.Plan, cluster: mw.Cluster = CLUSTER, layers: int = LAYERS) -> Foretold:
    """Each limit of memory leads to some of the same plans."""
    key = encode_json(plan), cluster.num_devices
    if key not in FORETOLD:
        FORETOLD[key] = foretell(lowering(layers), plan, cluster)
    return FORETOLD[key]


def keeping(plan: mw.Plan, numbers: tuple[int, ...], layers: int = LAYERS) -> mw.Plan:
    """The plan in which each stage computes all but its last ``numbers`` blocks again."""
    stages = tuple(
        msgspec.structs.replace(stage, recompute=names[: len(names) - number])
        for stage, names, number in zip(plan.stages, recomputed_units(plan, model(layers)), numbers, strict=True)
    )
    return msgspec.structs.replace(plan, stages=stages)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_as_many_blocks_are_kept_as_fit(kind: str) -> None:
    layout, graph = mw.Layout(dp=2, recompute=kind), model(FEW)  # type: ignore[arg-type]
    plan = mw.plan(graph, CLUSTER, devices=2, layout=layout)

    def weigh(plan: mw.Plan) -> Foretold:
        return simulated(plan, layers=FEW)

    before = weigh(plan)
    (names,) = recomputed_units(plan, graph)
    assert len(names) == FEW
    peaks = [weigh(keeping(plan, (number,), FEW)).peak.peak_bytes for number in range(FEW + 1)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    for limit in {peak + 1.0 for peak in peaks}:
        kept, foretold = keep_what_fits(plan, before, graph, limit, weigh)
        number = max(number for number, peak in enumerate(peaks) if peak <= limit)
        assert recomputed_units(kept, graph) == [names[: FEW - number]]
        assert foretold.peak.peak_bytes <= limit
        assert (foretold.played.step_s < before.played.step_s) == (number > 0)


def test_each_rank_of_a_pipeline_keeps_what_it_can() -> None:
    layout = mw.Layout(pp=2, microbatches=4, recompute="full")
    plan = mw.plan(model(), CLUSTER, devices=2, layout=layout)
    before = simulated(plan)
    first, last = (len(names) for names in recomputed_units(plan, model()))
    limit = simulated(keeping(plan, (1, 0))).memory[0].peak_bytes + 1.0
    kept, foretold = keep_what_fits(plan, before, model(), limit, simulated)
    left = [len(names) for names in recomputed_units(kept, model())]
    assert left[0] == first - 1
    assert left[1] < last, "the last stage has fewer micro-batches in flight"
    assert foretold.fits(limit)
    assert not simulated(keeping(plan, (2, last - left[1]))).fits(limit)
    if left[1]:
        assert not simulated(keeping(plan, (1, last - left[1] + 1))).fits(limit)


def test_the_search_keeps_blocks() -> None:
    """Under a limit between that of all blocks recomputed and that of none, some are kept."""
    bare, full = (
        simulated(mw.plan(model(), CLUSTER, devices=1, layout=mw.Layout(recompute=kind))) for kind in ("none", "full")
    )
    limit = full.peak.peak_bytes + (bare.peak.peak_bytes - full.peak.peak_bytes) / 2
    plan = mw.plan(model(), CLUSTER, devices=1, memory_bytes=limit)
    assert plan.prediction is not None
    assert plan.prediction.peak_memory_bytes <= limit
    assert plan.prediction.step_s < full.played.step_s


def test_the_search_compares_layouts_by_what_their_stages_can_keep() -> None:
    """Two replicas of two stages that compute some blocks again are the fastest layout, but not if they compute all."""
    limit = 180.0 * 2**20

    layout = mw.Layout(dp=2, pp=2, microbatches=4, recompute="full")
    plan = mw.plan(model(), FOUR, devices=4, layout=layout)
    before = simulated(plan, FOUR)
    _, kept = keep_what_fits(plan, before, model(), limit, lambda plan: simulated(plan, FOUR))
    assert kept.fits(limit)
    assert kept.played.step_s < before.played.step_s
    space = Space(
        schedules=("1f1b",), zero=(0, 1), unlike=False,
        holds=lambda shape: shape.tp == shape.cp == 1 and not shape.sequence_parallel,
    )  # fmt: skip
    search = Search(
        model(), 4, FOUR, PlanLowering, ADAMW, False, limit, "both", False, TimeLimit(), limit, space=space
    )  # fmt: skip
    try:
        search.run()
        best = search.best()
    finally:
        search.prices.close()
    assert best.prediction is not None
    assert best.prediction.step_s <= (1 + ALIKE) * kept.played.step_s


def test_a_plan_that_keeps_everything_stays() -> None:
    plan = mw.plan(model(), CLUSTER, devices=2, layout=mw.Layout(dp=2))
    before = simulated(plan)
    assert keep_what_fits(plan, before, model(), None, simulated) == (plan, before)


@pytest.mark.parametrize("stage", range(3))
def test_gradients_are_the_same_if_some_blocks_are_computed_again(stage: int) -> None:
    name = "GPT with dropout"
    plan = plan_of(name)
    some = msgspec.structs.replace(
        plan, stages=tuple(msgspec.structs.replace(each, recompute=("blocks.0", "blocks.2")) for each in plan.stages)
    )
    (kept, sent), (again, sent_again) = (run_alone(name, each, stage, "1f1b") for each in (plan, some))
    for parameter, gradient in kept.gradients.items():
        assert torch.equal(gradient, again.gradients[parameter]), parameter  # type: ignore[arg-type]
    assert all(torch.equal(tensor, other) for tensor, other in zip(sent, sent_again, strict=True))
