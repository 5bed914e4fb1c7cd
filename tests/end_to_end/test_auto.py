"""The layout that is chosen by itself: the best by the cost model, within memory; and what is said of others."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache

import msgspec
import pytest
import torch

import meshwright as mw
from benchmarks import quality
from benchmarks.enumeration import Uniform
from benchmarks.uniform import gpt as wide_gpt
from meshwright import optim
from meshwright.api import plans
from meshwright.api.plans import cost_of
from meshwright.catalog import load_cluster, with_software
from meshwright.cost import optimizer as cost
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import ClusterError, LayoutError, MeshwrightError, PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan_check import check_fits
from meshwright.ir.program import Program
from meshwright.lower.plans import PlanLowering
from meshwright.models import (
    GPT,
    GPTConfig,
    ResNet,
    UNet,
    classification_loss,
    language_model_loss,
    segmentation_loss,
)
from meshwright.planner import candidates, layout_search
from meshwright.planner.auto import plan_auto
from meshwright.planner.explicit import plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.time_limit import TimeIsOverError, TimeLimit
from meshwright.runtime.optimizer import OptimizerFactory
from tests.distributed import hugging_face, oracle
from tests.distributed.pool import Ranks

pytestmark = pytest.mark.usefixtures("without_workers")

HEAVY = msgspec.structs.replace(cost.ADAMW, moved=10**6, fused_moved=0)
"""An optimizer that moves so much that nothing else counts."""
UNKNOWN = msgspec.structs.replace(cost.ADAMW, divides=False, fused_moved=0)
SLOW = msgspec.structs.replace(cost.ADAMW, fused_moved=0)
BETWEEN = msgspec.structs.replace(cost.ADAMW, moved=10, fused_moved=0)
"""An optimizer whose update takes a little longer than the gathers of updated parameters."""
CLUSTER = load_cluster("cpu-local", software="meshwright")
FOUR = CLUSTER.resized(4)


@cache
def gpt(size: int = 4) -> Graph:
    subject = oracle.gpt(False, layers=1, size=size)
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


@cache
def mixtral() -> Graph:
    subject = hugging_face.subject("Mixtral", 1)
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


def layouts_of(batch_size: int, world_size: int, axes: candidates.Axes) -> Iterator[mw.Layout]:
    """All layouts of the space that a search considers."""
    space = batch_size, world_size, axes
    for shape in (*candidates.shapes(*space), *candidates.variations(*space)):
        yield from candidates.runs(shape, batch_size)


@cache
def every_layout(world_size: int, size: int = 4) -> dict[str, tuple[float, int]]:
    """Simulated seconds and peak bytes of everything, with every kind of recomputation."""
    graph, costs = gpt(size), {}
    layouts = layouts_of(graph.batch_size, world_size, candidates.axes_of(graph))
    for layout, recompute in itertools.product(layouts, RECOMPUTE):
        try:
            candidate = msgspec.structs.replace(layout, recompute=recompute)
            plan = oracle.plan_of(graph, candidate, world_size, CLUSTER)
        except MeshwrightError:
            continue
        one_step = foretell(PlanLowering(graph), plan, CLUSTER)
        costs[layout_text(candidate)] = (one_step.played.step_s, one_step.peak.peak_bytes)
    return costs


@pytest.mark.parametrize(
    ("world_size", "part_of_memory"),
    [
        (1, None),
        (1, 0.8),
        (1, 0.55),
        *(pytest.param(2, part, marks=pytest.mark.product) for part in (None, 0.8, 0.55)),
    ],
)
def test_nothing_that_fits_is_faster(world_size: int, part_of_memory: float | None) -> None:
    size = 8 if world_size == 1 else 4  # of one rank, few layouts need less memory than others
    graph, every = gpt(size), every_layout(world_size, size)
    largest = max(peak for _, peak in every.values())
    limit = largest * part_of_memory if part_of_memory else float(CLUSTER.device.memory_bytes)
    plan = mw.plan(graph, CLUSTER, devices=world_size, memory_bytes=limit)
    one_step = foretell(PlanLowering(graph), plan, CLUSTER)
    assert plan.prediction == one_step.prediction
    assert one_step.peak.peak_bytes <= limit
    fastest = min(seconds for seconds, needed in every.values() if needed <= limit)
    assert one_step.played.step_s <= (1 + ALIKE) * fastest


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.product), 2])
def test_ranks_share_by_zero_where_memory_demands_it(microbatches: int) -> None:
    """The fastest of all stages and recomputations that fit, of one division of the batch."""
    layout = mw.Layout(dp=2, microbatches=microbatches)

    def search(limit: float) -> layout_search.Search:
        clock = TimeLimit(None, lambda what: None)
        return layout_search.Search(gpt(), 2, CLUSTER, PlanLowering, ADAMW, False, limit, "both", False, clock)

    open_end = search(math.inf)
    every = [
        open_end.pipelines.option(msgspec.structs.replace(layout, zero=zero), (recompute,))
        for zero, recompute in itertools.product(ZERO_STAGES, RECOMPUTE)
    ]
    plain, shared = every[0].peak_bytes, 0
    for limit in sorted({option.peak_bytes for option in every if option.peak_bytes < plain}):
        lighter = search(limit).lighter
        sketches = lighter.first_sketches(lighter.pipelines.option(layout, RECOMPUTE[:1]))
        while (more := lighter.next_sketch(sketches[-1])) is not None:
            sketches.append(more)
        for sketch in sketches:
            ideal = lighter.idealized(sketch).ideal
            assert ideal is not None
            assert not (lighter.holds_too_much(sketch) and ideal.peak_bytes <= limit), "then the ideal cannot fit"
        sketches = [sketch for sketch in map(lighter.idealized, sketches) if lighter.may_fit(sketch)]
        best = lighter.best([lighter.priced(sketch) for sketch in sketches])
        for sketch in sketches:
            assert sketch.bound_s <= lighter.priced(sketch).step_s * (1 + 1e-9)
        shared += bool(best.layout.zero)
        assert best.peak_bytes <= limit
        least_again = {  # what is computed again costs time, so that less of it is enough
            zero: next(option for option in every if option.layout.zero == zero and option.peak_bytes <= limit)
            for zero in {option.layout.zero for option in every if option.peak_bytes <= limit}
        }
        assert best.step_s <= (1 + ALIKE) * min(option.step_s for option in least_again.values())
    assert shared


def test_stages_have_as_much_zero_as_their_memory_needs() -> None:
    """Of two stages, the first keeps the activations of more micro-batches, and needs more ZeRO than the second."""
    config = GPTConfig(layers=6, width=256, heads=4, vocabulary=8192, sequence_length=64, tied_head=False)
    with torch.device("meta"):
        tokens = torch.zeros(16, config.sequence_length, dtype=torch.int64)
        graph = mw.capture(GPT(config), language_model_loss, {"tokens": tokens, "targets": tokens})
    layout = mw.Layout(dp=2, pp=2, microbatches=4)

    def search(limit: float) -> layout_search.Search:
        clock = TimeLimit(None, lambda what: None)
        return layout_search.Search(graph, 4, FOUR, PlanLowering, ADAMW, False, limit, "both", False, clock)

    limit = search(math.inf).pipelines.option(msgspec.structs.replace(layout, zero=3), ("none",)).peak_bytes
    limited = search(limit)
    lighter, pipelines = limited.lighter, limited.pipelines
    sketches = lighter.first_sketches(pipelines.option(layout, RECOMPUTE[:1]))
    while (more := lighter.next_sketch(sketches[-1])) is not None:
        sketches.append(more)
    sketches = [sketch for sketch in map(lighter.idealized, sketches) if lighter.may_fit(sketch)]
    best = lighter.best([lighter.priced(sketch) for sketch in sketches])
    alike = lighter.best([
        pipelines.option(sketch.layout, RECOMPUTE[:number]) for sketch in sketches for number in (1, 2, 3)
    ])  # fmt: skip
    assert best.layout.stage_zero == (3, 1)
    assert not alike.layout.stage_zero
    assert best.step_s < 0.95 * alike.step_s
    plan, foretold = limited.model.planned(best, explains=False)
    assert foretold.peak.peak_bytes <= limit
    assert foretold.played.step_s == pytest.approx(best.step_s, rel=0.01)
    assert plan.notes[0].split == "ZeRO 3, 1"
    first, second = plan.stages
    assert first.released
    assert not second.released


@pytest.mark.parametrize(("optimizer", "zero"), [(SLOW, 1), (BETWEEN, 1), (ADAMW, 0), (cost.SGD, 0), (UNKNOWN, 0)])
def test_ranks_share_by_zero_where_the_update_takes_long(optimizer: OptimizerCost, zero: int) -> None:
    """Wide layers: AdamW in many passes on every rank takes longer than the gathers of updated parameters; its fused
    kernel and SGD do not. An unknown optimizer may look at whole tensors. There is memory enough. A small gain
    suffices: a layout with ZeRO and the same layout without it run the same kernels."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4)), torch.nn.Linear(4096, 8))
        given = {"inputs": torch.zeros(4096, 4096), "label": torch.zeros(4096, dtype=torch.int64)}
    graph, cluster = mw.capture(model, classification_loss, given), mw.Cluster.load("h100-80gb-dgx-ndr400x8", 8)
    space = candidates.Space(holds=lambda shape: shape.dp == 8)
    clock = TimeLimit(None, lambda what: None)
    ours = with_software(cluster, "meshwright")
    search = layout_search.Search(
        graph, 8, ours, PlanLowering, optimizer, False, math.inf, "both", False, clock, space=space
    )
    search.run()
    assert search.best().layout.zero == zero
    plain = [option for option in search.options if option.layout.microbatches == 1]
    estimated: dict[int, float] = {option.layout.zero: option.step_s for option in plain}
    simulated: dict[int, float] = {
        stage: foretell(
            PlanLowering(graph), mw.plan(graph, cluster, layout=mw.Layout(dp=8, zero=stage), optimizer=optimizer),
            cluster, optimizer=optimizer,
        ).played.step_s
        for stage in (0, 1)
    }  # fmt: skip
    if optimizer is BETWEEN:
        assert simulated[1] < simulated[0] < (1 + ALIKE) * simulated[1]
    elif optimizer.divides:
        assert all(seconds[zero] * (1 + ALIKE) < seconds[1 - zero] for seconds in (estimated, simulated))
    else:
        assert estimated.keys() == {0}


