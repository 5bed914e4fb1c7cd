"""When ZeRO communicates: parameters are gathered one bucket ahead, gradients are reduced as they are made."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import fx

import meshwright as mw
from meshwright.capture.builder import Capture, capture
from meshwright.errors import PlanError
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Flat
from meshwright.ir.plan import Bucket, Plan
from meshwright.ir.plan_check import check_fits
from meshwright.lower.partition import LoweredStage
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import lower_stage
from meshwright.models import MLP, classification_loss
from meshwright.ops.collectives import GATHER_PARTS, REDUCE_TO_PARTS, WAIT
from meshwright.ops.view import VIEWS

GROUPS = {"dp": AxisGroup("dp", 2, 0)}
LAYERS = 4


@cache
def captured() -> Capture:
    batch = {"inputs": torch.zeros(8, 6), "label": torch.zeros(8, dtype=torch.int64)}
    return capture(MLP((6, *(8,) * (LAYERS - 1), 4)), classification_loss, batch)


def planned(zero: Any, **options: Any) -> Plan:
    """A plan in which every layer is a bucket."""
    plan = mw.plan(captured().graph, layout=mw.Layout(dp=2, zero=zero, **options))

    def by_layer(bucket: Bucket) -> list[Bucket]:
        layers = dict.fromkeys(name.rpartition(".")[0] for name in bucket.parameters)
        members = [tuple(name for name in bucket.parameters if name.startswith(layer)) for layer in layers]
        return [msgspec.structs.replace(bucket, parameters=names) for names in members]

    (gathered,), (reduced,) = plan.gathers, plan.buckets
    plan = msgspec.structs.replace(plan, gathers=tuple(by_layer(gathered)), buckets=tuple(by_layer(reduced)))
    check_fits(plan, captured().graph)
    return plan


def program(plan: Plan) -> LoweredStage:
    return lower_stage(PlannedGraph(captured().graph, plan), 0, GROUPS)


def _product(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten.mm", "aten.addmm"))


def letters_of(graph: fx.Graph) -> str:
    """Gathers that start (g) and have come (G), products (x), reductions that start (r) and have come (R)."""
    letters = ""
    for node in graph.nodes:
        if node.target is GATHER_PARTS:
            letters += "g"
        elif node.target is REDUCE_TO_PARTS:
            letters += "r"
        elif node.target is WAIT and node.args[0].target in (GATHER_PARTS, REDUCE_TO_PARTS):
            letters += "G" if node.args[0].target is GATHER_PARTS else "R"
        elif _product(node):
            letters += "x"
    return letters


FORWARD = "gGgxGgxGgxGx"
"""The next bucket starts when one has come, before what that is for."""


def test_stages_1_and_2_gather_once_and_reduce_as_backward_goes() -> None:
    for zero in (1, 2):
        text = letters_of(program(planned(zero)).functions["prologue"].graph)
        assert text == FORWARD + "xxr" + "xxRr" + "xxRr" + "xRr" + "R"


def test_stage_3_gathers_for_forward_and_again_for_backward() -> None:
    """The first layer's weight is not needed for any gradient."""
    phases = program(planned(3)).functions
    assert letters_of(phases["forward"].graph) == FORWARD
    assert letters_of(phases["backward"].graph) == "gGgxxr" + "GgxxRr" + "GxxRr" + "xRr"
    waits = [node for node in phases["finish"].graph.nodes if node.target is WAIT]
    assert [node.args[0].name in phases["backward"].outputs for node in waits].count(True) == 1, "the last is left over"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_stage_3_keeps_no_parameter_between_forward_and_backward(microbatches: int) -> None:
    forward = program(planned(3, microbatches=microbatches)).functions["forward"].graph
    outputs = next(node for node in forward.nodes if node.op == "output").args[0]
    for node in outputs:
        while node.op == "call_function" and node.target not in (GATHER_PARTS, WAIT):
            if _product(node):
                break
            node = node.args[0]
        assert node.target not in (GATHER_PARTS, WAIT)


