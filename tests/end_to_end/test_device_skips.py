"""Updates that the device skips: on a CPU that counts as late, with PyTorch's fused kernels, as on CUDA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.capture.builder import capture
from meshwright.errors import LossScaleError, NonFiniteLossError
from meshwright.ir.precision import Precision
from meshwright.models import MLP, classification_loss
from meshwright.planner.explicit import adapt_plan
from meshwright.runtime import precision as scaling
from meshwright.runtime.device import CPU, CpuKind
from meshwright.runtime.trainer import Trainer


class LateCpu(CpuKind):
    """A CPU on which the host asks no step for its loss."""

    is_late = True


def a_batch(scale: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"inputs": scale * torch.randn(8, 6), "label": torch.randint(4, (8,))}


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def a_trainer(kind: CpuKind, precision: Precision | None = None, optimizer: str = "AdamW") -> Trainer:
    torch.manual_seed(0)
    model = MLP((6, 16, 12, 4))
    captured = capture(model, classification_loss, a_batch(), precision=precision)
    plan = mw.plan(captured.graph, layout=mw.Layout(precision=precision))
    return Trainer(
        model, classification_loss, captured, plan, device=CPU, kind=kind, seed=0, replan=adapt_plan,
        max_grad_norm=1.0, optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip


def weights(trainer: Trainer) -> list[Tensor]:
    return [value.detach().clone() for value in trainer.parameters.own.values()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def overflow(trainer: Trainer) -> None:
    for _ in range(40):
        trainer.step(a_batch(torch.inf))


def test_after_a_loss_that_is_not_finite_nothing_changes_until_the_host_has_seen_it() -> None:
    trainer = a_trainer(LateCpu())
    trainer.step(a_batch())
    before = weights(trainer)
    trainer.step(a_batch(torch.inf))
    assert equal(weights(trainer), before)
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.step(a_batch())
    assert str(caught.value).endswith(
        "; parameters are as they were before step 2, and later steps have not changed them"
    )
    assert equal(weights(trainer), before)
    trainer.step(a_batch())
    assert not equal(weights(trainer), before), "training goes on"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_device_adapts_the_scale_as_the_host_would(
    precision: Precision, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "GROWTH_STEPS", 2)
    late, host = (a_trainer(kind, precision, optimizer) for kind in (LateCpu(), CpuKind()))
    scales = []
    for size in (1e4, 1.0, 1e4, 1.0, 1.0, 1e4, 1e4, 1.0, 1.0, 1.0):
        losses = [trainer.step(a_batch(size)) for trainer in (late, host)]
        assert torch.equal(*losses)
        assert equal(weights(late), weights(host))
        assert int(late.metrics["skipped"]) == int(host.metrics["skipped"])
        assert late.loss_scale is not None
        assert host.loss_scale is not None
        late.loss_scale.settle()
        scales.append(host.loss_scale.value)
        assert late.loss_scale.value == host.loss_scale.value
        if precision == "float16":
            assert float(late.metrics["loss_scale"]) == host.loss_scale.value
    assert (len(set(scales)) > 2) == (precision == "float16"), "the scale rises and falls"


@pytest.mark.parametrize(
    ("gradients", "skipped"),
    [([], 0), ([1.0, 2.0], 0), ([1.0, math.inf], 1), ([-math.inf, 1.0], 1), ([math.nan, 1.0], 1), ([3e38, 3e38], 0)],
)
def test_a_gradient_that_is_not_finite_skips_the_step_in_bfloat16(gradients: list[float], skipped: int) -> None:
    """The loss is finite. Gradients are read and not changed; a parameter without elements has an empty gradient."""
    scale = scaling.LossScale("bfloat16", CPU, LateCpu())
    values = [torch.full((3,), value) for value in gradients] + [torch.zeros(0)]
    before = [value.clone() for value in values]
    assert int(scale.unscaled(values, {}, torch.tensor(1.0))) == skipped
    assert all(map(torch.equal, values, before)) or math.nan in gradients
    assert int(scale.unscaled(values, {}, torch.tensor(math.nan))) == 1


def test_steps_that_no_scale_helps_end_one_step_later() -> None:
    late, host = a_trainer(LateCpu(), "float16"), a_trainer(CpuKind(), "float16")
    ended = []
    for trainer in (host, late):
        before = weights(trainer)
        with pytest.raises(LossScaleError, match="the loss scale fell to"):
            overflow(trainer)
        assert equal(weights(trainer), before)
        ended.append(trainer.step_number)
    assert ended[1] == ended[0] + 1