def test_every_variation_is_considered_if_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variations are else those akin to the fastest plain layouts, and here are no plain layouts."""
    monkeypatch.setattr(layout_search, "EVERY_VARIATION", 1)
    space = candidates.Space(holds=lambda shape: shape.cp == 2)
    clock = TimeLimit(None, lambda what: None)
    search = layout_search.Search(
        gpt(), 4, FOUR, PlanLowering, ADAMW, False, math.inf, "both", False, clock, space=space
    )
    search.run()
    assert search.options
    assert search.best().layout.cp == 2
    assert search.weighed == search.count


def test_experts_over_ranks_are_weighed_whatever_the_fastest_plain_layouts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plain layout has the stages of these variations, so that none is akin to a plain layout."""
    monkeypatch.setattr(layout_search, "EVERY_VARIATION", 1)
    graph = mixtral()
    space = candidates.Space(holds=lambda shape: shape.pp == (2 if shape.is_plain else 1))
    search = layout_search.Search(
        graph, 4, FOUR, PlanLowering, ADAMW, False, math.inf, "both", False, TimeLimit(None, lambda what: None),
        space=space,
    )  # fmt: skip
    search.run()
    every = list(candidates.variations(graph.batch_size, 4, search.axes))
    bounds = {shape.ep: search.pipelines.bound_s(shape) for shape in every if shape.pp == shape.tp == shape.cp == 1}
    assert bounds.keys() == {2, 4}
    assert any(option.layout.is_plain for option in search.options)
    assert {text for text in search._seen if "ep" in text} == {"dp4 x ep2", "dp4 x ep4"}
    least = min(option.step_s for option in search.options)
    for ep, bound_s in bounds.items():  # estimated, or excluded by its own bound
        assert bound_s > least or any(option.layout.ep == ep for option in search.options)


