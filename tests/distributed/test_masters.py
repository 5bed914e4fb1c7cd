"""bfloat16 parameters with float32 masters: stepped as float32 parameters are, and split as the parameters are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import CheckpointError
from meshwright.models import MLP, classification_loss
from meshwright.optim import LAMB, MasterWeights
from tests.distributed.pool import Ranks


def adamw(parameters: Any) -> MasterWeights:
    return MasterWeights(parameters, lambda masters: torch.optim.AdamW(masters, lr=1e-2))


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, LAMB])
def test_masters_are_stepped_as_float32_parameters(inner: Any) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 4).bfloat16())
    other = nn.Parameter(torch.randn(3))
    expected = nn.Parameter(parameter.detach().float())
    optimizer = MasterWeights([parameter, other], lambda masters: inner(masters, lr=1e-4))
    reference = inner([expected], lr=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    same_schedule = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
    for _ in range(5):
        gradient = torch.randn(8, 4).bfloat16()
        parameter.grad, expected.grad = gradient, gradient.float()
        for stepper in (optimizer, schedule, reference, same_schedule):
            stepper.step()
        assert torch.equal(optimizer.state[parameter]["master"], expected.detach())
        assert torch.equal(parameter.detach(), expected.detach().bfloat16())
    assert other not in optimizer.state, "it has no gradient"


def a_trainer(layout: mw.Layout, factory: Any = adamw) -> tuple[mw.Trainer, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"inputs": torch.randn(8, 6).bfloat16(), "label": torch.randint(4, (8,))}
    torch.manual_seed(1)
    model = MLP((6, 8, 4)).bfloat16()
    return mw.parallelize(model, classification_loss, batch, plan=layout, optimizer=factory), batch


def train_save_and_load(path: str, layout: mw.Layout) -> tuple[bool, list[float], list[float], int, int]:
    trainer, batch = a_trainer(layout)
    for _ in range(3):
        trainer.step(batch)
    trainer.save(path)
    expected = [trainer.step(batch).item() for _ in range(3)]
    other, _ = a_trainer(layout)
    other.load(path)
    resumed_losses = [other.step(batch).item() for _ in range(3)]
    states = [value for state in other.optimizer.state.values() for key, value in state.items() if key == "master"]
    right = all(value.dtype == torch.float32 for value in states) and len(states) == len(other.parameters.trainable)
    held = sum(value.numel() for value in states)
    return right, expected, resumed_losses, held, sum(value.numel() for value in other.parameters.own.values())


def test_masters_are_split_like_parameters_and_are_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    right, expected, resumed_losses, whole, _ = train_save_and_load(str(tmp_path / "one"), mw.Layout())
    assert right
    assert expected == resumed_losses, "bit by bit: not from rounded parameters"
    for right, losses, again, held, own in ranks(
        2, train_save_and_load, str(tmp_path / "two"), mw.Layout(dp=2, zero=1)
    ):
        assert right
        assert losses == again
        assert losses == pytest.approx(expected, rel=0.02)
        assert held == own <= whole / 2 + 8, "a rank has the masters of its part"
    other, _ = a_trainer(mw.Layout())
    other.load(tmp_path / "two")
    assert other.step_number == 3


def test_another_inner_optimizer_is_refused(tmp_path: Path) -> None:
    trainer, batch = a_trainer(mw.Layout())
    trainer.step(batch)
    trainer.save(tmp_path / "ckpt")
    other, _ = a_trainer(mw.Layout(), lambda p: MasterWeights(p, lambda masters: torch.optim.SGD(masters, lr=0.1)))
    with pytest.raises(CheckpointError, match=r"of MasterWeights\(AdamW\), this trainer has MasterWeights\(SGD\)"):
        other.load(tmp_path / "ckpt")


def test_new_weights_are_new_masters(tmp_path: Path) -> None:
    trainer, batch = a_trainer(mw.Layout())
    trainer.step(batch)
    zeros = {name: torch.zeros_like(value) for name, value in trainer.full_state_dict().items()}
    trainer.load_state_dict(zeros)
    trainer.step(batch)
    largest = max(value.abs().max().item() for value in trainer.full_state_dict().values())
    assert largest < 0.1, "a step from zeros"
