"""Which products the planner runs in pieces, what they cost, and that they run on fake GPUs without a wait."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.cost.pieces import PieceCosts, part_of
from meshwright.cost.program import step_work
from meshwright.cost.work import Communicate, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.kernel import Kernel, Product
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.operator_algorithm import in_pieces
from meshwright.ir.plan import starred
from meshwright.ir.program import Collective, Node, Program
from meshwright.ir.software import Software
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.foretell import foretell
from meshwright.planner.pieces import pairs, with_pieces

H100 = "h100-dgx-ndr400x8"
LAYOUT = mw.Layout(tp=8, sequence_parallel=True)


@cache
def gpt(width: int = 4096, tokens: int = 2048, precision: Any = "bfloat16") -> Graph:
    """One block, wide enough that its products take as long as their transfers."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=1, width=width, heads=16, vocabulary=1024, sequence_length=tokens))
        batch = torch.zeros(4, tokens, dtype=torch.int64)
        return mw.capture(model, language_model_loss, {"tokens": batch, "targets": batch}, precision=precision)


def pieces_of(plan: mw.Plan) -> dict[str, str]:
    return {name: text for name, text in plan.stage.operator_algorithms.items() if text.startswith("pieces")}


def nodes_of(programs: tuple[Program, ...]) -> list[Node]:
    return [node for program in programs for phase in program.phases for node in phase.nodes]


def between_boxes(bits_per_s: float, latency_s: float = 1e-4, boxes: int = 2) -> Cluster:
    """Boxes of one CPU each."""
    base = load_cluster("cpu-local")
    level = Level(name="network", fan_out=boxes, alpha_s=latency_s, beta_s_per_byte=8 / bits_per_s)
    return msgspec.structs.replace(base, name="boxes", num_devices=boxes, levels=(level,), collectives=())


def test_gpus_of_a_box_run_products_in_pieces_where_they_are_faster() -> None:
    graph, cluster = gpt(), load_cluster(H100)
    plan = mw.plan(graph, cluster, devices=8, layout=LAYOUT)
    chosen = pieces_of(plan)
    assert chosen
    plain = msgspec.structs.replace(plan.stage, operator_algorithms={})
    whole = msgspec.structs.replace(plan, stages=(plain,))
    lowering = PlanLowering(graph)
    costs = PieceCosts(plan.mesh, cluster)
    fast, slow = (sum(costs.played_s(phase.nodes) for phase in lowering(each)[0].phases) for each in (plan, whole))
    assert fast < slow
    assert {note.split for note in plan.notes} >= set(chosen.values())
    shifts = [node for node in nodes_of(lowering(plan)) if node.starts is not None and node.starts.kind == "shift"]
    assert shifts
    assert all(any(other.waits == shift.name for other in nodes_of(lowering(plan))) for shift in shifts)


@pytest.mark.parametrize("why", ["memory is shared", "products are small", "the link is fast"])
def test_the_plain_form_is_taken_where_it_is_faster(why: str) -> None:
    if why == "memory is shared":  # ranks of a box move the bytes themselves, and cannot compute meanwhile
        plan = mw.plan(
            gpt(256, 256, None), load_cluster("cpu-local"), devices=2, layout=mw.Layout(tp=2, sequence_parallel=True)
        )
    elif why == "products are small":
        plan = mw.plan(gpt(64, 32), load_cluster(H100), devices=8, layout=LAYOUT)
    else:
        plan = mw.plan(
            gpt(256, 256, None),
            between_boxes(1e13, latency_s=0.0),
            devices=2,
            layout=mw.Layout(tp=2, sequence_parallel=True),
        )
    assert not pieces_of(plan)


def test_a_slow_host_launches_plain_products_as_a_graph_instead_of_pieces() -> None:
    """Pieces are faster on the device alone, but shifts between ranks cannot be part of a graph of kernels."""
    graph, layout = gpt(2048, 1024), mw.Layout(dp=2, tp=4, sequence_parallel=True, microbatches=2)
    slow = msgspec.structs.replace(load_cluster(H100), software=Software(name="slow launches", code="eager"))
    plan = mw.plan(graph, slow, devices=8, layout=layout)
    assert plan.graphs
    assert not pieces_of(plan)


def test_cpus_of_two_boxes_compute_while_the_network_carries_pieces() -> None:
    graph, cluster = gpt(256, 256, None), between_boxes(2e9)
    plan = mw.plan(graph, cluster, devices=2, layout=mw.Layout(tp=2, sequence_parallel=True))
    assert pieces_of(plan)
    (work,) = step_work(PlanLowering(graph)(plan), plan, cluster).stages
    pieces = [piece for kind in ("F", "B") for piece in work.pieces[kind]]
    shifts = [piece for piece in pieces if isinstance(piece, Communicate) and piece.collective == "shift"]
    waits = {piece.what for piece in pieces if isinstance(piece, Wait)}
    assert shifts
    assert all(piece.blocking or piece.what in waits for piece in shifts), "the simulator sees each piece"
    whole = msgspec.structs.replace(plan.stage, operator_algorithms={})
    plain = msgspec.structs.replace(plan, stages=(whole,))
    lowering = PlanLowering(graph)
    fast, slow = (foretell(lowering, each, cluster).trace().duration_s for each in (plan, plain))
    assert fast < slow


