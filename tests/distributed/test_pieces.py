"""Matrix products in pieces, while their rows are gathered or scattered: equal to the plain form and to one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture.batch import take_apart
from meshwright.capture.builder import Capture, capture
from meshwright.comm.groups import from_rank_0
from meshwright.errors import PlanError
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.operator_algorithm import in_pieces
from meshwright.ir.plan import starred
from meshwright.ir.program import Program
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.plans import PlanLowering
from meshwright.lower.stage import lower_stage
from meshwright.ops import collectives
from tests.distributed import lockstep, oracle
from tests.distributed.lockstep import run_step
from tests.distributed.oracle import plan_of
from tests.distributed.pool import Ranks
from tests.tries import tries

TOLERANCE = 1e-12


class Block(nn.Module):
    """Two products as of a transformer's feed-forward layer, and one that reads the same rows as the first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        result: Tensor = x + self.down(torch.nn.functional.silu(self.gate(rows)) * self.up(rows))
        return result


class Blocks(nn.Module):
    """Two blocks over rows that sequence parallelism divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.first, self.second = Block(width, hidden), Block(width, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.words(tokens)))
        return result


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Not invariant under permutations of rows."""
    output = model(batch["tokens"])
    weights = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos()
    return (output * weights).sum() / output.shape[0]


@cache
def captured(batch: int, sequence: int) -> tuple[nn.Module, dict[str, Tensor], Capture]:
    torch.manual_seed(5)
    model = Blocks(4, 6).double()
    inputs = {"tokens": torch.randint(11, (batch, sequence))}
    return model, inputs, capture(model, loss_fn, inputs)


def divided(plan: mw.Plan, graph: Graph, pieces: int) -> mw.Plan:
    """The plan, in which every product runs in so many pieces, if its rows are gathered or scattered."""
    names = {operator.name for operator in graph.operators if operator.target.startswith("aten.mm.")}
    stages = []
    for stage in plan.stages:
        held = set(map(starred, stage.strategies))
        own = {name: in_pieces(pieces) for name in map(starred, names) if name in held}
        stages.append(msgspec.structs.replace(stage, operator_algorithms=own))
    return msgspec.structs.replace(plan, stages=tuple(stages))


