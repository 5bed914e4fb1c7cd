"""The planner chooses the ZeRO stage of each parameter: training equals one process, whatever the mixture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.comm.groups import from_rank_0
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.intra_op.assign import Assigned
from tests.distributed import hugging_face, oracle, pipelines
from tests.distributed.pool import Ranks

CASES = {
    "dp2": (mw.Layout(dp=2, zero=-1), 0.99),
    "dp2 x tp2": (mw.Layout(dp=2, tp=2, zero=-1), 0.98),
    "m4": (mw.Layout(dp=2, microbatches=4, zero=-1), 0.95),
    "dp2 x cp2": (mw.Layout(dp=2, cp=2, zero=-1), 0.98),
    "dp2 x cp2, ring": (mw.Layout(dp=2, cp=2, context="ring", zero=-1), 0.98),
    "dp2 x pp2": (mw.Layout(dp=2, pp=2, microbatches=4, zero=-1), 0.98),
    "dp4 x ep2": (mw.Layout(dp=4, ep=2, zero=-1), 0.98),
}
"""Layouts, and the fraction of the memory that makes the planner mix stages."""


def subject_of(layout: mw.Layout) -> oracle.Subject:
    """A GPT; with expert parallelism, a Mixtral."""
    return hugging_face.subject("Mixtral") if layout.ep > 1 else pipelines.subject_of("GPT", "ragged")


def planned(graph: Graph, layout: mw.Layout, share: float) -> tuple[bytes, set[int]]:
    """A plan file in which a rank stores seven tenths of its parameters at most, in the fraction ``share`` of the
    memory that the fastest such plan needs; and the ZeRO stages that the plan mixes."""
    total = sum(graph.tensors[name].num_bytes for name in graph.parameters) / layout.feature_ranks
    cluster = mw.Cluster.load("h100-80gb-dgx-ndr400x8", layout.num_ranks)

    def solved(memory_bytes: float) -> tuple[mw.Plan, Assigned]:
        ask = Ask(explains=False, lower=PlanLowering(graph), memory_bytes=memory_bytes, parameter_bytes=0.7 * total)
        plan = plan_layout(graph, layout, world_size=layout.num_ranks, cluster=cluster, ask=ask)
        return plan, next(iter(ask.known.values()))

    _, free = solved(1e15)
    problem = free.formulated.problem
    spare = float(np.min(problem.limits[:-1] - problem.memory(free.solution.choices)[:-1]))
    plan, assignment = solved(share * (1e15 - spare / layout.pp))  # the limit is of the mean rank
    return encode_json(plan), {assignment.zero.get(name, 0) for name in assignment.storage}


def compare(name: str) -> tuple[set[int], oracle.LargestErrors | None]:
    """The ZeRO stages in the plan, and on rank 0 the comparison with one process."""
    (layout, share), settings = CASES[name], (oracle.OPTIMIZERS["AdamW"], oracle.CLIPPING["clipped"])
    subject, key = subject_of(layout), ("zero by parameter", layout.ep)
    graph = oracle.captured(key, subject, widens=True).graph
    text, stages = from_rank_0(lambda: planned(graph, layout, share))
    plan = decode(text, mw.Plan, where="plan of rank 0")
    run, trainer = oracle.in_parallel(subject, plan, *settings, oracle.sharing_capture(key, widens=True))
    if trainer.rank != 0:
        return stages, None
    serial = subject_of(layout)
    before: dict[str, Any] = {key: value.clone() for key, value in serial.model.state_dict().items()}
    with oracle.WiderCasts():
        expected = oracle.in_one_process(serial, *settings)
    return stages, oracle.compared(before, expected, run, trainer)


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_of_stages_equals_one_process(ranks: Ranks, name: str) -> None:
    results = ranks(CASES[name][0].num_ranks, compare, name)
    stages, errors = results[0]
    assert len(stages) > 1, "parameters differ in their stages"
    assert errors is not None
    assert errors.error <= oracle.TOLERANCE, errors
    assert errors.moved > 1e-3, "the parameters were trained"
