"""Whole steps on a CUDA device: the host never waits for the device; float16 scales its losses as torch.amp does."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import meshwright as mw
from benchmarks.gpu.models import Mixture
from meshwright.models import GPT, GPTConfig, language_model_loss
from tests.gpu.test_operators import no_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"


def a_model() -> tuple[GPT, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    text = torch.randint(64, (8, 17))
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    return GPT(GPTConfig(layers=2, width=64, heads=4, vocabulary=64, sequence_length=16)), batch


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def steps_without_waits(trainer: Any, batch: dict[str, torch.Tensor]) -> None:
    """The host does not wait from the fourth step on, when libraries are loaded and phases are captured."""
    for _ in range(3):
        trainer.step(batch)
    with no_waits():
        losses = [trainer.step(batch) for _ in range(3)]
    assert bool(torch.stack(losses).isfinite().all())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("precision", [None, "bfloat16", "float16"])
def test_the_host_waits_for_nothing_within_a_step(precision: Any, graphs: bool) -> None:
    model, batch = a_model()
    layout = mw.Layout(microbatches=2, precision=precision)
    graph = mw.capture(model, language_model_loss, batch, precision=precision)
    plan = mw.plan(graph, "h100-dgx", devices=1, layout=layout)
    trainer = mw.parallelize(
        model, language_model_loss, batch, plan=msgspec.structs.replace(plan, graphs=graphs), device=DEVICE,
        optimizer=adamw, max_grad_norm=1.0,
    )  # fmt: skip
    steps_without_waits(trainer, batch)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_the_host_waits_neither_for_experts_nor_for_random_numbers(precision: Any) -> None:
    """Only the device knows how many tokens each expert has, and the masks of dropout."""
    _, batch = a_model()
    parts: list[nn.Module] = [
        Mixture(layers=2, width=64, inner=64, experts=4, vocabulary=64),
        GPT(GPTConfig(layers=2, width=64, heads=4, vocabulary=64, sequence_length=16, dropout=0.1)),
    ]
    for model in parts:
        trainer = mw.parallelize(
            model, language_model_loss, batch, plan=mw.Layout(microbatches=2, recompute="full"), device=DEVICE,
            precision=precision, optimizer=adamw, max_grad_norm=1.0,
        )  # fmt: skip
        steps_without_waits(trainer, batch)


def test_float16_trains_as_torch_amp_does() -> None:
    model, batch = a_model()
    twin, on_device = copy.deepcopy(model).to(DEVICE), {name: value.to(DEVICE) for name, value in batch.items()}
    trainer = mw.parallelize(
        model, language_model_loss, batch, plan=mw.Layout(), device=DEVICE, precision="float16", optimizer=adamw,
        max_grad_norm=1.0,
    )  # fmt: skip
    optimizer, scaler = adamw(twin.parameters()), torch.amp.GradScaler(DEVICE)
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = language_model_loss(twin, on_device)[0]
        scaler.scale(loss.float()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(trainer.step(batch).float().cpu(), loss.float().detach().cpu(), rtol=1e-2, atol=1e-2)
