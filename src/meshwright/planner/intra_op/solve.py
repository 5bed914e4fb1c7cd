"""Solve a problem: simplify it exactly, then solve the rest with the integer program."""

import itertools
from dataclasses import dataclass

import numpy as np

from meshwright.planner.integer_program import TIME_LIMIT_S
from meshwright.planner.intra_op.eliminate import Core, simplify
from meshwright.planner.intra_op.integer import solve_core
from meshwright.planner.intra_op.problem import Problem

WIDEST = 2
"""Largest number of neighbours of an eliminated node if tables must stay small. New tables then join two nodes at
most."""
LARGEST_IN_PROGRAM = 100_000
"""Largest number of entries of a table in the integer program. The program has a column for each entry."""


@dataclass(frozen=True)
class Solution:
    """The solution of a problem. ``choices`` has the choice of each node. ``seconds`` is their cost, and ``bound`` is a
    lower bound on the cost of any choices. ``left`` is the number of nodes that were left to the integer program."""

    choices: tuple[int, ...]
    seconds: float
    bound: float
    left: int

    @property
    def gap(self) -> float:
        """The fraction of its cost by which the solution may exceed the best solution; 0 if it is proven to be the
        best."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds > 0 else 0.0


def solve(problem: Problem) -> Solution | None:
    """The choices of least cost within all memory limits; None if none exist.

    First solve without memory limits, which is cheap. If the result does not fit, solve with all limits.

    Raises:
        TimeoutError: choices that fit may exist, but none were found in time.
    """
    core = simplify(problem)
    if any(table.costs.size > LARGEST_IN_PROGRAM for table in core.tables):
        core = simplify(problem, widest=WIDEST)
    solution = _from(core, False)
    if solution is None or problem.fits(solution.choices):
        return solution
    return _from(simplify(problem, limited=True, widest=WIDEST), True)


def _from(core: Core, limited: bool) -> Solution | None:
    reply = solve_core(core, limited)
    if reply.chosen is None:
        if reply.proven:
            return None
        raise TimeoutError(f"no choices that fit were found in {TIME_LIMIT_S:g} s")
    choices = core.complete(reply.chosen)
    if limited and not core.problem.fits(choices):  # no remaining choice changes the memory
        return None
    seconds = core.problem.seconds(choices)
    return Solution(tuple(choices), seconds, seconds if reply.proven else min(seconds, reply.bound), len(core.nodes))


def solve_by_trying(problem: Problem) -> Solution | None:
    """Try all combinations of choices. This is the simple version against which ``solve`` is tested."""
    best: Solution | None = None
    for choices in itertools.product(*(range(node.num_choices) for node in problem.nodes)):
        seconds = problem.seconds(choices)
        if np.isfinite(seconds) and (best is None or seconds < best.seconds) and problem.fits(choices):
            best = Solution(choices, seconds, seconds, 0)
    return best
