"""Experts keep their activations for the backward pass, unless the plan recomputes them."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.ir.program import Node
from meshwright.ir.stages import BACKWARD, FORWARD
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import foretell
from tests.distributed import hugging_face, oracle

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
    peaks = [foretell(PlanLowering(run.graph), run.plan, CLUSTER).peak.peak_bytes for run in (keeps, recomputes)]
    assert peaks[0] > peaks[1]
