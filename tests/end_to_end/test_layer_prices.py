"""Layers that are priced once: the shortened graph, the chain of layers, and stages that are assembled from layers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.cost.closed_form import predict_step
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import step_work
from meshwright.cost.work import Compute, without_launches
from meshwright.errors import MeshwrightError
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE
from meshwright.ir.layout_text import layout_text
from meshwright.ir.program import Program
from meshwright.ir.stages import cut
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, ResNet, WideResNet, classification_loss, language_model_loss
from meshwright.planner.ahead import with_graphs
from meshwright.planner.candidates import Axes, runs, shapes
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op import layer_work, rounds, works
from meshwright.planner.inter_op.assemble import assemble
from meshwright.planner.inter_op.chain import Chain, chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import stage_layout
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.shorten import shorten
from meshwright.planner.lighter import lighter_bound_s
from meshwright.schedules.pipeline import schedule_of
from tests.distributed import hugging_face

CPU, GPU = load_cluster("cpu-local", 8), load_cluster("h100-dgx-ndr400x8", 64, "meshwright")
BATCH, RANKS = 16, 8


@cache
def gpt(layers: int, tied: bool = True) -> Graph:
    config = GPTConfig(layers=layers, width=128, heads=4, vocabulary=512, sequence_length=32, tied_head=tied)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(BATCH, config.sequence_length, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def described(graph: Graph, names: dict[str, str]) -> list[object]:
    """All that makes a graph, with the modules in ``names`` renamed."""

    def renamed(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    operators = [
        (renamed(op.name), op.target, tuple(map(renamed, op.inputs)), tuple(map(renamed, op.outputs)), op.flops,
         op.bytes, op.backward, op.prologue, op.rule.pattern if op.rule else None)
        for op in graph.operators
    ]  # fmt: skip
    tensors = {
        renamed(name): (tensor.shape, tensor.dtype, tensor.kind, renamed(tensor.storage))
        for name, tensor in graph.tensors.items()
    }
    gradients = {(renamed(gradient.parameter), renamed(gradient.gradient or "")) for gradient in graph.gradients}
    return [operators, tensors, gradients, list(map(renamed, graph.parameters))]


@pytest.mark.parametrize("layers", [4, 9])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_a_shortened_model_is_the_model_with_two_layers(layers: int, tied: bool) -> None:
    short = shorten(gpt(layers, tied))
    assert described(short.graph, {}) == described(gpt(2, tied), {})
    (run,) = short.copies
    assert len(run) == layers - 2
    for number, copy in enumerate(run, start=2):
        for kept, removed in copy.items():
            assert removed == kept.replace("blocks.1", f"blocks.{number}")


def test_models_without_equal_blocks_in_a_row_stay_as_they_are() -> None:
    assert shorten(gpt(2)).graph is gpt(2)


class Skips(nn.Module):
    """A model in which all blocks are read at the end: none can stand for another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for block in self.blocks:
            x = block(x)
            total = total + x
        return total


def test_blocks_that_are_read_later_are_kept() -> None:
    graph = mw.capture(Skips(), lambda model, batch: model(batch).square().mean(), torch.zeros(4, 8))
    assert shorten(graph).graph is graph


def test_an_encoder_and_a_decoder_have_a_run_each() -> None:
    """T5: the bias of the first block, and the result of the encoder, are read by all blocks."""
    subject = hugging_face.subject("T5", 1)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    chain = chain_of(graph, CPU)
    firsts = tuple(layer.first for layer in chain.layers[1:])
    assert cut(graph, firsts).num_stages == len(chain.layers)


@pytest.mark.parametrize("layers", [3, 4, 9])
def test_the_chain_has_all_layers_of_the_model(layers: int) -> None:
    graph = gpt(layers)
    chain = chain_of(graph, CPU)
    firsts = tuple(layer.first for layer in chain.layers[1:])
    divided = cut(graph, firsts)
    assert divided.num_stages == len(chain.layers)
    short = cut(chain.graph, chain.firsts)
    flops, priced = [0.0] * len(chain.layers), [0.0] * short.num_stages
    for operator in graph.operators:
        if operator.name in divided.stage_of:
            flops[divided.stage_of[operator.name]] += operator.flops
    for operator in chain.graph.operators:
        if operator.name in short.stage_of:
            priced[short.stage_of[operator.name]] += operator.flops
    assert flops == [priced[layer.priced] for layer in chain.layers]


