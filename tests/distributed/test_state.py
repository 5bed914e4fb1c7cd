"""Whole tensors in and out of a trainer: ``load_state_dict`` is the inverse of ``full_state_dict``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.errors import CheckpointError
from tests.distributed import oracle
from tests.distributed.oracle import TOLERANCE, Subject, error_of, largest_error
from tests.distributed.pool import Ranks

LAYOUTS = {
    "one": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "pp2": mw.Layout(pp=2, microbatches=2),
    **{f"zero{stage}": mw.Layout(dp=2, zero=stage) for stage in (1, 2, 3)},
}


def gpt() -> Subject:
    return oracle.gpt(False, layers=2, tied=True)


def resnet() -> Subject:
    return oracle.resnet(False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer_of(subject: Subject, layout: mw.Layout) -> mw.Trainer:
    return mw.parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=layout, optimizer=sgd)


def train_on_from_another_state(layout: mw.Layout, make: Callable[[], Subject]) -> list[float]:
    """A trainer takes over, in the middle, the values of a plain model that it has never seen."""
    torch.manual_seed(3)
    subject = make()
    plain = copy.deepcopy(subject.model)
    with torch.no_grad():
        for value in (*plain.parameters(), *plain.buffers()):
            value.add_(0.01 * torch.rand(value.shape)) if value.is_floating_point() else value.add_(1)
    trainer = trainer_of(subject, layout)
    trainer.step(subject.batches[0])
    given = {name: value.clone() for name, value in plain.state_dict().items()}
    trainer.load_state_dict(given if trainer.rank == 0 else {})
    errors = [largest_error(trainer.full_state_dict(all_ranks=True), given)]
    optimizer = sgd(plain.parameters())
    for batch in subject.batches[1:3]:
        optimizer.zero_grad()
        result = subject.loss_fn(plain, batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        errors.append(error_of(trainer.step(batch), loss.detach()))
    return [*errors, largest_error(trainer.full_state_dict(all_ranks=True), dict(plain.state_dict()))]


@pytest.mark.parametrize(
    ("layout", "make"), [*((name, gpt) for name in LAYOUTS), ("dp2", resnet), ("tp2", resnet), ("zero3", resnet)]
)
def test_load_state_dict_is_the_inverse_of_full_state_dict(
    ranks: Ranks, layout: str, make: Callable[[], Subject]
) -> None:
    """Tied weights, buffers, and every way to split; rank 0's tensors count."""
    for errors in ranks(LAYOUTS[layout].num_ranks, train_on_from_another_state, LAYOUTS[layout], make):
        assert errors[0] == 0.0
        assert max(errors) <= TOLERANCE, errors


def refusals_of(layout: mw.Layout) -> tuple[list[str], float, float]:
    torch.manual_seed(3)
    trainer = trainer_of(gpt(), layout)
    before = trainer.full_state_dict(all_ranks=True)
    name, *others = before
    bad: list[dict[str, Any]] = [
        {other: before[other] for other in others},
        {**before, "foreign": torch.zeros(2)},
        {**before, name: before[name][:-1]},
        {**before, name: before[name].to("meta")},
        {**before, name: 3},
        {**before, name: before[name] + 1},
    ]
    texts = []
    for state in bad:
        with pytest.raises(CheckpointError) as caught:
            trainer.load_state_dict(state)
        texts.append(str(caught.value))
    unchanged = largest_error(trainer.full_state_dict(all_ranks=True), before)
    last = others[-1]
    trainer.load_state_dict({last: before[last] + 1, "foreign": torch.zeros(2)}, strict=False)
    expected: dict[str, Tensor] = {**before, **{
        other: value + 1 for other, value in before.items() if other == last or trainer.graph.tied.get(last) == other
    }}  # fmt: skip
    return texts, unchanged, largest_error(trainer.full_state_dict(all_ranks=True), expected)


@pytest.mark.parametrize("layout", ["one", "tp2", "zero2"])
def test_a_state_dict_that_does_not_fit_changes_nothing(ranks: Ranks, layout: str) -> None:
    for texts, unchanged, partly in ranks(LAYOUTS[layout].num_ranks, refusals_of, LAYOUTS[layout]):
        missing, foreign, short, meta, number, untied = texts
        assert missing.startswith(
            "state dict, token_embedding.weight: it is missing\n  -> give all that full_state_dict() has"
        )
        assert foreign.startswith("state dict, foreign: the model has no such tensor\n  -> give the state dict of this")
        assert short.startswith(
            "state dict, token_embedding.weight: it is of shape [127, 16], in the model it is of shape [128,"
        )
        assert "it is a meta tensor of shape [128, 16], in the" in meta
        assert "it is a int, in the model" in number
        assert untied.startswith(
            "state dict, head.weight: it is not equal to token_embedding.weight, with which the model shares"
        )
        assert unchanged == 0.0
        assert partly == 0.0
