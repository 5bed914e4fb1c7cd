"""Attention around a ring: under a causal mask all ranks have as much to do, and results are those of one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.capture.builder import capture
from meshwright.ops.ring import Ring, num_steps
from tests.distributed import oracle
from tests.distributed.lockstep import run_step
from tests.distributed.oracle import plan_of
from tests.distributed.pool import Ranks

LENGTH = 4
"""Queries of a rank."""


def pairs(ring: Ring, step: int) -> list[tuple[int, int]]:
    """The (query, key) pairs, by place in the whole sequence, that a rank works on in a step."""

    def places(rank: int) -> torch.Tensor:
        return torch.cat([torch.arange(half * LENGTH // 2, (half + 1) * LENGTH // 2) for half in ring.takes(rank)])

    here = torch.zeros(1, 1, LENGTH, 1)
    part = ring.part(step, here, here, None, causal=True)
    assert part is not None
    queries, keys = places(ring.index)[part.rows], places(ring.source(step))[part.columns]
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if part.causal:
        seen = seen.tril()
    return [(int(queries[i]), int(keys[j])) for i, j in seen.nonzero().tolist()]


@given(st.integers(2, 9))
def test_every_pair_is_met_once_and_every_rank_has_as_many_in_every_step(size: int) -> None:
    rings = [Ring(lambda value: lambda: value, index, size, index * LENGTH, True) for index in range(size)]
    pairs_by_step = {(ring.index, step): pairs(ring, step) for ring in rings for step in range(size)}
    every = Counter(pair for some in pairs_by_step.values() for pair in some)
    assert every == {(query, key): 1 for query in range(size * LENGTH) for key in range(query + 1)}
    for step in range(size):
        assert len({len(pairs_by_step[index, step]) for index in range(size)}) == 1


def train(layout: mw.Layout) -> tuple[float, float]:
    subjects = []
    for _ in range(2):
        torch.manual_seed(5)
        subjects.append(oracle.gpt(True, tied=False))
    expected = oracle.reference(subjects[0], oracle.OPTIMIZERS["AdamW"])
    run, trainer = oracle.in_parallel(subjects[1], layout, oracle.OPTIMIZERS["AdamW"])
    state = oracle.largest_error(run.state, expected.state) if trainer.rank == 0 else 0.0
    return oracle.error_of(torch.stack(run.losses), torch.stack(expected.losses)), state


@pytest.mark.parametrize(
    "layout",
    [
        mw.Layout(cp=2, context="ring"),
        mw.Layout(cp=3, context="ring"),
        mw.Layout(dp=2, cp=2, context="ring"),
        mw.Layout(cp=2, tp=2, context="ring", sequence_parallel=False),
    ],
    ids=["cp2", "cp3", "dp2 x cp2", "cp2 x tp2"],
)
def test_training_equals_one_process(ranks: Ranks, layout: mw.Layout) -> None:
    for losses, state in ranks(layout.num_ranks, train, layout):
        assert losses <= oracle.TOLERANCE
        assert state <= oracle.TOLERANCE


class Attends(nn.Module):
    """Causal attention, with a scale so that there is a gradient."""

    def __init__(self, length: int, dropout: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 1, 2, length, 4, dtype=torch.float64))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.weights * x.unsqueeze(0)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().sum()
    return loss


@pytest.mark.parametrize(("size", "length"), [(2, 8), (4, 8), (2, 6)], ids=["2", "4", "odd halves"])
def test_gradients_are_those_of_the_masks_that_were_drawn(size: int, length: int) -> None:
    """With dropout: a step along the gradient changes the loss by what the gradient says."""
    torch.manual_seed(2)
    model, batch = Attends(length, 0.4), {"x": torch.randn(2, 2, length, 4, dtype=torch.float64)}
    captured = capture(model, loss_of, batch)
    plan = plan_of(captured.graph, mw.Layout(cp=size, context="ring"), size)
    strategies = plan.strategies(captured.graph)
    assert {"cp": "st"} in strategies.values()
    direction = torch.randn_like(model.weights)

    def step(by: float) -> tuple[float, torch.Tensor]:
        values = {"weights": (model.weights + by * direction).detach(), "batch.x": batch["x"]}
        result, _ = run_step(captured, plan, values)
        gradient = result.gradients["weights"]
        assert gradient is not None
        return float(result.loss), gradient

    by = 1e-5
    numeric = (step(by)[0] - step(-by)[0]) / (2 * by)
    assert numeric == pytest.approx(float((step(0.0)[1] * direction).sum()), rel=1e-6)


class Grouped(nn.Module):
    """Causal attention of query heads that share keys and values, with a window if it is not 0."""

    def __init__(self, length: int, window: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 4, length, 4, dtype=torch.float64))
        self.shared = nn.Parameter(torch.randn(2, 1, 2, length, 4, dtype=torch.float64))
        self.window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (key, value), mask = self.shared * x, None
        if self.window:
            place = torch.arange(x.shape[2])
            mask = (place[None] <= place[:, None]) & (place[None] > place[:, None] - self.window)
        causal = mask is None
        return F.scaled_dot_product_attention(self.query * x, key, value, mask, is_causal=causal, enable_gqa=True)


LAYOUTS = {
    "ring of 2": mw.Layout(cp=2, context="ring"),
    "ring of 3": mw.Layout(cp=3, context="ring"),
    "ring of 4": mw.Layout(cp=4, context="ring"),
    "gathered": mw.Layout(cp=3),
    "heads": mw.Layout(tp=2, pin={"*": "h@tp"}),
    "shared heads": mw.Layout(tp=2, pin={"*": "r@tp"}),
    "keys": mw.Layout(tp=2, pin={"*": "s1@tp"}),
    "ring and heads": mw.Layout(cp=2, tp=2, context="ring", pin={"*": "h@tp"}),
}


@pytest.mark.parametrize("window", [0, 1, 4, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_and_shared_keys_are_those_of_serial_attention(layout: str, window: int) -> None:
    torch.manual_seed(2)
    model, batch = Grouped(12, window), {"x": torch.randn(2, 1, 12, 1, dtype=torch.float64)}
    captured = capture(model, loss_of, batch)
    attention = next(
        operator for operator in captured.graph.operators if operator.target == "meshwright.attention.default"
    )
    assert len(attention.inputs) == 3, "the mask is a window"
    assert attention.arguments.endswith(f", True, 0.5, 0, 1, {window}" if window else ", True, 0.5, 0, 1")
    plan = plan_of(captured.graph, LAYOUTS[layout], LAYOUTS[layout].num_ranks)
    values = {name: value.detach().clone() for name, value in model.named_parameters()} | {"batch.x": batch["x"]}
    result, _ = run_step(captured, plan, values)
    expected = loss_of(model, batch)
    expected.backward()
    assert oracle.error_of(result.loss, expected.detach()) <= oracle.TOLERANCE
    for name, parameter in model.named_parameters():
        gradient = result.gradients[name]
        assert gradient is not None
        assert parameter.grad is not None
        assert oracle.error_of(gradient, parameter.grad) <= oracle.TOLERANCE


@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 6))
def test_a_ring_with_a_window_ends_when_all_keys_are_met(columns: int, window: int, size: int) -> None:
    needed = 0
    for query in range(columns * size):
        first = max(0, query - window + 1)
        needed = max(needed, query // columns - first // columns + 1)
    step_counts = {num_steps(columns, columns, size, index, index * columns, window) for index in range(size)}
    assert step_counts == {needed}