def test_ranks_with_different_experts_share_the_update_of_everything_else() -> None:
    """Ranks have experts of their own, but equal attention and vocabulary. Only the update takes time here."""
    graph = mixtral()
    space = candidates.Space(holds=lambda shape: shape.ep == shape.dp == 4)
    search = layout_search.Search(
        graph, 4, FOUR, PlanLowering, HEAVY, False, math.inf, "both", False, TimeLimit(None, lambda what: None),
        space=space,
    )  # fmt: skip
    search.run()
    steps = {option.layout.zero: option.step_s for option in search.options if option.layout.microbatches == 1}
    assert steps.keys() == {0, 1}
    plain = next(option for option in search.options if not option.layout.zero)
    (divided,) = search.lighter._divided(plain)
    assert 0 < divided < 3 / 4
    assert steps[1] / steps[0] == pytest.approx(1 - divided, rel=0.05)


def test_a_plan_tells_why_the_others_lost() -> None:
    plan = mw.plan(gpt(), CLUSTER, devices=2, memory_bytes=1e9)
    text = plan.explain()
    assert plan.prediction is not None
    assert f"predicted: {plan.prediction.step_s * 1e3:.4g} ms a step" in text
    assert "considered, and not chosen:" in text
    assert len(plan.alternatives) == layout_search.SHOWN
    for alternative in plan.alternatives:
        assert alternative.layout != layout_text(plan.layout)
        assert re.search(
            rf"    {re.escape(alternative.layout)} +{alternative.step_s * 1e3:.4g} ms a step, .* GiB a rank, ", text
        )
        assert re.search(r"less simple|\d% slower: .* ms more of (computing|communication|waiting)", alternative.why), (
            alternative.why
        )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.product)])
