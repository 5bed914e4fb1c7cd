"""Stages as functions: a backward in two parts is the backward; what is computed again is the same, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.capture.builder import Capture, capture
from meshwright.comm.transport.base import Arrival
from meshwright.ir.graph import Graph
from meshwright.ir.schedule import ActionKind
from meshwright.lower.partition import LoweredStage
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import lower_stage
from meshwright.models import UNet, segmentation_loss
from meshwright.runtime.executor import Executor, StepResult
from meshwright.runtime.route import Route
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from tests.distributed import oracle

CPU = torch.device("cpu")
ADDED = ("aten.add_.", "aten.addmm_.")
"""How gradients are accumulated."""
NUM_STAGES, MICROBATCHES = 3, 4


def unet() -> oracle.Subject:
    label = torch.randint(3, (8, 4, 4))
    batch = {"image": torch.randn(8, 1, 4, 4, dtype=torch.float64), "label": label}
    return oracle.Subject(UNet(depth=2, width=2, image_channels=1, classes=3).double(), segmentation_loss, [batch])


SUBJECTS: Mapping[str, Callable[[], oracle.Subject]] = {
    "GPT": lambda: oracle.gpt(True, layers=3),
    "U-Net": unet,
    "GPT with dropout": lambda: oracle.gpt(True, layers=3, dropout=0.5),
}


@cache
def subject_of(model: str) -> tuple[oracle.Subject, Capture]:
    torch.manual_seed(1)
    subject = SUBJECTS[model]()
    return subject, capture(subject.model, subject.loss_fn, subject.batches[0])


def plan_of(model: str, **options: Any) -> mw.Plan:
    layout = mw.Layout(pp=NUM_STAGES, microbatches=MICROBATCHES, **options)
    return mw.plan(subject_of(model)[1].graph, devices=NUM_STAGES, layout=layout)


def program_of(model: str, plan: mw.Plan, stage: int) -> LoweredStage:
    captured = subject_of(model)[1]
    return lower_stage(PlannedGraph(captured.graph, plan), stage, {}, constants=captured.constants)


# --- a stage alone ---------------------------------------------------------------------------------------------------


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        pass


@dataclass
class Neighbour:
    """The other end of one transfer: sends what its seed and the micro-batch say, and notes what it is sent."""

    seed: int
    sent: list[Tensor] = field(default_factory=list)

    def send(self, tensor: Tensor) -> Done:
        self.sent.append(tensor.clone())
        return Done()

    def receive(self, into: Tensor, label: str = "") -> Arrival:
        torch.manual_seed(self.seed + hash_of(label))
        into.copy_(torch.randn_like(into))
        return Arrival(None, come=lambda: True, check=lambda waited_s: None)


def hash_of(label: str) -> int:
    """Of the micro-batch and the direction."""
    return sum(map(ord, label))


def run_alone(model: str, plan: mw.Plan, stage: int, schedule: str) -> tuple[StepResult, list[Tensor]]:
    """One stage's part of a schedule, with made-up values from its neighbours; and what it sent, by transfer."""
    lowered = program_of(model, plan, stage)
    subject = subject_of(model)[0]
    routes: dict[tuple[int, ActionKind], list[Route]] = {}
    ends: list[Neighbour] = []
    for kind, transfers in lowered.program.transfers.items():
        for transfer in transfers:
            ends.append(Neighbour(len(ends)))
            route = Route(((len(ends) - 1, tuple(slice(0, size) for size in transfer.value.shape)),))
            routes.setdefault((stage, kind), []).append(route)
    actions = add_reduction(add_communication(build(schedule, NUM_STAGES, MICROBATCHES)))
    executor = Executor({stage: lowered}, actions, stage, routes, dict(enumerate(ends)), CPU)
    result = executor.run(
        {name: value.detach() for name, value in subject.model.named_parameters()},
        dict(subject.model.named_buffers()),
        {f"batch.{name}": value for name, value in subject.batches[0].items()},
        lambda microbatch: 100 + microbatch,
    )
    return result, [value for end in ends for value in end.sent]


