"""Parallel equals serial: losses, metrics, gradient norms, parameters and buffers after three steps, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.distributed import oracle
from tests.distributed.oracle import Case, LargestErrors
from tests.distributed.pool import Ranks

PAIRWISE = oracle.pairwise_cases()
HUGGING_FACE = [
    Case("HF GPT-2", "dp2", "AdamW", "clipped", "ragged"),
    Case("HF GPT-2, mask", "tp2", "SGD", "whole", "ragged"),
]
CHOSEN = [
    Case("HF T5", "dp2", "AdamW", "clipped", "ragged"),
    Case("HF T5", "tp2", "SGD", "whole", "ragged"),
]


def compare(case: Case) -> LargestErrors:
    return oracle.compare(case)


def compare_with_casts_as_they_come(case: Case) -> LargestErrors:
    return oracle.compare(case, widen_casts=False)


@pytest.mark.parametrize("case", [*PAIRWISE, *CHOSEN], ids=str)
def test_parallel_equals_one_process(ranks: Ranks, case: Case) -> None:
    results = ranks(case.num_ranks, compare, case)
    for rank, result in enumerate(results):
        assert result.error <= oracle.TOLERANCE, f"rank {rank}: {result}"
        assert result.values == results[0].values, "every rank reports the same loss"
        assert result.moved > 1e-3, "the parameters were trained"
        assert all(norm > oracle.MAX_GRAD_NORM for norm in result.norms), "clipping clipped"
        assert bool(result.norms) == (case.clipping == "clipped")
        assert bool(result.num_split) == ("tp2" in case.layout)


@pytest.mark.parametrize("case", HUGGING_FACE, ids=str)
def test_hugging_face_loss_in_float32_equals_plain_eager(ranks: Ranks, case: Case) -> None:
    for result in ranks(case.num_ranks, compare_with_casts_as_they_come, case):
        assert result.error <= 1e-5, result


def test_pairwise_cases_hold_every_pair() -> None:
    def met(cases: list[Case]) -> set[object]:
        return {pair for case in cases for pair in oracle.pairs(case)}

    assert met(PAIRWISE) == met(oracle.every_case())
    assert len(set(PAIRWISE)) == len(PAIRWISE) < len(oracle.every_case()) / 4


def test_casts_to_float32_are_widened() -> None:
    subject = oracle.hugging_face_gpt2(ragged=True)
    assert subject.loss_fn(subject.model, subject.batches[0]).dtype == torch.float32
    with oracle.WiderCasts():
        value = torch.ones(2, dtype=torch.float64)
        assert (
            value.float().dtype == value.to(torch.float32).dtype == value.to(dtype=torch.float32).dtype == torch.float64
        )
        assert subject.loss_fn(subject.model, subject.batches[0]).dtype == torch.float64


def test_errors_are_relative_above_one_and_absolute_below() -> None:
    large, small = torch.tensor([3.0, -1000.0]), torch.tensor([3.0, 1e-6])
    assert oracle.error_of(large + torch.tensor([0.0, 10.0]), large) == pytest.approx(0.01)
    assert oracle.error_of(torch.zeros(2), torch.full((2,), 1e-6)) == pytest.approx(1e-6)
    assert oracle.error_of(small[:1], small) == math.inf
    assert oracle.error_of(small.double(), small) == math.inf, "another dtype is another result"
    assert oracle.error_of(torch.tensor([math.nan]), torch.zeros(1)) == math.inf
    assert oracle.largest_error({"a": small}, {"a": small, "b": small}) == math.inf


@pytest.mark.parametrize("model", ["GPT", "HF GPT-2", "MLP"])
def test_means_of_ragged_shards_are_not_the_mean(model: str) -> None:
    """What averaging over dp shards would give is far outside the tolerance, so the comparison would find it."""
    case = Case(model, "dp2", "SGD", "whole", "ragged")
    serial, sharded = oracle.subject_of(case), oracle.subject_of(case)
    expected = oracle.in_one_process(serial, oracle.OPTIMIZERS["SGD"])

    def mean_of_means(model: nn.Module, batch: oracle.Batch) -> torch.Tensor:
        results = [sharded.loss_fn(model, part) for part in oracle.shards(batch, 2)]
        return sum((r[0] if isinstance(r, tuple) else r) for r in results) / 2

    wrong = oracle.Subject(sharded.model, mean_of_means, sharded.batches)
    run = oracle.in_one_process(wrong, oracle.OPTIMIZERS["SGD"])
    assert oracle.largest_error(run.state, expected.state) > 1e-4
