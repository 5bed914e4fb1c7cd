"""Gradients and losses whose memory has several readers: views of one tensor, one tensor for two parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from tests.distributed.oracle import TOLERANCE, Batch, error_of, largest_error
from tests.distributed.pool import Ranks

WIDTH = 48
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "flat": ((WIDTH * WIDTH,), lambda second: second.view(WIDTH, WIDTH)),
    "transposed": ((WIDTH, WIDTH), lambda second: second.t()),
    "same": ((WIDTH, WIDTH), lambda second: second),
}
"""How a parameter is added to another: its shape, and what of it is added."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Sum(nn.Module):
    """A product with ``first + view of second``: the gradients of both are one tensor."""

    def __init__(self, view: str) -> None:
        super().__init__()
        shape, self.view = VIEWS[view]
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.2)
        self.second = nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.2)
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = inputs @ (self.first + self.view(self.second))
        return scores


def loss_of(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and two views of it as metrics; the gradient of ``shift`` is one number, expanded."""
    assert isinstance(model, Sum)
    loss = F.cross_entropy(model(batch["inputs"]), batch["label"]) + 0.1 * model.shift.sum()
    return loss, {"again": loss.detach(), "view": loss.detach()[None].squeeze()}


def train(view: str, layout: mw.Layout, algorithm: str, max_grad_norm: float | None) -> list[float]:
    """The errors of three steps and an evaluation against eager PyTorch."""
    torch.manual_seed(2)
    model = Sum(view)
    plain = copy.deepcopy(model)
    batch = {"inputs": torch.randn(8, WIDTH, dtype=torch.float64), "label": torch.randint(WIDTH, (8,))}
    ranks = layout.dp * layout.feature_ranks
    plan = mw.plan(mw.capture(model, loss_of, batch), devices=ranks, layout=layout)
    plan = msgspec.structs.replace(
        plan,
        algorithms=dict.fromkeys(plan.algorithms, algorithm),
        buckets=tuple(msgspec.structs.replace(bucket, algorithm=algorithm) for bucket in plan.buckets),
    )
    trainer = mw.parallelize(model, loss_of, batch, plan=plan, optimizer=sgd, max_grad_norm=max_grad_norm)
    optimizer = sgd(plain.parameters())
    errors = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(plain, batch)[0]
        loss.backward()
        errors.append(error_of(trainer.step(batch), loss.detach()))
        if max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
            errors.append(error_of(trainer.metrics["grad_norm"], norm))
        optimizer.step()
    errors.append(largest_error(trainer.full_state_dict(all_ranks=True), plain.state_dict()))
    expected = loss_of(plain, batch)[0].detach()
    errors.append(error_of(trainer.evaluate(batch), expected))
    errors.append(largest_error(trainer.metrics, dict.fromkeys(("loss", "again", "view"), expected)))
    return errors


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("layout", "algorithm", "max_grad_norm"),
    [
        (mw.Layout(), "native", 0.05),
        (mw.Layout(dp=2), "exchange", 0.05),
        (mw.Layout(dp=2), "native", None),
        (mw.Layout(tp=2, pin={"": "batch@tp"}), "native", None),
        (mw.Layout(dp=4), "native", None),
    ],
    ids=["one, clipped", "dp2, clipped", "dp2 native", "tp2", "dp4"],
)
def test_gradients_that_share_memory(
    ranks: Ranks, view: str, layout: mw.Layout, algorithm: str, max_grad_norm: float | None
) -> None:
    for errors in ranks(layout.dp * layout.feature_ranks, train, view, layout, algorithm, max_grad_norm):
        assert max(errors) <= TOLERANCE, errors