LAYOUTS = (
    mw.Layout(dp=8),
    mw.Layout(tp=4, dp=2),
    mw.Layout(dp=4, tp=2, microbatches=2),
    mw.Layout(dp=2, pp=4, microbatches=4),
    mw.Layout(dp=4, pp=2),
    mw.Layout(tp=2, pp=2, dp=2, microbatches=4, schedule="zb-h1"),
    mw.Layout(dp=2, tp=2, pp=2, microbatches=4, zero=1, recompute="full"),
    mw.Layout(dp=4, pp=2, microbatches=2, recompute="selective"),
    mw.Layout(dp=4, pp=2, microbatches=2, schedule="interleaved", chunks=2),
    mw.Layout(tp=2, pp=2, dp=2, microbatches=4, schedule="zb-v", chunks=2),
    mw.Layout(dp=2, cp=2, pp=2, microbatches=4),
    mw.Layout(dp=4, tp=2, sequence_parallel=True),
    mw.Layout(dp=8, zero=2),
    mw.Layout(dp=8, zero=1, microbatches=2),
    mw.Layout(dp=2, pp=4, microbatches=4, zero=1, stage_zero=(1, 0, 0, 1)),
)


@cache
def images(depth: int) -> Graph:
    given = {"image": torch.zeros(BATCH, 1, 8, 8), "label": torch.zeros(BATCH, dtype=torch.int64)}
    return mw.capture(ResNet(depth=depth, width=8, image_channels=1), classification_loss, given)


SUBJECTS: dict[str, Callable[[], Graph]] = {
    "own head": lambda: gpt(9, tied=False),
    "tied": lambda: gpt(9),
    "batch norm": lambda: images(56),
}
TIMES = {"own head": 0.04, "tied": 0.03, "batch norm": 0.05}
PEAKS = {"own head": 0.05, "tied": 0.08, "batch norm": 0.25}
HOST_TIMES = 0.08
"""Relative errors. ``HOST_TIMES``: of steps in which a GPU waits for its host, which also makes views between layers.
The images are so small that a kernel's workspace is a large part of the peak."""


@cache
def subject(name: str) -> tuple[Graph, PlanLowering]:
    graph = SUBJECTS[name]()
    return graph, PlanLowering(graph)  # which keeps the programs of single operators from layout to layout


@cache
def program_of(name: str, plan: bytes) -> tuple[Program, ...]:
    """The program of a plan in which no cluster is named: many layouts have the same for both."""
    return subject(name)[1](decode(plan, mw.Plan, where="the plan"))


@cache
def layers_of(name: str, cluster: str) -> tuple[Chain, PlanLowering]:
    chain = chain_of(subject(name)[0], {candidate.name: candidate for candidate in (CPU, GPU)}[cluster], RANKS)
    return chain, PlanLowering(chain.graph)


def cases() -> Iterator[object]:
    """Subjects, layouts and clusters. Every layout of several stages meets both heads, and both clusters; every other
    layout a head, on a cluster: the word embeddings and a tied head are in one stage there."""
    batch_norm = [layout for layout in LAYOUTS if layout.microbatches == 1 and layout.tp == layout.cp == 1]
    for turn, (name, layouts) in enumerate({"own head": LAYOUTS, "tied": LAYOUTS, "batch norm": batch_norm}.items()):
        for number, layout in enumerate(layouts):
            for index, cluster in enumerate((CPU, GPU)):
                meets = layout.pp > 1 or name == "batch norm" or turn == number // 2 % 2
                marks = () if meets and (turn + number + index) % 2 else (pytest.mark.product,)
                yield pytest.param(name, layout, cluster, marks=marks)


def label(value: str | int | mw.Layout | mw.Cluster) -> str:
    if isinstance(value, mw.Layout):
        return layout_text(value)
    return value.name if isinstance(value, mw.Cluster) else str(value)


