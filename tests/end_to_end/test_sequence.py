"""Sequences and experts over ranks: which collectives a layout puts where, and which layouts are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture import builder
from meshwright.errors import LayoutError
from meshwright.ir.mesh import AxisGroup
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import lower_stage
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.ops import collectives

KINDS = {
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
}
SEQUENCE = 16


def gpt(heads: int = 4) -> builder.Capture:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=64, heads=heads, vocabulary=256, sequence_length=SEQUENCE))
    tokens = torch.zeros(2, SEQUENCE, dtype=torch.int64)
    return builder.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def exchanged(captured: builder.Capture, layout: mw.Layout) -> Counter[str]:
    """The collectives of the blocks, by kind."""
    plan = mw.plan(captured.graph, layout=layout)
    axes = [axis for axis in plan.mesh.axes if axis.size > 1]
    lowered = lower_stage(
        PlannedGraph(captured.graph, plan), 0, {axis.name: AxisGroup(axis.name, axis.size, 0) for axis in axes}
    )
    nodes: list[Any] = [node for node in lowered.functions["prologue"].graph.nodes if node.target in KINDS]
    return Counter(KINDS[node.target] for node in nodes if str(node.meta["operator"]).startswith("blocks."))


def test_sequence_parallel_has_no_all_reduce_of_activations() -> None:
    found = exchanged(gpt(), mw.Layout(tp=2, sequence_parallel=True))
    # of each of 2 layers' 2 blocks: one reduce-scatter forward, one backward; one all-gather forward, two backward;
    # then the gradient of positions, and the bucket of the norms' gradients
    assert found == {"reduce_scatter": 8, "all_gather": 12 + 1, "all_reduce": 1}


def test_context_parallel_gathers_keys_and_values() -> None:
    # of each of 2 layers: keys and values forward (and kept for backward), their gradients backward
    assert exchanged(gpt(), mw.Layout(cp=2)) == {"all_gather": 4, "reduce_scatter": 4}


def test_a_ring_gathers_nothing() -> None:
    layout = mw.Layout(cp=2, context="ring")
    assert exchanged(gpt(), layout) == {}
    plan = mw.plan(gpt().graph, layout=layout)
    assert plan.stage.strategy("blocks.0.attention:attention#0") == {"cp": "st"}


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (mw.Layout(sequence_parallel=True), "layout: sequence_parallel with tp=1\n  -> give tp of 2 or more"),
        (mw.Layout(cp=17), "a sequence of 16 is too short for cp=17\n  -> use a longer sequence"),
        (mw.Layout(cp=3, context="ring"), "a sequence of 16 does not divide over cp=3\n  -> use a sequence that it"),
        (mw.Layout(context="ring"), "layout: context='ring' with cp=1\n  -> give cp of 2 or more"),
        (mw.Layout(dp=2, ep=2), "layout: ep=2, and there are no experts\n  -> use ep=1"),
        (mw.Layout(tp=2, ep=2), "layout: ep=2 does not divide dp=1\n  -> experts lie over ranks that divide the batch"),
        (mw.Layout(tp=8), "module blocks.0.attention: 4 attention heads are too few for tp=8"),
    ],
    ids=["no tp", "short sequence", "odd ring", "no ring", "no experts", "ep without dp", "heads"],
)
def test_layouts_that_do_not_fit(layout: mw.Layout, text: str) -> None:
    graph = gpt().graph
    with pytest.raises(LayoutError) as caught:
        mw.plan(graph, layout=layout)
    assert text in str(caught.value)
