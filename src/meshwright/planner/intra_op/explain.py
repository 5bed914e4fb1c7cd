"""Explain the split of each module: what other strategies would cost if the neighbouring operators adapted to them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kind import COMPUTE, kind_of
from meshwright.ir.placement import is_linear
from meshwright.ir.plan import Note, Strategy
from meshwright.planner.intra_op.assign import Assigned
from meshwright.planner.intra_op.eliminate import Core, simplify
from meshwright.planner.intra_op.options import classes_of
from meshwright.planner.intra_op.problem import Problem, ProblemNode, ProblemTensor
from meshwright.planner.notes import merged
from meshwright.planner.words import word_of

SHOWN = 3
"""Number of other strategies that a note lists, the cheapest first."""
LARGEST = 300_000
"""Largest number of entries of a table that is made for an explanation."""
PROVEN = 1e-4
"""Largest gap of a solution (``Solution.gap``) that is not mentioned in a note."""


def notes_of(graph: Graph, assigned: Assigned, pinned: Mapping[str, Strategy]) -> tuple[Note, ...]:
    """A note for every module with weights or attention; repeated modules share one note if their notes are equal."""
    parameters = set(graph.parameters)
    main: dict[str, int] = {}
    around: dict[str, list[int]] = defaultdict(list)
    decisions = assigned.formulated.decisions
    for operator in graph.operators:
        place = decisions.place.get(operator.name)
        if place is None or operator.prologue:
            continue
        around[operator.module].append(place[0])
        tells = parameters & set(operator.inputs) or kind_of(operator) in COMPUTE
        if not operator.backward and (tells or operator.module in main):
            heaviest = main.get(operator.module)
            if heaviest is None or _weight(assigned, place[0]) > _weight(assigned, heaviest):
                main[operator.module] = place[0]
    line_of: dict[tuple[int, ...], tuple[str, str]] = {}
    lines: dict[str, tuple[str, str]] = {}
    for module, index in main.items():
        key = (index, *sorted(set(around[module])))
        if key not in line_of:
            line_of[key] = _line(graph, assigned, index, set(around[module]), pinned)
        lines[module] = line_of[key]
    gap = assigned.solution.gap
    if gap <= PROVEN:
        return merged(lines)
    proven = f"in the time given, these choices were proven within {gap:.2%} of the best"
    return (*merged(lines), Note(module="(model)", split="", reason=proven))


def _weight(assigned: Assigned, index: int) -> float:
    """The importance of a decision in its module: the seconds of its cheapest choice. Products, convolutions and
    attention are more important than all other operators."""
    product = kind_of(assigned.formulated.decisions.entries[index].leads[0]) in COMPUTE
    return float(assigned.formulated.problem.nodes[index].costs.min()) + (1e9 if product else 0.0)


def _line(
    graph: Graph, assigned: Assigned, index: int, module: set[int], pinned: Mapping[str, Strategy]
) -> tuple[str, str]:
    formulated, chosen = assigned.formulated, assigned.solution.choices
    decision = formulated.decisions.entries[index]
    lead = next((number for number, member in enumerate(decision.members) if not member.backward), 0)
    operator = decision.members[lead]
    ways = [_way(graph, operator, choice[lead], formulated.sizes) for choice in formulated.choices[index]]
    costs = _costs(assigned, index, module)
    by_way: dict[str, float] = {}
    for way, seconds in zip(ways, costs, strict=True):
        by_way[way] = min(seconds, by_way.get(way, np.inf))
    split, best = ways[chosen[index]], costs[chosen[index]]
    if pinned.get(operator.name):
        return split, "pinned"
    others = sorted((seconds - best, way) for way, seconds in by_way.items() if way != split and np.isfinite(seconds))
    if not others:
        return split, "no other split fits the neighbouring operators"
    return split, ", ".join(f"{way} {more * 1e3:+.3g} ms" for more, way in others[:SHOWN])


def _way(graph: Graph, operator: Operator, strategy: Strategy, sizes: Mapping[str, int]) -> str:
    """A strategy as text, such as ``batch@dp h@tp``."""
    choices = []
    for axis in sizes:
        choice = strategy.get(axis, "")
        if not choice or is_linear(choice):
            choices.append(f"none@{axis}")
        else:
            batch = any(graph.factor_classes[name].role == "batch" for name in classes_of(operator, choice))
            choices.append(f"{'batch' if batch else word_of(operator, choice)}@{axis}")
    return " ".join(choices)


def _costs(assigned: Assigned, index: int, module: set[int]) -> list[float]:
    """The seconds of the step for each choice of a decision, without the seconds that are equal for all choices.

    Other decisions of the module and neighbouring decisions take their best choices. All other decisions stay as
    chosen. If this needs tables that are too large, fewer decisions take their best choices.
    """
    problem, stored = assigned.formulated.problem, assigned.formulated.stored
    beside = {
        node
        for tensor in problem.tensors
        if index in tensor.nodes and len(tensor.readers) == 1
        for node in tensor.nodes
    }
    for free in (module | beside, beside, {index}):
        free |= {
            node for tensor in problem.tensors if free & set(tensor.nodes) for node in tensor.nodes if node in stored
        }
        core = _part(problem, assigned.solution.choices, free | {index}, index)
        if len(core.nodes) == 1 and not core.tensors:
            return [float(seconds) for table in core.tables for seconds in table.costs]
    raise AssertionError("what is fixed is eliminated")


def _part(problem: Problem, chosen: Sequence[int], free: set[int], index: int) -> Core:
    """The simplified problem of the nodes ``free``. The choices of their neighbours are fixed to those in ``chosen``.
    All nodes except ``index`` are eliminated as long as tables stay small."""
    near = [tensor for tensor in problem.tensors if free & set(tensor.nodes)]
    scope = sorted({node for tensor in near for node in tensor.nodes} | free)
    place = {node: number for number, node in enumerate(scope)}
    rows = {node: list(range(problem.nodes[node].num_choices)) if node in free else [chosen[node]] for node in scope}
    nodes = tuple(
        ProblemNode("", problem.nodes[node].costs[rows[node]], np.zeros((0, len(rows[node])))) for node in scope
    )
    tensors = tuple(
        ProblemTensor(
            place[tensor.maker],
            tensor.have[rows[tensor.maker]],
            tuple((place[node], wants[rows[node]]) for node, wants in tensor.readers),
            tensor.prices,
        )
        for tensor in near
    )
    return simplify(Problem(nodes, tensors), largest=LARGEST, keep=place[index])