@pytest.mark.parametrize(("name", "layout", "cluster"), list(cases()), ids=label)
def test_assembled_stages_cost_what_the_program_of_the_model_costs(
    name: str, layout: mw.Layout, cluster: mw.Cluster
) -> None:
    """What is left are views between layers, and under ZeRO whole gradients before they are reduced."""
    cluster = cluster.without_graphs()
    graph, lower = subject(name)
    chain, lower_layers = layers_of(name, cluster.name)
    prices = LayerPrices(chain, cluster, lower_layers, ADAMW, False, RANKS)
    stages = layout.pp * layout.chunks
    priced = [prices.of(stage_layout(layout, stage, layout.recompute)) for stage in range(stages)]
    count = len(chain.layers)
    ranges = [range(number * count // stages, (number + 1) * count // stages) for number in range(stages)]
    accumulates = layout.microbatches > 1
    assembled = assemble(priced, chain.priced(ranges), layout.pipeline, ADAMW, accumulates=accumulates)

    ask = Ask(explains=False, lower=lower, fits_buckets=False, firsts=chain.firsts_of(ranges))
    plan = plan_layout(graph, layout, world_size=RANKS, cluster=cluster, ask=ask)
    text = encode_json(msgspec.structs.replace(plan, cluster="any", links={}, notes=()))
    real = step_work(program_of(name, text), plan, cluster, optimizer=ADAMW)
    schedule = schedule_of(plan)
    for free in (True, False):
        works = [without_launches(work) if free else work for work in (real, assembled)]
        rel = TIMES[name] if free else HOST_TIMES
        expected, estimate = (predict_step(work, schedule, plan.mesh, cluster) for work in works)
        assert estimate.step_s == pytest.approx(expected.step_s, rel=rel)
        assert estimate.compute_s == pytest.approx(expected.compute_s, rel=rel)
        played = [foretell(lower, plan, cluster, work=work).played.step_s for work in works]
        assert played[1] == pytest.approx(played[0], rel=2 * rel)
    peaks = [max(rank.peak_bytes for rank in peak_memory(work, schedule)) for work in (real, assembled)]
    assert peaks[1] == pytest.approx(peaks[0], rel=max(0.1 if layout.zero else 0.0, PEAKS[name]))


@pytest.mark.parametrize(
    "layout",
    [
        mw.Layout(dp=2, pp=4, microbatches=4),
        mw.Layout(tp=2, pp=2, dp=2, microbatches=4, schedule="zb-h1"),
        mw.Layout(dp=8, zero=2),
    ],
    ids=label,
)
def test_estimates_know_that_phases_are_launched_as_graphs(layout: mw.Layout) -> None:
    """Without graphs, a GPU waits for its host, and the steps of this GPT take much longer."""
    graph, lower = subject("own head")
    chain, lower_layers = layers_of("own head", GPU.name)
    option = Pipelines(LayerPrices(chain, GPU, lower_layers, ADAMW, False, RANKS), float("inf")).option(
        layout, ("none",)
    )
    ask = Ask(explains=False, lower=lower, fits_buckets=False, firsts=option.firsts)
    plan = with_graphs(
        lower, plan_layout(graph, layout, world_size=RANKS, cluster=GPU, ask=ask), GPU, ADAMW, float("inf")
    )
    assert plan.graphs
    expected, slow = (
        foretell(lower, msgspec.structs.replace(plan, graphs=graphs), GPU).played.step_s for graphs in (True, False)
    )
    assert rounds.simulated_s(layout, option.work, GPU) == pytest.approx(expected, rel=0.1)
    assert slow > 1.3 * expected


def test_estimates_of_experts_count_launches() -> None:
    """Groups of tokens have sizes that vary, so that no graph can hold a mixture."""
    layout, chain = mw.Layout(dp=8), chain_of(experts(), GPU, RANKS)
    lower = PlanLowering(chain.graph)
    with_host, other = (
        LayerPrices(chain, cluster, lower, ADAMW, False, RANKS).of(layout) for cluster in (GPU, GPU.without_graphs())
    )
    assert with_host.works == other.works


@cache
def experts() -> Graph:
    """A Mixtral whose gradients of experts are larger than what a micro-batch saves for them."""
    config = MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = MixtralForCausalLM(config), torch.zeros(BATCH, 64, dtype=torch.int64)
    return mw.capture(model, lambda net, given: net(**given).loss, {"input_ids": tokens, "labels": tokens})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_a_split_backward_keeps_gradients_of_experts(schedule: Literal["1f1b", "zb-h1", "zb-h2"]) -> None:
    """A kernel makes them together with gradients of tokens, and they wait for the second part of the backward."""
    layout = mw.Layout(dp=2, pp=4, microbatches=8, schedule=schedule)
    chain = chain_of(experts(), GPU, RANKS)
    prices = LayerPrices(chain, GPU, PlanLowering(chain.graph), ADAMW, False, RANKS)
    option = Pipelines(prices, float("inf")).option(layout, ("none",))
    lower = PlanLowering(experts())
    plan = plan_layout(
        experts(), layout, world_size=RANKS, cluster=GPU, ask=Ask(lower=lower, fits_buckets=False, firsts=option.firsts)
    )
    work = step_work(lower(plan), plan, GPU, optimizer=ADAMW)
    peak = max(rank.peak_bytes for rank in peak_memory(work, schedule_of(plan)))
    assert option.peak_bytes == pytest.approx(peak, rel=0.05)


SCHEDULES = [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2)]


@pytest.mark.parametrize(
    ("name", "cluster", "devices"),
    [
        ("GPT", GPU, 4),
        ("batch norm", CPU, 2),
        ("wide first", GPU, 2),
        ("prime batch", CPU, 4),
        *(
            pytest.param(name, cluster, 4, marks=pytest.mark.product)
            for name, cluster in itertools.product(("GPT", "batch norm", "wide first", "prime batch"), (CPU, GPU))
            if (name, cluster.name) not in {("GPT", GPU.name), ("prime batch", CPU.name)}
        ),
    ],
    ids=label,
)
def test_bounds_are_below_estimates(name: str, cluster: mw.Cluster, devices: int) -> None:
    graphs = {
        "GPT": lambda: gpt(4),
        "batch norm": lambda: images(14),
        "wide first": lambda: of_tensor(nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 8), *map(small, range(6)))),
        "prime batch": lambda: of_tensor(nn.Sequential(*map(small, range(8))), 7),
    }
    graph = graphs[name]()
    chain = chain_of(graph, cluster, devices)
    pipelines = Pipelines(LayerPrices(chain, cluster, PlanLowering(chain.graph), ADAMW, False, devices), float("inf"))
    seen = 0
    for layout in itertools.chain.from_iterable(
        runs(shape, graph.batch_size) for shape in shapes(graph.batch_size, devices, Axes())
    ):
        try:
            before_s = pipelines.bound_s(layout)  # from larger micro-batches, as long as it is not priced
            option = pipelines.option(layout, ("none",))
        except MeshwrightError:
            continue
        assert max(before_s, pipelines.bound_s(layout)) <= option.step_s * (1 + 1e-9), layout_text(layout)
        seen += layout.pp > 1
    assert seen


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.product)])
def test_a_long_step_is_a_short_step_with_more_rounds(
    schedule: str, chunks: int, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = of_tensor(nn.Sequential(*map(small, range(8))), 64)
    chain = chain_of(graph, CPU, 4)
    prices = LayerPrices(chain, CPU, PlanLowering(chain.graph), ADAMW, False, 4)
    layout = mw.Layout(pp=pp, microbatches=32, schedule=schedule, chunks=chunks, tp=4 // pp)  # type: ignore[arg-type]
    short = Pipelines(prices, float("inf")).option(layout, ("none",))
    monkeypatch.setattr(rounds, "LONG", 1000)
    whole = Pipelines(prices, float("inf")).option(layout, ("none",))
    assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
    # The rank with the most computing in few rounds may be another than in the whole step.
    assert short.predicted.compute_s == pytest.approx(whole.predicted.compute_s, rel=3e-3)
    assert short.memory.peak_bytes == whole.memory.peak_bytes


@cache
def mixture() -> Graph:
    subject = hugging_face.subject("Mixtral", 1)
    tokens = {name: value.repeat(4, 1)[:BATCH] for name, value in subject.batches[0].items()}
    return mw.capture(subject.model, subject.loss_fn, tokens)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (mw.Layout(dp=4, microbatches=2), mw.Layout(dp=2, microbatches=4)),
        (mw.Layout(dp=2, microbatches=4), mw.Layout(dp=1, microbatches=8)),
        (mw.Layout(dp=4, ep=2, microbatches=2), mw.Layout(dp=8, ep=2, microbatches=1)),
        (mw.Layout(dp=4, ep=2, microbatches=4), mw.Layout(dp=8, ep=2, microbatches=2)),
        (mw.Layout(dp=2, ep=2, microbatches=4), mw.Layout(dp=4, ep=2, microbatches=2)),
    ],
    ids=layout_text,
)
def test_a_shared_price_is_the_price_of_the_layout(first: mw.Layout, second: mw.Layout) -> None:
    graph = mixture()
    chain = chain_of(graph, GPU, RANKS)
    lower, kinds = PlanLowering(chain.graph), ("F", "B", "REDUCE_GRAD")
    shared, alone = (LayerPrices(chain, GPU, lower, ADAMW, False, RANKS) for _ in "ab")
    shared.of(first)
    layer_works, expected = shared.of(second), alone.of(second)
    for kind in kinds:
        # One rank has one small kernel less to run and to launch: nothing joins label counts.
        less_s = 9e-6 if second.dp == 1 else 0.0
        assert shared.seconds(layer_works, [kind]) == pytest.approx(
            alone.seconds(expected, [kind]), rel=1e-6, abs=less_s
        )
    assert [fact.held.persistent_bytes for fact in layer_works.facts] == [
        fact.held.persistent_bytes for fact in expected.facts
    ]


