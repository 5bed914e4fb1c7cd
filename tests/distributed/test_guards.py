"""What model and loss function read from Python: changed after parallelize, it trains as in plain PyTorch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import CaptureError, ChangedModelError
from meshwright.runtime import trainer as module_of_trainer
from tests.distributed.oracle import TOLERANCE, Batch, error_of, largest_error
from tests.distributed.pool import Ranks

WIDTH, CLASSES = 64, 8
LAYOUTS = {
    "one": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "pp2": mw.Layout(pp=2, microbatches=2),
    **{f"zero{stage}": mw.Layout(dp=2, zero=stage) for stage in (1, 2, 3)},
}
SMOOTHING = 0.0


@dataclass
class Settings:
    """Numbers that a model keeps in an object of their own."""

    scale: float = 1.0
    unread: int = 0


class Model(nn.Module):
    """Reads all kinds of things."""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout, self.activation = nn.LayerNorm(WIDTH), nn.Dropout(0.0), nn.ReLU()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.temperature, self.unread = 1.0, 0
        self.settings, self.factors, self.names = Settings(), [1.0, 1.0], {"scale": 1.0}
        self.table = torch.ones(WIDTH, dtype=torch.float64)

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.settings.scale * self.factors[1] * self.names["scale"] + self.offset

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.activation(self.first(inputs)))
        hidden = self.dropout(self.norm(hidden)) * self.table
        if getattr(self, "extra", None) is not None:
            hidden = hidden + self.extra
        logits: Tensor = self.head(self.scaled(hidden)) / self.temperature
        return logits


def loss_function(weight: float, options: SimpleNamespace) -> Callable[..., Tensor]:
    """A loss function with a variable outside of it, a default argument, an object and a keyword of its own."""

    def loss_of(model: nn.Module, batch: Batch, power: float = 1.0, *, bias: float) -> Tensor:
        loss = F.cross_entropy(model(batch["inputs"]), batch["label"], label_smoothing=SMOOTHING)
        return weight * power * (1 + options.shift + bias) * loss

    return functools.partial(loss_of, bias=0.0)


@dataclass
class Side:
    """One of the two that are compared: the trainer's model or the plain one, with its loss function."""

    model: Any
    loss_fn: Any
    options: SimpleNamespace


def set_cell(side: Side, value: float) -> None:
    side.loss_fn.func.__closure__[1].cell_contents = value


def set_global(side: Side, value: float) -> None:
    globals()["SMOOTHING"] = value