def test_what_does_not_fit_says_what_would(world_size: int) -> None:
    size = 8 if world_size == 1 else 4
    graph = gpt(size)
    with pytest.raises(LayoutError) as caught:
        mw.plan(graph, CLUSTER, devices=world_size, memory_bytes=1e5)
    assert caught.value.where == "memory"
    match = re.fullmatch(
        r"no layout fits in [\d.e-]+ GiB for the tensors of a rank; the smallest, (.*), needs ([\d.e-]+) GiB a rank",
        caught.value.problem,
    )
    assert match is not None, caught.value.problem
    needed = min(peak for _, peak in every_layout(world_size, size).values())
    assert float(match[2]) * 2**30 == pytest.approx(needed, rel=0.01)
    assert f"give every rank {match[2]} GiB for tensors" in caught.value.remedy
    limit = float(match[2]) * 2**30 * 1.01
    plan = mw.plan(graph, CLUSTER, devices=world_size, memory_bytes=limit)
    assert plan.prediction is not None
    assert plan.prediction.peak_memory_bytes <= limit, "the remedy works"


def test_a_layout_that_cannot_be_lowered_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for Hugging Face's Phi over dp2 x tp2: micro-batches would need samples of others."""
    lower = PlanLowering.__call__

    def refusing(self: PlanLowering, plan: mw.Plan, rank: int = 0) -> tuple[Program, ...]:
        if plan.layout.pp == 1 and plan.layout.microbatches == 1:
            raise PlanError("it would have to communicate with other micro-batches")
        return lower(self, plan, rank)

    monkeypatch.setattr(PlanLowering, "__call__", refusing)
    plan = mw.plan(gpt(), CLUSTER, devices=2)
    assert plan.layout.pp > 1 or plan.layout.microbatches > 1


