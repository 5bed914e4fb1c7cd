"""Choose the strategy of every operator and the storage of every parameter with the integer program."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kind import COMPUTE, kind_of
from meshwright.ir.layout import DATA_AXES, FEATURE_AXES, MIXED, SPATIAL_AXES
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import (
    Partial,
    Placement,
    Placements,
    input_placements,
    is_linear,
    output_placements,
    unflattened,
)
from meshwright.ir.plan import Strategy
from meshwright.ir.program import Lower
from meshwright.planner.intra_op.costs import ClusterCosts, CostModel
from meshwright.planner.intra_op.formulate import Formulation
from meshwright.planner.intra_op.moments import Moments
from meshwright.planner.intra_op.options import classes_of, follow
from meshwright.planner.intra_op.prices import Prices
from meshwright.planner.intra_op.solve import Solution, solve

Pins = Mapping[str, Strategy]
"""Maps an operator and an axis to the factor that the operator must split over the axis. An empty factor means that the
operator must not be split over the axis."""


@dataclass(frozen=True)
class Chosen:
    """The chosen strategies and storage. ``zero`` has the ZeRO stage of each parameter whose storage ZeRO divides."""

    strategies: dict[str, Strategy]
    storage: dict[str, dict[str, Placement]]
    zero: dict[str, int]

    def alone(self) -> "Chosen":
        """The choice without the problem from which it was made."""
        return Chosen(self.strategies, self.storage, self.zero)


@dataclass(frozen=True)
class Assigned(Chosen):
    """The chosen strategies and storage, with their problem and its solution."""

    formulated: Formulation
    solution: Solution


def assign(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    lower: Lower,
    *,
    microbatches: int = 1,
    own_statistics: bool = False,
    pins: Pins | None = None,
    uses_axes: bool = False,
    optimizer: OptimizerCost = ADAMW,
    memory_bytes: float | None = None,
    whole: Collection[str] = (),
    costs: CostModel | None = None,
    zero: str = "",
    parameter_bytes: float | None = None,
) -> Assigned:
    """The cheapest strategies of all operators and storage of all parameters, over the axes of ``mesh`` except ``pp``.

    The data axes and ``ep`` split only the batch; ``cp`` splits only the sequence; ``tp`` and the axes of a grid split
    any factor but the batch; the spatial axes split only pinned factors; all other axes split any factor. Pins override
    these rules: experts are pinned on ``ep``.

    Args:
        lower: makes the programs of operators, from which their costs are computed.
        microbatches: the number of micro-batches of a step.
        own_statistics: whether batch norm computes statistics from each rank's own samples.
        uses_axes: use all axes wherever possible, even if that costs time. Operators then split their batch over
            ``dp`` and ``ep``. Matrix products split their weights over ``tp``, or over both axes of a grid. Products,
            convolutions and attention split any factor over mixed axes.
        memory_bytes: the limit of a rank's parameters, gradients, optimizer state and activations together.
        whole: parameters that are stored whole; operators may still read parts of them.
        costs: the cost model; None: the costs of ``cluster``.
        zero: the axis over which ZeRO may divide the storage of each parameter; empty: none.
        parameter_bytes: the limit of the parameters that a rank stores between steps, without optimizer state.

    Raises:
        LayoutError: pins contradict what an operator can do, or nothing fits in memory.
    """
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1 and axis.name != "pp"}
    asked: Pins = pins or {}
    sequences = sequence_classes(graph)

    def allows(operator: Operator, letter: str, axis: str) -> bool:
        names = classes_of(operator, letter)
        batch = any(graph.factor_classes[name].role == "batch" for name in names)
        if asked.get(operator.name, {}).get(axis) == letter:
            return True
        allowed = dict.fromkeys((*DATA_AXES, "ep"), batch) | dict.fromkeys(FEATURE_AXES, not batch)
        return (allowed | {"cp": sequences.issuperset(names)}).get(axis, axis not in SPATIAL_AXES)

    def keeps(operator: Operator, strategy: Strategy) -> bool:
        return operator.backward or _as_asked(asked.get(operator.name, {}), strategy)

    weights = _weight_letters(graph) if uses_axes else {}
    free = {axis for axis in sizes if axis.startswith(MIXED)}

    def merit(operator: Operator, strategy: Strategy) -> int:
        pinned = asked.get(operator.name, {})
        met = 2 * _as_asked(pinned, strategy)
        for axis in [axis for axis in FEATURE_AXES if uses_axes and axis in sizes and axis not in pinned]:
            met += strategy.get(axis, "") in weights.get(operator.name, ())
        if uses_axes and kind_of(operator) in COMPUTE:
            met += sum(bool(strategy.get(axis)) and not is_linear(strategy[axis]) for axis in free - pinned.keys())
        for axis in (*DATA_AXES, "ep") if uses_axes and not operator.prologue else ():
            if axis in sizes and axis not in pinned:
                met += 2 * (operator.classes.get(strategy.get(axis, "")) is not None)
        return met

    prices = Prices(graph, sizes, costs or ClusterCosts(mesh, sizes, cluster), lower, microbatches)
    marks = {name: tuple(sorted(pin.items())) for name, pin in asked.items()}
    stages = mesh.size("pp") if "pp" in mesh.names else 1
    moments = Moments(graph, prices, memory_bytes, stages) if memory_bytes is not None else None
    formulated = Formulation(
        graph, prices, allows, keeps, merit, marks, optimizer, moments, whole, own_statistics,
        zero if zero in sizes else "", parameter_bytes,
    )  # fmt: skip
    try:
        solution = solve(formulated.problem)
    except TimeoutError as error:
        raise LayoutError(str(error), where="memory", remedy="give more memory, or leave more open") from None
    limits = [limit for limit in (memory_bytes, parameter_bytes) if limit is not None]
    if solution is None and limits:
        raise LayoutError(
            f"no strategies of the operators fit in {min(limits) / 2**30:.3g} GiB a rank",
            where="memory",
            remedy="give more memory, use more ranks or a smaller batch, or recompute",
        )
    if solution is None:
        raise LayoutError("no strategies of all operators fit together", where="layout: pin", remedy="leave out a pin")
    strategies, storage, divided = read_out(formulated, solution.choices)
    return Assigned(strategies, storage, divided, formulated, solution)


def _as_asked(asked: Strategy, strategy: Strategy) -> bool:
    return all(
        strategy.get(axis, "") == factor or (factor == "" and is_linear(strategy.get(axis, "")))
        for axis, factor in asked.items()
    )


def sequence_classes(graph: Graph) -> set[str]:
    """The factor classes that are positions in a sequence. They are the dims of integer inputs, except the first dim
    and the batch."""
    tokens = [graph.tensors[name] for name in graph.inputs if "int" in graph.tensors[name].dtype]
    classes = {name for tensor in tokens for dim in tensor.dims[1:] for name in dim}
    return {name for name in classes if graph.factor_classes[name].role != "batch"}


def _weight_letters(graph: Graph) -> dict[str, set[str]]:
    """Maps each forward matrix product to the letters of its weights' factors, except the batch."""
    behind = set(graph.parameters)
    letters_of: dict[str, set[str]] = {}
    for operator in graph.operators:
        if operator.backward or operator.rule is None:
            continue
        if operator.bytes == 0 and len(operator.inputs) == 1 and operator.inputs[0] in behind:
            behind.update(operator.outputs)
        if kind_of(operator) == "matmul":
            letters = {
                factor.name
                for operand, name in zip(operator.rule.parsed.inputs, operator.inputs, strict=True) if name in behind
                for dim in operand.dims for factor in dim if factor.name
            }  # fmt: skip
            letters = {letter for letter in letters if graph.factor_classes[operator.classes[letter]].role != "batch"}
            if letters:
                letters_of[operator.name] = letters
    return letters_of


