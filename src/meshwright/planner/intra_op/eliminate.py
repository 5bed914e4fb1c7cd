"""Simplify a problem exactly: replace a decision by a table of its least costs, given the choices of its neighbours.

    a -- x -- b      becomes      a -- b      cost(a, b) = min over x of cost(a, x) + cost(x) + cost(x, b)

Nodes with one or two neighbours are eliminated as in OptCNN (Jia et al. 2018, section 5.3). Nodes with more neighbours
are eliminated as long as their table stays small (variable elimination, Dechter 1999). If two edges join the same
nodes, their costs are added up.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.intra_op.problem import Costs, Problem, ProblemTensor, table_of, table_size

LARGEST_TABLE = 20_000_000
"""Largest number of entries of a table. A decision that needs a larger table is left to the integer program."""
AT_ONCE = 1_000_000
"""Largest number of entries of a sum of tables that is computed at once. Larger sums are computed separately for each
choice of the eliminated node, to save memory."""


@dataclass(frozen=True, eq=False)
class Table:
    """Costs in seconds for every combination of choices of the nodes in ``scope`` (in rising order)."""

    scope: tuple[int, ...]
    costs: Costs


@dataclass(frozen=True, eq=False)
class BestChoices:
    """The best choice of an eliminated node for every combination of choices of the nodes in ``scope``."""

    node: int
    scope: tuple[int, ...]
    best: NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Core:
    """The part of a problem that elimination leaves: nodes, tables between them, and tensors that did not become
    tables. ``answers`` has the eliminated nodes in the order of elimination. ``seconds`` is the part of the cost that
    no longer depends on a choice."""

    problem: Problem
    nodes: tuple[int, ...]
    tables: tuple[Table, ...]
    tensors: tuple[ProblemTensor, ...]
    answers: tuple[BestChoices, ...]
    seconds: float

    def complete(self, chosen: dict[int, int]) -> list[int]:
        """The choices of all nodes, given the choices of the nodes that were not eliminated."""
        choices = dict(chosen)
        for answer in reversed(self.answers):
            choices[answer.node] = int(answer.best[tuple(choices[node] for node in answer.scope)])
        return [choices[node] for node in range(len(self.problem.nodes))]


def simplify(
    problem: Problem, limited: bool = False, largest: int = LARGEST_TABLE, widest: int = 64, keep: int | None = None
) -> Core:
    """Eliminate nodes as long as tables stay small. The node whose elimination makes the smallest table comes first.

    Args:
        limited: keep all nodes and tensors whose memory depends on choices, so that memory limits can be imposed later.
        largest: the largest number of entries of a table.
        widest: the largest number of neighbours of an eliminated node (2: all new tables join two nodes at most).
        keep: a node that is not eliminated. If it is the only node left, its table has the least cost of each of its
            choices.
    """
    tables: dict[tuple[int, ...], Costs] = {}
    left: list[ProblemTensor] = []

    def add(scope: tuple[int, ...], costs: Costs) -> None:
        tables[scope] = tables[scope] + costs if scope in tables else costs

    for index, decision in enumerate(problem.nodes):
        add((index,), decision.costs)
    for tensor in problem.tensors:
        weighs = limited and tensor.memory is not None
        if not weighs and len(tensor.nodes) <= widest and table_size(problem, tensor.nodes) <= largest:
            add(tensor.nodes, table_of(problem, tensor))
        else:
            left.append(tensor)
    held = {node for tensor in left for node in tensor.nodes}
    held |= {keep} if keep is not None else set()
    if limited:
        held |= {index for index, decision in enumerate(problem.nodes) if np.ptp(decision.memory, axis=1).any()}
    touching: dict[int, set[tuple[int, ...]]] = {index: set() for index in range(len(problem.nodes))}
    for scope in tables:
        for node in scope:
            touching[node].add(scope)
    answers: list[BestChoices] = []
    seconds = 0.0
    sizes = {node: _around(problem, touching, node) for node in touching if node not in held}
    while sizes:
        node = min(sizes, key=lambda candidate: (sizes[candidate][0], candidate))
        size, around = sizes.pop(node)
        if size > largest or len(around) > widest:
            break
        scopes = list(touching.pop(node))
        whole = (*around, node)
        parts = []
        for scope in scopes:
            parts.append(_spread(scope, tables.pop(scope), whole))
            for other in scope:
                if other != node:
                    touching[other].discard(scope)
        shape = tuple(problem.nodes[number].num_choices for number in whole)
        best, choice = _least(sorted(parts, key=lambda part: part.size), shape)
        answers.append(BestChoices(node, around, choice))
        if around:
            add(around, best)
            for other in around:
                touching[other].add(around)
                if other in sizes:
                    sizes[other] = _around(problem, touching, other)
        else:
            seconds += float(best)
    return Core(
        problem,
        tuple(sorted(touching)),
        tuple(Table(scope, costs) for scope, costs in tables.items()),
        tuple(left),
        tuple(answers),
        seconds,
    )


def _least(parts: list[Costs], shape: tuple[int, ...]) -> tuple[Costs, NDArray[np.integer]]:
    """Add up the tables ``parts`` (smallest first). Return the minimum over the last axis, and the index of the
    minimum."""
    if np.prod(shape) <= AT_ONCE:
        total = np.zeros(shape)
        for part in parts:
            total += part
        return total.min(axis=-1), np.asarray(total.argmin(axis=-1))
    best = np.full(shape[:-1], np.inf)
    choice = np.zeros(shape[:-1], dtype=np.int16)
    for last in range(shape[-1]):
        total = np.zeros((1,) * (len(shape) - 1))
        for part in parts:
            total = total + part[..., last if part.shape[-1] > 1 else 0]
        less = total < best
        np.copyto(best, total, where=less)
        np.copyto(choice, last, where=less)
    return best, choice


def _around(problem: Problem, touching: dict[int, set[tuple[int, ...]]], node: int) -> tuple[int, tuple[int, ...]]:
    """The number of entries of the table that would replace ``node``, and the nodes of that table."""
    around = tuple(sorted({other for scope in touching[node] for other in scope} - {node}))
    return table_size(problem, around), around


def _spread(scope: tuple[int, ...], costs: Costs, whole: tuple[int, ...]) -> Costs:
    """Arrange the axes of a table as in ``whole``, with axes of size 1 for nodes that are not in ``scope``."""
    order = sorted(range(len(scope)), key=lambda axis: whole.index(scope[axis]))
    shape = {scope[axis]: costs.shape[axis] for axis in range(len(scope))}
    return costs.transpose(order).reshape([shape.get(node, 1) for node in whole])
