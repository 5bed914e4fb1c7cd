"""A precision is part of what is captured and planned: its casts, what they save, and what is refused."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import config
from meshwright.api import plan_run
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import stage_held
from meshwright.errors import CaptureError, LaunchError, LayoutError, PlanError
from meshwright.ir import files
from meshwright.ir.graph import Graph
from meshwright.ir.plan_check import check_fits
from meshwright.ir.precision import Precision
from meshwright.ir.run import RunLayout
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.foretell import foretell
from meshwright.runtime.precision import check_device

CONFIG = GPTConfig(layers=2, width=64, heads=2, vocabulary=128, sequence_length=64)
TOKENS = torch.zeros(8, 64, dtype=torch.int64)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


@cache
def captured(precision: Precision | None) -> Graph:
    return mw.capture(GPT(CONFIG), language_model_loss, BATCH, precision=precision)


def test_products_are_low_and_what_sums_is_float32() -> None:
    graph = captured("bfloat16")
    dtypes: dict[str, set[str]] = {}
    for operator in graph.operators:
        dtypes.setdefault(operator.target, set()).add(graph.tensors[operator.outputs[0]].dtype)
    assert dtypes["aten.mm.default"] == {"bfloat16"}
    assert dtypes["meshwright.attention.default"] == {"bfloat16"}
    for target in ("aten.native_layer_norm.default", "aten._log_softmax.default", "aten.nll_loss_forward.default"):
        assert dtypes[target] == {"float32"}
    assert {graph.tensors[gradient.gradient].dtype for gradient in graph.gradients if gradient.gradient} == {"float32"}
    assert graph.inputs == captured(None).inputs
    assert captured("float16").inputs == (*graph.inputs, "loss_scale")


def test_a_plan_says_its_precision_and_is_told_from_others() -> None:
    low, plain = captured("bfloat16"), captured(None)
    plan = mw.plan(low, layout=mw.Layout(dp=2))
    assert (plan.precision, plan.layout.precision) == ("bfloat16", "bfloat16")
    assert mw.plan(plain, layout=mw.Layout(dp=2)).precision is None
    with pytest.raises(PlanError, match="the plan computes in bfloat16, the step was captured in the model's own dtyp"):
        check_fits(plan, plain)
    with pytest.raises(LayoutError) as caught:
        mw.plan(plain, layout=mw.Layout(dp=2, precision="bfloat16"))
    assert str(caught.value) == (
        "layout: precision='bfloat16', but the step was captured in the model's own dtypes\n  -> capture it with "
        "precision='bfloat16': its casts are operators of the step"
    )


def test_the_planner_takes_a_precision_only_when_told() -> None:
    assert mw.plan(captured(None), "h100-dgx", devices=2).precision is None
    assert mw.plan(captured("bfloat16"), "h100-dgx", devices=2).precision == "bfloat16"
    run = RunLayout(plan="auto", precision="bfloat16")
    assert run.searched
    assert not RunLayout(plan="auto", dp=2, precision="bfloat16").searched


@pytest.mark.parametrize("layout", [mw.Layout(), mw.Layout(microbatches=4), mw.Layout(dp=2, zero=3, microbatches=4)])
def test_memory_and_time_follow_the_casts(layout: mw.Layout) -> None:
    cluster = mw.Cluster.load("h100-dgx")
    helds, works = [], []
    for precision in (None, "bfloat16"):
        graph = captured(precision)
        plan, lower = mw.plan(graph, cluster, layout=layout), PlanLowering(graph)
        helds.append(stage_held(lower(plan), plan, 0, cluster, ADAMW))
        works.append(foretell(lower, plan, cluster).work.stages[0])
    plain, low = helds
    assert low.parameters_bytes == plain.parameters_bytes
    assert low.optimizer_bytes == plain.optimizer_bytes
    assert low.gradients_bytes == plain.gradients_bytes
    width = CONFIG.width
    products = CONFIG.layers * (12 * width**2 + 9 * width) + CONFIG.vocabulary * width  # weights and biases of them
    cast = 2 * products if layout.microbatches > 1 and not layout.zero else 0
    assert low.gathered_bytes == plain.gathered_bytes + cast, "parameters are cast once a step, or at each gathering"
    assert works[1].saved_bytes < works[0].saved_bytes


def test_devices_that_lack_a_precision_are_refused() -> None:
    graph = captured("bfloat16")
    for layout in (mw.Layout(dp=2), None):
        with pytest.raises(LayoutError) as caught:
            mw.plan(graph, "v100-dgx1", devices=2, layout=layout)
        assert "precision='bfloat16', which v100 does not compute in" in str(caught.value)
        assert "use float32 or float16" in str(caught.value)


def test_a_gpu_that_lacks_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(LaunchError, match="Tesla V100 does not compute in bfloat16"):
        check_device("bfloat16", torch.device("cuda"))
    check_device("float16", torch.device("cuda"))


@pytest.mark.parametrize("instructions", [True, False])
def test_a_cpu_without_instructions_says_which_it_lacks(
    instructions: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"architecture": "x86_64", "avx512_bf16": instructions}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    check_device("bfloat16", torch.device("cpu"))
    warning = (
        "this CPU has no instructions for bfloat16 (avx512_bf16 or amx_bf16): results are right, but slower than in"
    )
    assert (warning in caplog.text) is not instructions


def test_parameters_of_other_dtypes_are_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        mw.capture(GPT(CONFIG).double(), language_model_loss, BATCH, precision="bfloat16")
    assert str(caught.value) == (
        "parameter token_embedding.weight: it is float64; under precision 'bfloat16' parameters are kept in float32\n"
        "  -> pass model.float(), or leave precision out: the model then computes in its own dtypes"
    )


def test_a_precision_is_given_in_one_place(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    path = tmp_path / "plan.json"
    files.save(mw.plan(captured("bfloat16"), layout=mw.Layout()), path)
    with pytest.raises(LayoutError, match="precision='float16', but the plan has 'bfloat16'"):
        mw.parallelize(model, language_model_loss, BATCH, plan=path, precision="float16")
    assert mw.parallelize(model, language_model_loss, BATCH, plan=path).graph.precision == "bfloat16"


def test_verify_compares_in_float64_whatever_the_precision(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.save(mw.plan(captured("float16"), layout=mw.Layout(microbatches=2)), path)
    for plan in (mw.Layout(precision="float16", microbatches=2), path):
        assert all(row.ok for row in mw.verify(GPT(CONFIG), language_model_loss, BATCH, plan, steps=1))


def test_a_run_file_plans_in_it() -> None:
    raw = b"""model = {name = "gpt", layers = 1, width = 32, heads = 2}
data = {kind = "text", max_bytes = 100000, sequence_length = 32}
layout = {plan = "auto", precision = "bfloat16"}"""
    run = config.make(config.tables(raw, where="run.toml"), where="run.toml")
    assert plan_run(run, ranks=2).plan.precision == "bfloat16"


def test_convolutions_are_low_and_their_norms_float32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    batch = {"image": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4, dtype=torch.int64)}
    graph = mw.capture(
        model, lambda net, data: nn.functional.cross_entropy(net(data["image"]), data["label"]), batch,
        precision="bfloat16",
    )  # fmt: skip
    dtypes = {operator.target: graph.tensors[operator.outputs[0]].dtype for operator in graph.operators}
    assert dtypes["aten.convolution.default"] == "bfloat16"
    assert {dtype for target, dtype in dtypes.items() if "batch_norm" in target} == {"float32"}
