"""Sequences and experts over ranks: which collectives a layout puts where, and which layouts are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import meshwright as mw
from meshwright.capture import builder
from meshwright.errors import LayoutError
from meshwright.ir.layout_text import layout_text
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import misfit
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.plans import PlanLowering
from meshwright.lower.stage import lower_stage
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.ops import collectives
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.pipelines import ALIKE

KINDS = {
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
}
SEQUENCE = 16


@cache
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
    counts = exchanged(gpt(), mw.Layout(tp=2, sequence_parallel=True))
    # of each of 2 layers' 2 blocks: one reduce-scatter forward, one backward; one all-gather forward, two backward;
    # then the gradient of positions, and the bucket of the norms' gradients
    assert counts == {"reduce_scatter": 8, "all_gather": 12 + 1, "all_reduce": 1}


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


@cache
def large_gpt() -> builder.Capture:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=1024, heads=16, vocabulary=32768, sequence_length=1024))
        tokens = torch.zeros(16, 1024, dtype=torch.int64)
        return builder.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


@cache
def mixtral() -> builder.Capture:
    config = MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        tokens = torch.zeros(16, 1024, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        return builder.capture(MixtralForCausalLM(config), lambda model, batch: model(**batch).loss, batch)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (large_gpt, mw.Layout(cp=2, tp=2)),
        (large_gpt, mw.Layout(cp=2, tp=4)),
        (large_gpt, mw.Layout(dp=2, cp=2, tp=2)),
        (large_gpt, mw.Layout(cp=2, tp=2, context="ring")),
        (mixtral, mw.Layout(dp=2, ep=2, tp=2)),
        (mixtral, mw.Layout(dp=2, ep=2, cp=2)),
        (mixtral, mw.Layout(dp=2, ep=2, cp=2, tp=2)),
    ],
    ids=lambda value: layout_text(value) if isinstance(value, mw.Layout) else value.__name__,
)
def test_a_program_beside_cp_and_ep_is_not_slower_than_the_explicit_rule(
    model: Callable[[], builder.Capture], layout: mw.Layout
) -> None:
    """Attention stays split over cp, and experts over ep. Simulated steps, so that communication that is hidden does
    not count."""
    graph, cluster = model().graph, mw.Cluster.load("h100-80gb-dgx-ndr400x8", 8)
    lower, seconds = PlanLowering(graph), []
    for by_rule in (False, True):
        ask = Ask(by_rule=by_rule, explains=False, lower=lower)
        plan = plan_layout(graph, layout, world_size=layout.num_ranks, cluster=cluster, ask=ask)
        for operator in graph.operators:
            strategy = plan.stage.strategy(operator.name)
            if operator.target.startswith("meshwright.attention.") and layout.cp > 1:
                assert strategy["cp"] == ("st" if layout.context == "ring" else "s")
            if operator.target.startswith("meshwright.experts.") and layout.ep > 1:
                assert strategy["ep"] == "te"
        seconds.append(foretell(lower, plan, cluster).played.step_s)
    assert seconds[0] <= (1 + ALIKE) * seconds[1]


def test_keys_that_go_round_a_ring_are_not_split_over_another_axis() -> None:
    (attention,) = (
        operator for operator in gpt().graph.operators
        if operator.name.startswith("blocks.0") and operator.target.startswith("meshwright.attention.")
    )  # fmt: skip
    assert attention.rule is not None
    sizes, (queries, keys) = {"cp": 2, "tp": 2}, attention.rule.joint["st"]
    assert misfit(attention.rule, {"cp": "st", "tp": "h"}, sizes) is None
    assert misfit(attention.rule, {"cp": "st", "tp": queries}, sizes) is None
    assert misfit(attention.rule, {"cp": "st", "tp": keys}, sizes) is not None
