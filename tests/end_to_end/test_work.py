"""The work of a step, beside what is lowered for it: the same collectives, the same memory from forward to backward."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

import meshwright as mw
from meshwright.capture.builder import Capture, capture
from meshwright.catalog import load_cluster
from meshwright.cost.closed_form import predict_step
from meshwright.cost.kernels import Rates
from meshwright.cost.node_costs import VIEW_LAUNCHES, NodeCosts
from meshwright.cost.optimizer import ADAMW, MOMENTUM, SGD
from meshwright.cost.program import HeldBytes, stage_held, step_work
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.ir.halo import most_rows
from meshwright.ir.mesh import AxisGroup, members
from meshwright.ir.plan import Plan
from meshwright.ir.program import Program
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.ir.software import Software
from meshwright.lower.counts import Counter as Kernels
from meshwright.lower.partition import LoweredStage
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.plans import PlanLowering
from meshwright.lower.stage import lower_stage
from meshwright.models import (
    GPT,
    MLP,
    GPTConfig,
    ResNet,
    UNet,
    classification_loss,
    language_model_loss,
    segmentation_loss,
)
from meshwright.ops import collectives
from meshwright.ops.base import Call
from meshwright.planner.foretell import foretell
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from tests.distributed import oracle

CPU = load_cluster("cpu-local", 4)
GPU = load_cluster("a100-80gb-dgx")
KINDS = {
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
    collectives.GATHER_PARTS: "all_gather",
    collectives.REDUCE_TO_PARTS: "reduce_scatter",
    collectives.HALO_EXCHANGE: "halo",
    collectives.HALO_REDUCE: "halo",
    collectives.HALO_RETURN: "halo",
    collectives.ALL_TO_ALL: "all_to_all",
}


@cache
def captured(model: str) -> Capture:
    torch.manual_seed(0)
    if model == "GPT":
        tokens = torch.zeros(8, 16, dtype=torch.int64)
        config = GPTConfig(layers=2, width=32, heads=4, vocabulary=64, sequence_length=16)
        return capture(GPT(config), language_model_loss, {"tokens": tokens, "targets": tokens})
    label = torch.zeros(8, dtype=torch.int64)
    if model == "U-Net":
        picture = {"image": torch.zeros(2, 3, 16, 16), "label": torch.zeros(2, 16, 16, dtype=torch.int64)}
        return capture(UNet(1, 4), segmentation_loss, picture)
    if model == "ResNet":
        return capture(ResNet(8, 4), classification_loss, {"image": torch.zeros(8, 3, 16, 16), "label": label})
    return capture(MLP((16, 32, 32, 10)), classification_loss, {"inputs": torch.zeros(8, 16), "label": label})


def planned(model: str, **layout: Any) -> Plan:
    asked = mw.Layout(batch_statistics="microbatch" if layout.get("microbatches", 1) > 1 else "global", **layout)
    return oracle.plan_of(captured(model).graph, asked, asked.num_ranks, CPU)


@cache
def lowering(model: str) -> PlanLowering:
    return PlanLowering(captured(model).graph)


def lowered(model: str, plan: Plan) -> tuple[Program, ...]:
    return lowering(model)(plan)


def work_of(model: str, cluster: mw.Cluster = CPU, **layout: Any) -> StepWork:
    plan = planned(model, **layout)
    return step_work(lowered(model, plan), plan, cluster)


AXES = {"dp", "dp_shard", "tp", "pp", "sy", "sx"}


def groups_of(plan: Plan) -> dict[str, AxisGroup]:
    names = dict.fromkeys((*plan.mesh.names, *plan.algorithms))
    sizes = {name: plan.mesh.size(name) for name in names if plan.mesh.has(name)}
    return {name: AxisGroup(name, size, 0) for name, size in sizes.items() if size > 1}


def programs_of(model: str, plan: Plan) -> list[LoweredStage]:
    model_capture = captured(model)
    groups = {name: group for name, group in groups_of(plan).items() if name != "pp"}
    return [
        lower_stage(PlannedGraph(model_capture.graph, plan), stage, groups, rules=model_capture.rules)
        for stage in range(len(plan.stages))
    ]


def started(graph: fx.Graph) -> Counter[tuple[str, str, int]]:
    """The collectives of a lowered graph: kind, axis, bytes of the whole vector, or of what the busiest rank gets."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in KINDS:
            axis = next(
                argument for argument in node.args if isinstance(argument, str) and set(members(argument)) <= AXES
            )
            value = node.meta["val"]
            if KINDS[node.target] == "halo":
                counts["halo", str(axis), halo_bytes(node)] += 1
                continue
            largest = max(value.numel(), sum(source.meta.get("val", value).numel() for source in node.all_input_nodes))
            counts[KINDS[node.target], str(axis), largest * value.element_size()] += 1
    return counts


