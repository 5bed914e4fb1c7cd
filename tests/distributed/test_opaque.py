"""Opaque regions train as one process of eager PyTorch does, under all forms of parallelism."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture import opaque_capture
from meshwright.errors import PlanError
from meshwright.ir.layout_text import layout_text
from tests.distributed import opaque_models, oracle
from tests.distributed.lockstep import run_step
from tests.distributed.opaque_models import PARTS, ROW_WISE, batch, loss_fn, make_part
from tests.distributed.pool import Ranks

L = mw.Layout
CASES: dict[int, list[tuple[str, mw.Layout]]] = {
    1: [*((name, L(recompute="full")) for name in PARTS), ("function", L(microbatches=4))],
    2: [
        ("function", L(dp=2, zero=3)), ("loop", L(pp=2)), ("sparse", L(pp=2, microbatches=2)), ("item", L(tp=2)),
        ("norm", L(dp=2)), ("twice", L(dp=2)), ("turned", L(dp=2)), ("flattened", L(dp=2)),
        ("reentrant", L(dp=2, zero=3)), ("recomputed", L(dp=2, zero=3)),
    ],
    4: [("twice", L(dp=2, pp=2, microbatches=2, recompute="full")), ("loop", L(dp=2, tp=2, zero=1))],
}  # fmt: skip
"""Parts and layouts, by number of ranks. Micro-batches are for parts that compute each sample by itself."""
MORE: dict[int, list[tuple[str, mw.Layout]]] = {
    2: [
        ("function", L(pp=2)), ("loop", L(dp=2, zero=3)), ("sparse", L(tp=2)), ("item", L(dp=2)), ("norm", L(pp=2)),
    ],
    4: [("function", L(dp=4, zero=2)), ("sparse", L(dp=2, pp=2)), ("item", L(dp=2, pp=2)), ("norm", L(dp=4))],
}  # fmt: skip
"""Other pairs of these parts and layouts."""


def verified(cases: list[tuple[str, mw.Layout]]) -> dict[str, float]:
    """The largest difference of each case, relative to what is allowed."""
    ratios = {}
    for name, layout in cases:
        rows = mw.verify(make_part(name), loss_fn, batch(), layout, opaque="auto", steps=2)
        ratios[f"{name}, {layout_text(layout)}"] = max(row.difference / row.allowed for row in rows)
    return ratios


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [*CASES.items(), *(pytest.param(*more, marks=pytest.mark.product) for more in MORE.items())],
    ids=lambda value: f"{value} ranks" if isinstance(value, int) else "",
)
def test_training_equals_one_process(ranks: Ranks, num_ranks: int, cases: list[tuple[str, mw.Layout]]) -> None:
    every = ranks(num_ranks, verified, cases)
    wrong = {name: value for ratios in every for name, value in ratios.items() if not value <= 1}
    assert not wrong
    assert len(every[0]) == len(cases)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# --- random numbers --------------------------------------------------------------------------------------------------


class Summed(nn.Module):
    """A loss that is linear in the weight of the part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.part(x)
        return result


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) * torch.arange(1.0, 9.0)).sum()