CHANGES: dict[str, tuple[Callable[[Side], Any], Callable[[Side], Any]]] = {
    "number": (lambda s: setattr(s.model, "temperature", 0.1), lambda s: setattr(s.model, "temperature", 1.0)),
    "type": (lambda s: setattr(s.model, "temperature", 2), lambda s: setattr(s.model, "temperature", 1.0)),
    "dropout": (lambda s: setattr(s.model.dropout, "p", 1.0), lambda s: setattr(s.model.dropout, "p", 0.0)),
    "eps": (lambda s: setattr(s.model.norm, "eps", 0.5), lambda s: setattr(s.model.norm, "eps", 1e-5)),
    "object": (lambda s: setattr(s.model.settings, "scale", 3.0), lambda s: setattr(s.model.settings, "scale", 1.0)),
    "list": (lambda s: s.model.factors.__setitem__(1, 2.0), lambda s: s.model.factors.__setitem__(1, 1.0)),
    "dict": (lambda s: s.model.names.update(scale=2.0), lambda s: s.model.names.update(scale=1.0)),
    "class": (lambda s: setattr(Model, "offset", 0.25), lambda s: setattr(Model, "offset", 0.0)),
    "absent": (lambda s: setattr(s.model, "extra", 0.5), lambda s: delattr(s.model, "extra")),
    "tensor": (lambda s: setattr(s.model, "table", 2 * s.model.table), lambda s: None),
    "module": (lambda s: setattr(s.model, "activation", nn.Tanh()), lambda s: None),
    "forward hook": (lambda s: s.model.first.register_forward_hook(lambda m, i, out: 2 * out), lambda s: None),
    "outer variable": (lambda s: set_cell(s, 2.0), lambda s: set_cell(s, 1.0)),
    "default": (lambda s: setattr(s.loss_fn.func, "__defaults__", (2.0,)), lambda s: None),
    "keyword": (lambda s: s.loss_fn.keywords.update(bias=1.0), lambda s: s.loss_fn.keywords.update(bias=0.0)),
    "namespace": (lambda s: setattr(s.options, "shift", 1.0), lambda s: setattr(s.options, "shift", 0.0)),
    "global": (lambda s: set_global(s, 0.25), lambda s: set_global(s, 0.0)),
}
"""A change, and how it is taken back."""
UNREAD: dict[str, Callable[[Side], Any]] = {
    "attribute": lambda s: setattr(s.model, "unread", s.model.unread + 1),
    "new attribute": lambda s: setattr(s.model, "not_there_before", 1),
    "of an object": lambda s: setattr(s.model.settings, "unread", 1),
    "equal number": lambda s: setattr(s.model, "temperature", float("1.0")),
    "equal list": lambda s: setattr(s.model, "factors", list(s.model.factors)),
    "mode and back": lambda s: s.model.eval().train(),
    "gradient and back": lambda s: s.model.head.requires_grad_(False).requires_grad_(True),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def two_sides(layout: mw.Layout) -> tuple[Side, Side, mw.Trainer, torch.optim.Optimizer, Batch]:
    torch.manual_seed(5)
    original = Model().double()
    batch = {"inputs": torch.randn(8, WIDTH, dtype=torch.float64), "label": torch.randint(CLASSES, (8,))}
    parallel, plain = (
        Side(model, loss_function(1.0, options), options)
        for model, options in (
            (original, SimpleNamespace(shift=0.0)),
            (copy.deepcopy(original), SimpleNamespace(shift=0.0)),
        )
    )
    trainer = mw.parallelize(parallel.model, parallel.loss_fn, batch, plan=layout, optimizer=sgd)
    return parallel, plain, trainer, sgd(plain.model.parameters()), batch


def plain_step(side: Side, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = side.loss_fn(side.model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def change_and_take_back(layout: mw.Layout, names: list[str]) -> list[tuple[str, list[float], list[int], float]]:
    """By change: errors of the losses; how often the step was captured; how much the change changed the loss."""
    parallel, plain, trainer, optimizer, batch = two_sides(layout)
    results = []
    with patch.object(module_of_trainer, "capture", wraps=module_of_trainer.capture) as captures:

        def step() -> tuple[float, Tensor]:
            expected = plain_step(plain, optimizer, batch)
            return error_of(trainer.step(batch), expected), expected

        before = step()[1]
        for name in names:
            change, take_back = CHANGES[name]
            errors, counts, moved = [], [], 0.0
            for action in (change, lambda side: None, take_back, change, take_back):
                captures.reset_mock()
                for side in (parallel, plain):
                    action(side)
                error, now = step()
                errors.append(error)
                counts.append(captures.call_count)
                if action is change:
                    moved = max(moved, float(abs(now - before)))
                before = now
            results.append((name, errors, counts, moved))
    return results


@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2", "zero3"])
def test_what_the_step_reads_is_captured_again_when_it_changes(ranks: Ranks, layout: str) -> None:
    """And once only: what was captured before is kept for when the old value comes back."""
    names = list(CHANGES) if layout in ("one", "dp2") else ["number", "dropout", "module", "outer variable"]
    chosen = LAYOUTS[layout]
    for rows in ranks(chosen.num_ranks, change_and_take_back, chosen, names, timeout=400.0):
        for name, errors, counts, moved in rows:
            assert max(errors) <= TOLERANCE, (name, errors)
            assert moved > 1e-5, (name, moved)
            assert counts[:2] == [1, 0], (name, counts)
            if name not in ("tensor", "module", "forward hook"):  # changed each time to what was never there before
                assert counts[2:] == [0, 0, 0], (name, counts)


def change_nothing_that_counts(layout: mw.Layout) -> tuple[int, list[float]]:
    parallel, plain, trainer, optimizer, batch = two_sides(layout)
    errors = []
    trainer.step(batch)
    plain_step(plain, optimizer, batch)
    trainer.evaluate(batch)
    with patch.object(module_of_trainer, "capture", wraps=module_of_trainer.capture) as captures:
        for change in UNREAD.values():
            change(parallel)
            errors.append(error_of(trainer.step(batch), plain_step(plain, optimizer, batch)))
            trainer.evaluate(batch)
    return captures.call_count, errors


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_what_no_step_reads_may_change_freely(ranks: Ranks, layout: str) -> None:
    for count, errors in ranks(LAYOUTS[layout].num_ranks, change_nothing_that_counts, LAYOUTS[layout]):
        assert count == 0
        assert max(errors) <= TOLERANCE


def default_dtype_and_momentum() -> tuple[float, float]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    plain = copy.deepcopy(model)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = (model(batch) * torch.full((8,), 1 / 3)).square().mean()
        return loss

    batch = torch.randn(4, 8, dtype=torch.float64)
    trainer, optimizer = mw.parallelize(model, loss_of, batch, plan=mw.Layout(), optimizer=sgd), sgd(plain.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        for module in (model, plain):
            norm: Any = module[1]
            norm.momentum = 0.9
        error = error_of(trainer.step(batch), plain_step(Side(plain, loss_of, SimpleNamespace()), optimizer, batch))
        return error, largest_error(trainer.full_state_dict(), plain.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_dtype_and_momentum(ranks: Ranks) -> None:
    assert max(ranks(1, default_dtype_and_momentum)[0]) <= TOLERANCE


# --- what the step itself changes ------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, and does with the number what ``use`` says."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.use, self.calls = nn.Linear(4, 4), use, 0
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        result = self.use(self, self.linear(inputs))
        self.mean = result.mean()
        return result


def mean_of(model: Any, batch: Tensor) -> Tensor:
    model(batch)
    loss: Tensor = model.mean
    return loss


def remember(model: Any, value: Tensor) -> Tensor:
    model.seen.append(value)
    return value + len(model.seen)


def forget_and_remember(model: Any, value: Tensor) -> Tensor:
    model.seen.clear()
    return remember(model, value)


@pytest.mark.parametrize("use", [lambda model, value: value, forget_and_remember], ids=["counter", "list"])
def test_a_counter_that_nothing_depends_on_is_told_of(
    use: Callable[[Any, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Tracing leaves the model as it was, and nothing is captured again."""
    model, batch = Counting(use), torch.zeros(2, 4)
    with caplog.at_level(logging.INFO, "meshwright"):
        trainer = mw.parallelize(model, mean_of, batch, plan=mw.Layout(), optimizer=sgd)
        for _ in range(2):
            trainer.step(batch)
    assert "attribute calls: the model changes it itself (0 became 1); training does not run" in caplog.text
    assert "captur" not in caplog.text
    assert model.calls == 0
    assert model.seen == []
    assert not hasattr(model, "mean")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda model, value: value * model.calls,
            "module (model), attribute calls: the step reads it and changes it (",
        ),
        (
            lambda model, value: value.relu() if model.calls < 2 else value,
            "calls: the step reads it and changes it (0 b",
        ),
        (remember, "module (model), attribute seen: the step reads it and changes it ([] became a list)"),
    ],
    ids=["product", "branch", "list"],
)
def test_a_counter_that_the_step_depends_on_is_refused(use: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        mw.capture(Counting(use), mean_of, torch.zeros(2, 4))
    assert message in str(caught.value)
    assert "-> keep a value that changes from step to step in a buffer" in str(caught.value)


# --- what is refused -------------------------------------------------------------------------------------------------


def new_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(CLASSES, WIDTH, dtype=torch.float64))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter": (new_parameter, "parameter head.weight: it is another tensor than the one that is trained"),
    "module": (
        lambda model: setattr(model, "head", nn.Linear(WIDTH, CLASSES).double()),
        "parameter head.weight: it is another tensor than the one that is trained",
    ),
    "added": (lambda model: setattr(model, "more", nn.Linear(2, 2)), "parameter more.weight: it is new"),
    "gone": (lambda model: setattr(model.head, "bias", None), "parameter head.bias: it is gone"),
    "gradient hook": (
        lambda model: model.head.weight.register_hook(lambda gradient: 2 * gradient),
        "parameter head.weight: it has a hook for its gradient, which would not be called\n  -> remove the hook",
    ),
    "late hook": (
        lambda model: model.second.weight.register_post_accumulate_grad_hook(lambda value: None),
        "parameter second.weight: it has a hook for its gradient",
    ),
    "backward hook": (
        lambda model: model.second.register_full_backward_hook(lambda module, inputs, outputs: None),
        "module second: it has a hook for its gradient",
    ),
    "backward pre-hook": (
        lambda model: model.register_full_backward_pre_hook(lambda module, outputs: None),
        "module (model): it has a hook for its gradient",
    ),
    "dtype": (
        lambda model: model.norm.half(),
        "parameter or buffer norm.weight: it is [64] float16 on cpu now, and was",
    ),
}


def refusal_of(layout: mw.Layout, change: str) -> str:
    parallel, _, trainer, _, batch = two_sides(layout)
    trainer.step(batch)
    REFUSED[change][0](parallel.model)
    with pytest.raises((ChangedModelError, CaptureError)) as caught:
        trainer.step(batch)
    return str(caught.value)


@pytest.mark.parametrize("change", REFUSED)
def test_what_training_cannot_follow_is_refused(ranks: Ranks, change: str) -> None:
    for text in ranks(2, refusal_of, LAYOUTS["dp2"], change):
        assert REFUSED[change][1] in text
        assert "\n  -> " in text


@pytest.mark.parametrize("change", ["parameter", "gradient hook"])
def test_so_it_is_where_parameters_are_split(ranks: Ranks, change: str) -> None:
    for text in ranks(2, refusal_of, LAYOUTS["zero1"], change):
        assert REFUSED[change][1] in text


def step_under_autocast() -> None:
    _, _, trainer, _, batch = two_sides(mw.Layout())
    with torch.autocast("cpu", torch.bfloat16):
        trainer.step(batch)


def test_a_step_under_autocast_is_refused(ranks: Ranks) -> None:
    with pytest.raises(Exception, match="ChangedModelError: trainer: autocast is on, and was not when the step was"):
        ranks(1, step_under_autocast)


def other_number_on_rank_1() -> None:
    parallel, _, trainer, _, batch = two_sides(mw.Layout(dp=2))
    parallel.model.temperature = 2.0 + trainer.rank
    trainer.step(batch)


def test_ranks_must_change_alike(ranks: Ranks) -> None:
    place = "module .model., attribute temperature: 1.0 became"
    message = f"RankError: rank 1: {place} 3.0; rank 0: {place} 2.0. Ranks changed the model differently"
    with pytest.raises(Exception, match=message):
        ranks(2, other_number_on_rank_1)


# --- writing to the model --------------------------------------------------------------------------------------------


def halve(value: Tensor) -> None:
    with torch.no_grad():
        value.mul_(0.5)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: halve(model.first.weight),
    "data": lambda model: model.first.weight.data.fill_(0.01),
    "other data": lambda model: setattr(model.first.weight, "data", 0.5 * model.first.weight.data),
    "init": lambda model: nn.init.constant_(model.first.weight, 0.01),
    "part": lambda model: model.first.load_state_dict({
        "weight": torch.full((2 * WIDTH, WIDTH), 0.01, dtype=torch.float64),
        "bias": torch.zeros(2 * WIDTH, dtype=torch.float64),
    }),
}  # fmt: skip


def write(layout: mw.Layout, name: str) -> float | str:
    """The error of the loss after writing to both models, or how the trainer refuses it."""
    parallel, plain, trainer, optimizer, batch = two_sides(layout)
    trainer.step(batch)
    plain_step(plain, optimizer, batch)
    for side in (parallel, plain):
        WRITES[name](side.model)
    try:
        loss = trainer.step(batch)
    except ChangedModelError as error:
        return str(error)
    return error_of(loss, plain_step(plain, optimizer, batch))


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "zero1", "zero2", "zero3"])
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_writing_to_the_model_trains_or_is_refused(ranks: Ranks, layout: str, name: str) -> None:
    for result in ranks(2, write, LAYOUTS[layout], name):
        if layout in ("dp2", "pp2"):
            assert isinstance(result, float), result
            assert result <= TOLERANCE
        else:
            assert isinstance(result, str), result
            assert result.startswith("parameter first.weight: it was written to, but is split over ranks: the module")
            assert "-> give whole tensors to trainer.load_state_dict(" in result


def load_after_writing(layout: mw.Layout, path: str) -> list[float]:
    """Errors of the losses after a refused write, and its remedy."""
    parallel, plain, trainer, _, batch = two_sides(layout)
    expected = parallel.loss_fn(plain.model, batch).detach()
    trainer.save(path)
    errors = []
    for remedy in (lambda: trainer.load_state_dict(plain.model.state_dict()), lambda: trainer.load(path)):
        halve(parallel.model.first.weight)
        with pytest.raises(ChangedModelError):
            trainer.step(batch)
        remedy()
        errors.append(error_of(trainer.step(batch), expected))
    return errors


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_whole_tensors_make_a_refused_write_good(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    for errors in ranks(2, load_after_writing, LAYOUTS[layout], str(tmp_path / "saved")):
        assert max(errors) <= TOLERANCE


def load_into_model(layout: mw.Layout) -> tuple[str, float]:
    parallel, plain, trainer, _, _ = two_sides(layout)
    with pytest.raises(ChangedModelError) as caught:
        parallel.model.load_state_dict(plain.model.state_dict())
    whole = trainer.full_state_dict(all_ranks=True)
    parallel.model.load_state_dict(whole, assign=True)  # the way back to a plain model
    return str(caught.value), largest_error(dict(parallel.model.state_dict()), whole)


@pytest.mark.parametrize("layout", ["tp2", "zero1", "zero3"])
def test_loading_into_a_model_of_split_parameters_is_refused(ranks: Ranks, layout: str) -> None:
    for text, error in ranks(2, load_into_model, LAYOUTS[layout]):
        assert text.startswith("Model.load_state_dict: its parameters are split over ranks, and in their place")
        assert "-> load into the trainer: trainer.load_state_dict(...) takes" in text
        assert error == 0.0
