"""Buffers that a step changes: in place, or by putting another tensor in their place, as in plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import CaptureError
from tests.distributed.oracle import LAYOUTS, TOLERANCE, Batch, error_of, largest_error
from tests.distributed.pool import Ranks

WIDTH = 6


class Averages(nn.Module):
    """Keeps a moving average, the last two means, and the last sample; every buffer is assigned or changed."""

    average: Tensor
    last: Tensor
    before: Tensor
    count: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, WIDTH)
        for name in ("average", "before", "last"):
            self.register_buffer(name, torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.linear(inputs)
        mean = hidden.detach().mean(0)
        self.average = 0.9 * self.average + 0.1 * mean
        self.before = self.last
        self.last = mean
        self.count += 1
        self.seen = inputs[0]
        return hidden - self.average - 0.5 * self.before


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]), batch["label"])


def train(layout: mw.Layout) -> list[float]:
    torch.manual_seed(2)
    model = Averages().double()
    plain = copy.deepcopy(model)
    batches = [
        {"inputs": torch.randn(8, 8, dtype=torch.float64), "label": torch.randint(WIDTH, (8,))} for _ in range(3)
    ]
    trainer = mw.parallelize(
        model, loss_of, batches[0], plan=layout, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    errors = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        optimizer.step()
        errors.append(error_of(trainer.step(batch), loss.detach()))
        errors.append(largest_error(trainer.full_state_dict(all_ranks=True), plain.state_dict()))
    return errors


@pytest.mark.parametrize("layout", ["one", "dp2", "tp2"])
def test_buffers_that_are_assigned(ranks: Ranks, layout: str) -> None:
    """What is assigned is read back; two buffers that are one tensor, or an input, are written one after another."""
    chosen = {"one": mw.Layout(), **LAYOUTS}[layout]
    for errors in ranks(chosen.dp * chosen.feature_ranks, train, chosen):
        assert max(errors) <= TOLERANCE, errors


class Growing(nn.Module):
    """Assigns a buffer of another shape."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.linear(inputs)
        self.seen = hidden.detach().sum(0)
        return hidden


class Making(Growing):
    """Makes a buffer while it runs."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.register_buffer("made", inputs.sum(0))
        hidden: Tensor = self.linear(inputs)
        return hidden


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Growing(), "buffer seen: the step makes it [6] torch.float32, it was [1] torch.float32\n  -> keep its shape"),
        (Making(), "buffer made: the step makes it\n  -> register it in the module's __init__"),
    ],
)
def test_buffers_that_do_not_stay_alike_are_refused(model: nn.Module, message: str) -> None:
    batch = {"inputs": torch.zeros(8, 8), "label": torch.zeros(8, dtype=torch.int64)}
    with pytest.raises(CaptureError) as caught:
        mw.capture(model, loss_of, batch)
    assert message in str(caught.value)