def read_out(formulated: Formulation, choices: tuple[int, ...]) -> tuple[
    dict[str, Strategy], dict[str, dict[str, Placement]], dict[str, int]
]:  # fmt: skip
    """Read every operator's strategy, every parameter's storage and its ZeRO stage from ``choices``. A follower (a view
    with one reader) is split in the way that its reader needs."""
    graph, decisions = formulated.graph, formulated.decisions
    strategies: dict[str, Strategy] = {operator.name: {} for operator in graph.operators}
    for index, decision in enumerate(decisions.entries):
        for strategy, twins in zip(formulated.choices[index][choices[index]], decision.twins, strict=True):
            for name in twins:
                strategies[name] = dict(strategy)
    storage: dict[str, dict[str, Placement]] = {}
    stages: dict[str, int] = {}
    for node, (names, ways) in formulated.stored.items():
        way = ways[choices[node]]
        storage |= {name: dict(way.placements) for name in names}
        stages |= {name: way.zero for name in names if way.zero}
    if 3 in stages.values():  # parameters that backward does not read cost the same under stage 3
        stages |= {name: 3 for name in stages if name not in formulated.late and formulated.prices.microbatches == 1}
    wanted: dict[str, Placements] = {
        entry.gradient: unflattened(storage[entry.parameter]) for entry in graph.gradients if entry.gradient is not None
    }
    for operator in reversed(graph.operators):
        if operator.name in decisions.followers:
            followed = follow(operator, wanted.get(operator.outputs[0], {}), formulated.sizes)
            strategies[operator.name] = followed[0] if followed is not None else {}
        if operator.rule is not None:
            for position, name in enumerate(operator.inputs):
                wanted[name] = input_placements(operator.rule, strategies[operator.name], position, formulated.sizes)
    _pass_gradients(graph, decisions.followers, strategies, formulated.sizes)
    return strategies, storage, stages


def _pass_gradients(
    graph: Graph, followers: set[str], strategies: dict[str, Strategy], sizes: Mapping[str, int]
) -> None:
    """Let Partials pass unreduced through the views between a product and a parameter's gradient. The gradient is then
    reduced after these views, in a bucket with other gradients."""
    ends = {entry.gradient for entry in graph.gradients}
    chain: list[Operator] = []
    for operator in reversed(graph.operators):
        if operator.name in followers and operator.outputs[0] in ends:
            chain.append(operator)
            ends.add(operator.inputs[0])
    placements: dict[str, Placements] = {}
    views = {view.name for view in chain}
    for operator in graph.operators:
        if operator.rule is None or not ends.intersection(operator.outputs):
            continue
        linear = operator.rule.parsed.inputs[0].linear if operator.name in views else 0
        for axis, placement in placements.get(operator.inputs[0], {}).items() if linear else ():
            if placement == Partial("sum"):
                strategies[operator.name].setdefault(axis, "^" * linear)
        for index, name in enumerate(operator.outputs):
            placements[name] = output_placements(operator.rule, strategies[operator.name], index, sizes)
