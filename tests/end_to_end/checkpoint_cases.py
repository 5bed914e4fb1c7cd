"""Trainers small enough to be made for every test of checkpoints, and what is asked of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.models import MLP, classification_loss

Factory = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def a_batch(inputs: int = 6, classes: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "inputs": torch.randn(8, inputs, dtype=torch.float64, generator=generator),
        "label": torch.randint(classes, (8,), generator=generator),
    }


def a_trainer(optimizer: Factory | None = sgd, sizes: tuple[int, ...] = (6, 8, 4), **options: Any) -> mw.Trainer:
    batch = a_batch(sizes[0], sizes[-1])
    return mw.parallelize(MLP(sizes).double(), classification_loss, batch, optimizer=optimizer, **options)


def weights(trainer: mw.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_state_dict().items()}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@functools.cache
def unchanged() -> mw.Trainer:
    """A trainer that no test changes: loads into it are refused."""
    return a_trainer()


@functools.cache
def after_one_step() -> mw.Trainer:
    """Another trainer that no test changes."""
    trainer = a_trainer()
    trainer.step(a_batch())
    return trainer


def a_checkpoint(directory: Path) -> Path:
    """A good checkpoint of ``after_one_step``, to be spoilt."""
    after_one_step().save(directory / "ckpt")
    return directory / "ckpt"


def data_of(path: Path) -> Path:
    (directory,) = path.glob("data-*")
    return directory


def log_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own messages (torch logs its progress too)."""
    return [record.getMessage() for record in caplog.records if record.name == "meshwright"]


OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": sgd,
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": adamw,
    "AdamW without names": lambda p: torch.optim.AdamW([value for _, value in p], lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.0, "lr": 1e-3}]),
}
