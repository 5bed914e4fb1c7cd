"""A global batch of one sample: it trains and evaluates, unsplit or in tensor parallel, though PyTorch runs it with
other operators than a larger one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from tests.distributed import oracle
from tests.distributed.oracle import TOLERANCE, Subject, WiderCasts, error_of, largest_error
from tests.distributed.pool import Ranks


class Classifier(nn.Module):
    """A learned token before each sequence, as in vision transformers: expanded to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        scores: Tensor = self.head(self.down(self.up(tokens).relu())[:, 0])
        return scores


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]), batch["label"])


def classifier() -> Subject:
    batches = [{"inputs": torch.randn(8, 3, 8, dtype=torch.float64), "label": torch.randint(4, (8,))} for _ in range(3)]
    return Subject(Classifier().double(), loss_of, batches)


MODELS = {"classifier": classifier, "gpt2": lambda: oracle.hugging_face_gpt2(False)}


def train(name: str, layout: mw.Layout, first: int) -> list[float]:
    """Errors of steps and evaluations of batches of 1, after a capture with ``first`` samples."""
    torch.manual_seed(4)
    with WiderCasts():
        subject = MODELS[name]()
        plain = copy.deepcopy(subject.model)
        batches = [{key: value[:1] for key, value in batch.items()} for batch in subject.batches]
        captured = {key: value[:first] for key, value in subject.batches[0].items()}
        trainer = mw.parallelize(
            subject.model, subject.loss_fn, captured, plan=layout,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        errors = []
        for batch in batches:
            optimizer.zero_grad()
            loss: Any = subject.loss_fn(plain, batch)
            errors.append(error_of(trainer.evaluate(batch), loss.detach()))
            loss.backward()
            optimizer.step()
            errors.append(error_of(trainer.step(batch), loss.detach()))
    return [*errors, largest_error(trainer.full_state_dict(all_ranks=True), plain.state_dict())]


@pytest.mark.parametrize("first", [1, 8], ids=["captured with 1", "captured with 8"])
@pytest.mark.parametrize("layout", [mw.Layout(), mw.Layout(tp=2)], ids=["one", "tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_batch_of_one_trains_and_evaluates(ranks: Ranks, name: str, layout: mw.Layout, first: int) -> None:
    for errors in ranks(layout.feature_ranks, train, name, layout, first):
        assert max(errors) <= TOLERANCE, errors


def evaluate_alone(layout: mw.Layout) -> float:
    torch.manual_seed(4)
    subject = classifier()
    sample = {key: value[:1] for key, value in subject.batches[0].items()}
    expected = loss_of(subject.model, sample).detach()
    trainer = mw.parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=layout)
    return error_of(trainer.evaluate(sample), expected)


def test_one_sample_is_evaluated_under_data_parallel(ranks: Ranks) -> None:
    assert max(ranks(2, evaluate_alone, mw.Layout(dp=2))) <= TOLERANCE
