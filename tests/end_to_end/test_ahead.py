"""Parameters are gathered some buckets ahead, as the plan says: in the order of calls, on a device, in memory, and in
the planner's choice."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import fx

import meshwright as mw
from meshwright.api.dry_runs import dry_run_captured
from meshwright.capture.builder import Capture, capture
from meshwright.catalog import load_cluster
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.plan import Plan
from meshwright.lower.plans import PlanLowering
from meshwright.lower.prefetch import prefetch
from meshwright.models import MLP, classification_loss
from meshwright.ops import collectives
from meshwright.planner.ahead import ALIKE, DEPTHS, USUAL, look_ahead
from meshwright.planner.explicit import adapt_plan
from meshwright.planner.foretell import foretell
from meshwright.runtime.dry_run import DryRunJob, _world, rehearse
from meshwright.runtime.fake_operators import DEVICE
from meshwright.runtime.rehearsal import Rehearsal
from meshwright.runtime.rehearsed_graphs import RehearsedGraphs
from meshwright.schedules.rendezvous import Awaited, StartedOperation
from tests.distributed import oracle
from tests.end_to_end import dry_run_cases

aten = torch.ops.aten
CLUSTER = "h100-dgx-ndr400x8"


def graph_of(count: int) -> fx.Graph:
    """``count`` buckets, each gathered just before it is read."""
    graph = fx.Graph()
    parts = [graph.placeholder(f"part_{index}") for index in range(count)]
    value: Any = graph.placeholder("x")
    for part in parts:
        started = graph.call_function(collectives.GATHER_PARTS, ([part], "dp", 2, "native"))
        whole = graph.call_function(collectives.WAIT, (started,))
        value = graph.call_function(aten.mm.default, (value, whole))
    graph.output(value)
    return graph


def picture(graph: fx.Graph) -> str:
    """``s``: the start of a gather, ``w``: the wait for it, ``x``: a product."""
    letters = {collectives.GATHER_PARTS: "s", collectives.WAIT: "w", aten.mm.default: "x"}
    return "".join(letters[node.target] for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(0, "swxswxswxswx"), (1, "swsxwsxwsxwx"), (2, "sswsxwsxwxwx"), (3, "ssswsxwxwxwx"), (9, "sssswxwxwxwx")],
)
def test_the_order_of_calls(ahead: int, expected: str) -> None:
    graph = graph_of(4)
    prefetch(graph, ahead)
    graph.lint()
    assert picture(graph) == expected


def test_what_is_computed_before_it_is_gathered_stays_before() -> None:
    graph = graph_of(3)
    second = graph.find_nodes(op="call_function", target=collectives.GATHER_PARTS)[1]
    with graph.inserting_before(second):
        cast = graph.call_function(aten._to_copy.default, (second.args[0][0],))
    second.args = ([cast], *second.args[1:])
    prefetch(graph, 8)
    graph.lint()


@cache
def deep_mlp() -> tuple[oracle.Subject, Capture]:
    torch.manual_seed(0)
    batch = {"inputs": torch.randn(8, 64), "label": torch.randint(4, (8,))}
    subject = oracle.Subject(MLP((64, *[64] * 6, 4)), classification_loss, [batch])
    return subject, capture(subject.model, subject.loss_fn, batch)


def planned(layout: mw.Layout, prefetch: int, buckets: int = 1) -> Plan:
    """A plan whose buckets have one parameter each."""
    plan = mw.plan(deep_mlp()[1].graph, CLUSTER, devices=layout.num_ranks, layout=layout)
    singles = tuple(
        msgspec.structs.replace(bucket, parameters=(name,), num_bytes=4 * 64 * 64)
        for bucket in plan.gathers
        for name in bucket.parameters
    )
    return msgspec.structs.replace(plan, gathers=singles, prefetch=prefetch, graphs=False)


def test_a_device_starts_gathers_ahead_of_the_waits_for_them() -> None:
    meanwhile = [check_gathers(ahead) for ahead in (0, 1, 3)]
    assert meanwhile[0] == 0, "each gather is waited for at once"
    assert meanwhile[0] < meanwhile[1] < meanwhile[2]


def check_gathers(ahead: int) -> int:
    """Check the order of gathers; return the number of kernels that run during gathers."""
    subject, captured = deep_mlp()
    plan = planned(mw.Layout(dp=2, zero=3, microbatches=2), ahead)
    job = DryRunJob(
        subject.model, subject.loss_fn, subject.batches[0], captured, plan, adapt_plan, oracle.OPTIMIZERS["AdamW"]
    )
    rehearsed = rehearse(job, 0)
    assert not rehearsed.findings
    gathers, begun, ends, kernels = dict[int, int](), 0, list[int](), 0
    for entry in rehearsed.streams["step 2"]:
        if isinstance(entry, StartedOperation) and "allgather" in entry.kind:
            gathers[entry.number] = begun
            begun += 1
        elif isinstance(entry, Awaited) and entry.number in gathers:
            ends.append(begun - gathers[entry.number] - 1)
            kernels += entry.kernels
    phases = [len(plan.gathers), 6] * 2  # backward of each micro-batch reads six weights again
    places = [(place, count) for count in phases for place in range(count)]
    assert ends == [min(max(ahead - 1, 0), count - 1 - place) for place, count in places]
    return kernels


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_the_memory_of_gathers_is_predicted(ahead: int) -> None:
    subject, captured = deep_mlp()
    given = subject.model, subject.loss_fn, subject.batches[0]
    plan = planned(mw.Layout(dp=2, zero=3, microbatches=2), ahead)
    report = dry_run_captured(captured, *given, plan=plan, cluster=CLUSTER, ranks=(0,))
    assert report.findings == ()
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


def test_the_planner_takes_the_best_number_that_fits() -> None:
    captured = deep_mlp()[1]
    lower, cluster = PlanLowering(captured.graph), mw.Cluster.load(CLUSTER)
    given = planned(mw.Layout(dp=8, zero=3), USUAL)
    steps: dict[int, tuple[float, int]] = {}
    for depth in DEPTHS:
        forecast = foretell(lower, msgspec.structs.replace(given, prefetch=depth), cluster, optimizer=ADAMW)
        steps[depth] = forecast.played.step_s, forecast.peak.peak_bytes
    for limit in {0, *(peak for _, peak in steps.values())}:
        fitting = {depth: step_s for depth, (step_s, peak) in steps.items() if peak <= limit}
        chosen = look_ahead(lower, given, cluster, ADAMW, limit)
        if fitting:
            assert steps[chosen.prefetch][1] <= limit
            assert steps[chosen.prefetch][0] <= (1 + ALIKE) * min(fitting.values())
        else:
            assert steps[chosen.prefetch][1] == min(peak for _, peak in steps.values())
        assert f"gathered {chosen.prefetch} ahead" in chosen.explain()


def test_stages_of_different_sizes_have_graphs_and_gathers_ahead() -> None:
    subject, captured = deep_mlp()
    layout = mw.Layout(pp=2, stage_sizes=({"dp": 4}, {"dp": 2}), microbatches=2, zero=3)
    plan = mw.plan(captured.graph, load_cluster(CLUSTER), devices=6, layout=layout)
    assert plan.graphs, "launches take most of this step"
    assert any(note.module == "launches" for note in plan.notes)
    report = mw.dry_run(subject.model, subject.loss_fn, subject.batches[0], plan=plan, cluster=CLUSTER, ranks=(0, 5))
    assert report.clean, report.findings
    smaller = adapt_plan(plan, captured.graph)
    assert (smaller.graphs, smaller.prefetch) == (plan.graphs, plan.prefetch)


def test_a_software_without_graphs_is_planned_without_them() -> None:
    captured = deep_mlp()[1]
    layout = mw.Layout(pp=2, stage_sizes=({"dp": 4}, {"dp": 2}), microbatches=2, zero=3)
    plan = mw.plan(captured.graph, load_cluster(CLUSTER).without_graphs(), devices=6, layout=layout)
    assert not plan.graphs
    assert all(note.module != "launches" for note in plan.notes)


def test_cpus_gather_as_usual() -> None:
    captured = deep_mlp()[1]
    plan = mw.plan(captured.graph, devices=2, layout=mw.Layout(dp=2, zero=3))
    assert (plan.prefetch, plan.graphs) == (USUAL, False)


def test_a_kernel_that_reads_what_a_collective_still_writes_is_found() -> None:
    rehearsal = Rehearsal(0)
    with _world(0, 2), rehearsal.watching():
        rehearsal.begin("step 1")
        value = torch.empty(4, device=DEVICE)
        work = dist.all_reduce(value, async_op=True)
        value.view(2, 2)
        assert rehearsal.findings == []
        value.add(1)
        work.wait()
        value.add(1)
    (finding,) = rehearsal.findings
    assert finding.what == "aten.add.Tensor has a tensor that allreduce still writes"


def test_what_a_device_refuses_within_a_graph_is_found() -> None:
    rehearsal = Rehearsal(0)
    with _world(0, 2), rehearsal.watching():
        rehearsal.begin("step 1")
        graphs = RehearsedGraphs(rehearsal)
        value = torch.empty(4, device=DEVICE)
        outside = dist.all_reduce(value, async_op=True)

        def work() -> None:
            outside.wait()
            value.sum().item()
            dist.send(value, 1)
            dist.all_reduce(torch.empty(4, device=DEVICE), async_op=True)

        graph, _ = graphs.capture(work, graphs.pool())
        begun = len(rehearsal.stream["step 1"])
        graph.replay()
        assert len(rehearsal.stream["step 1"]) > begun
    assert {finding.what for finding in rehearsal.findings} == {
        "a graph waits for a collective that began outside of it",
        "the host reads a value of one float32 on cuda",
        "send within a graph",
        "a graph ends before allreduce in step 1",
    }
