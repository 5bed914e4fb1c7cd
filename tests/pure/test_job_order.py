"""Order and simulation of job graphs, against brute force, closed forms and Python's own topological sorter."""

from __future__ import annotations

import graphlib
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.job_graph import FunctionVertex, JobGraph, JobNode
from meshwright.ir.job_run import JobSpan
from meshwright.jobs import order
from meshwright.jobs.order import Unit
from meshwright.jobs.placement import Free, could_run
from meshwright.jobs.simulate import UnitTime, lower_bound, makespan, simulate
from meshwright.report.job_drawing import lanes_of

Edges = dict[str, tuple[str, ...]]


@st.composite
def dags(draw: st.DrawFn, most: int = 6) -> Edges:
    """Random acyclic graphs, whose names are not given in topological order."""
    size = draw(st.integers(1, most))
    shuffled = draw(st.permutations(range(size)))
    return {
        f"v{index}": tuple(f"v{shuffled[other]}" for other in range(place) if draw(st.booleans()))
        for place, index in enumerate(shuffled)
    }


seconds_of = st.lists(st.integers(1, 5), min_size=6, max_size=6)


def units_of(before: Edges, cpus: list[int] | None = None) -> dict[str, Unit]:
    asked = dict(zip(before, cpus or [1] * len(before), strict=False))
    return {name: Unit(name, (name,), before[name], asked[name], 0, 0, ()) for name in order.topological(before)}


def paths(before: Edges, name: str) -> list[list[str]]:
    """All paths that end at a name."""
    return [[name], *([*path, name] for other in before[name] for path in paths(before, other))]


# --- order -----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), unique=True), min_size=6))
def test_a_cycle_is_found_where_python_finds_one(before: dict[str, list[str]]) -> None:
    cycle = order.find_cycle(before)
    try:
        graphlib.TopologicalSorter(before).prepare()
        assert cycle == []
    except graphlib.CycleError:
        assert cycle[0] == cycle[-1]
        assert len(cycle) > 1
        assert all(earlier in before[later] for earlier, later in itertools.pairwise(cycle))


@given(dags())
def test_an_order_has_each_name_after_those_before_it(before: Edges) -> None:
    names = order.topological(before)
    assert sorted(names) == sorted(before)
    assert all(names.index(other) < names.index(name) for name in before for other in before[name])


@given(dags(), seconds_of)
def test_the_critical_path_is_the_longest_of_all_paths(before: Edges, times: list[int]) -> None:
    seconds = {name: float(times[index]) for index, name in enumerate(before)}
    longest = max(sum(seconds[each] for each in path) for name in before for path in paths(before, name))
    length, path = order.critical_path(before, seconds)
    assert length == longest == sum(seconds[name] for name in path)
    assert not before[path[0]]
    assert all(earlier in before[later] for earlier, later in itertools.pairwise(path))


@given(dags())
def test_a_chain_has_no_two_names_that_could_run_at_once(before: Edges) -> None:
    def reaches(first: str, last: str) -> bool:
        return any(first in path for path in paths(before, last))

    apart = [
        (name, other) for name, other in itertools.combinations(before, 2)
        if not reaches(name, other) and not reaches(other, name)
    ]  # fmt: skip
    assert order.is_chain(before) == (not apart)
    for chain in order.chains(before):
        assert len(chain) > 1
        assert all(before[later] == (earlier,) for earlier, later in itertools.pairwise(chain))


def test_streams_join_vertices_to_units() -> None:
    graph = JobGraph(vertices={
        "read": FunctionVertex(function="m:f", outputs={"lines": "stream"}, gpus=1),
        "count": FunctionVertex(function="m:f", inputs={"lines": "read.lines"}, outputs={"n": "json"}, cpus=0.5),
        "after": FunctionVertex(function="m:f", inputs={"n": "count.n"}),
    })  # fmt: skip
    units = order.units(graph)
    assert list(units) == ["read+count", "after"]
    assert units["read+count"] == Unit("read+count", ("read", "count"), (), 1.5, 1, 0, ())
    assert units["after"].before == ("read+count",)


# --- simulation ------------------------------------------------------------------------------------------------------


def brute_force(units: dict[str, Unit], seconds: dict[str, float], cores: int) -> float:
    """The shortest makespan of all schedules: every order of starts, each start as early as possible."""
    best = math.inf
    for names in itertools.permutations(units):
        times: dict[str, UnitTime] = {}
        for name in names:
            if any(other not in times for other in units[name].before):
                break
            earliest = max((times[other].end_s for other in units[name].before), default=0.0)
            begins = sorted({earliest, *(time.end_s for time in times.values() if time.end_s > earliest)})
            for start_s in begins:
                end_s = start_s + seconds[name]
                moments = {start_s, *(time.start_s for time in times.values() if start_s <= time.start_s < end_s)}
                busy = max(
                    sum(units[t.unit].cpus for t in times.values() if t.start_s <= moment < t.end_s)
                    for moment in moments
                )
                if busy + units[name].cpus <= cores:
                    times[name] = UnitTime(name, "n", start_s, end_s)
                    break
        else:
            best = min(best, makespan(list(times.values())))
    return best