@pytest.mark.parametrize(
    "layout",
    [mw.Layout(dp=8), mw.Layout(dp=4, tp=2, microbatches=2), mw.Layout(dp=4, ep=2, microbatches=2, zero=3)],
    ids=layout_text,
)
def test_layouts_that_differ_in_recomputation_are_priced_together(layout: mw.Layout) -> None:
    """Their plans and emitted calls are shared, but for mixtures of experts, which ``full`` computes again."""
    chain = chain_of(mixture(), GPU, RANKS)
    lower = PlanLowering(chain.graph)
    together, alone = (LayerPrices(chain, GPU, lower, ADAMW, False, RANKS) for _ in "ab")
    layouts = [msgspec.structs.replace(layout, recompute=kind) for kind in RECOMPUTE]
    expected = [msgspec.msgpack.encode(alone.of(each)) for each in layouts]
    assert [msgspec.msgpack.encode(works) for works in together.each(layouts)] == expected
    assert len(set(expected)) == len(RECOMPUTE)


def test_other_processes_find_the_same_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(gpt(4), CPU, 4)
    lower, layouts = PlanLowering(chain.graph), [mw.Layout(tp=2, microbatches=2), mw.Layout(tp=4), mw.Layout(dp=4)]
    alone, helped = (LayerPrices(chain, CPU, lower, ADAMW, False, 4) for _ in "ab")
    expected = [msgspec.msgpack.encode(alone.of(layout)) for layout in layouts]
    monkeypatch.setattr(layer_work, "WORKERS_AFTER_S", -1.0)
    monkeypatch.setattr(layer_work, "num_workers", lambda: 2)
    here: list[mw.Layout] = []
    worked_out = helped._worked_out

    def counted(singles: Sequence[mw.Layout]) -> list[works.LayerWorks]:
        here.extend(singles)
        return worked_out(singles)

    monkeypatch.setattr(helped, "_worked_out", counted)
    helped.expect(layouts)
    assert helped._workers is not None
    try:
        until = time.monotonic() + 60
        while helped._workers.waiting and time.monotonic() < until:
            time.sleep(0.01)
        assert [msgspec.msgpack.encode(helped.of(layout)) for layout in layouts] == expected
        assert not here, "nothing was priced in this process"
        assert helped._ask.learned, "other processes tell what their integer programs chose"
        assert not helped._ask.known
        helped.expect([mw.Layout(tp=2, microbatches=3)])
        with pytest.raises(MeshwrightError, match="micro"):
            helped.of(mw.Layout(tp=2, microbatches=3))
    finally:
        helped.close()