def test_a_smaller_batch_that_would_fit_is_named() -> None:
    """Batch norm over the whole batch forbids micro-batches, so that only a smaller batch needs less memory."""

    @cache
    def graph(batch: int) -> Graph:
        images = {"image": torch.zeros(batch, 1, 16, 16), "label": torch.zeros(batch, dtype=torch.int64)}
        return mw.capture(ResNet(depth=8, width=4, image_channels=1), classification_loss, images)

    def refusal(memory_bytes: float) -> LayoutError:
        with pytest.raises(LayoutError) as caught:
            mw.plan(graph(128), CLUSTER, devices=1, memory_bytes=memory_bytes)
        return caught.value

    least = re.search(r"needs ([\d.e-]+) GiB", refusal(1e5).problem)
    assert least is not None
    limit = 0.9 * float(least[1]) * 2**30
    result = re.search(r"or use a global batch of (\d+)", refusal(limit).remedy)
    assert result is not None
    batch = int(result[1])
    assert 0 < batch < 128
    assert mw.plan(graph(batch), CLUSTER, devices=1, memory_bytes=limit).prediction is not None, "the remedy works"


def test_more_ranks_than_cores_are_planned_for_as_if_there_were_as_many() -> None:
    cores = CLUSTER.num_devices
    plan = mw.plan(gpt(), devices=4 * cores)
    assert plan.mesh.world_size == 4 * cores
    assert plan.prediction is not None


def test_batch_norm_keeps_the_batch_whole() -> None:
    images = {"image": torch.zeros(8, 1, 8, 8), "label": torch.zeros(8, dtype=torch.int64)}
    graph = mw.capture(ResNet(depth=8, width=4, image_channels=1), classification_loss, images)
    plan = mw.plan(graph, CLUSTER, devices=2)
    assert plan.microbatches == 1
    assert plan.layout.batch_statistics == "global"


def test_of_two_alike_data_parallelism_is_simpler_than_mixed_axes() -> None:
    """A U-Net's gradients are small: whatever its mixed axes find, no prediction tells it from data parallelism."""
    images = {"image": torch.zeros(4, 3, 128, 128), "label": torch.zeros(4, 128, 128, dtype=torch.int64)}
    plan = mw.plan(mw.capture(UNet(2, 16), segmentation_loss, images), CLUSTER, devices=2)
    assert layout_text(plan.layout) == "dp2"
    (mixed,) = [alternative for alternative in plan.alternatives if alternative.layout == "mixed 2"]
    assert mixed.why.endswith("which is within the accuracy of predictions, and less simple")


# --- sequences, experts, and layouts by hand --------------------------------------------------------------------------


def test_what_a_model_has_decides_which_axes_are_weighed() -> None:
    axes = candidates.axes_of(gpt())
    assert axes == candidates.Axes(sequences=True, attention=True, experts=1)
    images = {"image": torch.zeros(8, 1, 8, 8), "label": torch.zeros(8, dtype=torch.int64)}
    resnet = mw.capture(ResNet(depth=8, width=4, image_channels=1), classification_loss, images)
    assert candidates.axes_of(resnet) == candidates.Axes(images=True)
    moe = candidates.axes_of(mixtral())
    assert moe.experts == 4

    def asked(axes: candidates.Axes) -> set[str]:
        return {layout_text(layout) for layout in layouts_of(8, 4, axes)}

    assert not {text for text in asked(candidates.Axes()) if "cp" in text or "ep" in text or "sequence" in text}
    assert {"cp4", "cp4, ring attention", "dp2 x cp2", "dp2 x tp2, sequence parallel"} <= asked(axes)
    assert {"dp4 x ep4", "dp4 x ep2", "dp2 x ep2 x tp2", "dp2 x ep2 x cp2"} <= asked(moe)
    assert len(asked(moe)) == len(list(layouts_of(8, 4, moe))), "none twice"


