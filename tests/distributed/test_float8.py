"""Matrix products in float8: those of the rounded operands, equal under every layout, within the format's error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import meshwright as mw
from meshwright import config
from meshwright.capture.builder import Capture, capture
from meshwright.cost.optimizer import ADAMW
from meshwright.errors import LaunchError, LayoutError, PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling
from meshwright.ir.operator_algorithm import Float8, float8_of
from meshwright.ir.part import part_of
from meshwright.ir.plan import starred
from meshwright.ir.run import RunLayout
from meshwright.lower.operator import emit_operator
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.ops import float8
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.runtime.device import Processor
from meshwright.runtime.device_check import check_float8
from tests.distributed import oracle
from tests.distributed.lockstep import run_step
from tests.distributed.oracle import plan_of
from tests.distributed.pool import Ranks
from tests.distributed.test_pieces import values_of

SCALINGS = ("tensorwise", "rowwise")
CHOICES: tuple[Float8Scaling, ...] = ("", "tensorwise")
EPSILON = {"e4m3": 2**-4, "e5m2": 2**-3}
"""The largest relative error of a rounded number: half a unit in the last place of its mantissa."""


def product(left: Tensor, right: Tensor, scaling: str, formats: tuple[str, str] = ("e4m3", "e4m3")) -> Tensor:
    dims = (1, 0) if scaling == "rowwise" else (-1, -1)
    most = [float8.largest(value, dim) for value, dim in zip((left, right), dims, strict=True)]
    return float8.multiply(left, right, most[0], most[1], *formats)


def by_hand(left: Tensor, right: Tensor, scaling: str, formats: tuple[str, str]) -> Tensor:
    """Quantise, dequantise, multiply: the simplest correct form, element by element in float64."""
    values = []
    for value, dim, name in zip((left, right), (1, 0), formats, strict=True):
        limit = torch.finfo(float8.FORMATS[name]).max
        most = value.abs().amax(dim, keepdim=True) if scaling == "rowwise" else value.abs().amax()
        scale = most.to(torch.float32).clamp_min(1e-12) / limit
        stored = (value.float() / scale).clamp(-limit, limit).to(float8.FORMATS[name])
        values.append(stored.double() * scale.double())
    return values[0] @ values[1]


@settings(max_examples=20, deadline=None)
@given(
    m=st.integers(1, 40), k=st.sampled_from([1, 5, 16, 32, 48]), n=st.sampled_from([3, 16, 32]),
    scaling=st.sampled_from(SCALINGS), formats=st.sampled_from([("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]),
    seed=st.integers(0, 2**20), columns=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_products_are_those_of_the_rounded_operands(
    m: int, k: int, n: int, scaling: str, formats: tuple[str, str], seed: int, columns: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(seed)
    left = (torch.randn(m, k, generator=draw) * 10.0 ** torch.randn(m, 1, generator=draw)).to(dtype)
    right = torch.randn(n, k, generator=draw).to(dtype).t() if columns else torch.randn(k, n, generator=draw).to(dtype)
    actual, expected = product(left, right, scaling, formats), by_hand(left, right, scaling, formats)
    assert actual.dtype == dtype
    bound = by_hand(left.abs(), right.abs(), scaling, formats) * (torch.finfo(dtype).eps + k * 2**-23)
    assert ((actual.double() - expected).abs() <= bound + 1e-30).all()


@settings(max_examples=15, deadline=None)
@given(scaling=st.sampled_from(SCALINGS), left=st.sampled_from(["e4m3", "e5m2"]), seed=st.integers(0, 2**20))
def test_the_error_is_within_that_of_the_formats(scaling: str, left: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    first, second = torch.randn(24, 64, generator=draw), torch.randn(64, 32, generator=draw)
    exact = first.double() @ second.double()
    relative = (1 + EPSILON[left]) * (1 + EPSILON["e4m3"]) - 1
    # below the smallest normal number, the error is half of the smallest step instead
    smallest = (
        2**-9 / 448 * (first.abs().max() * second.abs().sum(0).max() + second.abs().max() * first.abs().sum(1).max())
    )
    bound = relative * (first.abs().double() @ second.abs().double()) + float(smallest)
    error = (product(first, second, scaling, (left, "e4m3")).double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-4, "it is rounded"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zero_and_nan_arrives(scaling: str) -> None:
    left, right = torch.zeros(16, 16), torch.randn(16, 16)
    assert torch.equal(product(left, right, scaling), torch.zeros(16, 16))
    for value in (math.nan, math.inf):
        left[3, 4] = value
        assert product(left, right, scaling)[3].isnan().all()


# ------------------------------------------------------------------------------------------------------------ layouts


def in_float8(plan: mw.Plan, graph: Graph, scaling: Any) -> mw.Plan:
    """The plan with every product in float8, gradients in e5m2 if scales are of tensors."""
    makers = graph.producers()
    texts = {}
    for operator in graph.operators:
        if operator.target.startswith("aten.mm."):
            gradients = [name in makers and makers[name].backward for name in operator.inputs]
            formats = ["e5m2" if each and scaling == "tensorwise" else "e4m3" for each in gradients]
            texts[starred(operator.name)] = f"{Float8(scaling, *formats)}"  # type: ignore[arg-type]
    stages = []
    for stage in plan.stages:
        held = set(map(starred, stage.strategies))
        every = len(plan.stages) == 1 or not held
        own = {name: text for name, text in texts.items() if every or name in held}
        stages.append(msgspec.structs.replace(stage, operator_algorithms=own))
    return msgspec.structs.replace(plan, stages=tuple(stages))


@cache
def captured(model: str) -> tuple[nn.Module, dict[str, Tensor], Capture]:
    torch.manual_seed(5)
    if model == "MLP":
        batch = {"inputs": torch.randn(8, 6, dtype=torch.float64), "label": torch.randint(4, (8,))}
        module: nn.Module = MLP((6, 16, 12, 4)).double()
        return module, batch, capture(module, classification_loss, batch)
    tokens = torch.randint(32, (4, 6))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    module = GPT(GPTConfig(layers=1, width=8, heads=2, vocabulary=32, sequence_length=6)).double()
    return module, batch, capture(module, language_model_loss, batch)


LAYOUTS: Mapping[str, mw.Layout] = {
    "dp2": mw.Layout(dp=2), "tp2": mw.Layout(tp=2), "dp2 x tp2": mw.Layout(dp=2, tp=2),
    "tp2, sequence parallel": mw.Layout(tp=2, sequence_parallel=True),
}  # fmt: skip


def step(model: str, layout: mw.Layout, scaling: str) -> tuple[Tensor, dict[str, Tensor]]:
    module, batch, shared = captured(model)
    plan = plan_of(shared.graph, layout, layout.num_ranks)
    if scaling:
        plan = in_float8(plan, shared.graph, scaling)
    result, _ = run_step(shared, plan, values_of(module, batch, shared.graph))
    return result.loss, {name: value for name, value in result.gradients.items() if value is not None}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["MLP", "GPT"])
def test_every_layout_has_the_same_numbers(model: str, name: str, scaling: str) -> None:
    """In float64 around the products, so that no other rounding hides a scale that differs."""
    if model == "MLP" and LAYOUTS[name].sequence_parallel:
        pytest.skip("it has no sequence")
    loss, gradients = step(model, mw.Layout(), scaling)
    exact, _ = step(model, mw.Layout(), "")
    assert abs(float(loss - exact)) > 1e-6, "it is rounded"
    split_loss, split_gradients = step(model, LAYOUTS[name], scaling)
    assert oracle.error_of(split_loss, loss) < 1e-10
    assert oracle.largest_error(split_gradients, gradients) < 1e-10


def train(layout: mw.Layout, scaling: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of a GPT on this rank."""
    torch.manual_seed(3)
    subject = oracle.gpt(False, size=4, layers=2)
    shared = capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = plan_of(shared.graph, layout, layout.num_ranks)
    plan = in_float8(plan, shared.graph, scaling) if scaling else plan
    run, _ = oracle.in_parallel(subject, plan, oracle.OPTIMIZERS["SGD"])
    return [float(loss) for loss in run.losses], run.state