def dropped(layout: mw.Layout, batch_dim: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Summed(mw.opaque(opaque_models.Dropped(), batch_dim=batch_dim))
    before = torch.get_rng_state()
    trainer = mw.parallelize(
        model, summed, batch(), plan=layout, seed=5, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    weight = trainer.full_state_dict(all_ranks=True)["part.weight"].clone()
    losses = [float(trainer.step(batch()))]
    gradient = weight - trainer.full_state_dict(all_ranks=True)["part.weight"]
    return {
        "losses": losses,
        "product": float((weight * gradient).sum()),
        "kept": bool(torch.equal(before, torch.get_rng_state())),
        "evaluated": float(trainer.evaluate(batch())),
    }


@pytest.mark.parametrize(
    ("layout", "batch_dim"),
    [(mw.Layout(recompute="full"), None), (mw.Layout(dp=2), None), (mw.Layout(dp=2, zero=3), 0), (mw.Layout(dp=2), 0)],
    ids=["recompute", "dp2 whole", "dp2 zero3 split", "dp2 split"],
)
def test_backward_draws_the_numbers_of_forward(ranks: Ranks, layout: mw.Layout, batch_dim: Any) -> None:
    """The loss is linear in the weight, so that it equals the product of weight and gradient: with equal masks only."""
    every = ranks(layout.num_ranks, dropped, layout, batch_dim)
    for result in every:
        assert result["losses"][0] == pytest.approx(result["product"], rel=1e-4)
        assert result["losses"][0] != pytest.approx(result["evaluated"], rel=1e-3), "dropout is on in training"
        assert result["kept"], "the region does not move the caller's generator"


def test_a_plan_that_splits_a_backward_that_draws_unlike_its_forward_is_refused() -> None:
    torch.manual_seed(3)
    model = Summed(mw.opaque(opaque_models.Dropped(), batch_dim=0))
    captured = opaque_capture.capture(model, summed, batch())
    plan = oracle.plan_of(captured.graph, mw.Layout(dp=2), 2)
    (backward,) = (name for name in plan.stage.strategies if "backward" in name and "opaque" in name)
    stage = msgspec.structs.replace(plan.stage, strategies={**plan.stage.strategies, backward: {}})
    values = {**{name: value.detach() for name, value in model.named_parameters()}, **batch()}
    with pytest.raises(PlanError) as caught:
        run_step(captured, msgspec.structs.replace(plan, stages=(stage,)), values)
    assert str(caught.value) == (
        "part:opaque_backward#0: it draws the numbers of its forward, which is split over {'dp': 'b'}, but it is split "
        "over nothing\n  -> split an operator that draws by parts and its gradient alike"
    )


def test_a_region_on_the_whole_batch_draws_the_same_under_every_layout(ranks: Ranks) -> None:
    alone = ranks(1, dropped, mw.Layout(), None)[0]["losses"]
    every = ranks(2, dropped, mw.Layout(dp=2), None)
    assert [result["losses"] for result in every] == [pytest.approx(alone, rel=1e-5)] * 2


# --- split and whole -------------------------------------------------------------------------------------------------


def losses_of(name: str, batch_dim: Any) -> tuple[list[float], list[str]]:
    model: Any = make_part(name)
    mw.opaque(getattr(model.part, "inner", model.part), batch_dim=batch_dim)
    model.double()
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch().items()}
    trainer = mw.parallelize(model, loss_fn, inputs, plan=mw.Layout(dp=2), optimizer=sgd)
    regions = [operator for operator in trainer.graph.operators if "opaque" in operator.target]
    splits = ["split" if operator.rule is not None else "whole" for operator in regions]
    return [float(trainer.step(inputs)) for _ in range(3)], splits


@pytest.mark.parametrize(("name", "dim"), [*((name, 0) for name in ROW_WISE), ("turned", 1)])
def test_split_by_samples_equals_whole(ranks: Ranks, name: str, dim: int) -> None:
    split, whole = (ranks(2, losses_of, name, batch_dim)[0] for batch_dim in (dim, None))
    assert set(split[1]) == {"split"}
    assert set(whole[1]) == {"whole"}
    assert split[0] == pytest.approx(whole[0], rel=1e-12)


def other_batches() -> list[float]:
    """Training and evaluation with smaller batches than the example, whose step is captured again."""
    model: Any = make_part("item")
    mw.opaque(model.part)
    trainer = mw.parallelize(model, loss_fn, batch(), plan=mw.Layout(dp=2), optimizer=sgd)
    return [float(trainer.step(batch())), float(trainer.step(batch(6))), float(trainer.evaluate(batch(4)))]


def test_smaller_batches_and_evaluations(ranks: Ranks) -> None:
    model: Any = make_part("item")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for size in (8, 6):
        loss = loss_fn(model, batch(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    expected.append(loss_fn(model.eval(), batch(4)).item())
    assert ranks(2, other_batches)[0] == pytest.approx(expected, rel=1e-5)


def other_values() -> tuple[list[float], list[float]]:
    """Training where rank 1's initial values end the loop at once, so that its check finds samples independent."""
    model, plain = make_part("loop"), make_part("loop")
    if dist.get_rank():
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(1e-3)
    trainer = mw.parallelize(model, loss_fn, batch(), plan=mw.Layout(dp=2), optimizer=sgd, opaque="auto")
    optimizer, losses, expected = sgd(plain.parameters()), [], []
    for _ in range(2):
        losses.append(float(trainer.step(batch())))
        loss = loss_fn(plain, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return losses, expected


def test_the_verdict_of_rank_0_holds(ranks: Ranks) -> None:
    for losses, expected in ranks(2, other_values):
        assert losses == pytest.approx(expected, rel=1e-5)
