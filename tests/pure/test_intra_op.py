"""The program over strategies: simplified or not, by elimination or by HiGHS, it finds what trying everything finds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.intra_op import eliminate
from meshwright.planner.intra_op import solve as intra_op_solve
from meshwright.planner.intra_op.integer import CoreSolution, solve_core
from meshwright.planner.intra_op.problem import Problem, ProblemNode, ProblemTensor, table_of
from meshwright.planner.intra_op.solve import solve, solve_by_trying

SECONDS = st.integers(0, 20).map(float)
PRICES = st.one_of(SECONDS, SECONDS, SECONDS, st.just(np.inf))


@st.composite
def problems(draw: st.DrawFn, moments: int = 0) -> Problem:
    """A few decisions of one to three choices, and tensors of one to three readers (also of what makes them)."""
    count = draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 3)) for _ in range(count)]

    def array(*shape: int, of: st.SearchStrategy[float] = SECONDS) -> np.ndarray:
        flat = draw(st.lists(of, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.array(flat, dtype=float).reshape(shape)

    nodes = [ProblemNode(f"n{index}", array(size), array(moments, size)) for index, size in enumerate(sizes)]
    tensors = []
    for _ in range(draw(st.integers(0, 7))):
        maker, places = draw(st.integers(0, count - 1)), draw(st.integers(1, 3))

        def spread(node: int, places: int = places) -> np.ndarray:
            each = st.lists(st.integers(0, places - 1), min_size=sizes[node], max_size=sizes[node])
            return np.array(draw(each), dtype=np.int64)

        readers = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
        memory = array(moments, places, places) if moments else None
        prices = array(places, places, of=PRICES)
        tensors.append(
            ProblemTensor(maker, spread(maker), tuple((node, spread(node)) for node in readers), prices, memory)
        )
    limits = np.array([draw(st.integers(10, 120)) for _ in range(moments)], dtype=float)
    return Problem(tuple(nodes), tuple(tensors), limits)


def assert_best(problem: Problem) -> None:
    best, solution = solve_by_trying(problem), solve(problem)
    if best is None:
        assert solution is None
    else:
        assert solution is not None
        assert solution.seconds == pytest.approx(best.seconds)
        assert solution.gap == pytest.approx(0.0, abs=1e-5)
        assert problem.fits(solution.choices)


@given(problems())
def test_the_solution_is_what_trying_everything_finds(problem: Problem) -> None:
    assert_best(problem)


@given(problems(moments=2))
def test_so_it_is_under_limits_of_memory(problem: Problem) -> None:
    assert_best(problem)


@given(problems(), st.integers(0, 3), st.sampled_from([1, 8, 10**6]))
def test_simplifying_keeps_the_best_and_the_program_finds_it(problem: Problem, widest: int, largest: int) -> None:
    best = solve_by_trying(problem)
    core = eliminate.simplify(problem, widest=widest, largest=largest)
    solution = solve_core(core)
    if best is None:
        assert solution.chosen is None or not np.isfinite(problem.seconds(core.complete(solution.chosen)))
    else:
        assert solution.chosen is not None
        assert problem.seconds(core.complete(solution.chosen)) == pytest.approx(best.seconds)


@given(problems())
def test_a_table_says_what_a_tensor_costs(problem: Problem) -> None:
    for tensor in problem.tensors:
        table = table_of(problem, tensor)
        alone = Problem(tuple(ProblemNode("", np.zeros(n.num_choices), n.memory) for n in problem.nodes), (tensor,))
        for at in np.ndindex(table.shape):
            choices = [0] * len(problem.nodes)
            for node, choice in zip(tensor.nodes, at, strict=True):
                choices[node] = choice
            assert table[at] == alone.seconds(choices)


def test_chains_trees_and_rings_need_no_integer_program() -> None:
    rng = np.random.default_rng(0)
    nodes = tuple(ProblemNode(f"n{index}", rng.random(4), np.zeros((0, 4))) for index in range(40))
    places = np.arange(4)
    ring = tuple(ProblemTensor(i, places, (((i + 1) % 40, places),), rng.random((4, 4))) for i in range(40))
    solution = solve(Problem(nodes, ring))
    assert solution is not None
    assert solution.left == 0


def test_the_program_gets_small_tables_where_elimination_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decision has four neighbours, the others all have each other: to eliminate more would take 26 ** 6 entries,
    and the first alone leaves a table of 26 ** 4."""
    cores = []

    def recorded(core: eliminate.Core, *others: Any) -> CoreSolution:
        cores.append(core)
        return solve_core(core, *others)

    monkeypatch.setattr(intra_op_solve, "solve_core", recorded)
    count, choices, places = 8, 26, np.arange(26)
    pairs = [(0, other) for other in range(1, 5)] + list(itertools.combinations(range(1, count), 2))
    differ = 1.0 - np.eye(choices)
    tensors = tuple(ProblemTensor(maker, places, ((reader, places),), differ) for maker, reader in pairs)
    costs = np.random.default_rng(0).integers(1, 9, (count, choices)).astype(float)
    costs[:, 11] = 0.5
    nodes = tuple(ProblemNode(f"n{index}", each, np.zeros((0, choices))) for index, each in enumerate(costs))
    solution = solve(Problem(nodes, tensors))
    assert solution is not None
    assert (solution.choices, solution.left) == ((11,) * count, count)
    assert max(len(table.scope) for core in cores for table in core.tables) == 2


def test_readers_that_want_the_same_pay_once() -> None:
    free, prices = np.zeros(1), np.array([[5.0]])
    nodes = tuple(ProblemNode(name, free, np.zeros((0, 1))) for name in "abc")
    at = np.zeros(1, dtype=np.int64)
    problem = Problem(nodes, (ProblemTensor(0, at, ((1, at), (2, at)), prices),))
    assert problem.seconds((0, 0, 0)) == 5.0
