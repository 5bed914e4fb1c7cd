"""Batches: which forms are taken, and what is said about one that is not like the captured one, or differs by rank."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import DataError, RankError
from meshwright.models import MLP, classification_loss
from tests.distributed.pool import Ranks


def batch(samples: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randn(samples, 6, generator=generator),
        "label": torch.randint(4, (samples,), generator=generator),
    }


def a_trainer(given: Any = None, layout: mw.Layout | None = None) -> mw.Trainer:
    torch.manual_seed(0)
    return mw.parallelize(
        MLP((6, 8, 4)),
        classification_loss,
        batch() if given is None else given,
        plan=layout or mw.Layout(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


class Tokens(dict[str, Tensor]):
    """A dict of a class of its own."""


@pytest.mark.parametrize("kind", [UserDict, Tokens, OrderedDict])
def test_mappings_are_taken_as_dicts(kind: Any) -> None:
    """A tokenizer gives a UserDict."""
    trainer = a_trainer(kind(batch()))
    assert float(trainer.step(kind(batch()))) == float(a_trainer().step(batch()))
    assert float(trainer.evaluate([kind(batch())][0])) > 0


def nested_loss(model: nn.Module, given: Any) -> Tensor:
    loss: Tensor = classification_loss(model, given[0]["data"])[0]
    return loss


def test_mappings_inside_a_batch() -> None:
    given = (UserDict(data=Tokens(batch())),)
    trainer = mw.parallelize(MLP((6, 8, 4)), nested_loss, given, optimizer=torch.optim.SGD)
    assert trainer.graph.inputs == ("batch[0].data.inputs", "batch[0].data.label")
    assert torch.isfinite(trainer.step(given))


def test_arrays_are_refused_by_name() -> None:
    """Their values would be constants, and a later batch's would not be looked at."""
    given = {**batch(), "label": np.zeros(4, dtype=np.int64)}
    with pytest.raises(DataError, match=r"batch\.label: it is a numpy\.ndarray, whose .*\n  -> pass tensors"):
        a_trainer(given)
    with pytest.raises(DataError, match=r"batch\.label: it is a numpy\.ndarray"):
        a_trainer().step(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": torch.zeros(4, 6, dtype=torch.float64)}, "batch.inputs: it is float64, in the captured batch it"),
        ({"label": torch.zeros(4, dtype=torch.int32)}, "batch.label: it is int32, in the captured batch it was int64"),
        ({"label": 1}, "batch.label: it is int, in the captured batch it was int64"),
        ({"more": torch.zeros(4)}, "batch: the batch holds batch.inputs, batch.label, batch.more, the captured one"),
    ],
)  # fmt: skip
def test_batch_unlike_the_captured_one(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        a_trainer().step({**batch(), **change})
    assert str(caught.value).startswith(message)


def step_on_unlike_batches(layout: mw.Layout, difference: str) -> str:
    trainer = a_trainer(layout=layout)
    rank = dist.get_rank()
    samples = 4 - 2 * rank if difference == "shapes" else 4
    with pytest.raises(RankError) as caught:
        trainer.step(batch(samples, seed=rank), local=difference == "shapes")
    return str(caught.value)


def test_ranks_with_batches_of_other_shapes(ranks: Ranks) -> None:
    """They would wait for each other, or add what does not belong together."""
    for text in ranks(2, step_on_unlike_batches, mw.Layout(dp=2), "shapes", timeout=30):
        assert text.startswith(
            "batch of rank 1: it was given batch.inputs [2, 6] float32, batch.label [2] int64, rank 0"
        )


@pytest.mark.parametrize("layout", [mw.Layout(tp=2), mw.Layout(dp=2)])
def test_ranks_with_other_values(ranks: Ranks, layout: mw.Layout) -> None:
    for text in ranks(2, step_on_unlike_batches, layout, "values", timeout=30):
        assert text.startswith(
            "batch of rank 1: it was given other values than rank 0, though both are to have the same"
        )
        assert "with local=True, the part that trainer.data_shard says" in text


def step_on_parts() -> float:
    trainer = a_trainer(layout=mw.Layout(dp=2))
    return float(trainer.step(batch(2, seed=dist.get_rank()), local=True))


def test_parts_may_differ(ranks: Ranks) -> None:
    first_loss, second_loss = ranks(2, step_on_parts)
    assert first_loss == second_loss


def test_modules_that_change_their_mode_are_followed() -> None:
    """Batch norm that is frozen between two steps keeps its statistics; switched on again, it goes on."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    trainer = mw.parallelize(
        model, lambda model, given: model(given["inputs"]).square().mean(), batch(), optimizer=torch.optim.SGD
    )
    statistics = []
    for frozen in (False, True, True, False):
        model[1].train(not frozen)
        trainer.step(batch())
        statistics.append(trainer.full_state_dict()["1.running_mean"])
    assert torch.equal(statistics[0], statistics[1])
    assert torch.equal(statistics[1], statistics[2])
    assert not torch.equal(statistics[2], statistics[3])