def test_a_worker_that_dies_leaves_its_layout_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(gpt(4), CPU, 4)
    prices = LayerPrices(chain, CPU, PlanLowering(chain.graph), ADAMW, False, 4)
    monkeypatch.setattr(layer_work, "WORKERS_AFTER_S", -1.0)
    monkeypatch.setattr(layer_work, "num_workers", lambda: 1)
    real, parent = prices._worked_out, os.getpid()
    monkeypatch.setattr(prices, "_worked_out", lambda singles: real(singles) if os.getpid() == parent else os._exit(1))
    prices.expect([mw.Layout(dp=4)])
    assert prices._workers is not None
    try:
        until = time.monotonic() + 60
        while prices._workers.waiting and time.monotonic() < until:
            time.sleep(0.01)
        assert prices.of(mw.Layout(dp=4)).works
    finally:
        prices.close()


@pytest.mark.parametrize("layout", [mw.Layout(dp=4, pp=2), mw.Layout(dp=8, microbatches=2), mw.Layout(dp=4, tp=2)])
def test_no_layout_with_zero_is_better_than_its_ideal(layout: mw.Layout) -> None:
    chain = chain_of(gpt(9, tied=False), GPU, RANKS)
    prices = LayerPrices(chain, GPU, PlanLowering(chain.graph), ADAMW, False, RANKS)
    for zero in (1, 2, 3):
        level = msgspec.structs.replace(layout, zero=zero)
        plain = Pipelines(prices, float("inf")).option(level, RECOMPUTE)
        for limit in (float("inf"), plain.peak_bytes * 0.9, plain.peak_bytes * 0.7):
            pipelines = Pipelines(prices, limit)
            ideal, real = pipelines.ideal(level), pipelines.option(level, RECOMPUTE)
            if real.peak_bytes <= limit:
                assert ideal.peak_bytes <= limit
                divided = [1 - 1 / layout.dp] * len(ideal.work.stages)
                assert lighter_bound_s(ideal, prices.network, divided) <= real.step_s * (1 + 1e-9)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ideal_zero_divides_parameters_that_layers_share(zero: Literal[1, 2, 3]) -> None:
    """A tied vocabulary has most of the parameters here, so that a rank's parts are smaller than one whole copy."""
    config = GPTConfig(layers=2, width=32, heads=2, vocabulary=4096, sequence_length=32)
    tokens = torch.zeros(BATCH, 32, dtype=torch.int64)
    chain = chain_of(mw.capture(GPT(config), language_model_loss, {"tokens": tokens, "targets": tokens}), GPU, RANKS)
    pipelines = Pipelines(LayerPrices(chain, GPU, PlanLowering(chain.graph), ADAMW, False, RANKS), float("inf"))
    layout = mw.Layout(dp=RANKS, zero=zero)
    ideal, real = pipelines.ideal(layout), pipelines.option(layout, ["none"])
    assert ideal.peak_bytes <= real.peak_bytes
    updates = [piece.seconds for piece in ideal.work.stages[0].after if isinstance(piece, Compute)]
    assert updates
    assert min(updates) > 0