def most_alive(graph: fx.Graph) -> int:
    """How many gathered buckets have memory at once: from the start of one to the last use of what lies in it."""
    place = {node: index for index, node in enumerate(graph.nodes)}

    def last(node: fx.Node) -> int:
        within = [user for user in node.users if user.target is WAIT or user.target in VIEWS]
        return max([*map(place.__getitem__, node.users), *map(last, within)])

    spans = [(place[node], last(node)) for node in graph.nodes if node.target is GATHER_PARTS]
    return max(sum(first <= moment <= end for first, end in spans) for moment in place.values())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_stage_3_holds_two_gathered_buckets_at_most(microbatches: int) -> None:
    phases = program(planned(3, microbatches=microbatches)).functions
    assert {name: most_alive(phases[name].graph) for name in ("forward", "backward")} == {"forward": 2, "backward": 2}


def test_what_is_gathered_or_reduced_again_and_again_takes_turns_in_the_same_memory() -> None:
    """What stays for the step, or for the optimizer, does not: it would stay between steps, too."""
    for zero, gathers, reductions in ((1, False, False), (2, False, True), (3, True, True)):
        reuses = {GATHER_PARTS: set[bool](), REDUCE_TO_PARTS: set[bool]()}
        for phase in program(planned(zero, microbatches=2)).functions.values():
            for node in phase.graph.nodes:
                if node.target in reuses:
                    reuses[node.target].add(bool(node.kwargs.get("again")))
        assert reuses == {GATHER_PARTS: {gathers}, REDUCE_TO_PARTS: {reductions}}


def test_several_microbatches_share_what_stages_1_and_2_gather() -> None:
    for zero, each, once in ((1, "xxxxxxx", "rrrr"), (2, "xxr" + "xxRr" + "xxRr" + "xRr" + "R", "")):
        stage = program(planned(zero, microbatches=2))
        assert letters_of(stage.functions["prologue"].graph) == "gGgGgGgG"
        assert letters_of(stage.functions["forward"].graph) == "x" * LAYERS
        assert letters_of(stage.functions["backward"].graph) == each
        assert letters_of(stage.functions["reduce"].graph) == once
        whole = {accumulator.parameter: accumulator.value.shape for accumulator in stage.program.accumulators}
        assert whole["layers.0.weight"] == ((8, 6) if zero == 1 else (4, 6)), "stage 2 sums up parts"


def wrong(plan: Plan, **changes: Any) -> Plan:
    """The plan with another stage."""
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(plan.stage, **changes),))


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plan, name = planned(3), "layers.0.weight"
    whole = {**plan.stage.storage, name: {}}
    twice = msgspec.structs.replace(plan, gathers=(*plan.gathers, plan.gathers[0]))
    mixed = msgspec.structs.replace(
        wrong(plan, storage={**plan.stage.storage, "layers.0.bias": {}}, released=(), gradients={}), gathers=()
    )
    for faulty_plan, message in (
        (
            wrong(plan, storage=whole),
            f"plan: gathers[0]: '{name}' is not flat over 'dp'\n  -> take it out of the bucket",
        ),
        (twice, f"plan: gathers[4]: '{name}' is gathered already\n  -> take it out of one"),
        (
            msgspec.structs.replace(wrong(plan, storage=whole), gathers=()),
            f"plan: stages[0].released: '{name}' is not stored flat\n  -> take it out",
        ),
        (
            msgspec.structs.replace(wrong(plan, storage=whole, released=()), gathers=()),
            f"plan: stages[0].gradients: the gradient of '{name}' is summed up otherwise than the parameter is stored",
        ),
        (mixed, "plan: buckets[3]: some of its parameters are flat over 'dp', and some are not\n  -> make two of it"),
        (
            wrong(plan, storage={**plan.stage.storage, name: {"dp": Flat(), "tp": Flat()}}),
            f"plan: storage['{name}']: it is flat over two axes\n  -> leave one of them out",
        ),
    ):
        with pytest.raises(PlanError) as caught:
            check_fits(faulty_plan, captured().graph)
        assert str(caught.value).startswith(message)
