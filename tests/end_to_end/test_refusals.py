"""Steps that would do otherwise captured than in plain PyTorch: each is refused by name."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.builder import capture
from meshwright.errors import CaptureError


class Clamped(nn.Module):
    """Keeps its weight small by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        clamped: Tensor = self.linear(x)
        return clamped


class Scaled(nn.Module):
    """Scales by a number that is drawn anew in every step, it hopes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.draw()
        return scaled


class PerSample(nn.Module):
    """Weighs every sample by a number of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weighed: Tensor = self.linear(x) * torch.from_numpy(np.random.rand(len(x), 1)).float()
        return weighed


def hooked(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    weight: Any = model[0].weight
    getattr(weight, kind)(lambda value: None)
    return model


def hooked_module(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    getattr(model[0], kind)(lambda module, *gradients: None)
    return model


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (Clamped(), torch.zeros(2, 4), "parameter linear.weight: the step changes it in place ("),
        (nn.Embedding(9, 4, max_norm=1.0), torch.zeros(2, 3, dtype=torch.int64), "parameter weight: the step changes"),
        (hooked("register_hook"), torch.zeros(2, 4), "parameter 0.weight: it has a hook for its gradient"),
        (hooked("register_post_accumulate_grad_hook"), torch.zeros(2, 4), "parameter 0.weight: it has a hook for its"),
        (hooked_module("register_full_backward_hook"), torch.zeros(2, 4), "module 0: it has a hook for its gradient"),
        (hooked_module("register_full_backward_pre_hook"), torch.zeros(2, 4), "module 0: it has a hook for its grad"),
        (Scaled(random.random), torch.zeros(2, 4), "the step draws from Python's random, and would have the same"),
        (Scaled(lambda: float(np.random.rand())), torch.zeros(2, 4), "the step draws from numpy.random, and would"),
        (Scaled(lambda: float(np.random.randn(9).sum())), torch.zeros(2, 4), "the step draws from numpy.random, and"),
        (Scaled(lambda: float(np.random.randn())), torch.zeros(2, 4), "the step draws from numpy.random, and would"),
        (Scaled(lambda: random.gauss(0.0, 1.0)), torch.zeros(2, 4), "the step draws from Python's random, and would"),
        (PerSample(), torch.zeros(2, 4), "the step draws from numpy.random, and would have the same numbers for ever"),
    ],
    ids=[
        "clamp",
        "max_norm",
        "hook",
        "late hook",
        "backward hook",
        "backward pre-hook",
        "random",
        "numpy",
        "normal",
        "one normal",
        "gauss",
        "per sample",
    ],
)
def test_what_would_be_lost_without_a_word(model: nn.Module, batch: Tensor, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, loss_of, batch)
    assert message in str(caught.value)
    assert caught.value.remedy


def test_module_hooks_are_part_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, inputs, output: output.sin())
    assert "aten.sin.default" in {
        operator.target for operator in capture(model, loss_of, torch.zeros(2, 4)).graph.operators
    }


def test_numbers_that_a_thread_draws_meanwhile_are_none_of_the_step() -> None:
    """A thread that loads data draws as it pleases, and not as often in one trace as in the other."""
    done = threading.Event()

    def load() -> None:
        for count in itertools.count(1):
            for _ in range(count):
                random.random()
            if done.wait(0.001):
                return

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert capture(Scaled(lambda: 1.0), loss_of, torch.zeros(2, 4)).graph.operators
    finally:
        done.set()
        thread.join()
