"""The sizes of buckets that plans have: the best of all that are simulated, within the memory of a rank."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.capture.builder import capture
from meshwright.catalog import with_software
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import CollectiveTiming, Operation
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Note
from meshwright.lower.plans import PlanLowering
from meshwright.models import MLP, classification_loss
from meshwright.planner import bucket_size
from meshwright.planner.algorithms import in_a_box
from meshwright.planner.bucket_size import ALIKE, LADDER_BYTES, peak_bytes
from meshwright.planner.explicit import Ask, adapt_plan, plan_layout
from meshwright.planner.foretell import foretell

A100 = with_software(mw.Cluster.load("a100-80gb-dgx"), "meshwright")
GPU = msgspec.structs.replace(
    A100, device=msgspec.structs.replace(A100.device, peak_flops_per_s={"float32": A100.device.peak("tfloat32")})
)
"""Whose float32 products run on tensor cores, so that a small model computes no longer than it communicates."""
NUM_RANKS = 8
PART_OF_A_STEP = 0.01
"""By so much the simulator may find a step longer than another: a timeline of buckets tells of nothing else."""


@cache
def mlp(batch: int = 4096) -> Graph:
    with torch.device("meta"):
        model = MLP((512, 1024, 1024, 1024, 1024, 1024, 512, 10))
        data = {"inputs": torch.zeros(batch, 512), "label": torch.zeros(batch, dtype=torch.int64)}
    return capture(model, classification_loss, data).graph


@cache
def lowering() -> PlanLowering:
    """It keeps the programs of operators from plan to plan."""
    return PlanLowering(mlp())


def network(alpha_s: float, byte_s: float, base: mw.Cluster = GPU, algorithm: str = "native") -> mw.Cluster:
    """Whose collectives are measured to take this."""
    operations: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    rows = tuple(
        CollectiveTiming(
            operation=operation, algorithm=algorithm, level=base.levels[0].name, ranks=NUM_RANKS, bytes=size,
            time_s=alpha_s + byte_s * size,
        )
        for operation in operations
        for size in (2**10, 2**30)
    )  # fmt: skip
    return msgspec.structs.replace(base, collectives=rows)


def planned(cluster: mw.Cluster, room_bytes: float | None = None, **layout: int) -> mw.Plan:
    ask = Ask(optimizer=ADAMW, room_bytes=room_bytes, lower=lowering(), fits_buckets=room_bytes != 0)
    return plan_layout(mlp(), mw.Layout(dp=NUM_RANKS, **layout), world_size=NUM_RANKS, cluster=cluster, ask=ask)  # type: ignore[arg-type]


def every_size(cluster: mw.Cluster, **layout: int) -> list[mw.Plan]:
    """The plans with buckets of all sizes (of two sizes together, every other), each as the only one that there is."""
    plans = []
    for reduced in LADDER_BYTES[::2] if layout.get("zero") else LADDER_BYTES:
        for gathered in LADDER_BYTES[::2] if layout.get("zero") else (2**23,):
            with patch.object(bucket_size, "ranked", only(reduced, gathered)):
                plans.append(planned(cluster, **layout))
    return plans


def only(reduced: int, gathered: int):  # type: ignore[no-untyped-def]
    def near(choices: list[bucket_size.BucketSizes], computed_s: float) -> list[bucket_size.BucketSizes]:
        del computed_s
        return sorted(
            choices, key=lambda sizes: abs(sizes.reduced_bytes - reduced) + abs(sizes.gathered_bytes - gathered)
        )

    return near


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"zero": 2, "microbatches": 2},
        *(pytest.param(each, marks=pytest.mark.product) for each in ({"zero": 1}, {"zero": 3}, {"microbatches": 2})),
    ],
    ids=str,
)
def test_no_other_sizes_are_faster(layout: dict[str, int]) -> None:
    # With ZeRO 2, buckets change the order of the kernels. With micro-batches, the device waits for its host.
    exact = layout.get("zero", 0) < 2 and "microbatches" not in layout
    spread = []
    for cluster in (A100, network(0.0, 1e-10, A100), network(1e-3, 1e-12, A100)):
        steps = [foretell(lowering(), plan, cluster).played.step_s for plan in every_size(cluster, **layout)]
        chosen_s = foretell(lowering(), planned(cluster, **layout), cluster).played.step_s
        assert chosen_s <= min(steps) * (1 + (ALIKE if exact else PART_OF_A_STEP))
        spread.append(max(steps) / min(steps))
    assert max(spread) > 1.1, "it matters"


def test_latency_makes_few_buckets_and_bandwidth_many() -> None:
    assert len(planned(network(1e-3, 1e-12)).buckets) == 1
    assert len(planned(network(0.0, 2e-11)).buckets) > 4


def test_larger_buckets_stay_within_memory() -> None:
    cluster = network(1e-4, 1e-12)
    free, usual = planned(cluster, zero=3), planned(cluster, room_bytes=0, zero=3)
    most, least = (peak_bytes(lowering(), plan, cluster, ADAMW) for plan in (free, usual))
    assert most > least, "what buckets hold is counted"
    peaks = []
    for part in (0.0, 0.3, 0.6, 1.0):
        limit = least + part * (most - least)
        peaks.append(peak_bytes(lowering(), planned(cluster, room_bytes=limit, zero=3), cluster, ADAMW))
        assert peaks[-1] <= limit
    assert peaks[-1] == most
    assert max(peaks[:-1]) < most, "what does not fit is not taken"
    assert planned(cluster, room_bytes=1.0, zero=3).gathers == usual.gathers, "none fits: no larger than usual"


def test_a_layout_has_buckets_within_the_memory_that_is_given() -> None:
    cluster, layout = network(1e-4, 1e-12), mw.Layout(dp=NUM_RANKS, zero=3)
    free, tight = (mw.plan(mlp(), cluster, layout=layout, memory_bytes=room) for room in (None, 1.0))
    assert tight.gathers == planned(cluster, room_bytes=0, zero=3).gathers
    assert max(gather.num_bytes for gather in free.gathers) > max(gather.num_bytes for gather in tight.gathers)


def test_the_plan_says_what_other_sizes_cost() -> None:
    text = planned(GPU, zero=1).explain()
    assert "gradients   4 buckets of at most 8 MiB  stands still " in text
    assert "parameters  4 buckets of at most 8 MiB  stands still " in text
    assert "; 4 MiB +" in text
    assert ", 16 MiB +" in text


def test_a_plan_for_another_batch_keeps_its_buckets() -> None:
    plan = planned(GPU, zero=3)
    again = adapt_plan(plan, mlp(2048))
    assert [bucket.parameters for bucket in again.buckets] == [bucket.parameters for bucket in plan.buckets]
    assert [gather.parameters for gather in again.gathers] == [gather.parameters for gather in plan.gathers]


def test_what_is_foretold_of_a_plan_is_of_its_buckets() -> None:
    plan = mw.plan(mlp(), GPU, only="intra")
    ours = with_software(GPU, "meshwright")
    assert plan.prediction == foretell(lowering(), plan, ours).prediction


def test_buckets_hide_between_cpus_of_two_boxes_and_not_within_one() -> None:
    """Where nothing hides, as few as latency asks for; between boxes more, of which the last is short."""
    box = mw.Cluster.load("cpu-local", NUM_RANKS)
    (level,) = box.levels
    between = msgspec.structs.replace(level, name="network", alpha_s=3e-4)
    boxes = msgspec.structs.replace(box, levels=(between,))
    within = msgspec.structs.replace(box, levels=(msgspec.structs.replace(level, alpha_s=3e-4),))
    assert len(planned(within).buckets) == 1 < len(planned(boxes).buckets)
    by_threads, in_rounds = (network(4e-3, 7e-10, boxes, name) for name in ("native", "ring"))
    assert len(planned(in_rounds).buckets) == 1 < len(planned(by_threads).buckets), "starting sends the first round"
    two = (msgspec.structs.replace(level, fan_out=4), msgspec.structs.replace(between, fan_out=2))
    mesh = Mesh.of(dp=2, tp=4)
    cluster = msgspec.structs.replace(box, levels=two)
    assert [in_a_box(mesh, axis, cluster) for axis in ("dp", "tp")] == [False, True]


def test_a_plan_is_lowered_once_for_its_memory_and_its_time() -> None:
    lower, plan = PlanLowering(mlp()), plan_layout(mlp(), mw.Layout(dp=2), world_size=2, cluster=GPU)
    noted = msgspec.structs.replace(plan, notes=(Note(module="", split="none", reason="as an example"),))
    assert lower(noted) is lower(plan)
    other = msgspec.structs.replace(plan, buckets=())
    assert lower(other) == PlanLowering(mlp())(other) != lower(plan)
    assert lower(plan) == PlanLowering(mlp())(plan)
