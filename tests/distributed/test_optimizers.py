"""Optimizers under every sharding: three steps of each equal one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm.groups import from_rank_0
from meshwright.optim import LAMB
from tests.distributed import oracle
from tests.distributed.oracle import LargestErrors
from tests.distributed.pool import Ranks

LAYOUTS = {
    **oracle.LAYOUTS,
    "pp2": mw.Layout(pp=2, microbatches=2),
    "tp2 x pp2": mw.Layout(tp=2, pp=2, microbatches=2),
    "zero1": mw.Layout(dp=2, zero=1),
    "zero2, m2": mw.Layout(dp=2, zero=2, microbatches=2),
    "zero3 in groups of 2": mw.Layout(dp=4, zero=3, zero_ranks=2),
    "zero3 x tp2": mw.Layout(dp=2, tp=2, zero=3),
    "zero1 x pp2": mw.Layout(dp=2, pp=2, microbatches=2, zero=1),
}
OPTIMIZERS = {**oracle.OPTIMIZERS, **oracle.MORE_OPTIMIZERS}
LAYER_WISE = ("LARS", "LARC", "LAMB")
ELEMENT_WISE = tuple(name for name in OPTIMIZERS if name not in ("AdamW", *LAYER_WISE))
TWICE = ("dp2 x tp2", "tp2 x pp2", "zero3 x tp2", "zero1 x pp2")
"""Layouts that cut twice: there it matters how layers are summed up."""
CASES = [
    *((layout, tuple(OPTIMIZERS)) for layout in LAYOUTS if layout not in TWICE),
    *((layout, ("AdamW", *LAYER_WISE)) for layout in TWICE),
    *(pytest.param(layout, ELEMENT_WISE, marks=pytest.mark.product) for layout in TWICE),
]


def subject(blocks: int = 1) -> oracle.Subject:
    """A GPT whose tied embedding is split over tp and held by the first and the last stage."""
    torch.manual_seed(7)
    original = oracle.gpt(True, layers=blocks)
    return oracle.Subject(original.model, original.loss_fn, original.batches[:3])


@cache
def in_one_process(blocks: int, optimizer: str) -> oracle.Run:
    """Training in one process, which layouts share."""
    return oracle.in_one_process(subject(blocks), OPTIMIZERS[optimizer])


def train_with_each(
    layout: mw.Layout, optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]]
) -> dict[str, LargestErrors]:
    """All optimizers on one captured graph: making it is most of the time."""
    first = subject(layout.pp)
    parallelize = oracle.sharing_capture(("optimizers", layout.pp))
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    errors = {}
    for name, optimizer in optimizers.items():
        run, trainer = oracle.in_parallel(subject(layout.pp), layout, optimizer, parallelize=parallelize)
        expected = oracle.Run(**from_rank_0(lambda: vars(in_one_process(layout.pp, name))))  # noqa: B023
        errors[name] = oracle.compared(before, expected, run, trainer)
    return errors


def train_with(layout: mw.Layout, names: tuple[str, ...]) -> dict[str, LargestErrors]:
    return train_with_each(layout, {name: OPTIMIZERS[name] for name in names})


@pytest.mark.parametrize(("layout", "names"), CASES, ids=str)
def test_every_optimizer_equals_one_process(ranks: Ranks, layout: str, names: tuple[str, ...]) -> None:
    results = ranks(LAYOUTS[layout].num_ranks, train_with, LAYOUTS[layout], names)
    for rank, result in enumerate(results):
        assert set(result) == set(names)
        for name, errors in result.items():
            assert errors.error <= oracle.TOLERANCE, f"{name}, rank {rank}: {errors}"
            assert errors.values == results[0][name].values, "every rank reports the same loss"
            assert errors.moved > 1e-3, f"{name} trained the parameters"
            assert bool(errors.num_split) == ("tp2" in layout or "zero" in layout)


def deaf(make: Callable[..., Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """The optimizer, which does not hear how to sum over shards."""

    def make_deaf(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.sum_shards_with = lambda _: None
        return optimizer

    return make_deaf


def train_on_norms_of_parts(layout: mw.Layout) -> dict[str, LargestErrors]:
    return train_with_each(layout, {name: deaf(OPTIMIZERS[name]) for name in LAYER_WISE})


def test_norms_of_parts_would_train_otherwise(ranks: Ranks) -> None:
    """What the comparison above would find if norms were not summed: a thousand times its tolerance, and more."""
    results = ranks(2, train_on_norms_of_parts, LAYOUTS["tp2"])[0]
    assert {name: errors.error > 1e-6 for name, errors in results.items()} == dict.fromkeys(LAYER_WISE, True)


def layers_in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Biases and gains without decay and without adaptation, which splits the sums over two groups."""
    matrices = [value for _, value in parameters if value.dim() > 1]
    vectors = [value for _, value in parameters if value.dim() <= 1]
    return LAMB([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "adapt_vectors": False}], lr=0.01)


def train_clipped_and_frozen(layout: mw.Layout) -> list[float]:
    """With groups, clipping, and parameters that are frozen on the way."""
    parallel, plain = subject(), subject()
    trainer = mw.parallelize(
        parallel.model,
        parallel.loss_fn,
        parallel.batches[0],
        plan=layout,
        optimizer=layers_in_groups,
        max_grad_norm=0.1,
    )
    optimizer = layers_in_groups(list(plain.model.named_parameters()))
    errors = []
    for step, batch in enumerate(parallel.batches):
        if step == 2:
            for model in (parallel.model, plain.model):
                model.get_parameter("blocks.0.mlp.up.weight").requires_grad_(False)
        loss = trainer.step(batch)
        optimizer.zero_grad()
        expected, _ = plain.loss_fn(plain.model, batch)
        expected.backward()
        nn.utils.clip_grad_norm_([value for value in plain.model.parameters() if value.grad is not None], 0.1)
        optimizer.step()
        errors.append(oracle.error_of(loss, expected.detach()))
    return [*errors, oracle.largest_error(trainer.full_state_dict(all_ranks=True), plain.model.state_dict())]


def test_layers_in_groups_clipped_and_frozen(ranks: Ranks) -> None:
    for errors in ranks(4, train_clipped_and_frozen, LAYOUTS["dp2 x tp2"]):
        assert max(errors) <= oracle.TOLERANCE, errors
