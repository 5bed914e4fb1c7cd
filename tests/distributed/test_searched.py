"""What the search decides, ranks run: unequal stages, recomputation of single stages, and stages with other axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.groups import from_rank_0
from meshwright.ir.files import decode, encode_json
from tests.distributed import oracle
from tests.distributed.oracle import LargestErrors, Subject
from tests.distributed.pool import Ranks

pytestmark = pytest.mark.usefixtures("without_workers")

TIGHT = 0.8
"""A part of the memory that a plan without a limit needs."""

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "GPT": partial(oracle.gpt, True, layers=5, tied=False),
    "GPT, tied": partial(oracle.gpt, True, layers=3),
    "T5": partial(oracle.hugging_face_t5, True, encoder_layers=3),
    "GPT-2": partial(oracle.hugging_face_gpt2, True),
}


def subject_of(name: str) -> Subject:
    torch.manual_seed(7)
    return SUBJECTS[name]()


def searched(name: str, ranks: int, **options: Any) -> mw.Plan:
    with oracle.WiderCasts():
        subject = subject_of(name)
        graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    return mw.plan(graph, mw.Cluster.load("cpu-local", ranks), devices=ranks, **options)


@cache
def searched_stages(name: str) -> mw.Plan:
    return searched(name, 2, only="inter")


def trained(name: str, text: bytes) -> LargestErrors:
    """The same training in one process, and on these ranks by a plan file."""
    serial = subject_of(name)
    before = {key: value.clone() for key, value in serial.model.state_dict().items()}

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    with oracle.WiderCasts():
        expected = oracle.reference(serial, sgd)
        plan = decode(from_rank_0(lambda: text), mw.Plan, where="plan of rank 0")
        share = oracle.sharing_capture(("searched", name))
        run, trainer = oracle.in_parallel(subject_of(name), plan, sgd, parallelize=share)
    return oracle.compared(before, expected, run, trainer)


def checked(ranks: Ranks, count: int, name: str, plan: mw.Plan) -> None:
    for errors in ranks(count, trained, name, encode_json(plan)):
        assert errors.moved > 1e-4
        assert max(errors.losses, errors.metrics, errors.state) <= 1e-9


T5 = pytest.param("T5", marks=pytest.mark.product)


@pytest.mark.parametrize("name", ["GPT", "GPT, tied", T5, "GPT-2"])
def test_stages_that_a_search_cuts_train_as_one_process(ranks: Ranks, name: str) -> None:
    plan = searched_stages(name)
    assert len(plan.stages) >= 2
    checked(ranks, 2, name, plan)


@pytest.mark.parametrize("name", ["GPT", T5])
def test_stages_recompute_what_their_memory_needs(ranks: Ranks, name: str) -> None:
    free = searched_stages(name)
    assert free.prediction is not None
    plan = searched(name, 2, only="inter", memory_bytes=TIGHT * free.prediction.peak_memory_bytes)
    assert plan.prediction is not None
    assert plan.prediction.peak_memory_bytes <= TIGHT * free.prediction.peak_memory_bytes
    checked(ranks, 2, name, plan)


def test_four_ranks_run_what_a_search_over_everything_finds(ranks: Ranks) -> None:
    plan = searched("GPT", 4)
    checked(ranks, 4, "GPT", plan)
