"""Placements of the integer program for the small models of Alpa's tests on 4 devices, under Alpa's cost model.

Run as part of ``make bench-planning``; ``tests/end_to_end/test_golden_placements.py`` asserts the same. The sizes, the
constants of the cost model, the optimal placements and their collectives are those of alpa-projects/alpa at b8078a9,
``tests/shard_parallel`` (Zheng et al., OSDI 2022), as 26 rows: 9 models on meshes of 4x1 and 1x4, and 8 on 2x2.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import prod

import meshwright as mw
from benchmarks import golden_models as models
from meshwright.cost.optimizer import ADAM
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.placement import describe
from meshwright.ir.plan import Plan
from meshwright.ir.program import Collective, CollectiveKind
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.intra_op.assign import Assigned
from meshwright.planner.intra_op.costs import AlphaBetaCosts
from meshwright.planner.intra_op.eliminate import simplify
from meshwright.planner.intra_op.integer import solve_core

COMMAND = "python -m benchmarks.placements"
ADDED_S = {"all_reduce": 0.01, "all_gather": 0.1, "reduce_scatter": 0.001, "all_to_all": 0.001}
SPREAD = 0.5
"""Alpa's constants: seconds added to each collective, and the factor of its all-to-alls."""
SCALARS = 8
"""Collectives of at most this number of bytes are not counted: the loss and the number of labels, which Alpa's steps do
not return."""

