"""Experts keep their activations for the backward pass, unless the plan recomputes them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import meshwright as mw
from meshwright.ir.program import Node
from meshwright.ir.stages import BACKWARD, FORWARD
from meshwright.lower import fuse
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import foretell
from tests.distributed import hugging_face, oracle

ours = torch.ops.meshwright
CLUSTER = mw.Cluster.load("cpu-local")


def experts_of(trainer: mw.Trainer) -> list[Node]:
    (program,) = PlanLowering(trainer.graph)(trainer.plan)
    phases = [phase for phase in program.phases if phase.name in (FORWARD, BACKWARD)]
    return [node for phase in phases for node in phase.nodes if "experts" in node.target]


def trained(**layout: object) -> tuple[oracle.Run, mw.Trainer]:
    subject = hugging_face.subject("Mixtral", 3)
    return oracle.in_parallel(subject, mw.Layout(**layout), oracle.OPTIMIZERS["AdamW"])  # type: ignore[arg-type]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_experts_keep_their_activations_unless_they_are_recomputed(microbatches: int) -> None:
    """The same numbers in either way, and those of one process; what is kept takes memory and saves products."""
    with oracle.WiderCasts():
        expected = oracle.in_one_process(hugging_face.subject("Mixtral", 3), oracle.OPTIMIZERS["AdamW"])
        (kept, keeps), (again, recomputes) = (
            trained(microbatches=microbatches, recompute=kind) for kind in ("none", "full")
        )
    forms = [[node.target.split(".")[1] for node in experts_of(trainer)] for trainer in (keeps, recomputes)]
    assert sorted(forms[0]) == 2 * ["experts_backward_kept"] + 2 * ["experts_kept"]
    assert set(forms[1]) == {"experts", "experts_backward"}
    for run in (kept, again):
        assert oracle.largest_error(run.state, expected.state) <= oracle.TOLERANCE
    assert [loss.item() for loss in kept.losses] == [loss.item() for loss in again.losses]
    assert oracle.largest_error(kept.state, again.state) == 0
    flops = [sum(node.flops for node in experts_of(trainer)) for trainer in (keeps, recomputes)]
    assert flops[1] / flops[0] >= 11 / 9, "forward and backward take 9 products, to recompute takes 2 or more"
    kept_bytes = [value.num_bytes for node in experts_of(keeps) if "kept" in node.target for value in node.outputs[1:2]]
    size = hugging_face.SMALL
    rows = size.batch // microbatches * size.sequence * 2
    assert kept_bytes[:2] == 2 * [rows * 2 * size.inner * 8], "gate and up, of two experts a token, in float64"
    with patch.object(fuse, "_keep_activations", lambda *_: None):
        without = foretell(PlanLowering(keeps.graph), keeps.plan, CLUSTER).peak.peak_bytes
    assert foretell(PlanLowering(keeps.graph), keeps.plan, CLUSTER).peak.peak_bytes > without, "and it counts"


@pytest.mark.parametrize(("first", "number"), [(0, 4), (0, 2), (2, 2), (3, 1)])
def test_kept_activations_give_the_gradients_of_recomputed_ones(first: int, number: int) -> None:
    """Also on a rank that holds some experts only, or whose experts nobody chooses."""
    torch.manual_seed(0)
    tokens, weights = torch.randn(6, 8), torch.rand(6, 2)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(6)])
    up, down, grad = torch.randn(number, 10, 8), torch.randn(number, 8, 5), torch.randn(6, 8)
    given = (tokens, index, weights, up, down)
    output, hidden = ours.experts_kept(*given, "silu", first)
    assert torch.equal(output, ours.experts(*given, "silu", first))
    kept = ours.experts_backward_kept(grad, *given, hidden, "silu", first)
    for gradient, again in zip(kept, ours.experts_backward(grad, *given, "silu", first), strict=True):
        assert torch.equal(gradient, again)


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    torch.manual_seed(0)
    tokens, up, down = torch.randn(4, 3), torch.randn(3, 10, 3), torch.randn(3, 2, 5)
    index, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    gradients = torch.ops.meshwright.experts_backward(torch.randn(4, 2), tokens, index, weights, up, down, "silu", 0)
    for gradient in gradients[2:]:
        assert bool(gradient[0].any())
        assert not gradient[1:].any()