def serial(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_fn(model, inputs)
    loss.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return loss.detach(), gradients


def values_of(model: nn.Module, inputs: dict[str, Tensor], graph: Graph) -> dict[str, Any]:
    return {
        **{name: value.detach() for name, value in model.named_parameters()},
        **dict(zip(graph.inputs, take_apart(inputs).tensors.values(), strict=True)),
    }


def count(graphs: list[torch.fx.Graph]) -> Counter[Any]:
    return Counter(node.target for node in graphs[0].nodes if node.target in collectives.STARTS)


@settings(tries(8), phases=[Phase.explicit, Phase.generate])
@given(
    batch=st.integers(1, 2),
    sequence=st.sampled_from([3, 4, 6, 7]),
    tp=st.sampled_from([2, 3]),
    chunks=st.integers(1, 3),
)
def test_pieces_equal_one_process_for_all_shapes(batch: int, sequence: int, tp: int, chunks: int) -> None:
    model, inputs, shared = captured(batch, sequence)
    plain = plan_of(shared.graph, mw.Layout(tp=tp, sequence_parallel=True), tp)
    values = values_of(model, inputs, shared.graph)
    expected_loss, expected = serial(model, inputs)
    _, before = run_step(shared, plain, values)
    result, graphs = run_step(shared, divided(plain, shared.graph, tp * chunks), values)
    assert oracle.error_of(result.loss, expected_loss) < TOLERANCE
    assert oracle.largest_error({k: v for k, v in result.gradients.items() if v is not None}, expected) < TOLERANCE
    plainly, moved = count(before), count(graphs)
    replaced = sum(
        plainly[collective] - moved[collective] for collective in (collectives.ALL_GATHER, collectives.REDUCE_SCATTER)
    )
    assert replaced >= (7 if batch > 1 and sequence % tp == 0 else 1)
    assert moved[collectives.SHIFT] == replaced * (tp - 1) * min(chunks, batch * -(-sequence // tp))


@pytest.mark.parametrize("sequence", [6, 7])
def test_in_shared_memory_the_products_are_pytorchs(sequence: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, shared = captured(2, sequence)
    plan = divided(plan_of(shared.graph, mw.Layout(tp=2, sequence_parallel=True), 2), shared.graph, 2)
    expected_loss, expected = serial(model, inputs)

    def lower(planned: PlannedGraph, stage: int, groups: Mapping[str, AxisGroup], **rest: Any) -> Any:
        return lower_stage(planned, stage, groups, **rest, symmetric={group.name for group in groups.values()})

    monkeypatch.setattr(lockstep, "lower_stage", lower)
    result, graphs = run_step(shared, plan, values_of(model, inputs, shared.graph))
    assert oracle.error_of(result.loss, expected_loss) < TOLERANCE
    assert oracle.largest_error({k: v for k, v in result.gradients.items() if v is not None}, expected) < TOLERANCE
    targets = Counter(node.target for node in graphs[0].nodes)
    assert targets[collectives.GATHER_MULTIPLY]
    assert targets[collectives.MULTIPLY_SCATTER] or sequence % 2
    assert not targets[collectives.SHIFT]


def wire_bytes(program: Program) -> int:
    """The bytes that a rank sends."""
    total = 0
    for node in (node for phase in program.phases for node in phase.nodes):
        if (each := node.starts) is not None:
            whole = each.bytes * (each.size - 1) // each.size
            total += {"shift": each.bytes, "all_reduce": 2 * whole}.get(each.kind, whole)
    return total


@pytest.mark.parametrize("sequence", [6, 7])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_words_on_the_wire_are_those_of_the_plain_form(sequence: int, tp: int, chunks: int) -> None:
    _, _, shared = captured(2, sequence)
    plain = plan_of(shared.graph, mw.Layout(tp=tp, sequence_parallel=True), tp)
    lowering = PlanLowering(shared.graph)
    (before,), (after,) = lowering(plain), lowering(divided(plain, shared.graph, tp * chunks))
    assert any(
        node.starts is not None and node.starts.kind == "shift" for phase in after.phases for node in phase.nodes
    )
    assert wire_bytes(after) == wire_bytes(before)
    flops = [sum(node.flops for phase in program.phases for node in phase.nodes if "mm" in node.target)
             for program in (before, after)]  # fmt: skip
    assert flops[1] >= flops[0]
    assert flops[1] == flops[0] or sequence % tp


@pytest.mark.parametrize("text", ["pieces", "pieces 0", "pieces two", "flash", "pieces 4 5"])
def test_other_words_are_no_algorithm_of_products(text: str) -> None:
    _, _, shared = captured(2, 6)
    plan = plan_of(shared.graph, mw.Layout(tp=2, sequence_parallel=True), 2)
    stage = msgspec.structs.replace(plan.stage, operator_algorithms={"first.up:mm#0": text})
    with pytest.raises(PlanError, match="no algorithm of matrix products"):
        PlanLowering(shared.graph)(msgspec.structs.replace(plan, stages=(stage,)))


def test_the_number_of_pieces_is_a_multiple_of_the_ranks() -> None:
    _, _, shared = captured(2, 6)
    plan = plan_of(shared.graph, mw.Layout(tp=3, sequence_parallel=True), 3)
    with pytest.raises(PlanError, match="4 pieces of a product that 3 ranks share"):
        PlanLowering(shared.graph)(divided(plan, shared.graph, 4))


LAYOUTS = {
    "tp2": mw.Layout(tp=2, sequence_parallel=True),
    "tp2 x pp2": mw.Layout(tp=2, pp=2, microbatches=2, sequence_parallel=True),
    "dp2 x tp2, zero 3, recompute": mw.Layout(
        dp=2, tp=2, zero=3, microbatches=2, recompute="full", sequence_parallel=True
    ),
    "tp2, then one rank": mw.Layout(pp=2, stage_sizes=({"tp": 2}, {"tp": 1}), microbatches=2, sequence_parallel=True),
}


def train(layout: mw.Layout, algorithm: str) -> tuple[oracle.LargestErrors, int]:
    """A GPT whose products run in pieces beside one process; and on rank 0, the shifts in the stages' programs."""
    torch.manual_seed(3)
    serial_run, subject = (oracle.gpt(True, size=4) for _ in range(2))
    subject.model.load_state_dict(serial_run.model.state_dict())
    subject = oracle.Subject(subject.model, subject.loss_fn, serial_run.batches)
    before = {name: value.clone() for name, value in serial_run.model.state_dict().items()}
    graph = oracle.captured("pieces", subject).graph

    def planned() -> bytes:
        plan = divided(plan_of(graph, layout, layout.num_ranks), graph, 4)
        own = dict.fromkeys(plan.algorithms, algorithm) if algorithm else plan.algorithms
        return encode_json(msgspec.structs.replace(plan, algorithms=own))

    plan = decode(from_rank_0(planned), mw.Plan, where="plan of rank 0")
    optimizer = oracle.OPTIMIZERS["SGD"]
    expected = oracle.reference(serial_run, optimizer, 0.1, key="pieces")
    run, trainer = oracle.in_parallel(subject, plan, optimizer, 0.1, oracle.sharing_capture("pieces"))
    if trainer.rank:
        return oracle.compared(before, expected, run, trainer), 0
    starts = Counter(
        node.starts.kind for program in PlanLowering(graph)(plan) for phase in program.phases
        for node in phase.nodes if node.starts is not None
    )  # fmt: skip
    return oracle.compared(before, expected, run, trainer), starts["shift"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.product if name == "tp2" else ()) for name in LAYOUTS]
)
def test_training_equals_one_process(ranks: Ranks, name: str) -> None:
    layout = LAYOUTS[name]
    every = ranks(layout.num_ranks, train, layout, "")
    for errors, _ in every:
        assert errors.error < TOLERANCE
        assert errors.moved > 1e-3
    assert every[0][1] > 8


def test_pieces_travel_by_torch_distributed_too(ranks: Ranks) -> None:
    for errors, _ in ranks(2, train, LAYOUTS["tp2"], "native"):
        assert errors.error < TOLERANCE
