"""Bridges to other libraries: what they share, and what they say if a library is missing."""

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.bridges.planned import Planned, adopted, checked
from meshwright.errors import LaunchError, OptimizerError, PlanError


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("hugging_face", "transformers", "hf"), ("hugging_face", "accelerate", "hf"),
        ("lightning", "lightning", "lightning"), ("accelerate", "accelerate", "accelerate"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"meshwright.bridges.{module}", raising=False)
    with pytest.raises(LaunchError, match=rf"{module}: .*not installed\n  -> pip install 'meshwright\[{extra}\]'"):
        importlib.import_module(f"meshwright.bridges.{module}")


def test_options_are_those_of_parallelize() -> None:
    assert checked({"seed": 3, "compile": False}, "here") == {"seed": 3, "compile": False}
    with pytest.raises(PlanError, match="here: there is no option 'optimizer'\n  -> the options are: plan, seed"):
        checked({"optimizer": None}, "here")


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    result: torch.Tensor = model(batch["inputs"]).square().mean()
    return result


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("plan", ["auto", mw.Layout()], ids=["auto", "layout"])
def test_the_loops_own_optimizer_is_taken_over_with_its_state(
    without_workers: None, kind: type[torch.optim.Optimizer], plan: Any
) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    batch = {"inputs": torch.randn(4, 4)}
    pairs = [(each, kind(each.parameters(), lr=0.1)) for each in (model, twin)]  # type: ignore[call-arg]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pairs]
    planned = Planned(model, loss_fn, plan, {})
    for step in range(4):
        for (each, optimizer), schedule in zip(pairs, schedules, strict=True):
            by_plan = each is model and step > 0  # the optimizer has made a step before
            loss = planned.begin(batch, optimizer, step).loss(batch) if by_plan else loss_fn(each, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    torch.testing.assert_close(model.weight, twin.weight)
    assert planned.trainer is not None
    assert planned.trainer.optimizer is pairs[0][1]
    assert planned.trainer.step_number == 4


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"SGD: it holds a parameter of shape \[4, 4\] that is not the model's"):
        adopted(torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1), nn.Linear(4, 4))