@pytest.mark.parametrize("split", [0, 1])
def test_a_stage_with_sizes_of_its_own_has_pieces_of_its_own(split: int) -> None:
    cluster = between_boxes(2e9, boxes=3)
    sizes = tuple({"tp": 2 if stage == split else 1} for stage in range(2))
    layout = mw.Layout(pp=2, stage_sizes=sizes, microbatches=2, sequence_parallel=True)
    plan = mw.plan(gpt(256, 256, None), cluster, devices=3, layout=layout)
    held = {name for name in plan.stages[split].strategies if name.endswith(":mm#0")}
    divided = plan.stages[split].operator_algorithms
    assert set(divided.values()) <= {"pieces 2", "pieces 4"}
    assert held & divided.keys()
    assert not plan.stages[1 - split].operator_algorithms
    noted = {note.module for note in plan.notes if note.split.startswith("pieces")}
    assert all(any(name.startswith(module.partition(": ")[2].split(" ")[0]) for name in divided) for module in noted)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_pieces_take_as_long_as_a_ring_that_is_played(kind: Any, size: int, chunks: int) -> None:
    """The oracle: every rank's every step, event by event."""
    mesh, cluster = Mesh.of(tp=size), load_cluster(H100)
    costs = PieceCosts(mesh, cluster)
    rows, width, columns = 4096 * chunks, 1024, 2048
    product = Kernel("matmul", "bfloat16", 2.0 * rows * width * columns, 0, product=Product(rows, columns, width))
    num_bytes = 2 * rows * (width if kind == "all_gather" else columns)
    collective, pieces = Collective(kind, "tp", size, num_bytes), size * chunks
    part_s, whole_s = (
        costs.played_s([Node(name="mm", target="aten.mm.default", kernels=(kernel,))])
        for kernel in (part_of(product, pieces), product)
    )
    compute_s = max(part_s, whole_s / pieces)
    shift = Collective("shift", "tp", size, num_bytes // pieces)
    shift_s = costs.played_s([Node(name="a", target="", starts=shift), Node(name="b", target="", waits="a")])
    add_s = 0.0
    if kind == "reduce_scatter":
        add = Kernel("pointwise", "bfloat16", 0.0, 3 * num_bytes // pieces)
        add_s = costs.played_s([Node(name="add", target="aten.add.Tensor", kernels=(add,))])
    now, link, arrived = 0.0, 0.0, dict[tuple[int, int], float]()

    def send(step: int, chunk: int, ready: float) -> None:
        nonlocal link
        link = max(link, ready) + shift_s
        arrived[step, chunk] = link

    if kind == "all_gather":
        for chunk in range(chunks):
            send(1, chunk, 0.0)
    for step in range(size):
        for chunk in range(chunks):
            if kind == "all_gather":
                if step:
                    now = max(now, arrived[step, chunk])
                    if step < size - 1:
                        send(step + 1, chunk, now)
                now += compute_s
            else:
                now += compute_s
                if step:
                    now = max(now, arrived[step, chunk]) + add_s
                if step < size - 1:
                    send(step + 1, chunk, now)
    assert costs.pieces_s(product, collective, pieces) == pytest.approx(now, rel=1e-9)


def test_pairs_are_products_whose_rows_travel() -> None:
    graph = gpt()
    plan = mw.plan(graph, load_cluster("cpu-local"), devices=2, layout=mw.Layout(tp=2, sequence_parallel=True))
    (program,) = PlanLowering(graph)(plan)
    all_pairs = [pair for phase in program.phases for pair in pairs(phase)]
    kinds = {(pair.backward, pair.collective.kind) for pair in all_pairs}
    assert kinds == {(back, kind) for back in (False, True) for kind in ("all_gather", "reduce_scatter")}
    assert all(pair.product.product is not None and pair.collective.size == 2 for pair in all_pairs)
    for pair in all_pairs:
        m, n, k, _ = pair.product.product or Product(0, 0, 0)
        width = k if pair.collective.kind == "all_gather" else n
        assert pair.collective.bytes in (2 * m * width, 4 * m * width), "in bfloat16, or cast to float32"


def test_a_plan_without_tensor_parallelism_is_left_as_it_is() -> None:
    graph, cluster = gpt(), load_cluster(H100)
    plan = mw.plan(graph, cluster, devices=2, layout=mw.Layout(dp=2))
    assert with_pieces(PlanLowering(graph), plan, graph, cluster) is plan


def test_a_dry_run_on_gpus_finds_nothing_to_wait_for() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=16, heads=4, vocabulary=64, sequence_length=12))
    tokens = torch.randint(64, (4, 12))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    graph = mw.capture(model, language_model_loss, batch)
    layout = mw.Layout(tp=2, pp=2, microbatches=2, sequence_parallel=True)
    plan = mw.plan(graph, load_cluster(H100), devices=4, layout=layout)
    names = {starred(operator.name) for operator in graph.operators if operator.target.startswith("aten.mm.")}
    stages = tuple(
        msgspec.structs.replace(
            stage,
            operator_algorithms={name: in_pieces(4) for name in names if name in set(map(starred, stage.strategies))},
        )
        for stage in plan.stages
    )
    plan = msgspec.structs.replace(plan, stages=stages)
    assert any(node.starts is not None and node.starts.kind == "shift" for node in nodes_of(PlanLowering(graph)(plan)))
    report = mw.dry_run(model, language_model_loss, batch, plan=plan, cluster=H100)
    assert report.clean, report.findings
