"""Which steps can be worked through in micro-batches and stages, and what is said about the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.models import MLP, ResNet, classification_loss

SAMPLES = {"inputs": torch.zeros(8, 6), "label": torch.zeros(8, dtype=torch.int64)}
IMAGES = {"image": torch.zeros(8, 1, 8, 8), "label": torch.zeros(8, dtype=torch.int64)}


@pytest.fixture(scope="module")
def mlp() -> Graph:
    return mw.capture(MLP((6, 8, 8, 4)), classification_loss, SAMPLES)


def refusal(graph: Graph, layout: mw.Layout) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as caught:
        mw.plan(graph, devices=layout.num_ranks, layout=layout)
    return caught.value


def regularized(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A term of the parameters alone is counted once, whatever the number of micro-batches."""
    weights = torch.stack([value.pow(2).sum() for value in model.parameters()])
    return F.cross_entropy(model(batch["inputs"]), batch["label"]) + 0.1 * weights.sum()


@pytest.mark.parametrize("microbatches", [2, 8])
def test_micro_batches_without_a_pipeline_equal_the_whole_batch(microbatches: int) -> None:
    model = MLP((6, 8, 4)).double()
    batch = {"inputs": torch.randn(8, 6, dtype=torch.float64), "label": torch.randint(4, (8,))}
    assert all(row.ok for row in mw.verify(model, regularized, batch, mw.Layout(microbatches=microbatches)))


# --- what would have to communicate over time ------------------------------------------------------------------------


def test_batch_norm_over_the_batch_names_the_operator_and_the_option() -> None:
    graph = mw.capture(ResNet(depth=8, width=4, image_channels=1), classification_loss, IMAGES)
    error = refusal(graph, mw.Layout(microbatches=4))
    assert isinstance(error, LayoutError)
    assert error.where.startswith("stem_norm:_native_batch_norm_legit_functional#0, ")
    assert "models/resnet.py:" in error.where
    assert error.problem == "the step cannot be divided into 4 micro-batches: its statistics are over the whole batch"
    assert error.remedy == (
        "set batch_statistics='microbatch': each micro-batch then has its own statistics (which is another "
        "computation), or microbatches=1"
    )
    mw.plan(graph, layout=mw.Layout(microbatches=4, batch_statistics="microbatch"))


def test_statistics_of_each_rank_are_of_its_part_of_a_micro_batch() -> None:
    graph = mw.capture(ResNet(depth=8, width=4, image_channels=1), classification_loss, IMAGES)
    plan = mw.plan(graph, layout=mw.Layout(dp=2, microbatches=2, batch_statistics="rank"))
    assert plan.stage.strategy("stem_norm:_native_batch_norm_legit_functional#0") == {"dp": "own", "time": "b"}
    assert "statistics of each rank" in layout_text(plan.layout)


def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every sample against all others of the batch."""
    first, second = model(batch["inputs"]), model(batch["inputs"] + 1)
    return F.cross_entropy(first @ second.t(), torch.arange(first.shape[0]))


def centered(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["inputs"])
    return ((scores - scores.mean(0)) ** 2).mean()


@pytest.mark.parametrize(
    ("loss_fn", "problem"),
    [
        (contrastive, r"it needs all of '.*', of which every micro-batch makes a part"),
        (centered, r"it needs the whole sum '.*', of which every micro-batch makes a term"),
    ],
)
def test_samples_that_meet_others_of_the_batch(loss_fn: Callable[..., Any], problem: str) -> None:
    graph = mw.capture(MLP((6, 8, 4)), loss_fn, SAMPLES)
    error = refusal(graph, mw.Layout(microbatches=2))
    assert isinstance(error, LayoutError)
    assert any(error.where.startswith(operator.name) for operator in graph.operators)
    text, _, rest = error.problem.partition(": ")
    assert text == "the step cannot be divided into 2 micro-batches"
    assert re.fullmatch(problem, rest), rest
    assert error.remedy == "use microbatches=1, or let samples meet only in a loss that is a sum or mean over them"


class Averaging(nn.Module):
    """Remembers a mean over the batch."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("memory", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        self.memory = 0.9 * self.memory + 0.1 * scores.detach().mean(0)
        return scores


def test_a_buffer_that_is_a_sum_over_the_batch_is_no_obstacle() -> None:
    graph = mw.capture(Averaging(), classification_loss, SAMPLES)
    assert mw.plan(graph, layout=mw.Layout(microbatches=2)).microbatches == 2
