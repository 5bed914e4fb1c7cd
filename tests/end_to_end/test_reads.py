"""What is recorded of Python during a capture leaves the caller's objects as they were, and is watched with measure."""

import argparse
import functools
import itertools
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture.values import state_of
from meshwright.errors import CaptureError

BATCH = torch.ones(2, 4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


class Model(nn.Module):
    """A product, then ``use``."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use
        self.stats: dict[str, list[Any]] = {"acts": []}
        self.options: Any = None

    @functools.cached_property
    def mask(self) -> Tensor:
        """Made at its first use."""
        return torch.full((4,), 2.0)

    def forward(self, inputs: Tensor) -> Tensor:
        value: Tensor = self.linear(inputs)
        return value if self.use is None else self.use(self, value)


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch)
    return value.mean()


def trained(model: nn.Module, loss_fn: Any = mean_of) -> mw.Trainer:
    return mw.parallelize(model, loss_fn, BATCH, plan=mw.Layout(), optimizer=sgd)


def num_captures(log: pytest.LogCaptureFixture) -> int:
    return sum("capturing the step again" in record.getMessage() for record in log.records)


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshwright")


class Double(torch.autograd.Function):
    """Twice a value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return 2 * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Config:
    """Has a class method."""

    factor = 2.0

    @classmethod
    def make(cls) -> float:
        return cls.factor


def test_class_methods_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    before = vars(Config)["make"]

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = Double.apply(model(batch)) * Config.make() * Config.factor
        return value.mean()

    trainer = trained(Model(), loss_of)
    trainer.step(BATCH)
    assert vars(Config)["make"] is before
    assert "apply" not in vars(Double)
    assert num_captures(caplog) == 0


def test_a_variable_that_is_assigned_later_is_seen() -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).mean()
        try:
            return value * factor
        except NameError:
            return value

    model = Model()
    trainer = trained(model, loss_of)
    expected = model(BATCH).mean()
    torch.testing.assert_close(trainer.step(BATCH), expected)
    factor = 3.0
    torch.testing.assert_close(trainer.step(BATCH), 3 * expected)
    del factor
    torch.testing.assert_close(trainer.step(BATCH), expected)


def keep_activation(model: Any, value: Tensor) -> Tensor:
    model.stats["acts"].append(value)
    return value


def test_nested_lists_that_the_step_fills_stay_empty(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(keep_activation)
    trainer = trained(model)
    for _ in range(3):
        trainer.step(BATCH)
    assert model.stats == {"acts": []}
    assert num_captures(caplog) == 0
    assert "attribute stats: the model changes it itself (the contents of a dict changed)" in caplog.text


class Frozen(msgspec.Struct, frozen=True):
    """A setting that may not change."""

    factor: float = 2.0


def test_a_frozen_struct_stays_frozen() -> None:
    model = Model(lambda model, value: value * model.options.factor)
    model.options = Frozen()
    trained(model).step(BATCH)
    with pytest.raises(AttributeError):
        model.options.factor = 3.0


class Loose(msgspec.Struct):
    """A setting that may change."""

    factor: float = 2.0


def test_a_struct_that_changes_is_seen() -> None:
    model = Model(lambda model, value: value * model.options.factor)
    model.options = Loose()
    trainer = trained(model)
    loss = trainer.step(BATCH)
    model.options.factor = 4.0
    torch.testing.assert_close(trainer.step(BATCH), 2 * loss)


def test_a_parameter_whose_shape_is_read_may_be_trained(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    weight = model.linear.weight

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).mean()
        return value / weight.shape[0]

    trainer = trained(model, loss_of)
    for _ in range(3):
        trainer.step(BATCH)
    assert num_captures(caplog) == 0


@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace])
def test_of_a_namespace_only_what_is_read_counts(kind: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda model, value: value * model.options.factor * getattr(model.options, "later", 1.0))
    model.options = kind(factor=1.0, epoch_number=0)
    trainer = trained(model)
    loss = trainer.step(BATCH)
    model.options.epoch_number += 1
    trainer.step(BATCH)
    assert num_captures(caplog) == 0
    model.options.factor = 3.0
    torch.testing.assert_close(trainer.step(BATCH), 3 * loss)
    model.options.later = 2.0
    torch.testing.assert_close(trainer.step(BATCH), 6 * loss)


