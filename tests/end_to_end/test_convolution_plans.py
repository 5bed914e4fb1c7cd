"""Plans under a limit of workspace: what they choose stays within it, is counted, explained, kept in plan files, and
refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.api.times import load_times, times_file
from meshwright.cli import run as cli
from meshwright.cost.program import step_work
from meshwright.cost.scratch import scratch_bytes
from meshwright.errors import ClusterError, LayoutError, PlanError
from meshwright.ir import files
from meshwright.ir.algorithm_times import AlgorithmTimes, AlgorithmTiming
from meshwright.ir.convolution import algorithms_of, piece_work
from meshwright.ir.graph import Graph
from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.operator_algorithm import CONVOLUTIONS, NATIVE, parse, piece_sizes
from meshwright.ir.plan import starred
from meshwright.ir.plan_check import check_fits
from meshwright.ir.run import RunLayout
from meshwright.ir.stages import cut
from meshwright.lower.plans import PlanLowering
from meshwright.models import ResNet, classification_loss
from meshwright.planner.convolutions import sizes_of
from meshwright.planner.explicit import Ask, adapt_plan, plan_layout
from meshwright.runtime import algorithm_times
from meshwright.runtime.machine import machine_name
from tests.distributed import oracle

MIB = 2**20
LAYOUTS = [mw.Layout(), mw.Layout(dp=2, microbatches=2, batch_statistics="microbatch"), mw.Layout(spatial=(2,))]


@cache
def resnet(batch: int = 16) -> Graph:
    with torch.device("meta"):
        images = {"image": torch.zeros(batch, 3, 32, 32), "label": torch.zeros(batch, dtype=torch.int64)}
        return mw.capture(ResNet(depth=8, width=16), classification_loss, images)


def limited(layout: mw.Layout, limit: int, over: str = "operator") -> mw.Layout:
    return msgspec.structs.replace(layout, workspace_bytes=limit, workspace_over=over)


def scratch(graph: Graph, plan: mw.Plan) -> dict[str, int]:
    """By operator, the temporary bytes of its largest convolution on a rank."""
    by_operator: dict[str, int] = {}
    for program in PlanLowering(graph)(plan):
        for node in (node for phase in program.phases for node in phase.nodes if "convolution" in node.target):
            most = max(scratch_bytes(kernel, True) for kernel in node.kernels)
            by_operator[node.operator] = max(most, by_operator.get(node.operator, 0))
    return by_operator


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one rank", "dp2, 2 micro-batches", "rows"])
def test_every_convolution_stays_within_the_limit(layout: mw.Layout) -> None:
    graph = resnet(32)
    free = mw.plan(graph, layout=layout)
    limit = max(scratch(graph, free).values()) // 4
    plan = mw.plan(graph, layout=limited(layout, limit))
    assert free.stage.operator_algorithms == {}
    assert any("x" in text for text in plan.stage.operator_algorithms.values())
    assert 0 < max(scratch(graph, plan).values()) <= limit
    explained = plan.explain()
    for name, text in plan.stage.operator_algorithms.items():
        lines = [line for line in explained.splitlines() if line.split() and starred(line.split()[0]) == starred(name)]
        assert lines
        assert any(f"  {text}  " in line for line in lines)
        assert all(" of workspace, " in line and "by FLOPs and bytes" in line for line in lines)


def test_the_memory_of_a_rank_has_the_workspace() -> None:
    graph = resnet(64)
    known = mw.Cluster.load("cpu-local")
    peaks = {}
    for limit in (0, MIB // 4):
        plan = mw.plan(graph, known, layout=limited(mw.Layout(), limit))
        (work,) = step_work(PlanLowering(graph)(plan), plan, known).stages
        peaks[limit] = work.workspace_bytes
    assert peaks[0] - peaks[MIB // 4] > 2 * MIB


def test_a_budget_for_all_convolutions_together_is_kept() -> None:
    graph = resnet()
    plan = mw.plan(graph, layout=limited(mw.Layout(), 4 * MIB, "network"))
    # Both gradients of a convolution run in one call where both are PyTorch's own: it counts once, not twice.
    assert sum(scratch(graph, plan).values()) <= 4 * MIB
    assert set(plan.stage.operator_algorithms.values())


@pytest.mark.parametrize("over", ["operator", "network"])
def test_a_limit_that_nothing_fits_names_the_smallest_that_does(over: str) -> None:
    graph = resnet()
    with pytest.raises(LayoutError, match="workspace") as error:
        mw.plan(graph, layout=limited(mw.Layout(), 1024, over))
    least = int(error.value.remedy.split(" bytes")[0].split()[-1].replace(",", ""))
    assert least > 1024
    if over == "operator":
        assert "convolution" in error.value.where


def test_layouts_refuse_what_is_no_limit() -> None:
    graph = resnet()
    with pytest.raises(LayoutError, match="workspace_bytes=-1"):
        mw.plan(graph, layout=mw.Layout(workspace_bytes=-1))
    with pytest.raises(LayoutError, match="without a limit"):
        mw.plan(graph, layout=mw.Layout(workspace_over="network"))


def test_plan_files_keep_algorithms_and_other_batches_follow_them(tmp_path: Path) -> None:
    graph = resnet()
    plan = mw.plan(graph, layout=limited(mw.Layout(), MIB))
    files.save(plan, tmp_path / "plan.json")
    read = files.load(tmp_path / "plan.json", mw.Plan)
    assert read.stage.operator_algorithms == plan.stage.operator_algorithms != {}
    assert read.digest == plan.digest
    smaller = adapt_plan(plan, resnet(10))
    assert smaller.stage.operator_algorithms == plan.stage.operator_algorithms
    assert max(scratch(resnet(10), smaller).values()) <= MIB


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("stem:convolution#0", "fast", "'fast' is no algorithm"),
        ("stem:convolution#7", "fft", "there is no operator 'stem:convolution#7'"),
        ("head:mm#0", "fft", "it is no algorithm of matrix products"),
        ("blocks.1.conv1:convolution#0", "winograd(2)", "winograd(2) does not compute a convolution with these"),
    ],
)
def test_plans_refuse_algorithms_that_do_not_serve(name: str, text: str, problem: str) -> None:
    graph = resnet()
    plan = mw.plan(graph, layout=mw.Layout())
    stage = msgspec.structs.replace(plan.stage, operator_algorithms={name: text})
    plan = msgspec.structs.replace(plan, stages=(stage,))

    def lower() -> None:
        check_fits(plan, graph)
        PlanLowering(graph)(plan)

    with pytest.raises(PlanError) as error:
        lower()
    assert problem in error.value.problem


# --- measured times --------------------------------------------------------------------------------------------------


def table(graph: Graph, seconds: Callable[[ConvolutionSizes, str], float], deviation: float = 0.01) -> AlgorithmTimes:
    """Times of all convolutions of the graph on one rank, for all pieces."""
    lower, timings = PlanLowering(graph), []
    for operator in graph.operators:
        sizes = sizes_of(lower.operator(operator, {}, {})) if "aten.convolution" in operator.target else None
        for samples in piece_sizes(sizes.samples) if sizes is not None else ():
            assert sizes is not None
            piece = sizes._replace(samples=samples)
            for name in algorithms_of(sizes):
                workspace, part = piece_work(piece, name).workspace_bytes, samples < sizes.samples
                taken_s = samples * seconds(piece, name) + 0.01
                timings.append(AlgorithmTiming(piece, name, taken_s, deviation, workspace, part and name == NATIVE))
    return AlgorithmTimes(
        machine=machine_name(), torch=str(torch.__version__), threads=1, time_s=0, timings=tuple(timings)
    )


def planned(graph: Graph, times: AlgorithmTimes, layout: mw.Layout | None = None) -> mw.Plan:
    ask = Ask(lower=PlanLowering(graph), times=times)
    return plan_layout(graph, layout or mw.Layout(), world_size=1, cluster=mw.Cluster.load("cpu-local"), ask=ask)


@pytest.mark.parametrize(("faster", "deviation", "taken"), [(0.5, 0.01, True), (0.97, 0.01, False), (0.8, 0.2, False)])
def test_without_a_limit_another_algorithm_must_be_faster_by_more_than_the_noise(
    faster: float, deviation: float, taken: bool
) -> None:
    graph = resnet()
    plan = planned(graph, table(graph, lambda sizes, name: faster if name == "fft" else 1.0, deviation))
    texts = set(plan.stage.operator_algorithms.values())
    assert texts == ({"fft"} if taken else set())
    assert ("measured; native" in plan.explain()) == taken


def test_measured_pieces_are_divided_as_their_times_say() -> None:
    graph = resnet()
    times = table(graph, lambda sizes, name: 0.5 if (name, sizes.samples) == ("gemm", 4) else 1.0)
    plan = planned(graph, times)
    assert set(plan.stage.operator_algorithms.values()) == {"4x4 gemm"}


def test_a_measurement_has_native_and_others_and_is_kept(tmp_path: Path) -> None:
    graph = resnet(4)
    lower = PlanLowering(graph)
    sizes = next(sizes_of(lower.operator(op, {}, {})) for op in graph.operators if op.name.startswith("stem:conv"))
    assert sizes is not None
    times = algorithm_times.measure([sizes])
    names = {timing.algorithm for timing in times.timings}
    assert NATIVE in names <= set(CONVOLUTIONS)
    assert len(names) > 1
    assert {timing.sizes.samples for timing in times.timings if timing.algorithm == NATIVE} == {1, 2, 4}
    assert all(timing.seconds > 0 for timing in times.timings)
    files.save(times.joined(times), tmp_path / "times.json")
    assert load_times(tmp_path / "times.json") == times
    kept = {(timing.sizes.samples, timing.piece) for timing in times.of(sizes) if timing.algorithm == NATIVE}
    assert kept == {(1, True), (2, True), (4, False)}
    assert times.of(sizes._replace(samples=3)) == ()


@pytest.mark.parametrize("field", ["machine", "torch"])
def test_a_table_of_another_machine_is_not_used(field: str, caplog: pytest.LogCaptureFixture) -> None:
    graph = resnet()
    times = table(graph, lambda sizes, name: 0.5 if name == "fft" else 1.0)
    times_file().parent.mkdir(parents=True, exist_ok=True)
    files.save(times, times_file())
    assert set(mw.plan(graph, layout=mw.Layout()).stage.operator_algorithms.values()) == {"fft"}
    files.save(msgspec.structs.replace(times, **{field: "another"}), times_file())
    assert mw.plan(graph, layout=mw.Layout()).stage.operator_algorithms == {}
    assert "the measured times of algorithms are not used" in caplog.text
    with pytest.raises(ClusterError, match="another") as error:
        load_times(times_file())
    assert "meshwright bench convolutions" in error.value.remedy
    assert str(times_file()) in error.value.where


def test_a_table_holds_for_its_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = resnet()
    times_file(3).parent.mkdir(parents=True, exist_ok=True)
    files.save(table(graph, lambda sizes, name: 0.5 if name == "fft" else 1.0), times_file(3))
    assert mw.plan(graph, layout=mw.Layout()).stage.operator_algorithms == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert mw.plan(graph, layout=mw.Layout()).stage.operator_algorithms


def test_the_noise_of_what_is_not_taken_does_not_count() -> None:
    graph = resnet()
    times = table(graph, lambda sizes, name: 0.6 if name == "fft" else 1.0, 0.01)
    noisy = tuple(
        msgspec.structs.replace(timing, deviation=0.5) if timing.algorithm == "gemm" else timing
        for timing in times.timings
    )
    plan = planned(graph, msgspec.structs.replace(times, timings=noisy))
    assert set(plan.stage.operator_algorithms.values()) == {"fft"}


def test_a_limit_beside_a_search_or_on_cuda_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not weigh algorithms"):
        _ = RunLayout(plan="auto", workspace_bytes=2**20).searched
    with pytest.raises(LayoutError, match="not known"):
        mw.plan(resnet(), "v100-dgx1", layout=mw.Layout(workspace_bytes=2**20))


def test_an_algorithm_in_another_stage_is_refused() -> None:
    graph = resnet()
    plan = mw.plan(graph, devices=2, layout=mw.Layout(pp=2, batch_statistics="microbatch"))
    later = [name for name, stage in cut(graph, plan.firsts).stage_of.items() if stage == 1 and ":convolution#" in name]
    first, second = plan.stages
    named = msgspec.structs.replace(first, operator_algorithms={later[-1]: "gemm"})
    with pytest.raises(PlanError, match="there is in stage 0 no operator"):
        check_fits(msgspec.structs.replace(plan, stages=(named, second)), graph)
    named = msgspec.structs.replace(second, operator_algorithms={later[-1]: "gemm"})
    check_fits(msgspec.structs.replace(plan, stages=(first, named)), graph)


def test_the_budget_of_a_network_is_that_of_each_pipeline_rank() -> None:
    graph = resnet()
    alone = scratch(graph, mw.plan(graph, layout=mw.Layout()))
    limit = sum(alone.values()) // 2
    layout = limited(mw.Layout(pp=2, batch_statistics="microbatch"), limit, "network")
    plan = mw.plan(graph, devices=2, layout=layout)
    stages = cut(graph, plan.firsts).stage_of
    taken = scratch(graph, plan)
    sums = [sum(size for name, size in taken.items() if stages.get(name, 0) == stage) for stage in range(2)]
    assert max(sums) <= limit
    assert sum(sums) > limit, "each rank has the budget for itself"


def test_a_plan_that_reads_the_table_trains_to_the_same_numbers() -> None:
    torch.manual_seed(0)
    subject = oracle.resnet(False)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    limit = max(scratch(graph, mw.plan(graph, layout=mw.Layout())).values()) // 8
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    torch.manual_seed(0)
    serial = oracle.resnet(False)
    optimizer = oracle.OPTIMIZERS["SGD"]
    expected = oracle.in_one_process(serial, optimizer)
    run, trainer = oracle.in_parallel(subject, limited(mw.Layout(), limit), optimizer)
    assert trainer.plan.stage.operator_algorithms
    assert all(parse(text) for text in trainer.plan.stage.operator_algorithms.values())
    assert oracle.compared(before, expected, run, trainer).error <= oracle.TOLERANCE


def test_the_command_line_limits_measures_and_reads_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--data.shape", "[3, 8, 8]", "--model.width", "4", "--data.batch_size", "4", "--dp", "1"]
    assert cli(["plan", "resnet", "--workspace", "8KiB", *small, "--output", "plan.json"]) == 0
    assert " of workspace, " in capsys.readouterr().out
    assert files.load("plan.json", mw.Plan).layout.workspace_bytes == 8192
    assert cli(["plan", "resnet", "--workspace", "1KiB", *small]) == 2
    assert "bytes of workspace" in capsys.readouterr().err
    assert cli(["bench", "convolutions", *small[:-2], "--layout.dp", "1"]) == 0
    text = capsys.readouterr().out
    assert "forward: 3 channels of 8x8 -> 4 filters of 3x3, stride 1" in text
    assert times_file().name in text.replace("\n", "")
    assert len({timing.sizes.direction for timing in load_times(times_file()).timings}) == 3
    assert cli(["plan", "resnet", "--workspace", "8KiB", *small]) == 0
    assert " measured" in capsys.readouterr().out