def test_pipelines_and_zero_train_alike(ranks: Ranks) -> None:
    losses, state = ranks(2, train, mw.Layout(dp=2, microbatches=2), "tensorwise")[0]
    exact, _ = ranks(2, train, mw.Layout(dp=2, microbatches=2), "")[0]
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02), "as float8 allows"
    other_losses, other_state = ranks(2, train, mw.Layout(dp=2, zero=3, microbatches=2), "tensorwise")[0]
    assert other_losses == pytest.approx(losses, abs=1e-9)
    assert oracle.largest_error(other_state, state) < 1e-9
    # pipelines and tensor parallelism have the same micro-batches, which differ from those of dp2
    losses, state = ranks(2, train, mw.Layout(tp=2, microbatches=2), "tensorwise")[0]
    other_losses, other_state = ranks(2, train, mw.Layout(pp=2, microbatches=2), "tensorwise")[0]
    assert other_losses == pytest.approx(losses, abs=1e-9)
    assert oracle.largest_error(other_state, state) < 1e-9


# ------------------------------------------------------------------------------------------------------------ choices


@cache
def wide() -> Graph:
    """A block whose products are large enough for float8 to pay."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=4096, heads=32, vocabulary=1024, sequence_length=2048))
        tokens = torch.zeros(4, 2048, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": tokens}
        return mw.capture(model, language_model_loss, batch, precision="bfloat16")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_planner_takes_float8_only_where_it_is_allowed_and_faster(scaling: Any) -> None:
    graph = wide()
    layout = mw.Layout(dp=2, precision="bfloat16")
    plain = mw.plan(graph, mw.Cluster.load("h100-dgx"), devices=2, layout=layout)
    allowed = msgspec.structs.replace(layout, float8=scaling)
    plan = mw.plan(graph, mw.Cluster.load("h100-dgx"), devices=2, layout=allowed)
    assert not plain.stage.in_float8
    chosen = {name: float8_of(text) for name, text in plan.stage.operator_algorithms.items() if "float8" in text}
    assert "blocks.*.mlp.up:mm#0" in chosen
    assert not any(name.startswith("head") for name in chosen), "the model's output stays wide"
    formats = {form.left for form in chosen.values()} | {form.right for form in chosen.values()}
    assert formats == ({"e4m3", "e5m2"} if scaling == "tensorwise" else {"e4m3"})
    seconds = [
        mw.simulate(graph, mw.Cluster.load("h100-dgx"), each).duration_s for each in (plan, plain)
    ]  # fmt: skip
    assert seconds[0] < seconds[1]
    on_cpu = mw.plan(graph, mw.Cluster.load("cpu-local"), devices=2, layout=allowed)
    assert not on_cpu.stage.in_float8


def test_a_search_takes_float8_if_it_is_allowed() -> None:
    cluster = mw.Cluster.load("h100-dgx")
    plain, plan = (mw.plan(wide(), cluster, devices=1, float8=scaling, fresh=True) for scaling in CHOICES)
    assert plan.layout.float8 == "tensorwise"
    assert plan.stage.in_float8
    assert not plain.stage.in_float8
    assert plain.prediction is not None
    assert plan.prediction is not None
    assert plan.prediction.step_s < plain.prediction.step_s


def test_a_search_prices_layers_in_float8() -> None:
    cluster, layout = part_of(mw.Cluster.load("h100-dgx"), range(1)), mw.Layout()
    chain = chain_of(wide(), cluster, 1)

    def seconds(layout: mw.Layout, allowed: Float8Scaling) -> float:
        prices = LayerPrices(chain, cluster, PlanLowering(chain.graph), ADAMW, False, 1, float8=allowed)
        return sum(prices.seconds(prices.of(layout), ("F", "B")))

    own = msgspec.structs.replace(layout, float8="tensorwise")
    assert seconds(layout, "tensorwise") == seconds(own, "") < seconds(layout, "")


def test_a_run_file_allows_float8_beside_a_search() -> None:
    layout = RunLayout(plan="auto", float8="rowwise")
    assert layout.searched
    assert layout.chosen() == "auto"
    run = config.make(
        {"model": {"name": "mlp", "sizes": [4, 4]}, "data": {"kind": "random", "shape": [4], "classes": 4},
         "layout": {"float8": "rowwise", "tp": 2}}, where="test",
    )  # fmt: skip
    assert run.searched().layout.float8 == "rowwise"


def test_float8_beside_a_layout_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"float8='rowwise' together with a plan or layout\n  -> write Layout\(float8="
    ):
        mw.plan(wide(), mw.Cluster.load("h100-dgx"), devices=2, layout=mw.Layout(dp=2), float8="rowwise")


def test_devices_without_float8_are_refused() -> None:
    old = mw.Cluster.load("a100-80gb-dgx-hdr200x8")
    with pytest.raises(LayoutError, match="a100-80gb has no products in float8"):
        mw.plan(wide(), old, devices=2, layout=mw.Layout(dp=2, float8="rowwise"))
    with pytest.raises(LayoutError, match="a100-80gb has no products in float8"):
        mw.plan(wide(), old, devices=2, float8="rowwise", fresh=True)
    layout = mw.Layout(float8="rowwise")
    check_float8(layout, Processor("NVIDIA H100 80GB HBM3", (9, 0)))
    check_float8(mw.Layout(), Processor("NVIDIA A100", (8, 0)))
    with pytest.raises(LaunchError, match=r"compute capability 8\.9"):
        check_float8(layout, Processor("NVIDIA A100", (8, 0)))


def test_terms_of_sums_are_not_rounded() -> None:
    graph = captured("MLP")[2].graph
    operator = next(operator for operator in graph.operators if operator.target.startswith("aten.mm."))
    calls: Any = None  # nothing is emitted
    with pytest.raises(PlanError, match="terms cannot be rounded alone"):
        emit_operator(calls, operator, {"tp": "^"}, [calls, calls], False, None, algorithm="float8 rowwise e4m3 e4m3")


@pytest.mark.parametrize(
    "text", ["float8", "float8 rowwise", "float8 tensorwise e4m3 int8", "float8 blockwise e4m3 e4m3"]
)
def test_other_words_are_no_float8(text: str) -> None:
    with pytest.raises(PlanError, match="no product in float8"):
        float8_of(text)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_dry_run_on_gpus_finds_nothing_to_wait_for(scaling: Any) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=32, heads=4, vocabulary=64, sequence_length=16))
    tokens = torch.randint(64, (4, 16))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    graph = mw.capture(model, language_model_loss, batch, precision="bfloat16")
    layout = mw.Layout(dp=2, tp=2, precision="bfloat16")
    plan = in_float8(mw.plan(graph, mw.Cluster.load("h100-dgx"), devices=4, layout=layout), graph, scaling)
    report = mw.dry_run(model, language_model_loss, batch, plan=plan, cluster="h100-dgx", ranks=(0,))
    assert report.clean, report.findings
