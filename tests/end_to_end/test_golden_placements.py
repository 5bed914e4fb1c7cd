"""The integer program on the small models of other planners' tests: Alpa's under Alpa's cost model, and AutoParallel's
placements of data parallel, fully sharded and tensor parallel steps."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial

import numpy as np
import pytest

import meshwright as mw
from benchmarks import golden_models as models
from benchmarks.placements import ROWS, Row, is_best, plan_row, problems
from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.placement import Placements, describe, input_placements, output_placements
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.intra_op.assign import Assigned
from meshwright.planner.intra_op.eliminate import simplify
from meshwright.planner.intra_op.integer import solve_core
from meshwright.planner.intra_op.solve import solve, solve_by_trying


def named(case: str) -> Row:
    return next(row for row in ROWS if row.case == case)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.case} {row.layout.mixed or ''}" for row in ROWS])
def test_placements_and_collectives_are_those_of_alpa_or_cheaper(row: Row) -> None:
    published = plan_row(row, published=True)
    assert problems(row, published) == []
    free = plan_row(row) if row.pins or row.whole else published
    assert is_best(free)
    assert free is published or free.assigned.solution.seconds < published.assigned.solution.seconds


@pytest.mark.parametrize("case", ["mlp6-2d", "bert2-tp", "embed-tied-2d"])
def test_the_integer_program_proves_what_elimination_finds(case: str) -> None:
    found = plan_row(named(case)).assigned
    core = simplify(found.formulated.problem, widest=1)
    assert len(core.nodes) > 1
    other = solve_core(core)
    assert other.proven
    assert other.bound == pytest.approx(found.solution.seconds, rel=1e-6)


def way_of(operator: Operator, letter: str) -> str:
    """How a factor cuts a product: the ``samples``, the ``columns`` of the weight, its ``rows``, or ``experts``, each
    with a weight and samples of its own."""
    assert operator.rule is not None
    left, right, output = (
        {factor.name for dim in operand.dims for factor in dim}
        for operand in (*operator.rule.parsed.inputs[:2], operator.rule.parsed.outputs[0])
    )
    if letter in left & right:
        return "experts" if letter in output else "rows"
    return "columns" if letter in right else "samples" if letter else "whole"


def tried(row: Row, products: list[str], *axes: str) -> dict[tuple[str, ...], float]:
    """The least seconds for every combination of ways to cut these products over the axes, of which globs match the
    names. All other choices are free."""
    found = plan_row(row).assigned
    formulated, barred_s = found.formulated, 100 * found.solution.seconds
    problem, operators = formulated.problem, {operator.name: operator for operator in row.graph().operators}
    numbers: dict[tuple[str, str], dict[str, dict[int, set[int]]]] = {}
    for glob, axis in itertools.product(products, axes):
        ways: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name in filter(partial(fnmatch, pat=glob), formulated.decisions.place):
            node, member = formulated.decisions.place[name]
            for number, choice in enumerate(formulated.choices[node]):
                ways[way_of(operators[name], choice[member].get(axis, ""))][node].add(number)
        numbers[glob, axis] = ways
    seconds = {}
    for picked in itertools.product(*numbers.values()):
        nodes = list(problem.nodes)
        for way, ways in zip(picked, numbers.values(), strict=True):
            for node, allowed in ways[way].items():
                barred = [0.0 if number in allowed else barred_s for number in range(nodes[node].num_choices)]
                nodes[node] = replace(nodes[node], costs=nodes[node].costs + np.array(barred))
        solution = solve(replace(problem, nodes=tuple(nodes)))
        if solution is not None and solution.seconds < barred_s:
            seconds[picked] = solution.seconds
    return seconds


@pytest.mark.parametrize(
    ("case", "products", "axes", "best"),
    [
        # published: columns and rows by turns, which is 7 % slower
        ("conv4-tp", [f"convs.{n}:convolution#0" for n in range(4)], ["m1"], ("columns", "rows", "rows", "rows")),
        # as published, but that biases of rows, and norms, are stored cut and gathered for use
        ("mlp6-2d", [f"layers.{n}:mm#0" for n in range(0, 12, 2)], ["tp"], ("columns", "rows") * 3),
        ("mlp6-2d-rs", [f"layers.{n}:mm#0" for n in range(0, 12, 2)], ["tp"], ("columns", "rows") * 3),
        ("bert2-2d", [f"*.{name}:mm#0" for name in ("qkv", "out", "inner.0", "inner.2")], ["tp"],
         ("columns", "rows") * 2),
        # published: the dense layer before the vocabulary is whole
        ("bert2-mlm-2d", [f"*{name}:mm#0" for name in ("qkv", ".out", "inner.0", "inner.2", "dense")], ["tp"],
         (*("columns", "rows") * 2, "columns")),
        # published: the batch over both axes in dense layers; one axis is so fast that their columns are better cut
        ("mixed-2d", ["bmm#[01]", "one:mm#0"], ["m1", "m2"], ("experts", "experts", "samples", "columns")),
    ],
)  # fmt: skip
def test_products_are_cut_as_in_the_best_of_all_ways(
    case: str, products: list[str], axes: list[str], best: tuple[str, ...]
) -> None:
    row = named(case)
    seconds = tried(row, products, *axes)
    assert len(seconds) >= 2 ** len(products)
    assert min(seconds, key=seconds.__getitem__) == best
    assert plan_row(row).assigned.solution.seconds == pytest.approx(min(seconds.values()), rel=1e-12)


def test_parameters_are_stored_as_in_the_best_of_all_ways() -> None:
    """All 12 parameters as the limits of memory allow, each under ZeRO 2 or 3. Published is ZeRO 3 for all."""
    found = plan_row(named("mlp6-zero3")).assigned
    problem, stored = found.formulated.problem, found.formulated.stored
    others = [node for node in range(len(problem.nodes)) if node not in stored]
    assert all(problem.nodes[node].num_choices == 1 for node in others)  # dp divides the batch of every operator
    best = solve_by_trying(problem)
    assert best is not None
    assert found.solution.seconds == pytest.approx(best.seconds, rel=1e-12)
    published = list(found.solution.choices)
    for node, (_, ways) in stored.items():
        stage = max(way.zero for way in ways)
        published[node] = next(number for number, way in enumerate(ways) if way.zero == stage)
    assert problem.fits(published)
    assert problem.seconds(published) > best.seconds


# --- AutoParallel ----------------------------------------------------------------------------------------------------

# Products of a layer that is cut by columns (q, k, v, w1), or by rows (o, w2), over dp, tp: the two inputs and the
# output. The source is meta-pytorch/autoparallel at a54c252, tests/test_optimize_placement.py.
COLUMNS = ("dp:S(0)", "tp:S(1)", "dp:S(0) tp:S(1)")
ROW_CUT = ("dp:S(0) tp:S(1)", "tp:S(0)", "dp:S(0) tp:P(sum)")
COLUMNS_WEIGHT = ("dp:S(1) tp:S(0)", "dp:S(0)", "dp:P(sum) tp:S(0)")
ROWS_WEIGHT = ("dp:S(1)", "dp:S(0) tp:S(1)", "dp:P(sum) tp:S(1)")
FORWARD = ("dp:S(0)", "R", "dp:S(0)")
WEIGHT = ("dp:S(1)", "dp:S(0)", "dp:P(sum)")
H100 = mw.Cluster.load("h100-80gb-dgx-ndr400x8", 256)
FREE = OptimizerCost(states=0, moved=0, kernels=1)
"""AutoParallel's costs know no optimizer."""


