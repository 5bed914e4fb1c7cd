"""Phases as CUDA graphs: the same losses as without, also with random numbers, compiled, and after a smaller batch."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import GPT, GPTConfig, language_model_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYOUTS = {
    "whole": mw.Layout(),
    "micro-batches": mw.Layout(microbatches=4),
    "recompute": mw.Layout(microbatches=2, recompute="full"),
}


class Noisy(GPT):
    """A GPT whose logits pass through dropout."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.2)


def a_batch(size: int) -> dict[str, Tensor]:
    text = torch.randint(64, (size, 17), generator=torch.Generator().manual_seed(size))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def trainers(layout: mw.Layout, make: Any = GPT, compile: bool = False) -> list[mw.Trainer]:
    """One with graphs, one without."""
    torch.manual_seed(0)
    model = make(GPTConfig(layers=2, width=32, heads=4, vocabulary=64, sequence_length=16)).double()
    graph = mw.capture(model, language_model_loss, a_batch(8))
    plan = mw.plan(graph, "h100-dgx", devices=1, layout=layout)
    return [
        mw.parallelize(
            copy.deepcopy(model), language_model_loss, a_batch(8), compile=compile, device="cuda",
            plan=msgspec.structs.replace(plan, graphs=graphs), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        )
        for graphs in (True, False)
    ]  # fmt: skip


def compare(pair: list[mw.Trainer], sizes: list[int]) -> None:
    batches = [a_batch(size) for size in sizes]
    with_graphs, without = ([trainer.step(batch).cpu() for batch in batches] for trainer in pair)
    torch.testing.assert_close(torch.stack(with_graphs), torch.stack(without), rtol=1e-9, atol=1e-9)
    state = pair[1].full_state_dict()
    for name, value in pair[0].full_state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_without_graphs(name: str) -> None:
    pair = trainers(LAYOUTS[name])
    compare(pair, [8] * 6)
    stages = pair[0].executor.stages.values()
    assert all(stage.graphs is not None and stage.graphs.captured for stage in stages)


def test_random_numbers_differ_from_step_to_step_and_equal_those_without_graphs() -> None:
    compare(trainers(mw.Layout(microbatches=2), Noisy), [8] * 6)


def test_compiled_phases_are_captured_too() -> None:
    compare(trainers(mw.Layout(), compile=True), [8] * 5)


def test_a_smaller_batch_between_others_runs_without_graphs() -> None:
    compare(trainers(mw.Layout()), [8, 8, 8, 4, 8, 8, 4, 4, 4, 8])


def test_memory_that_is_kept_for_graphs_does_not_grow() -> None:
    trainer, held = trainers(mw.Layout(microbatches=2))[0], []
    for _ in range(8):
        trainer.step(a_batch(8))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert len(set(held[-4:])) == 1