@given(dags(5), seconds_of, st.lists(st.integers(1, 2), min_size=5, max_size=5), st.integers(2, 3))
def test_no_simulated_schedule_beats_brute_force_or_the_bound(
    before: Edges, times: list[int], cpus: list[int], cores: int
) -> None:
    units = units_of(before, cpus)
    seconds = {name: float(times[index]) for index, name in enumerate(before)}
    nodes = {"n": JobNode(cpus=cores)}
    played = simulate(units, nodes, seconds)
    assert makespan(played) >= brute_force(units, seconds, cores) >= lower_bound(units, nodes, seconds) - 1e-9
    for time in played:
        running = [other for other in played if other.start_s <= time.start_s < other.end_s]
        assert sum(units[other.unit].cpus for other in running) <= cores
        ends = {other.unit: other.end_s for other in played}
        assert all(ends[name] <= time.start_s for name in units[time.unit].before)


@given(dags(), seconds_of, st.integers(1, 4))
def test_list_scheduling_keeps_grahams_bound(before: Edges, times: list[int], cores: int) -> None:
    """R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969: at most work / m + (1 - 1 / m) critical path;
    with a core for each vertex the critical path, with one core the work."""
    units = units_of(before)
    seconds = {name: float(times[index]) for index, name in enumerate(before)}
    path_s, _ = order.critical_path(before, seconds)
    length = makespan(simulate(units, {"n": JobNode(cpus=cores)}, seconds))
    assert length <= sum(seconds.values()) / cores + (1 - 1 / cores) * path_s + 1e-9
    assert makespan(simulate(units, {"n": JobNode(cpus=len(before))}, seconds)) == path_s
    assert makespan(simulate(units, {"n": JobNode(cpus=1)}, seconds)) == sum(seconds.values())


def test_a_unit_takes_the_fullest_node_that_has_what_it_needs() -> None:
    nodes = {
        "big": JobNode(cpus=4, gpus=2), "small": JobNode(cpus=1), "edge": JobNode(cpus=4, labels={"tier": "edge"}),
        "lean": JobNode(cpus=2, memory_bytes=100),
    }  # fmt: skip
    free = Free(nodes)

    def unit(cpus: float, gpus: int = 0, memory_bytes: int = 0, *labels: tuple[str, str]) -> Unit:
        return Unit("u", ("u",), (), cpus, gpus, memory_bytes, labels)

    first = free.take(unit(1, 1))
    assert first is not None
    assert (first.node, first.gpus) == ("big", (0,))
    assert [slot and slot.node for slot in (free.take(unit(1)), free.take(unit(0.5, 0, 60)))] == ["small", "lean"]
    second = free.take(unit(3, 1))
    assert second is not None
    assert second.gpus == (1,)
    assert free.take(unit(0, 1)) is None
    free.give(first)
    again = free.take(unit(1, 1))
    assert again is not None
    assert again.gpus == (0,)
    assert free.take(unit(1, 0, 60)) is not None  # on the node whose memory is not counted
    labelled = free.take(unit(1, 0, 0, ("tier", "edge")))
    assert labelled is not None
    assert labelled.node == "edge"
    assert not could_run(unit(1, 0, 0, ("tier", "cloud")), nodes)
    assert not could_run(unit(5), nodes)


@pytest.mark.parametrize("cores", [1, 2])
def test_the_longest_path_goes_first(cores: int) -> None:
    units = units_of({"short": (), "long": (), "after": ("long",)})
    played = simulate(units, {"n": JobNode(cpus=cores)}, {"short": 1.0, "long": 1.0, "after": 1.0})
    assert played[0].unit == "long"
    assert makespan(played) == (3.0 if cores == 1 else 2.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=8))
def test_spans_of_a_lane_do_not_overlap(intervals: list[tuple[int, int]]) -> None:
    spans = [
        JobSpan(vertex=f"v{index}", node="n", start_s=start, end_s=start + length)
        for index, (start, length) in enumerate(intervals)
    ]
    lanes = lanes_of(spans)
    for first, second in itertools.combinations(spans, 2):
        assert lanes[first] != lanes[second] or first.end_s <= second.start_s or second.end_s <= first.start_s
    at_once = max((sum(s.start_s <= span.start_s < s.end_s for s in spans) for span in spans), default=0)
    assert len(set(lanes.values())) == at_once