Price = Callable[[CollectiveKind, float, str], float]
"""The seconds of a collective: its kind, its bytes and its axis."""
Pins = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    ``counts`` has the least and the most collectives of each kind in the lowered step; other kinds must not occur.
    ``stored`` maps globs of parameters to their placements. ``seconds`` is the objective in closed form, and
    ``tolerance`` its relative error, where the published form is rough (Alpa's tests allow 1 %). ``pins`` and
    ``whole`` (globs of parameters that are stored whole) fix the published placement where the program finds a cheaper
    placement. ``divided``: a rank may store only its share of the parameters.
    ``memory_bytes`` limits all that a rank holds. ``note`` names a difference that no pins can remove.
    """

    case: str
    graph: Callable[[], Graph]
    layout: Layout
    counts: Mapping[str, tuple[int, int]]
    stored: Mapping[str, str] = field(default_factory=dict)
    alpha: tuple[float, float] = (1.0, 1.0)
    beta: tuple[float, float] = (1.0, 1.0)
    seconds: Callable[[Graph, Price], float] | None = None
    tolerance: float = 1e-9
    pins: Pins = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    divided: bool = False
    memory_bytes: float | None = None
    note: str = ""

    @property
    def cheaper(self) -> bool:
        """Whether the program finds a placement that is cheaper than the published one."""
        return bool(self.pins or self.whole or self.note)

    @property
    def costs(self) -> AlphaBetaCosts:
        """Alpa's cost model on the row's mesh. Its integer program knows no reduce-scatters."""
        sizes = {axis.name: axis.size for axis in self.layout.mesh().axes if axis.size > 1}
        alpha, beta = (dict(zip(sizes, values, strict=False)) for values in (self.alpha, self.beta))
        return AlphaBetaCosts(sizes, alpha, beta, ADDED_S, SPREAD, scatters=False)


def numel(graph: Graph, but: str = "") -> list[int]:
    """The number of elements of each trained parameter whose name does not match the glob ``but``."""
    return [graph.tensors[name].num_elements for name in graph.parameters if not fnmatch(name, but)]


def reduced(graph: Graph, price: Price, axis: str, but: str = "") -> float:
    """The seconds to all-reduce every gradient alone, and the loss."""
    return sum(price("all_reduce", 4 * count, axis) for count in (*numel(graph, but), 1))


def _one_axis(axis: str, sizes: tuple[int, ...]) -> list[Row]:
    mixed = Layout(mixed=sizes)
    exchanged = 64 * 16 * 64 * 2 * 4 // 4  # the bytes on one rank of four
    return [
        Row("mlp6-dp", lambda: models.mlp(256, 32), mixed, {"all_reduce": (1, 1)}, {"*": "R"},
            seconds=lambda graph, price: reduced(graph, price, axis)),
        Row("mlp6-tp", lambda: models.mlp(32, 256), mixed, {"all_reduce": (5, 5)},
            {f"layers.{n}.weight": f"{axis}:S({n // 2 % 2})" for n in range(0, 12, 2)},
            seconds=lambda graph, price: 5 * price("all_reduce", 32 * 256 * 4, axis)),
        Row("bert2-dp", lambda: models.bert(64, 64, 32), mixed, {"all_reduce": (1, 1)}, {"*": "R"},
            seconds=lambda graph, price: reduced(graph, price, axis)),
        Row("bert2-tp", lambda: models.bert(8, 8, 128), mixed, {"all_reduce": (7, 7)},
            {"*.qkv.weight": f"{axis}:S(0/3)", "*.out.weight": f"{axis}:S(1)", "*.inner.0.weight": f"{axis}:S(0)",
             "*.inner.2.weight": f"{axis}:S(1)"},
            seconds=lambda graph, price: 7 * price("all_reduce", 8 * 8 * 128 * 4, axis)),
        Row("moe1-ep", models.moe_layer, mixed, {"all_reduce": (1, 1), "all_to_all": (4, 4)},
            {"inner.up": f"{axis}:S(0)", "inner.down": f"{axis}:S(0)", "qkv.*": "R", "out.*": "R", "*.gate.*": "R"},
            seconds=lambda graph, price: 4 * price("all_to_all", exchanged, axis)
            + reduced(graph, price, axis, "inner.[ud]*")),
        Row("moe2-lm-ep", models.moe_language_model, mixed, {"all_reduce": (1, 4), "all_to_all": (4, 4)},
            {"*.inner.up": f"{axis}:S(0)", "*.inner.down": f"{axis}:S(0)"}),
        Row("conv3-dp", lambda: models.convolutions(3, 16, 4), mixed, {"all_reduce": (4, 4), "all_gather": (3, 3)},
            {"*": "R"}),
        Row("conv4-tp", lambda: models.convolutions(4, 8, 256), mixed, {"all_reduce": (3, 3), "all_gather": (0, 4)},
            {f"convs.{n}.weight": f"{axis}:S({n % 2})" for n in range(4)},
            pins={f"convs.{n}": f"{('filter', 'channel')[n % 2]}@{axis}" for n in range(4)}),
        Row("depthwise-tp", models.depthwise, mixed, {"all_reduce": (1, 1)},
            {"first.weight": f"{axis}:S(0)", "middle.weight": f"{axis}:S(0)", "last.weight": f"{axis}:S(1)"},
            seconds=lambda graph, price: price("all_reduce", 4 * 256 * 8 * 8 * 4, axis)),
    ]  # fmt: skip


def _mlp_2d(graph: Graph, price: Price) -> float:
    """As published. Biases of columns are counted whole, although their gradients are cut."""
    gradients = 6 * (price("all_reduce", 32 * 32 * 4 / 2, "dp") + price("all_reduce", 32 * 4, "dp"))
    return gradients + 5 * price("all_reduce", 256 * 32 * 4 / 2, "tp") + price("all_reduce", 4, "dp")


def _bert_2d(graph: Graph, price: Price) -> float:
    """As published. Gradients of norms are counted as cut, although norms are whole."""
    gradients = sum(price("all_reduce", 4 * count / 2, "dp") for count in numel(graph))
    return gradients + 7 * price("all_reduce", 8 * 8 * 128 * 4 / 2, "tp") + price("all_reduce", 4, "dp")


def _tied(graph: Graph, price: Price) -> float:
    """The vocabulary's gradient, both sums over the vocabulary, and for the log-softmax one gather in place of two
    all-reduces. We also all-reduce the number of labels and the loss."""
    sums = price("all_reduce", 1024 * 8 * 4 / 2, "dp") + 2 * price("all_reduce", 8 * 8 * 8 * 4 / 2, "tp")
    scalars = price("all_reduce", 8, "dp") + price("all_reduce", 4, "dp") + price("all_reduce", 4, "tp")
    return sums + price("all_gather", 2 * 2 * 8 * 8 * 4 / 2, "tp") + scalars


BOTH = Layout(dp=2, tp=2)
ROWS = (
    *_one_axis("m1", (4, 1)),
    *_one_axis("m2", (1, 4)),
    Row("mlp6-2d", lambda: models.mlp(256, 32), BOTH, {"all_reduce": (6, 7)},
        {f"layers.{n}.weight": f"tp:S({n // 2 % 2})" for n in range(0, 12, 2)}, beta=(1.0, 0.1), seconds=_mlp_2d,
        tolerance=0.02,
        pins={f"layers.{n}": f"{('f', 'none')[n // 2 % 2]}@tp" for n in range(1, 10, 2)},
        whole=("layers.2.bias", "layers.6.bias", "layers.10.bias")),
    Row("mlp6-2d-rs", lambda: models.mlp(256, 32), Layout(dp=2, tp=2, zero=-1),
        {"all_reduce": (5, 5), "reduce_scatter": (1, 2), "all_gather": (1, 4)}, {"*": "*dp:flat*"}, beta=(1.0, 0.1),
        divided=True, note="4 gathers, published at most 2: of 3 biases that are stored cut over both axes"),
    Row("mlp6-zero2", lambda: models.mlp(256, 32), Layout(dp=4, zero=-1),
        {"reduce_scatter": (1, 1), "all_gather": (1, 1)}, {"*": "dp:flat"}, divided=True),
    Row("mlp6-zero3", lambda: models.mlp(256, 32), Layout(dp=4, zero=-1),
        {"reduce_scatter": (1, 2), "all_gather": (2, 3)}, {"*": "dp:flat"}, divided=True, memory_bytes=150_000,
        note="the last weight is gathered once for forward and backward, as under ZeRO 2: its uses adjoin"),
    Row("bert2-2d", lambda: models.bert(8, 8, 128), BOTH, {"all_reduce": (8, 8)},
        {"*.qkv.weight": "tp:S(0/3)", "*.out.weight": "tp:S(1)", "*.inner.0.weight": "tp:S(0)",
         "*.inner.2.weight": "tp:S(1)"},
        alpha=(2.0, 2.0), beta=(1.0, 0.1), seconds=_bert_2d, tolerance=0.01,
        whole=("*.out.bias", "*.inner.2.bias", "*norm.*")),
    Row("bert2-mlm-2d", models.masked_language_model, BOTH, {"all_reduce": (11, 20), "all_gather": (0, 4)},
        {"tokens.weight": "tp:S(0)", "dense.weight": "R", "*.qkv.weight": "tp:S(0/3)", "*.out.weight": "tp:S(1)",
         "*.inner.0.weight": "tp:S(0)", "*.inner.2.weight": "tp:S(1)"},
        alpha=(2.0, 2.0), beta=(1.0, 0.1), pins={"dense": "none@tp"},
        whole=("*.out.bias", "*.inner.2.bias", "*norm*", "dense.*", "positions.*")),
    Row("embed-tied-2d", lambda: models.tied(8, 8, 8, 1024), BOTH, {"all_reduce": (3, 3), "all_gather": (1, 1)},
        {"tokens.weight": "tp:S(0)"}, seconds=_tied),
    Row("mixed-2d", models.dense_and_experts, Layout(mixed=(2, 2)), {"all_to_all": (1, 12), "all_reduce": (1, 8)},
        {"up": "m1:S(0) m2:S(0)", "down": "m1:S(0) m2:S(0)", "*.weight": "R"}, beta=(1.0, 0.1),
        pins=dict.fromkeys(("one", "two", "three", "four"), "batch@m1 batch@m2")),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The program's outcome for a row: its plan, its solution, and the collectives of the lowered step."""

    plan: Plan
    assigned: Assigned
    collectives: tuple[Collective, ...]

    @property
    def counts(self) -> Counter[str]:
        """The number of collectives of each kind, without those of scalars."""
        return Counter(collective.kind for collective in self.collectives if collective.bytes > SCALARS)


def plan_row(row: Row, published: bool = False) -> Outcome:
    """Plan the row by the integer program. ``published``: the published placement is fixed by pins."""
    graph, lower = row.graph(), PlanLowering(row.graph())
    share = sum(graph.tensors[name].num_bytes for name in graph.parameters) / prod(row.layout.axis_sizes)
    whole = {name for name in graph.parameters if published and any(fnmatch(name, glob) for glob in row.whole)}
    layout = mw.Layout(
        dp=row.layout.dp, tp=row.layout.tp, mixed=row.layout.mixed, zero=row.layout.zero,
        pin=dict(row.pins) if published else {},
    )  # fmt: skip
    ask = Ask(
        explains=False, lower=lower, fits_buckets=False, costs=row.costs, whole=frozenset(whole), optimizer=ADAM,
        memory_bytes=row.memory_bytes, parameter_bytes=share if row.divided else None,
    )  # fmt: skip
    plan = plan_layout(graph, layout, world_size=layout.num_ranks, ask=ask)
    (assigned,) = ask.known.values()
    (program,) = lower(plan)
    collectives = tuple(
        collective
        for phase in program.phases if phase.name not in ("input", "weight")  # halves of backward, for pipelines
        for node in phase.nodes
        for collective in (*((node.starts,) if node.starts is not None else ()), *node.inside)
    )  # fmt: skip
    return Outcome(plan, assigned, collectives)


def is_best(outcome: Outcome) -> bool:
    """Whether the solution is the best of its problem, as a second solver proves: the integer program alone, in which
    only nodes with one neighbour are eliminated before."""
    problem, seconds = outcome.assigned.formulated.problem, outcome.assigned.solution.seconds
    limited = len(problem.limits) > 0
    reply = solve_core(simplify(problem, limited=limited, widest=1), limited)
    return reply.proven and abs(reply.bound - seconds) <= 1e-6 * seconds


def problems(row: Row, outcome: Outcome) -> list[str]:
    """The differences from the row: numbers of collectives, placements, the objective."""
    differences = []
    for kind in {*row.counts, *outcome.counts}:
        low, high = row.counts.get(kind, (0, 0))
        if not low <= outcome.counts[kind] <= high:
            differences.append(f"{outcome.counts[kind]} x {kind}, not {low} to {high}")
    for glob, wanted in row.stored.items():
        for name in outcome.assigned.storage:
            lies = describe(outcome.assigned.storage[name])
            if fnmatch(name, glob) and not fnmatch(lies, wanted.replace("[", "[[]")):
                differences.append(f"{name} is {lies}, not {wanted}")
    if row.seconds is not None:
        expected, seconds = row.seconds(row.graph(), row.costs.collective_s), outcome.assigned.solution.seconds
        if abs(seconds - expected) > row.tolerance * expected:
            differences.append(f"objective {seconds:.6g}, not {expected:.6g}")
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.parse_args(arguments)
    verdicts: Counter[str] = Counter()
    for row in ROWS:
        published = plan_row(row, published=True)
        free = plan_row(row) if row.cheaper else published
        wrong = problems(row, published)
        seconds, ours = published.assigned.solution.seconds, free.assigned.solution.seconds
        wrong += [] if is_best(free) else ["the solution is not proven to be the best"]
        verdict = "differs" if wrong or ours > seconds * (1 + 1e-9) else "cheaper" if row.cheaper else "equal"
        verdicts[verdict] += 1
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(published.counts.items()))
        beside = f"; the program finds {ours:.8g}" if row.pins or row.whole else ""
        mesh = "x".join(map(str, row.layout.mixed or (row.layout.dp, row.layout.tp)))
        remarks = "; ".join([*wrong, *([row.note] if row.note else [])])
        print(f"{verdict:8}{row.case:14}{mesh:5}{seconds:14.8g}  {counts}{beside}  {remarks}")
    print(", ".join(f"{count} of {len(ROWS)} {verdict}" for verdict, count in verdicts.items()))
    return int("differs" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
