"""The state dict of a trainer: gathered tensor by tensor, and kept on the CPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from meshwright.runtime.state import LocalParameters
from tests.end_to_end.checkpoint_cases import a_trainer


class OnDevice(Tensor):
    """Stands for a whole tensor on an accelerator."""

    def cpu(self, *args: object, **options: object) -> Tensor:
        return self.as_subclass(Tensor).clone()


def test_one_whole_tensor_at_a_time_lies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LocalParameters.whole
    references: list[weakref.ref[Tensor]] = []

    def on_device(parameters: LocalParameters, name: str, value: Tensor | None) -> Tensor:
        assert not any(reference() is not None for reference in references), "the tensors before it are on the CPU"
        result = whole(parameters, name, value).as_subclass(OnDevice)
        references.append(weakref.ref(result))
        return result

    trainer = a_trainer()
    expected = {name: value.clone() for name, value in trainer.full_state_dict().items()}
    monkeypatch.setattr(LocalParameters, "whole", on_device)
    state = trainer.full_state_dict()
    assert len(references) == len(state) == 4
    assert all(type(value) is Tensor and torch.equal(value, expected[name]) for name, value in state.items())
