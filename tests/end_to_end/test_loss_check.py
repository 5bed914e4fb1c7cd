"""A loss that is not finite: its error says what the parameters are, on a CPU and on a device that runs ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.errors import CheckpointError, NonFiniteLossError
from tests.end_to_end.checkpoint_cases import a_batch, a_trainer, adamw, same, weights

BEFORE = "parameters and checkpoints are as they were before the step"
AFTER = "parameters are those after step 2: load the last checkpoint, which is from before it"


def bad_batch() -> dict[str, Tensor]:
    return {name: value * torch.inf if value.is_floating_point() else value for name, value in a_batch().items()}


def a_late_trainer() -> mw.Trainer:
    """As on CUDA, but for copies that run beside the host."""
    trainer = a_trainer(adamw)
    trainer.losses.late = True
    return trainer


def test_on_a_cpu_the_update_is_not_made() -> None:
    trainer = a_trainer(adamw)
    trainer.step(a_batch())
    before = weights(trainer)
    with pytest.raises(NonFiniteLossError, match=f"^step 2: the loss became nan at step 2\n.*; {BEFORE}$"):
        trainer.step(bad_batch())
    assert same(weights(trainer), before)
    assert trainer.step_number == 1


def test_a_device_that_runs_ahead_says_that_the_update_was_made() -> None:
    trainer = a_late_trainer()
    trainer.step(a_batch())
    before = weights(trainer)
    assert not torch.isfinite(trainer.step(bad_batch()))
    after = weights(trainer)
    assert not same(after, before)
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.step(a_batch())
    assert str(caught.value).startswith("step 2: the loss became nan at step 2\n")
    assert str(caught.value).endswith(f"; {AFTER}")
    assert trainer.step_number == 2
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in weights(trainer).items())


def test_an_evaluation_and_a_save_look_at_the_last_step_and_load_forgets_it(tmp_path: Path) -> None:
    trainer = a_late_trainer()
    trainer.step(a_batch())
    trainer.save(tmp_path / "good")
    for look in (lambda: trainer.evaluate(a_batch()), lambda: trainer.save(tmp_path / "bad")):
        trainer.load(tmp_path / "good")
        trainer.step(bad_batch())
        with pytest.raises(NonFiniteLossError, match="the loss became nan at step 2"):
            look()
    trainer.load(tmp_path / "good")
    trainer.step(bad_batch())
    trainer.load(tmp_path / "good")
    assert torch.isfinite(trainer.step(a_batch())), "the step after the checkpoint is another one"


def test_the_loss_of_an_evaluation_is_not_taken_for_that_of_a_step() -> None:
    trainer = a_late_trainer()
    trainer.step(a_batch())
    assert not torch.isfinite(trainer.evaluate(bad_batch()))
    assert torch.isfinite(trainer.step(a_batch()))


def test_a_load_that_fails_forgets_no_loss(tmp_path: Path) -> None:
    trainer = a_late_trainer()
    trainer.step(bad_batch())
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path / "missing")
    with pytest.raises(NonFiniteLossError, match="the loss became nan at step 1"):
        trainer.step(a_batch())
