"""Shared links: together, transfers take what the closed forms say; alone they are faster, beside others slower."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collective import Group, Network
from meshwright.cost.fabric import Fabric
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.device import Device
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Schedule
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.simulate.engine import play
from meshwright.simulate.network import Flow, Links

DEVICE = Device(
    name="x", kind="cpu", memory_bytes=10**9, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s={"float32": 1e9}
)


def cluster(*levels: Level) -> Cluster:
    count = 1
    for level in levels:
        count *= level.fan_out
    return Cluster(name="c", num_devices=count, device=DEVICE, levels=levels)


def boxes(links: int, contention: float = 1.0) -> Cluster:
    """Two boxes of four devices."""
    return cluster(
        Level(name="box", fan_out=4, alpha_s=1e-3, beta_s_per_byte=1e-6),
        Level(name="rack", fan_out=2, alpha_s=1e-2, beta_s_per_byte=1e-5, links=links, contention=contention),
    )


def finish(links: Links, *flows: tuple[float, tuple[Flow, ...]]) -> list[float]:
    """When each of these transfers ends."""
    ends = [0.0] * len(flows)
    for index, (start_s, transfer) in enumerate(flows):
        links.start(lambda time_s, index=index: ends.__setitem__(index, time_s), start_s, transfer)  # type: ignore[misc]
    while links.advance():
        pass
    return ends


@given(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1.0, 3.0]),
    st.sampled_from([("dp", Mesh.of(dp=8)), ("tp", Mesh.of(dp=2, tp=4)), ("dp", Mesh.of(dp=2, tp=4)),
                     ("dp", Mesh.of(dp=4, tp=2)), ("tp", Mesh.of(dp=4, tp=2))]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_all_groups_of_an_axis_at_once_take_what_the_closed_form_says(
    collective: Any, num_links: int, contention: float, case: tuple[str, Mesh], size: int
) -> None:
    axis, mesh = case
    cluster = boxes(num_links, contention)
    links = Links(Fabric(cluster, mesh))
    ends = finish(links, *((1.0, links.collective(collective, size, group)) for group in mesh.groups(axis)))
    first = mesh.groups(axis)[0]
    wanted = 1.0 + Network(cluster).collective_s(collective, size, Group(len(first), first[1] - first[0]))
    assert ends == pytest.approx([wanted] * len(ends))


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all"])
def test_measured_collectives_take_on_shared_links_what_was_measured(operation: Any) -> None:
    """Twice as long as β says, and latency of their own; alone on its links a group is faster than that."""
    rows = tuple(
        CollectiveTiming(
            operation=operation, algorithm="x", level="rack", ranks=2, bytes=size, time_s=0.5 + 1e-4 * size
        )
        for size in (0, 10**6)
    )
    cluster, mesh = msgspec.structs.replace(boxes(1), collectives=rows), Mesh.of(dp=2, tp=4)
    links, groups = Links(Fabric(cluster, mesh)), mesh.groups("dp")
    ends = finish(links, *((0.0, links.collective(operation, 10**5, group)) for group in groups))
    assert ends == pytest.approx([Network(cluster).collective_s(operation, 10**5, Group(2, 4))] * 4)
    assert ends[0] == pytest.approx(0.5 + 10)
    links = Links(Fabric(cluster, mesh))
    assert finish(links, (0.0, links.collective(operation, 10**5, groups[0])))[0] < 0.6 * ends[0]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1.0, 2.0]), st.integers(0, 10**6))
def test_all_replicas_sending_at_once_take_what_the_closed_form_says(links: int, contention: float, size: int) -> None:
    cluster = boxes(links, contention)
    shared = Links(Fabric(cluster, Mesh.of(pp=2, dp=4)))
    ends = finish(shared, *((0.0, shared.message(size, rank, rank + 4)) for rank in range(4)))
    # Four of the rack's eight devices send, and the core has room for what one box cannot even fill.
    assert ends == pytest.approx([Network(boxes(links)).send_s(size, 4)] * 4)


def test_one_message_alone_has_a_link_for_itself_and_two_share_it() -> None:
    links = Links(Fabric(boxes(1), Mesh.of(dp=8)))
    seconds = 1e-2 + 1e-5 * 10**6
    assert finish(links, (0.0, links.message(10**6, 0, 4))) == pytest.approx([seconds])
    links = Links(Fabric(boxes(1), Mesh.of(dp=8)))
    ends = finish(links, *((0.0, links.message(10**6, rank, rank + 4)) for rank in (0, 1)))
    assert ends == pytest.approx([1e-2 + 2 * 1e-5 * 10**6] * 2)
    links = Links(Fabric(boxes(1), Mesh.of(dp=8)))
    there, back = links.message(10**6, 0, 4), links.message(10**6, 4, 0)
    assert finish(links, (0.0, there), (0.0, back)) == pytest.approx([seconds, seconds])


def test_a_transfer_slows_down_while_another_is_under_way() -> None:
    """The first has 10 s to go alone; from 6 s on they share; at 14 s it ends, and the second has 6 s left."""
    links = Links(Fabric(cluster(Level(name="box", fan_out=3, alpha_s=0.0, beta_s_per_byte=1e-3)), Mesh.of(dp=3)))
    first, second = links.message(10_000, 0, 1), links.message(10_000, 0, 2)
    assert finish(links, (0.0, first), (6.0, second)) == pytest.approx([14.0, 20.0])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 7), st.integers(1, 10**6), st.floats(0, 5)), max_size=8))
def test_no_link_carries_more_than_it_can(messages: list[tuple[int, int, int, float]]) -> None:
    links = Links(Fabric(boxes(2, 1.5), Mesh.of(dp=8)))
    flows = [(start_s, links.message(size, rank, (rank + step) % 8)) for rank, step, size, start_s in messages]
    ends = finish(links, *flows)
    for (start_s, (flow,)), end_s in zip(flows, ends, strict=True):
        assert end_s >= start_s + flow.latency_s + flow.bytes / flow.limit_bytes_per_s * (1 - 1e-9)
    for resource in {resource for _, (flow,) in flows for resource in flow.uses}:
        loads = [(start_s + flow.latency_s, end_s, flow.bytes * flow.uses[resource])
                 for (start_s, (flow,)), end_s in zip(flows, ends, strict=True) if resource in flow.uses]  # fmt: skip
        capacity = 2.0 if resource[1] else 1.0
        capacity *= 2 / 1.5 if resource[0] == "core" and resource[1] else 4 if resource[0] == "core" else 1
        first, last = min(start for start, _, _ in loads), max(end for _, end, _ in loads)
        assert sum(load for _, _, load in loads) <= capacity * (last - first) * (1 + 1e-9)


# --- in the simulator ------------------------------------------------------------------------------------------------


def test_without_anything_to_share_contention_changes_nothing() -> None:
    pieces: dict[str, tuple[Piece, ...]] = {"F": (Compute("f", 1.0),), "B": (Compute("b", 2.0),)}
    step = StepWork((StageWork(pieces=pieces, sent_up_bytes=1000, sent_down_bytes=2000),) * 4)
    schedule = add_communication(build("1f1b", 4, 6))
    alone, shared = (
        play(schedule, step, Mesh.of(pp=4), boxes(1).resized(4), contention=contention).trace()
        for contention in (False, True)
    )
    shared_spans, wanted = (
        {(span.rank, span.what): (span.start_s, span.end_s) for span in trace.spans if span.stream != "wait"}
        for trace in (shared, alone)
    )
    assert shared_spans.keys() == wanted.keys()
    for key, times in wanted.items():
        assert shared_spans[key] == pytest.approx(times)


def _started_together(mesh: Mesh, *axes: str) -> tuple[Schedule, StepWork, Mesh, Cluster]:
    """After 3 s of computing, an all-reduce of 1 MB along each of ``axes``, then a wait for all; on one box."""
    started = tuple(Communicate(f"{n}", "all_reduce", axis, 10**6, blocking=False) for n, axis in enumerate(axes))
    pieces: dict[str, tuple[Piece, ...]] = {
        "F": (Compute("f", 1.0),),
        "B": (Compute("b", 2.0),),
        "REDUCE_GRAD": started,
    }
    step = StepWork((StageWork(pieces=pieces, after=tuple(Wait(piece.what) for piece in started)),))
    return add_reduction(build("none", 1, 1)), step, mesh, boxes(1).resized(4)


def test_collectives_of_two_groups_of_one_rank_at_once_share_its_link() -> None:
    step = _started_together(Mesh.of(dp=2, tp=2), "dp", "tp")
    alone_s, latency_s = (Network(step[3]).collective_s("all_reduce", size, Group(2)) for size in (10**6, 0))
    assert play(*step).step_s == pytest.approx(3 + alone_s)
    assert play(*step, contention=True).step_s == pytest.approx(3 + latency_s + 2 * (alone_s - latency_s))


@pytest.mark.parametrize("contention", [False, True])
def test_collectives_of_one_group_go_one_after_the_other(contention: bool) -> None:
    step = _started_together(Mesh.of(dp=4), "dp", "dp", "dp")
    played = play(*step, contention=contention)
    assert played.step_s == pytest.approx(3 + 3 * Network(step[3]).collective_s("all_reduce", 10**6, Group(4)))
    spans = [span for span in played.trace([2]).spans if span.stream == "communication"]
    assert [span.what.split()[-1] for span in spans] == ["0", "1", "2"]
    assert all(span.end_s <= following.start_s + 1e-9 for span, following in itertools.pairwise(spans))


def test_groups_that_lie_unevenly_in_boxes_and_unlike_boxes_are_refused() -> None:
    three = cluster(
        Level(name="box", fan_out=2, alpha_s=0.0, beta_s_per_byte=1e-6),
        Level(name="rack", fan_out=2, alpha_s=0.0, beta_s_per_byte=1e-6),
    )
    links = Links(Fabric(three, Mesh.of(dp=3)))
    with pytest.raises(LayoutError, match="3 ranks lie unevenly in units of level 'box'"):
        links.collective("all_reduce", 1, (0, 1, 2))
    members = (LevelMembers(count=1), LevelMembers(count=1, device=DEVICE))
    unlike = cluster(Level(name="box", fan_out=2, alpha_s=0.0, beta_s_per_byte=1e-6, members=members))
    with pytest.raises(ClusterError, match="between like units only"):
        Links(Fabric(unlike, Mesh.of(dp=2)))