def halo_bytes(node: fx.Node) -> int:
    """What the busiest rank of a halo exchange gets."""
    given, dim, lows, highs, edges, *_ = cast(Any, node.args)
    value = given.meta["val"]
    ranges = tuple(zip(lows, highs, strict=True))
    return int(value.numel() // value.shape[dim] * most_rows(ranges, edges) * value.element_size())


def counted(pieces: tuple[Piece, ...]) -> Counter[tuple[str, str, int]]:
    return Counter((piece.collective, piece.axis, piece.bytes) for piece in pieces if isinstance(piece, Communicate))


WHOLE = [
    ("GPT", {"dp": 2}), ("GPT", {"tp": 2}), ("GPT", {"dp": 2, "tp": 2}), ("MLP", {"dp": 2}), ("MLP", {"tp": 2}),
    ("ResNet", {"dp": 2}), ("GPT", {"dp": 2, "zero": 1}), ("GPT", {"dp": 2, "tp": 2, "zero": 2}),
    ("GPT", {"dp": 4, "zero": 2, "zero_ranks": 2}), ("ResNet", {"dp": 2, "zero": 1}),
    ("ResNet", {"dp": 2}), ("ResNet", {"spatial": (2,)}), ("ResNet", {"dp": 2, "spatial": (2,)}),
    ("U-Net", {"spatial": (2, 2)}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), WHOLE, ids=str)
def test_a_step_in_one_piece_has_the_collectives_that_are_lowered(model: str, layout: dict[str, Any]) -> None:
    plan = planned(model, **layout)
    ran = started(programs_of(model, plan)[0].functions["prologue"].graph)
    (stage,) = step_work(lowered(model, plan), plan, CPU).stages
    foretold = sum((counted(pieces) for pieces in (stage.before, *stage.pieces.values())), Counter())
    assert foretold == ran


STAGED: list[tuple[str, dict[str, Any]]] = [
    ("GPT", {"microbatches": 4}),
    ("GPT", {"dp": 2, "microbatches": 2}),
    ("GPT", {"tp": 2, "microbatches": 2}),
    ("GPT", {"pp": 2, "microbatches": 4}),
    ("GPT", {"pp": 2, "dp": 2, "tp": 2, "microbatches": 2}),
    ("GPT", {"pp": 2, "microbatches": 4, "recompute": "selective"}),
    ("GPT", {"microbatches": 4, "recompute": "full"}),
    ("GPT", {"tp": 2, "microbatches": 2, "recompute": "full"}),
    ("MLP", {"pp": 2, "microbatches": 2}),
    ("MLP", {"dp": 2, "microbatches": 2}),
    ("ResNet", {"pp": 2, "microbatches": 4}),
    ("ResNet", {"microbatches": 4, "recompute": "full"}),
    ("GPT", {"dp": 2, "zero": 3}),
    ("GPT", {"dp": 2, "zero": 1, "microbatches": 2}),
    ("GPT", {"dp": 2, "zero": 2, "microbatches": 2}),
    ("GPT", {"dp": 2, "zero": 3, "microbatches": 2, "recompute": "full"}),
    ("GPT", {"dp": 4, "zero": 3, "zero_ranks": 2, "microbatches": 2}),
    ("GPT", {"dp": 2, "zero": 1, "pp": 2, "microbatches": 2}),
    ("GPT", {"dp": 2, "tp": 2, "zero": 3}),
    ("MLP", {"dp": 2, "zero": 3}),
    ("ResNet", {"dp": 2, "zero": 3}),
    ("ResNet", {"pp": 2, "spatial": (2,), "microbatches": 2}),
    ("U-Net", {"spatial": (2,), "microbatches": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(("model", "layout"), STAGED, ids=str)
def test_a_step_in_phases_has_the_collectives_that_are_lowered(model: str, layout: dict[str, Any]) -> None:
    plan = planned(model, **layout)
    work = step_work(lowered(model, plan), plan, CPU)
    for program, stage in zip(programs_of(model, plan), work.stages, strict=True):
        ran = {name: started(phase.graph) for name, phase in program.functions.items()}
        own = Counter({key: count for key, count in counted(stage.after).items() if key[1] != "pp"})
        counts = sum((counted(stage.pieces[kind]) for kind in ("F", "B", "REDUCE_GRAD")), own + counted(stage.before))
        assert counts == sum((ran[name] for name in ("prologue", "forward", "backward", "reduce", "finish")), Counter())
        if len(work.stages) > 1:
            parts = counted(stage.pieces["I"]) + counted(stage.pieces["W"])
            assert parts == ran["input"] + ran["weight"] == counted(stage.pieces["B"])


def kept_bytes(lowered: LoweredStage) -> int:
    """What the executor keeps of a micro-batch until its backward, by storage."""
    program, functions = lowered.program, lowered.functions
    late = {name for phase in ("backward", "input", "weight") for name in functions[phase].inputs}
    received = (transfer.value.name for transfer in program.crossing(ActionKind.RECV_F))
    names = {*functions["forward"].outputs, *received} & late
    nodes = {node.name: node for phase in ("forward", "backward") for node in functions[phase].graph.nodes}
    storages = {name: nodes[name].meta["val"].untyped_storage() for name in names}
    held = (*program.parameters, *program.buffers, *program.inputs)
    whole_step = {*(entry.value for entry in held), *program.slices}
    given = {
        node.meta["val"].untyped_storage()._cdata
        for phase in functions.values()
        for node in phase.graph.nodes
        if node.op == "placeholder" and node.name in whole_step
    }
    return sum(
        {storage._cdata: storage.nbytes() for storage in storages.values() if storage._cdata not in given}.values()
    )


@pytest.mark.parametrize(("model", "layout"), STAGED, ids=str)
def test_what_is_saved_is_what_the_executor_keeps(model: str, layout: dict[str, Any]) -> None:
    plan = planned(model, **layout)
    work = step_work(lowered(model, plan), plan, CPU)
    for each, stage in zip(programs_of(model, plan), work.stages, strict=True):
        assert stage.saved_bytes == kept_bytes(each), each.program.stage


# --- by hand ---------------------------------------------------------------------------------------------------------


def step_s(model: str, cluster: mw.Cluster = CPU, **layout: Any) -> float:
    plan = planned(model, **layout)
    work = step_work(lowered(model, plan), plan, cluster)
    return predict_step(work, schedule_of(plan), plan.mesh, cluster).step_s


def schedule_of(plan: Plan) -> Schedule:
    schedule = build(plan.schedule, plan.mesh.size("pp") if "pp" in plan.mesh.names else 1, plan.microbatches, 1)
    return add_reduction(add_communication(schedule))


def flops(pieces: tuple[Piece, ...]) -> float:
    return sum(piece.flops for piece in pieces if isinstance(piece, Compute))


@pytest.mark.parametrize("model", ["GPT", "MLP", "ResNet"])
def test_one_rank_computes_every_flop_once(model: str) -> None:
    (stage,) = work_of(model).stages
    total = flops(stage.pieces["F"]) + flops(stage.pieces["B"])
    assert total == pytest.approx(captured(model).graph.flops(), rel=0.02)


def test_a_scatter_into_memory_of_its_input_moves_only_what_it_changes() -> None:
    """The gradient of the loss: 8 x 16 labels of 64 words each; an index, a source, and an element read and written."""
    nodes = lowered("GPT", planned("GPT"))[0].phase("backward").nodes
    (scatter,) = (node for node in nodes if node.target == "aten.scatter_add.out")
    assert [(kernel.kind, kernel.bytes) for kernel in scatter.kernels] == [("scatter", 8 * 16 * (8 + 3 * 4))]
    aten = torch.ops.aten
    x, index, source, other = (
        torch.zeros(9, 64),
        torch.zeros(9, 1, dtype=torch.int64),
        torch.zeros(9, 1),
        torch.ones(9, 64),
    )
    for target, kwargs in ((aten.scatter_add.default, {}), (aten.scatter_add.out, {"out": other})):
        (kernel,) = Kernels({}).kernels(Call(target, (x, 1, index, source), kwargs, (other,)))
        assert kernel.bytes == 4 * (2 * 9 * 64 + 9) + 8 * 9, "all of x is copied first"


@pytest.mark.parametrize("layout", [{"dp": 2}, {"microbatches": 2}, {"dp": 2, "microbatches": 4}], ids=str)
def test_a_divided_batch_divides_products(layout: dict[str, Any]) -> None:
    parts = layout.get("dp", 1) * layout.get("microbatches", 1)
    (whole,), (part,) = work_of("MLP").stages, work_of("MLP", **layout).stages
    assert flops(part.pieces["F"]) == pytest.approx(flops(whole.pieces["F"]) / parts, rel=0.01)
    assert flops(part.pieces["B"]) == pytest.approx(flops(whole.pieces["B"]) / parts, rel=0.02), "and sums"


def test_stages_share_the_flops_and_pass_the_hidden_state() -> None:
    first, last = work_of("GPT", pp=2, microbatches=4).stages
    total = sum(flops(stage.pieces[kind]) for stage in (first, last) for kind in "FB")
    assert total == pytest.approx(captured("GPT").graph.flops() / 4, rel=0.02)
    assert (first.sent_up_bytes, first.sent_down_bytes) == (2 * 16 * 32 * 4, 0)
    assert (last.sent_up_bytes, last.sent_down_bytes) == (0, 2 * 16 * 32 * 4)


def seconds(pieces: tuple[Piece, ...]) -> float:
    return sum(piece.seconds for piece in pieces if isinstance(piece, Compute))


def test_a_backward_in_two_parts_computes_what_one_does() -> None:
    for stage in work_of("GPT", pp=2, microbatches=4).stages:
        two = seconds(stage.pieces["I"]) + seconds(stage.pieces["W"])
        assert two == pytest.approx(seconds(stage.pieces["B"]), rel=1e-9)


def test_recomputation_saves_less_and_computes_more() -> None:
    (kept,), (again,) = (work_of("GPT", microbatches=4, recompute=recompute).stages for recompute in ("none", "full"))
    assert again.saved_bytes < kept.saved_bytes / 4
    assert flops(kept.pieces["B"]) < flops(again.pieces["B"]) < flops(kept.pieces["B"]) + flops(kept.pieces["F"])
    assert again.pieces["F"] == kept.pieces["F"]


def test_what_is_held_is_parameters_gradients_and_the_states_of_the_optimizer() -> None:
    graph, plan = captured("MLP").graph, planned("MLP", microbatches=2)
    programs = lowered("MLP", plan)
    size = graph.num_parameters() * 4
    for optimizer, states in ((SGD, 0), (MOMENTUM, 1), (ADAMW, 2)):
        held = stage_held(programs, plan, 0, CPU, optimizer)
        assert (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes) == (size, size, states * size)
        assert held.inputs_bytes == 8 * 16 * 4 + 8 * 8
        (stage,) = step_work(programs, plan, CPU, optimizer=optimizer).stages
        assert stage.held_bytes == held.total_bytes


def held(model: str, **layout: Any) -> HeldBytes:
    plan = planned(model, **layout)
    return stage_held(lowered(model, plan), plan, 0, CPU, ADAMW)


def test_ranks_that_share_by_zero_hold_half_of_more_and_more() -> None:
    """Parameters (and, whole, those that are gathered once a step), gradients, two states."""
    size = captured("MLP").graph.num_parameters() * 4
    parts = {}
    for zero in (0, 1, 2, 3):
        memory = held("MLP", dp=2, zero=zero, microbatches=2)
        parts[zero] = (memory.parameters_bytes, memory.gathered_bytes, memory.gradients_bytes, memory.optimizer_bytes)
    assert parts == {
        0: (size, 0, size, 2 * size),
        1: (size // 2, size, size, size),
        2: (size // 2, size, size // 2, size),
        3: (size // 2, 0, size // 2, size),
    }


def test_gathers_hide_behind_the_layers_before_on_a_gpu() -> None:
    pieces = work_of("MLP", GPU, dp=2, zero=3).stages[0].pieces["F"]
    gathers = [piece for piece in pieces if isinstance(piece, Communicate) and piece.collective == "all_gather"]
    assert [gather.blocking for gather in gathers] == [True], "one bucket holds it all"
    plan = planned("MLP", dp=2, zero=3)
    (gather,) = plan.gathers
    layers = [gather.parameters[k : k + 2] for k in range(0, len(gather.parameters), 2)]
    plan = msgspec.structs.replace(
        plan, gathers=tuple(msgspec.structs.replace(gather, parameters=names) for names in layers)
    )
    (stage,) = step_work(lowered("MLP", plan), plan, GPU).stages
    kinds = [(type(piece).__name__, getattr(piece, "blocking", True)) for piece in stage.pieces["F"]]
    begun, awaited, computed = ("Communicate", False), ("Wait", True), ("Compute", True)
    assert kinds[:5] == [("Communicate", True), begun, computed, awaited, begun]


def test_tensor_parallel_ranks_hold_half_of_what_is_split() -> None:
    whole, half = held("MLP").parameters_bytes, held("MLP", tp=2).parameters_bytes
    assert whole / 2 <= half < 0.6 * whole


def test_the_gradients_of_tied_weights_are_joined_over_the_stages() -> None:
    for stage in work_of("GPT", pp=2, microbatches=2).stages:
        joined = [piece for piece in stage.after if isinstance(piece, Communicate) and piece.collective == "all_reduce"]
        assert [(piece.axis, piece.bytes) for piece in joined] == [("pp", 64 * 32 * 4)]


def waits(stage: StageWork) -> int:
    return sum(isinstance(piece, Wait) for pieces in stage.pieces.values() for piece in pieces)


def test_collectives_hide_behind_compute_but_on_a_cpu_where_ranks_move_the_bytes_themselves() -> None:
    (cpu,), (gpu,) = work_of("GPT", CPU, dp=2).stages, work_of("GPT", GPU, dp=2).stages
    assert waits(cpu) == 0
    assert waits(gpu) > 0
    started_before: set[str] = set()
    for piece in (*gpu.before, *gpu.pieces["F"], *gpu.pieces["B"]):
        if isinstance(piece, Communicate):
            assert piece.what not in started_before
            started_before.add(piece.what)
        elif isinstance(piece, Wait):
            assert piece.what in started_before


@pytest.mark.parametrize("model", ["GPT", "MLP"])
def test_clipping_and_a_larger_optimizer_take_longer(model: str) -> None:
    plan = planned(model)
    plain, clipped, adam = (
        seconds(step_work(lowered(model, plan), plan, CPU, **options).stages[0].after)
        for options in ({}, {"clips": True}, {"optimizer": ADAMW})
    )
    assert plain < clipped
    assert plain < adam


def test_two_ranks_are_faster_than_one_and_a_pipeline_pays_its_bubble() -> None:
    one_rank_s, two_ranks_s = step_s("MLP"), step_s("MLP", CPU_WITHOUT_LATENCY, dp=2)
    assert one_rank_s / 2.2 < two_ranks_s < one_rank_s
    many, few = (step_s("GPT", pp=2, microbatches=m, schedule="gpipe") for m in (4, 2))
    busy = sum(seconds(stage.pieces[kind]) for stage in work_of("GPT", pp=2, microbatches=4).stages for kind in "FB")
    assert many > 4 * busy / 2
    assert few > 0


def test_a_kernel_costs_its_dispatch_and_the_larger_of_arithmetic_and_memory() -> None:
    device = load_cluster("cpu-local").device
    rates = Rates(device)
    peak, bandwidth = device.peak("float32"), device.memory_bandwidth_bytes_per_s
    assert rates.seconds("matmul", "float32", 1e9, 8.0) == rates.kernel_s + 1e9 / peak
    assert rates.seconds("matmul", "float32", 8.0, 1e9) == rates.kernel_s + 1e9 / bandwidth
    assert rates.seconds("pointwise", "float32", 1e12, 1e6) == rates.kernel_s + 1e6 / bandwidth


def with_numbers(cluster: mw.Cluster, *, launches: bool = True, **numbers: float) -> mw.Cluster:
    """``launches``: the host takes time to launch kernels."""
    kernels, software = cluster.device.kernels, msgspec.structs.replace(Software(), **numbers)
    assert kernels is not None
    kernels = kernels if launches else msgspec.structs.replace(kernels, launch_s=0.0)
    device = msgspec.structs.replace(cluster.device, kernels=kernels)
    return msgspec.structs.replace(cluster, device=device, software=software)


@pytest.mark.parametrize("model", ["GPT", "ResNet"])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2, "microbatches": 2}], ids=str)
def test_launches_bound_every_action_where_the_host_launches_ahead(model: str, layout: dict[str, Any]) -> None:
    fast, slow = (work_of(model, with_numbers(GPU, launches=there), **layout).stages for there in (False, True))
    plan, launch_s = planned(model, **layout), Rates(GPU.device).launch_s
    for before, after, program in zip(fast, slow, lowered(model, plan), strict=True):
        for kind, phase in (("F", "forward"), ("B", "backward")):
            nodes = program.phase(phase).nodes
            launches = sum(Rates(GPU.device).cost(kernel).launches for node in nodes for kernel in node.kernels)
            device_s, taken_s = (seconds(stage.pieces[kind]) for stage in (before, after))
            assert taken_s >= max(device_s, launches * launch_s) * (1 - 1e-6)
            waits_s = sum(piece.host_s for piece in after.pieces[kind] if isinstance(piece, Compute))
            assert taken_s - waits_s == pytest.approx(device_s, rel=1e-3), "the rest is the device's"
    assert work_of(model, with_numbers(CPU, host=20.0), **layout) == work_of(model, CPU, **layout), (
        "it launches its own"
    )


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("model", ["GPT", "ResNet"])
def test_every_view_counts_for_the_host_of_a_gpu(model: str, layout: dict[str, Any]) -> None:
    """Views between two collectives too: a device has nothing to do for them."""
    plan = planned(model, **layout)
    (stage,) = work_of(model, GPU, **layout).stages
    costs = NodeCosts(plan.mesh, GPU)
    for program in lowered(model, plan):
        for kind, phase in (("F", "forward"), ("B", "backward")):
            cost = costs.of(program.phase(phase).nodes)
            launch_s = sum(piece.launch_s for piece in stage.pieces[kind] if isinstance(piece, Compute))
            assert launch_s == pytest.approx(costs.launch_s * cost.launches)
            nodes = program.phase(phase).nodes
            views = sum(not (node.kernels or node.starts or node.waits) for node in nodes)
            kernels = sum(costs.rates.cost(kernel).launches for node in nodes for kernel in node.kernels)
            assert views
            assert cost.launches == pytest.approx(kernels + VIEW_LAUNCHES * views)


def test_traffic_multiplies_what_other_kernels_than_products_and_the_optimizer_take() -> None:
    plain, more = (Rates(GPU.device, Software(traffic=traffic)) for traffic in (1.0, 2.0))
    moved_s = [rates.seconds("norm", "float32", 0.0, 1e9) - rates.kernel_s for rates in (plain, more)]
    assert moved_s[1] == pytest.approx(2 * moved_s[0])
    for kind in ("matmul", "attention", "update"):
        assert more.seconds(kind, "float32", 1e9, 1e9) == plain.seconds(kind, "float32", 1e9, 1e9)
    before, after = (work_of("GPT", with_numbers(GPU, traffic=t, launches=False)).stages[0] for t in (1.0, 2.0))
    assert seconds(after.pieces["F"]) > seconds(before.pieces["F"])
    assert seconds(after.after) == pytest.approx(seconds(before.after)), "the update's bytes are those of the optimizer"


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2, "microbatches": 4}], ids=str)
def test_the_rest_of_a_step_is_added_once(layout: dict[str, Any]) -> None:
    plan = planned("GPT", **layout)
    plain, slower = (foretell(lowering("GPT"), plan, with_numbers(GPU, step_s=s, launches=False)) for s in (0.0, 0.5))
    assert slower.played.step_s == pytest.approx(plain.played.step_s + 0.5)
    assert slower.trace().duration_s == pytest.approx(slower.played.step_s)
    schedule = schedule_of(plan)
    closed = [predict_step(plain.work, schedule, plan.mesh, with_numbers(GPU, step_s=s)).step_s for s in (0.0, 0.5)]
    assert closed[1] == pytest.approx(closed[0] + 0.5)
    assert slower.host_share > 0.5 > plain.host_share
    assert slower.deviation > plain.deviation, "what the host does is less certain"


class Counting(TorchFunctionMode):
    """Counts the calls of functions that it sees."""

    seen = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def test_function_modes_see_none_of_the_calls_of_lowering() -> None:
    plan = planned("GPT", tp=2)
    expected = PlanLowering(captured("GPT").graph)(plan)
    with Counting() as mode:
        torch.zeros(1)
        before = mode.seen
        assert PlanLowering(captured("GPT").graph)(plan) == expected
    assert mode.seen == before > 0


CPU_WITHOUT_LATENCY = mw.Cluster(
    name="ideal",
    num_devices=2,
    device=CPU.device,
    levels=(type(CPU.levels[0])(name="box", fan_out=2, alpha_s=0.0, beta_s_per_byte=1e-15),),
)
