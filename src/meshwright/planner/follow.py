"""Adapt an existing plan to another batch size or an evaluation: operators keep the strategies of the plan."""

from collections.abc import Sequence

from meshwright.ir.graph import Graph
from meshwright.ir.placement import Shard
from meshwright.ir.plan import Plan
from meshwright.ir.stages import cut
from meshwright.planner.factors import FactorChoices


def inherit(factors: FactorChoices, base: Plan, firsts: tuple[str, ...]) -> None:
    """Give every operator its strategy in the plan ``base``, as far as the sizes of its factors allow."""
    held = cut(factors.graph, firsts).stage_of
    for operator in factors.graph.operators:
        for axis, choice in base.stages[held.get(operator.name, 0)].strategy(operator.name).items():
            if operator.rule is None or axis not in factors.sizes:
                continue
            if operator.rule.splittable(choice) and factors.fits(operator, choice, axis):
                factors.strategies[operator.name][axis] = choice


def follow_storage(factors: FactorChoices, base: Plan, axes: Sequence[str]) -> None:
    """For operators that ``base`` does not have, such as those of an evaluation: choose for each of ``axes`` a factor
    over which an input is already split. The splits of the parameters are those of their storage in ``base``.

    If the graph is that of ``base``, nothing is chosen: an operator without a strategy is whole by the plan's
    decision."""
    for axis in axes if base.graph_fingerprint != factors.graph.fingerprint else ():
        _follow_storage(factors, base, axis)


def _follow_storage(factors: FactorChoices, base: Plan, axis: str) -> None:
    graph, placed = factors.graph, dict[str, str | None]()
    for name in graph.parameters:
        shard = base.storage(name).get(axis)
        if isinstance(shard, Shard):
            placed[name] = _class_at(graph, name, shard)
    for operator in graph.operators:
        strategy = factors.strategies[operator.name]
        if axis not in strategy:
            for tensor in operator.inputs:
                source = placed.get(tensor)
                letter = next((factor for factor, other in operator.classes.items() if other == source), None)
                if letter is not None and factors.fits(operator, letter, axis):
                    strategy[axis] = letter
                    break
        choice = strategy.get(axis)
        for output in operator.outputs:
            factor_class = operator.classes.get(choice) if choice else None
            dims = [name for dim in graph.tensors[output].dims for name in dim]
            placed[output] = factor_class if factor_class in dims else None


def _class_at(graph: Graph, tensor: str, shard: Shard) -> str | None:
    outer = 1
    for name in graph.tensors[tensor].dims[shard.dim]:
        if outer == shard.outer:
            return name
        outer *= graph.factor_classes[name].size
    return None