def small(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def of_tensor(model: nn.Module, batch: int = BATCH) -> Graph:
    return mw.capture(model, lambda net, given: net(given).square().mean(), torch.zeros(batch, 8))


def test_blocks_with_batch_norm_are_shortened() -> None:
    graph = images(56)
    assert len(shorten(graph).graph.operators) < len(graph.operators) / 2


def test_equal_blocks_inside_of_unequal_groups_are_shortened() -> None:
    images = {"image": torch.zeros(4, 3, 32, 32), "label": torch.zeros(4, dtype=torch.int64)}
    graph = mw.capture(WideResNet((2, 2, 6, 2), width=8), classification_loss, images)
    (run,) = shorten(graph).copies
    assert len(run) == 4, "of six blocks, the first has a stride"
    assert set(next(iter(run[0])).split(".")[:2]) == {"groups", "2"}
    chain = chain_of(graph, CPU)
    assert cut(graph, tuple(layer.first for layer in chain.layers[1:])).num_stages == len(chain.layers)


class Twice(nn.Module):
    """All blocks run twice, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


class Towers(nn.Module):
    """Two towers whose blocks run by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(6)) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return x + y


@pytest.mark.parametrize("kind", [Twice, Towers])
def test_blocks_that_do_not_run_in_a_row_are_kept(kind: type[nn.Module]) -> None:
    graph = of_tensor(kind())
    assert shorten(graph).graph is graph
    plan = mw.plan(graph, CPU, devices=4, only="inter")
    assert cut(graph, plan.firsts).num_stages == len(plan.stages) >= 4


@pytest.mark.parametrize("part", [0.5, 0.7])
def test_cuts_that_are_known_from_other_layouts_are_those_found_anew(part: float) -> None:
    chain = chain_of(gpt(12), GPU, RANKS)
    prices = LayerPrices(chain, GPU, PlanLowering(chain.graph), ADAMW, False, RANKS)
    plain = mw.Layout(dp=2, pp=4, microbatches=8)
    limit = part * Pipelines(prices, float("inf")).option(plain, ("none",)).peak_bytes
    shared = Pipelines(prices, limit)
    for (schedule, chunks), zero in itertools.product(SCHEDULES, (0, 1, 2, 3)):
        layout = msgspec.structs.replace(plain, schedule=schedule, chunks=chunks)
        for kinds in (RECOMPUTE[:1], RECOMPUTE):
            assert shared.option(layout, kinds) == Pipelines(prices, limit).option(layout, kinds)
        zeroed = msgspec.structs.replace(layout, zero=zero)
        assert shared.ideal(zeroed) == Pipelines(prices, limit).ideal(zeroed)
