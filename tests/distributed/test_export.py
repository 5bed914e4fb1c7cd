"""Files for FSDP2 on real ranks: their losses are those of the plan; `make bench-export` has ten models."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import LayoutError, PlanError
from meshwright.export import fsdp2
from meshwright.export.modules import NONE
from meshwright.ir.layout import Layout
from tests.distributed import exports
from tests.distributed.oracle import TOLERANCE
from tests.distributed.pool import Ranks


@pytest.mark.parametrize(
    ("model", "layout"),
    [("Qwen3", Layout(tp=2)), ("GPT-2", Layout(dp=2, zero=3, microbatches=2, recompute="full"))],
)
def test_losses_are_those_of_the_plan(ranks: Ranks, model: str, layout: Layout) -> None:
    plan = exports.planned(model, layout)
    exported = exports.exported(model, plan)
    for result in ranks(2, exports.compare, model, plan, exports.text_of(exported), timeout=600):
        assert result.error <= TOLERANCE, result


class Fused(nn.Module):
    """A layer whose code depends on the width of the whole model, between two linear layers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.up, self.down, self.heads = nn.Linear(8, 16), nn.Linear(16, 8), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = y.view(len(x), self.heads, -1) if self.heads else y.view(len(x), -1, 4)
        y = torch.sin(y)
        return torch.as_tensor(self.down(y.reshape(len(x), -1))).square().mean()


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch)
    return result


@pytest.mark.parametrize("heads", [0, 4])
def test_code_that_knows_the_whole_width_is_left_whole(heads: int) -> None:
    model, batch = Fused(heads), torch.randn(4, 8)
    graph = mw.capture(model, loss_fn, batch)
    plan = mw.plan(graph, "cpu-local", devices=2, layout=Layout(tp=2))
    assert plan.storage("up.weight"), "the plan splits the layer"
    exported = fsdp2.export(model, loss_fn, batch, plan, cluster="cpu-local")
    text = exports.text_of(exported)
    assert ('"up": ColwiseParallel()' in text) == (heads == 0)
    assert (exported.form.layout.pin.get("up") == NONE) == (heads == 4)
    assert exported.planned is not None
    assert exported.predicted is not None
    assert "meshwright" not in "\n".join(line for line in text.splitlines() if "import" in line)


def test_a_pipeline_becomes_data_parallelism_and_says_so() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batch = torch.randn(8, 8)

    def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(batch)).square().mean()

    graph = mw.capture(model, squared, batch)
    plan = mw.plan(graph, "cpu-local", devices=2, layout=Layout(pp=2, microbatches=4))
    exported = fsdp2.export(model, squared, batch, plan, cluster="cpu-local")
    assert [gap.what for gap in exported.gaps] == ["pp2"]
    assert (exported.form.layout.dp, exported.form.layout.zero, exported.form.layout.pp) == (2, 3, 1)
    assert "- pp2. Instead: dp2, zero=3." in exports.text_of(exported)
    assert exported.predicted != exported.planned


def test_a_plan_of_another_model_and_replicas_are_refused() -> None:
    model, batch = Fused(0), torch.randn(4, 8)
    plan = mw.plan(mw.capture(model, loss_fn, batch), "cpu-local", devices=2, layout=Layout(tp=2))
    with pytest.raises(PlanError):
        fsdp2.export(nn.Sequential(nn.Linear(8, 8)), lambda m, x: m(x).square().mean(), batch, plan)
    replicas = msgspec.structs.replace(plan, layout=Layout(tp=2, replicas=2, consistency="local(16)"))
    with pytest.raises(LayoutError, match="2 replicas under"):
        fsdp2.export(model, loss_fn, batch, replicas)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    model, batch = Fused(0), torch.randn(3, 8)
    graph = mw.capture(model, loss_fn, batch)
    plan = mw.plan(graph, "cpu-local", devices=2, layout=Layout(mixed=(2,)))
    with pytest.raises(LayoutError, match="a batch of 3 does not divide over 2"):
        fsdp2.export(model, loss_fn, batch, plan, cluster="cpu-local")