def test_one_long_sequence_is_cut_along_itself() -> None:
    """A batch of one over four ranks, with heads that three quarters of the ranks would have nothing of."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=96, heads=1, vocabulary=64, sequence_length=2048)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.sequence_length, dtype=torch.int64)
    graph = mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})
    plan = mw.plan(graph, FOUR, devices=4)
    assert plan.layout.cp == 4


V100 = mw.Cluster.load("v100-16gb-p3-eth25", 4)


@pytest.mark.parametrize(
    ("head", "cluster", "devices"),
    [
        ("tied", FOUR, 4),
        ("own", V100, 2),
        pytest.param("tied", V100, 4, marks=pytest.mark.product),
        pytest.param("own", FOUR, 4, marks=pytest.mark.product),
        pytest.param("own", V100, 4, marks=pytest.mark.product),
    ],
    ids=lambda value: value.name if isinstance(value, mw.Cluster) else str(value),
)
def test_no_layout_by_hand_is_faster(head: str, cluster: mw.Cluster, devices: int) -> None:
    """Megatron-LM's columns and rows, with and without sequence parallelism; `make bench-models` has larger places."""
    config = GPTConfig(layers=2, width=256, heads=4, vocabulary=4096, sequence_length=64, tied_head=head == "tied")
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(8, config.sequence_length, dtype=torch.int64)
    graph = mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})
    comparison = quality.compared("GPT", graph, cluster, devices)
    assert comparison.notes["slower"] <= ALIKE, comparison.measured


def test_layouts_are_compared_as_graphs_if_the_best_is_launched_so() -> None:
    """Estimates know no graphs. By them, ``pp4`` is the fastest, since each of its ranks launches the fewest kernels.
    PyTorch's own launches are slow enough for graphs."""
    config = GPTConfig(layers=6, width=1024, heads=16, vocabulary=1024, sequence_length=256, tied_head=False)
    with torch.device("meta"):
        tokens = torch.zeros(16, config.sequence_length, dtype=torch.int64)
        model = GPT(config).to(torch.bfloat16)
        graph = mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})
    cluster = mw.Cluster.load("h100-box4-ndr400x1", 4)
    plan, by_hand = plan_auto(graph, 4, cluster, PlanLowering), Uniform(graph, cluster)
    assert plan.graphs
    assert plan.prediction is not None
    stages_s, pairs_s = (by_hand.as_asked(layout).step_s for layout in (mw.Layout(pp=4), mw.Layout(dp=2, pp=2)))
    assert plan.prediction.step_s <= pairs_s < 0.9 * stages_s


