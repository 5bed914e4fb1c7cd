"""What one operator is emitted as alone, and what the planner concludes from its price."""

from collections import Counter

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME
from meshwright.ir.plan import Plan
from meshwright.ir.program import Node
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from tests.distributed import oracle

GPU = mw.Cluster.load("a100-80gb-dgx")


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def convolutions(size: int, channels: int) -> Graph:
    """Two convolutions of pictures of ``size`` x ``size``."""
    with torch.device("meta"):
        layers = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        return mw.capture(nn.Sequential(*layers), squares, torch.zeros(4, channels, size, size))


def gpt() -> Graph:
    config = GPTConfig(layers=1, width=32, heads=4, vocabulary=64, sequence_length=16)
    with torch.device("meta"):
        model, tokens = GPT(config), torch.zeros(8, 16, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def communicated(nodes: list[Node]) -> Counter[tuple[str, str, int]]:
    """Collectives within operators, by kind, axis and bytes."""
    every = [collective for node in nodes for collective in (*([node.starts] if node.starts else ()), *node.inside)]
    return Counter((collective.kind, collective.axis, collective.bytes) for collective in every)


@pytest.mark.parametrize("model", ["GPT", "convolutions"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_operators_alone_do_what_they_do_in_the_program(model: str, microbatches: int) -> None:
    if model == "GPT":
        graph, layout = gpt(), mw.Layout(cp=2, context="ring", microbatches=microbatches)
    else:
        graph, layout = convolutions(16, 8), mw.Layout(spatial=(2,), microbatches=microbatches)
    plan: Plan = oracle.plan_of(graph, layout, 2, GPU)
    lower, strategies = PlanLowering(graph), plan.strategies(graph)
    sizes = {axis: plan.mesh.size(axis) for axis in plan.mesh.names} | {TIME: microbatches}
    nodes: list[Node] = []
    fetched: set[object] = set()
    for operator in graph.operators:
        program = lower.operator(operator, strategies[operator.name], sizes)
        times = 1 if operator.prologue else microbatches
        for node in program.nodes:
            fetch = program.fetches.get(node.name)
            key = (operator.inputs[fetch.position], fetch.rows) if fetch is not None else None
            if key is None or key not in fetched:
                nodes += [node] * times
            fetched |= {key} if key is not None else set()
    (whole,) = lower(plan)
    once = ("prologue", "finish")
    run = [
        node for phase in whole.phases if phase.name not in ("input", "weight")
        for node in phase.nodes * (1 if phase.name in once or whole.together else microbatches)
    ]  # fmt: skip
    assert sum(node.flops for node in nodes) == pytest.approx(sum(node.flops for node in run), rel=0.01)
    in_program, alone = communicated(run), communicated(nodes)
    assert alone, "some operators communicate"
    assert not alone - in_program


def test_large_convolutions_compute_their_interior_while_halos_travel_and_small_ones_do_not() -> None:
    layout = mw.Layout(spatial=(4,))
    assert oracle.plan_of(convolutions(224, 64), layout, 4, GPU).interiors
    assert oracle.plan_of(convolutions(16, 2), layout, 4, GPU).interiors == ()


def test_rows_over_two_axes_have_no_interior_of_their_own() -> None:
    plan = mw.plan(convolutions(64, 8), GPU, layout=mw.Layout(tp=2, spatial=(2,), pin={"*": "height@tp"}))
    assert plan.interiors == ()