class Counted(Model):
    """Counts all calls of the class."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).calls = self.calls + 1
        return super().forward(inputs)


def test_a_counter_of_a_class_stays_the_class_s(caplog: pytest.LogCaptureFixture) -> None:
    model = Counted()
    trainer = trained(model)
    trainer.step(BATCH)
    assert "calls" not in vars(model)
    assert Counted.calls == 0
    assert num_captures(caplog) == 0


class Ticking:
    """Has another time at each look."""

    ticks = itertools.count()

    def __getattribute__(self, name: str) -> Any:
        return next(Ticking.ticks) if name == "now" else super().__getattribute__(name)


def read_time(model: Any, value: Tensor) -> Tensor:
    assert model.options.now >= 0
    return value


def test_what_changes_at_each_capture_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(read_time)
    model.options = Ticking()
    trainer = trained(model)
    for _ in range(3):
        trainer.step(BATCH)
    assert "now" not in vars(model.options)
    assert num_captures(caplog) == 0
    assert caplog.text.count("attribute now: capturing the step changes it; it is not compared before") == 1


def new_teacher_weight(teacher: Any) -> None:
    teacher[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def written_teacher_weight(teacher: Any) -> None:
    with torch.no_grad():
        teacher[0].weight.fill_(1.0)


def evaluated_teacher(teacher: nn.Module) -> None:
    teacher.eval()


@pytest.mark.parametrize("change", [new_teacher_weight, written_teacher_weight, evaluated_teacher])
def test_modules_outside_of_the_model_are_watched(
    change: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    teacher = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(1.0)).requires_grad_(False)
    if change is not evaluated_teacher:
        teacher[1].eval()

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch), teacher(batch))

    model = Model()
    trainer = trained(model, loss_of)
    trainer.step(BATCH)
    assert num_captures(caplog) == 0
    change(teacher)
    torch.testing.assert_close(trainer.step(BATCH), loss_of(model, BATCH).detach())
    trainer.step(BATCH)
    assert num_captures(caplog) == 1


def test_large_nested_containers_are_not_compared_item_by_item() -> None:
    table = [[float(row)] * 400 for row in range(400)]
    begun = time.process_time()
    for _ in range(100):
        assert state_of(table) == state_of(table)
    assert time.process_time() - begun < 1.0  # 160,000 items take 100 ms each time


def test_a_cached_property_is_made_anew_by_every_capture(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda model, value: value * model.mask)
    trainer = trained(model)
    torch.testing.assert_close(trainer.step(BATCH), model(BATCH).mean().detach())
    trainer.step(BATCH)
    assert num_captures(caplog) == 0


def fill_cache(model: Any, value: Tensor) -> Tensor:
    if model.options is None:
        model.options = torch.full((4,), 2.0)
    result: Tensor = value * model.options
    return result


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_lazy_cache_is_refused_until_it_is_filled() -> None:
    model = Model(fill_cache)
    with pytest.raises(CaptureError, match="if it is a cache, call the model once before parallelize, to fill it"):
        trained(model)
    expected = model(BATCH).mean().detach()
    torch.testing.assert_close(trained(model).step(BATCH), expected)


class SetsItselfUp(nn.Module):
    """As models of transformers do: what they record of their layers, they record by hooks of their first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.results: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_set_up", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, result: self.results.append(result))
            self.is_set_up = True
        self.results = []
        for layer in self.layers:
            x = layer(x)
        return torch.stack(self.results).sum(0)


def test_a_model_may_set_itself_up_when_it_is_first_called() -> None:
    model, batch = SetsItselfUp(), torch.ones(2, 4)
    graph = mw.capture(model, lambda model, batch: model(batch).sum(), batch)
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1, 1]
    assert sum(operator.target.startswith("aten.mm.") and not operator.backward for operator in graph.operators) == 3
    stacked = next(operator for operator in graph.operators if operator.target.startswith(("aten.stack", "aten.cat")))
    assert len(stacked.inputs) == 3