def test_stages_are_no_worse_than_those_of_the_same_layout_by_hand() -> None:
    """By estimates, the second stage has a block beside the output layer of 262,144 words. As graphs, the output layer
    alone is better balanced: a step takes 36.8 instead of 40.0 ms."""
    graph, cluster = wide_gpt(), mw.Cluster.load("h100-box4-ndr400x1", 8)
    space = candidates.Space(holds=lambda shape: shape.pp == 2 and shape.dp == 4)
    clock = TimeLimit(None, lambda what: None)
    search = layout_search.Search(
        graph, 8, cluster, PlanLowering, ADAMW, False, math.inf, "both", False, clock, space=space
    )
    search.run()
    plan = search.best()
    assert plan.stages[1].first == "final_norm:native_layer_norm#0"
    assert plan.prediction is not None
    assert plan.prediction.step_s <= Uniform(graph, cluster).as_asked(plan.layout).step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (None, cost.ADAMW),
        (lambda parameters: torch.optim.AdamW(parameters), cost.ADAMW),
        (lambda parameters: torch.optim.Adam(parameters), cost.ADAM),
        (lambda parameters: torch.optim.SGD(parameters), cost.SGD),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), cost.MOMENTUM),
        (lambda parameters: torch.optim.RMSprop(parameters), cost.RMSPROP),
        (
            lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
            msgspec.structs.replace(cost.RMSPROP, states=3, moved=cost.RMSPROP.moved + 4),
        ),
        (
            lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
            msgspec.structs.replace(cost.ADAMW, states=3, moved=cost.ADAMW.moved + 2, fused_moved=9),
        ),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=True), SLOW),
        (
            lambda parameters: torch.optim.AdamW(
                [{"params": [value], "foreach": not index or None} for index, (_, value) in enumerate(parameters)]
            ),
            SLOW,
        ),
        (
            lambda parameters: type("Own", (torch.optim.AdamW,), {})(parameters, amsgrad=True),
            msgspec.structs.replace(cost.ADAMW, states=3, moved=cost.ADAMW.moved + 2, divides=False, fused_moved=0),
        ),
        (lambda parameters: optim.LAMB(parameters), cost.LAMB),
        (lambda parameters: optim.LARC(parameters), cost.LARS),
        (
            lambda parameters: torch.optim.SGD(
                [{"params": [parameter for _, parameter in parameters if parameter.dim() > 1]}]
            ),
            cost.SGD,
        ),
        (lambda parameters: torch.optim.Adadelta(parameters), UNKNOWN),
        (lambda parameters: torch.optim.SGD(parameters, lr=-1.0), UNKNOWN),  # cannot be made: refused later
    ],
)
def test_optimizers_are_counted_as_what_they_are(factory: OptimizerFactory | None, expected: OptimizerCost) -> None:
    assert cost_of(factory, gpt()) == expected


def test_a_costly_optimizer_is_not_run_whole_on_every_rank() -> None:
    graph = gpt(64)
    whole, chosen = (
        mw.plan(graph, FOUR, devices=2, layout=layout, optimizer=HEAVY, only="intra")
        for layout in (mw.Layout(dp=2), None)
    )
    times = [foretell(PlanLowering(graph), plan, FOUR, optimizer=HEAVY).played.step_s for plan in (whole, chosen)]
    assert times[1] < 0.6 * times[0]
    assert mw.plan(graph, FOUR, devices=2, optimizer=cost.SGD, only="intra").layout.dp == 2


def test_parallelize_tells_the_planner_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at where a layout is searched, and only there."""
    asked: list[tuple[OptimizerCost, bool]] = []

    def searched(
        graph: Graph,
        world_size: int,
        cluster: mw.Cluster,
        lower: object,
        *,
        optimizer: OptimizerCost,
        clips: bool,
        **_: object,
    ) -> mw.Plan:
        asked.append((optimizer, clips))
        return plan_layout(graph, mw.Layout(), world_size=world_size)

    monkeypatch.setattr(plans, "plan_auto", searched)
    calls: list[int] = []

    def factory(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        calls.append(1)
        return torch.optim.SGD(parameters, lr=0.1)

    subject = oracle.gpt(False, layers=1)
    given = subject.model, subject.loss_fn, subject.batches[0]
    mw.parallelize(*given, optimizer=factory, max_grad_norm=1.0)
    assert asked == [(cost.SGD, True)]
    assert len(calls) == 2
    mw.parallelize(*given, plan=mw.Layout(), optimizer=factory)
    assert len(asked) == 1
    assert len(calls) == 3


# --- a limit of time -------------------------------------------------------------------------------------------------


def stop_after(layouts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the time were over when so many layouts have been weighed."""
    left = layouts

    def check(clock: TimeLimit) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise TimeIsOverError

    monkeypatch.setattr(TimeLimit, "check", check)
    monkeypatch.setattr(TimeLimit, "over", property(lambda clock: left < 0))


