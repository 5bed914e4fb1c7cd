"""Message-driven pipelines on ranks: the losses of 1f1b bit for bit, in any order."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import ScheduleError
from meshwright.ir.schedule import ActionList, Schedule
from meshwright.schedules.check import check
from tests.distributed import oracle
from tests.distributed.pool import Ranks
from tests.distributed.test_executor import executor_of, sgd

LIMIT = {2: 4, 3: 6, 4: 8}
"""Micro-batches in flight, by the number of ranks."""


def slow_functions(trainer: mw.Trainer, seconds: float) -> None:
    """Make every forward and backward of this rank take so much longer, unequally."""
    for stage in executor_of(trainer).stages.values():
        for name in ("forward", "backward"):
            function, count = stage.functions[name], iter(range(10**6))

            def late(values: list[Any], function: Any = function, count: Any = count) -> list[Any]:
                time.sleep(seconds * (next(count) % 3))
                return list(function(values))

            stage.functions[name] = late


Trained = tuple[list[float], dict[str, torch.Tensor], str, int]


def trained(layout: mw.Layout, slow: int | None = None) -> Trained:
    """Losses, the trained values on rank 0, the actions of this rank in the last step, and the most in flight."""
    torch.manual_seed(3)
    subject = oracle.gpt(True, layers=4)
    parallelize = oracle.sharing_capture("message-driven")
    trainer = parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=layout, optimizer=sgd)
    if trainer.rank == slow:
        slow_functions(trainer, 0.002)
    losses = [float(trainer.step(batch)) for batch in subject.batches]
    spans = [span for span in trainer.trace().spans if span.stream == "compute" and "_" not in span.what]
    actions = " ".join(span.what for span in spans if span.what[1:2] in ("F", "B") and span.what[2:].isdigit())
    return losses, trainer.full_state_dict(), actions, executor_of(trainer).live_activations


@pytest.fixture(scope="module")
def by_1f1b(ranks: Ranks) -> Callable[[int], list[Trained]]:
    """Trains so many stages under 1f1b, once."""
    return cache(lambda pp: ranks(pp, trained, mw.Layout(pp=pp, microbatches=8)))


@pytest.mark.parametrize(
    ("pp", "slow"), [(2, None), pytest.param(3, None, marks=pytest.mark.product), (3, 1), (4, 3), (4, 0)]
)
def test_losses_and_values_are_those_of_1f1b_bit_for_bit(
    ranks: Ranks, by_1f1b: Callable[[int], list[Trained]], pp: int, slow: int | None
) -> None:
    expected = by_1f1b(pp)
    results = ranks(pp, trained, mw.Layout(pp=pp, microbatches=8, schedule="message-driven"), slow)
    for rank in range(pp):
        assert results[rank][0] == expected[rank][0]
    for name, value in expected[0][1].items():
        assert torch.equal(results[0][1][name], value), name
    executed = Schedule.of("executed", [ActionList.from_text(actions) for _, _, actions, _ in results])
    report = check(executed)
    assert executed.num_microbatches == 8
    for rank, (_, _, _, live) in enumerate(results):
        assert live == report.ranks[rank].live_activations <= (LIMIT[pp] if rank < pp - 1 else 1)


def test_a_limit_of_its_own_is_kept(ranks: Ranks) -> None:
    layout = mw.Layout(pp=3, microbatches=8, schedule="message-driven", in_flight=2)
    assert [live for _, _, _, live in ranks(3, trained, layout, 2)] == [2, 2, 1]


@pytest.mark.parametrize("dp", [{"dp": 2}, {"dp": 2, "zero": 1}])
def test_replicas_of_a_stage_may_differ_in_their_order(ranks: Ranks, dp: dict[str, int]) -> None:
    layout = mw.Layout(pp=2, microbatches=4, **dp)  # type: ignore[arg-type]
    expected = ranks(4, trained, layout)
    results = ranks(4, trained, mw.Layout(pp=2, microbatches=4, schedule="message-driven", **dp), 2)  # type: ignore[arg-type]
    assert [each[0] for each in results] == [each[0] for each in expected]
    for name, value in expected[0][1].items():
        assert torch.equal(results[0][1][name], value), name


def refused(layout: mw.Layout) -> str:
    try:
        trained(layout)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 2}, "axis tp meet in every micro-batch"),
        ({"dp": 2, "zero": 2}, "is a collective in every micro-batch"),
        ({"dp": 2, "zero": 3}, "is a collective in every micro-batch"),
    ],
)
def test_collectives_in_every_micro_batch_are_refused(ranks: Ranks, options: dict[str, int], words: str) -> None:
    layout = mw.Layout(pp=2, microbatches=4, schedule="message-driven", **options)  # type: ignore[arg-type]
    for message in ranks(4, refused, layout):
        assert words in message
        assert "take another schedule, such as `1f1b`" in message
