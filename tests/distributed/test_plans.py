"""Plans that somebody wrote: two axes on one factor run, where it divides, and are refused where it does not."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.ir.placement import Placement, Shard
from meshwright.ir.plan_check import check_fits
from meshwright.models import MLP, classification_loss
from tests.distributed.oracle import TOLERANCE, error_of, largest_error
from tests.distributed.pool import Ranks

LAYOUT = mw.Layout(dp=2, tp=2)


def batch_of(samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "label": torch.randint(4, (samples,), generator=generator)}


def plan_over_both(graph: mw.Graph, *, only: str = "") -> mw.Plan:
    """Every operator with a batch splits it over both axes (``only``: just over tp in the modules of that name)."""
    strategies: dict[str, dict[str, str]] = {}
    for operator in graph.operators:
        for letter, name in operator.classes.items():
            batch = graph.factor_classes[name].role == "batch"
            if batch and operator.rule is not None and operator.rule.splittable(letter):
                only_tp = bool(only) and operator.module == only
                strategies[operator.name] = {"tp": letter} if only_tp else {"dp": letter, "tp": letter}
                break
    plan = mw.plan(graph, devices=4, layout=LAYOUT)
    stage = msgspec.structs.replace(plan.stage, strategies=strategies, storage={})
    return msgspec.structs.replace(plan, buckets=(), stages=(stage,))


def train(only: str, size: int) -> list[float]:
    torch.manual_seed(0)
    model, batch = MLP((6, 16, 4)).double(), batch_of(size)
    plain = copy.deepcopy(model)
    plan = plan_over_both(mw.capture(model, classification_loss, batch), only=only)
    trainer = mw.parallelize(
        model, classification_loss, batch, plan=plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    errors = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = classification_loss(plain, batch)[0]
        loss.backward()
        optimizer.step()
        errors.append(error_of(trainer.step(batch), loss.detach()))
    return [*errors, largest_error(trainer.full_state_dict(all_ranks=True), plain.state_dict())]


@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.parametrize("only", ["", "layers.0"])
def test_two_axes_on_one_factor(ranks: Ranks, only: str, size: int) -> None:
    """Everywhere; and with a first layer on the inner axis alone, whose parts the outer axis must then cut anew."""
    for errors in ranks(4, train, only, size):
        assert max(errors) <= TOLERANCE, errors


def test_two_axes_of_more_ranks_than_a_factor_has_are_refused() -> None:
    graph = mw.capture(MLP((6, 16, 4)).double(), classification_loss, batch_of(3))
    with pytest.raises(
        PlanError, match=r"factor 'b' has size 3, axes 'dp', 'tp' have 4\n  -> no rank can have nothing"
    ):
        check_fits(plan_over_both(graph), graph)


@pytest.mark.parametrize(
    ("shards", "fits"),
    [
        ({"dp": Shard(0), "tp": Shard(0)}, True),
        ({"dp": Shard(0), "tp": Shard(0, outer=2)}, True),
        ({"dp": Shard(0, outer=4), "tp": Shard(0)}, True),
        ({"dp": Shard(1), "tp": Shard(0)}, True),
        ({"dp": Shard(1), "tp": Shard(1)}, True),
        ({"dp": Shard(1, unit=2), "tp": Shard(1, outer=3)}, True),
        ({"dp": Shard(1), "tp": Shard(1, outer=3)}, False),
    ],
)
def test_storage_over_two_axes(shards: dict[str, Placement], fits: bool) -> None:
    """A weight of 16 x 6: two axes may cut one dim where the parts of one begin at the parts of the other."""
    graph = mw.capture(MLP((6, 16, 4)).double(), classification_loss, batch_of(8))
    plan = plan_over_both(graph)
    stage: Any = msgspec.structs.replace(plan.stage, storage={"layers.0.weight": shards})
    edited = msgspec.structs.replace(plan, stages=(stage,))
    if fits:
        check_fits(edited, graph)
        return
    with pytest.raises(PlanError, match=r"storage\['layers.0.weight'\]: S\(1\) over 'dp' and .* do not cut dim 1 of"):
        check_fits(edited, graph)