def stored(graph: Graph, layout: mw.Layout, share: float) -> Assigned:
    """The solution if a rank may store the fraction ``share`` of all parameters."""
    total = sum(graph.tensors[name].num_bytes for name in graph.parameters)
    ask = Ask(
        explains=False, lower=PlanLowering(graph), fits_buckets=False, parameter_bytes=share * total,
        memory_bytes=1e15, optimizer=FREE,
    )  # fmt: skip
    plan_layout(graph, layout, world_size=256, cluster=H100, ask=ask)
    return next(iter(ask.known.values()))


def products(graph: Graph, found: Assigned, block: str = "") -> Counter[tuple[str, ...]]:
    """The placements of the inputs and the output of every product, and how often they occur."""
    sizes = found.formulated.sizes
    counts: Counter[tuple[str, ...]] = Counter()
    for op in graph.operators:
        if ":mm#" in op.name and op.name.startswith(block):
            assert op.rule is not None
            strategy = found.strategies[op.name]
            sides: list[Placements] = [input_placements(op.rule, strategy, side, sizes) for side in range(2)]
            counts[tuple(map(describe, [*sides, output_placements(op.rule, strategy, 0, sizes)]))] += 1
    return counts


@pytest.mark.parametrize(("share", "placement"), [(1 / 256, "dp:flat"), (1.0, "R")], ids=["FSDP", "DDP"])
@pytest.mark.parametrize("name", ["ffn", "block"])
def test_memory_decides_between_fsdp_and_ddp(name: str, share: float, placement: str) -> None:
    graph = models.feed_forward(2048 * 256) if name == "ffn" else models.blocks(8 * 256)
    found = stored(graph, mw.Layout(dp=256, zero=-1), share)
    assert {describe(lies) for lies in found.storage.values()} == {placement}
    assert set(products(graph, found)) == {FORWARD, WEIGHT}


def test_fsdp_and_tp_of_a_feed_forward() -> None:
    graph = models.feed_forward(2048 * 32)
    found = stored(graph, mw.Layout(dp=32, tp=8, zero=-1), 1 / 256)
    assert list(map(describe, found.storage.values())) == ["tp:S(0) dp:flat", "tp:S(1) dp:flat"]  # S0S0 and S0S1
    assert products(graph, found) == Counter([COLUMNS, ROW_CUT, ROWS_WEIGHT, COLUMNS, COLUMNS_WEIGHT])


def test_fsdp_and_tp_of_a_block() -> None:
    graph = models.blocks(8 * 32)
    found = stored(graph, mw.Layout(dp=32, tp=8, zero=-1), 1 / 256)
    for name, lies in found.storage.items():
        cut = 1 if name.endswith(("o.weight", "w2.weight")) else 0
        assert describe(lies) == f"tp:S({cut}) dp:flat", name
    # q, k, v and w1 are cut by columns, o and w2 by rows. The gradient of a cut by columns reads like a cut by rows.
    columns, rows = 4, 2
    assert products(graph, found, "1.") == {
        COLUMNS: columns + rows, ROW_CUT: rows + columns, COLUMNS_WEIGHT: columns, ROWS_WEIGHT: rows,
    }  # fmt: skip


def test_less_than_the_smallest_share_is_refused() -> None:
    with pytest.raises(LayoutError, match="no strategies of the operators fit"):
        stored(models.feed_forward(2048 * 256), mw.Layout(dp=256, zero=-1), 1 / 512)
