"""The order of a job graph: units that run together, cycles, levels, chains, and the critical path. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from meshwright.ir.job_graph import FunctionVertex, JobGraph

Before = Mapping[str, Sequence[str]]


class Unit(NamedTuple):
    """Vertices that run together on one node, because streams join them: mostly a single vertex. It takes the sum of
    its vertices' resources. ``before`` are the units that must have finished."""

    name: str
    members: tuple[str, ...]
    before: tuple[str, ...]
    cpus: float
    gpus: int
    memory_bytes: int
    labels: tuple[tuple[str, str], ...]


def find_cycle(before: Before) -> list[str]:
    """A cycle as names in the order in which data would flow, the first name again at the end; empty if there is
    none."""
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def topological(before: Before) -> list[str]:
    """The names in an order in which each comes after those before it; else in the order in which they are given. The
    graph must have no cycle."""
    result: dict[str, None] = {}
    waiting = list(before)
    while waiting:
        name = next(name for name in waiting if all(other in result for other in before[name]))
        result[name] = None
        waiting.remove(name)
    return list(result)


def groups(graph: JobGraph) -> dict[str, str]:
    """Maps each vertex to the first vertex of those that streams join it with, or to itself."""
    leader = {name: name for name in graph.vertices}
    for writer, _, reader, _ in graph.streams():
        first, second = leader[writer], leader[reader]
        leader = {name: first if of == second else of for name, of in leader.items()}
    first_of = {leader[name]: name for name in reversed(list(graph.vertices))}
    return {name: first_of[of] for name, of in leader.items()}


def grouped(graph: JobGraph) -> dict[str, list[str]]:
    """The groups of vertices that run together, by their first vertex, and the first vertices of the groups before
    them: the graph in which a cycle would wait for ever."""
    leader, before = groups(graph), graph.before()
    result: dict[str, list[str]] = {leader[name]: [] for name in graph.vertices}
    for name in graph.vertices:
        for other in before[name]:
            if leader[other] != leader[name] and leader[other] not in result[leader[name]]:
                result[leader[name]].append(leader[other])
    return result


def units(graph: JobGraph) -> dict[str, Unit]:
    """The units of a checked graph by name, in topological order."""
    leader, before = groups(graph), grouped(graph)
    members = {first: tuple(name for name in graph.vertices if leader[name] == first) for first in before}
    names = {first: "+".join(members[first]) for first in before}
    result = {}
    for first in topological(before):
        vertices = [graph.vertices[name] for name in members[first]]
        result[names[first]] = Unit(
            name=names[first], members=members[first], before=tuple(names[other] for other in before[first]),
            cpus=sum(vertex.cores for vertex in vertices), gpus=sum(vertex.gpus for vertex in vertices),
            memory_bytes=sum(vertex.memory_bytes for vertex in vertices),
            labels=tuple(dict.fromkeys(label for vertex in vertices for label in vertex.labels.items())),
        )  # fmt: skip
    return result


def worker_threads(graph: JobGraph) -> dict[int, int]:
    """The number of units by the threads of the worker that runs them: those of a single function, or one thread."""
    single = [(unit, graph.vertices[unit.members[0]]) for unit in units(graph).values()]
    return Counter(
        max(1, int(vertex.cores)) if len(unit.members) == 1 and isinstance(vertex, FunctionVertex) else 1
        for unit, vertex in single
    )


def before_units(of: Mapping[str, Unit]) -> dict[str, tuple[str, ...]]:
    """The units before each unit."""
    return {name: unit.before for name, unit in of.items()}


def levels(before: Before) -> dict[str, int]:
    """The number of names on the longest path that ends before each name."""
    result: dict[str, int] = {}
    for name in topological(before):
        result[name] = max((result[other] + 1 for other in before[name]), default=0)
    return result


def remaining_s(before: Before, seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds from the start of each name to the end of the longest path from it."""
    result = {name: seconds[name] for name in before}
    for name in reversed(topological(before)):
        for other in before[name]:
            result[other] = max(result[other], seconds[other] + result[name])
    return result


def critical_path(before: Before, seconds: Mapping[str, float]) -> tuple[float, tuple[str, ...]]:
    """The seconds of the longest path, and its names: no number of nodes makes the graph faster."""
    left = remaining_s(before, seconds)
    after = followers(before)
    path: list[str] = []
    choices = [name for name in before if not before[name]]
    while choices:
        path.append(max(choices, key=lambda name: left[name]))
        choices = after[path[-1]]
    return max(left.values(), default=0.0), tuple(path)


def followers(before: Before) -> dict[str, list[str]]:
    """The names after each name."""
    result: dict[str, list[str]] = {name: [] for name in before}
    for name, others in before.items():
        for other in others:
            result[other].append(name)
    return result


def chains(before: Before) -> list[list[str]]:
    """The longest runs of names in which each one is the only one after the one before it, and waits for it alone; of
    two names at least."""
    after = followers(before)

    def link(name: str) -> str:
        """The only name after this one, if it waits for nothing else; else empty."""
        return after[name][0] if len(after[name]) == 1 and len(before[after[name][0]]) == 1 else ""

    linked = {link(name) for name in before}
    result = []
    for name in topological(before):
        if name in linked or not link(name):
            continue
        chain = [name]
        while following := link(chain[-1]):
            chain.append(following)
        result.append(chain)
    return result


def is_chain(before: Before) -> bool:
    """Whether at no time two names could run at once."""
    names = topological(before)
    return all(earlier in before[later] for earlier, later in pairwise(names))