def test_a_search_without_limit_says_what_it_weighs_and_that_is_all() -> None:
    messages: list[str] = []
    plan = mw.plan(gpt(), CLUSTER, devices=2, progress=messages.append)
    weighed = [text for text in messages if not text.startswith("simulating ")]
    count = weighed[0].rpartition(" ")[2]
    assert [text.partition(";")[0].rpartition(", ")[2] for text in weighed] == [
        f"layout {number} of {count}" for number in range(1, len(weighed) + 1)
    ]
    best_so_far = re.findall(
        r"; best so far: (.*), ([\d.]+) ms a step, [\d.e-]+ GiB a rank$", "\n".join(messages), re.MULTILINE
    )
    assert len(best_so_far) >= len(messages) - 1, "from the second layout on"
    assert len(set(best_so_far)) > 1
    assert [float(step) for _, step in best_so_far] == sorted((float(step) for _, step in best_so_far), reverse=True)
    assert weighed[0].startswith("dp2, layout 1 of ")
    assert len(weighed) < int(count), "lower bounds exclude the others"
    assert "stopped after" not in plan.explain()


def test_when_the_time_is_over_the_best_so_far_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, messages = gpt(), list[str]()
    stop_after(3, monkeypatch)
    with caplog.at_level(logging.WARNING, "meshwright"):
        plan = mw.plan(graph, CLUSTER, devices=2, seconds=7.0, progress=messages.append)
    check_fits(plan, graph)
    weighed = [text for text in messages if not text.startswith("simulating ")]
    count = weighed[0].rpartition(" ")[2]
    reason = f"{len(weighed)} of {count} layouts were considered, 1 simulated: another may be faster"
    assert re.search(rf"\(planner\) +stopped after 7 s +{reason}", plan.explain())
    assert caplog.messages == [f"planning has stopped after 7 s: {reason}"]
    assert layout_text(plan.layout) in {text.partition(", layout ")[0] for text in weighed}
    assert plan.prediction is not None


def test_where_nothing_was_found_in_time_that_is_an_error() -> None:
    expected = r"^seconds: no layout that fits was found in 1e-09 s: 0 of \d+ were considered"
    with pytest.raises(LayoutError, match=expected):
        mw.plan(gpt(), CLUSTER, devices=2, seconds=1e-9)


@pytest.mark.parametrize("seconds", [0, 0.0, -1.5, math.nan, "5"])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    expected = f"seconds: {seconds!r} is not a time limit\n  -> give a number above 0, or None: no limit"
    subject = oracle.gpt(False, layers=1)
    given = subject.model, subject.loss_fn, subject.batches[0]
    for call in (
        lambda: mw.plan(gpt(), CLUSTER, devices=2, seconds=seconds),
        lambda: mw.parallelize(*given, seconds=seconds),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        assert str(caught.value) == expected


def plan_on_a_slow_first_rank() -> tuple[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 0:
            stop_after(2, patch)
        subject = oracle.gpt(False, layers=1)
        trainer = mw.parallelize(subject.model, subject.loss_fn, subject.batches[0], cluster=CLUSTER, seconds=60.0)
    return trainer.plan.digest, sum(note.split == "stopped after 60 s" for note in trainer.plan.notes)


def test_all_ranks_take_the_plan_that_rank_0_found_in_time(ranks: Ranks) -> None:
    first, second = ranks(2, plan_on_a_slow_first_rank)
    assert first == second
    assert first[1] == 1


def test_more_devices_than_there_are_anywhere_are_refused() -> None:
    for layout in (None, mw.Layout(dp=10**12)):
        with pytest.raises(ClusterError, match="cluster cpu-local: 1000000000000 devices are more than 1,000,000"):
            mw.plan(gpt(), "cpu-local", devices=10**12, layout=layout)