@pytest.mark.parametrize("stage", range(NUM_STAGES))
@pytest.mark.parametrize("model", ["GPT", "U-Net"])
def test_backward_in_two_parts_is_the_backward_bit_by_bit(model: str, stage: int) -> None:
    plan = plan_of(model)
    (whole, sent_whole), (split, sent_split) = (run_alone(model, plan, stage, name) for name in ("1f1b", "zb-h1"))
    assert whole.gradients.keys() == split.gradients.keys() != set()
    for name, gradient in whole.gradients.items():
        assert gradient is not None
        assert bool(gradient.any()), f"the gradient of {name} is not zero"
        assert torch.equal(gradient, split.gradients[name]), name  # type: ignore[arg-type]
    assert len(sent_whole) == len(sent_split) > 0
    assert all(torch.equal(tensor, other) for tensor, other in zip(sent_whole, sent_split, strict=True))


@pytest.mark.parametrize("model", ["GPT", "U-Net"])
def test_what_is_sent_waits_for_no_gradient_of_a_parameter(model: str) -> None:
    plan = plan_of(model)
    for stage in range(1, NUM_STAGES):
        phases = program_of(model, plan, stage).functions
        added = {
            name: [
                node for node in phases[name].graph.nodes if str(node.target).startswith(("aten.add_", "aten.addmm_"))
            ]
            for name in ("backward", "input", "weight")
        }
        assert added["input"] == []
        assert len(added["weight"]) == len(added["backward"]) > 0
    first = program_of(model, plan, 0).functions
    assert not [node for node in first["input"].graph.nodes if node.op == "call_function"], "the first sends nothing"


# --- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_recomputation_draws_the_same_dropout_masks(recompute: str, stage: int) -> None:
    model = "GPT with dropout"
    kept, sent_kept = run_alone(model, plan_of(model), stage, "1f1b")
    again, sent_again = run_alone(model, plan_of(model, recompute=recompute), stage, "1f1b")
    for name, gradient in kept.gradients.items():
        assert torch.equal(gradient, again.gradients[name]), name  # type: ignore[arg-type]
    assert all(torch.equal(tensor, other) for tensor, other in zip(sent_kept, sent_again, strict=True))


def kept_of(model: str, recompute: str, stage: int) -> dict[str, int]:
    """What a stage's forward hands to its backward: operators, and how many bytes of each."""
    program = program_of(model, plan_of(model, recompute=recompute), stage)
    outputs = {node.name: node for node in program.functions["forward"].graph.nodes}
    sizes: dict[str, int] = {}
    for name in program.functions["forward"].outputs:
        if name in program.functions["backward"].inputs:
            node = outputs[name]
            operator = str(node.meta["operator"])
            sizes[operator] = sizes.get(operator, 0) + node.meta["val"].nbytes
    return sizes


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_selective_recomputation_does_not_keep_attention(stage: int) -> None:
    graph = subject_of("GPT with dropout")[1].graph
    attention = {operator.name for operator in graph.operators if operator.target.startswith("meshwright.attention.")}
    everything, selective = (kept_of("GPT with dropout", name, stage) for name in ("none", "selective"))
    assert attention & everything.keys()
    assert selective.keys() == everything.keys() - attention


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_full_recomputation_keeps_what_enters_a_block(stage: int) -> None:
    graph = subject_of("GPT with dropout")[1].graph
    everything, full = (kept_of("GPT with dropout", name, stage) for name in ("none", "full"))
    inside = {name for name in full if in_block(graph, name)}
    assert len([name for name in everything if in_block(graph, name)]) > 10
    for name in inside:
        readers = [reader for output in named(graph, name).outputs for reader in graph.consumers()[output]]
        assert any(block_of(operator.module) != block_of(named(graph, name).module) for operator, _ in readers), name
    assert (
        sum(full[name] for name in inside) < sum(size for name, size in everything.items() if in_block(graph, name)) / 3
    )


def named(graph: Graph, name: str) -> Any:
    return next(operator for operator in graph.operators if operator.name == name)


def block_of(module: str) -> str:
    return ".".join(module.split(".")[:2]) if module.startswith("blocks.") else ""


def in_block(graph: Graph, name: str) -> bool:
    return any(operator.name == name and block_of(operator.module) for operator in graph.operators)
