"""Derive other parts of a plan from its strategies: unreduced Partials, the storage of parameters, recomputation."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import msgspec

from meshwright.errors import PlanError, refuse
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME, Layout, Recompute
from meshwright.ir.own_samples import owned, owned_problems
from meshwright.ir.placement import (
    Flat,
    Partial,
    Placement,
    Placements,
    Shard,
    flat_axis,
    input_placements,
    is_linear,
    output_placements,
)
from meshwright.ir.plan import Plan, Stage, Strategy, starred
from meshwright.ir.stages import Cut, cut

_ATTENTION = "meshwright.attention."
Value = TypeVar("Value", Strategy, str)
Consumers = dict[str, list[tuple[Operator, int]]]


def pass_partials(
    graph: Graph,
    divided: Cut,
    strategies: dict[str, Strategy],
    axes: Mapping[str, int],
    settled: Iterable[str] = (),
    otherwise: Mapping[str, Strategy] | None = None,
) -> dict[str, Placements]:
    """Let Partials pass unreduced through linear operators where that costs no more than reducing the Partials first.

    The function changes ``strategies`` and returns the placements of all outputs. A tensor from another stage can be a
    Partial only over ``TIME``, the axis of micro-batches. On the axes in ``settled``, the strategies already decide
    which operators let Partials pass. On these axes, the function only revokes this for operators whose inputs are not
    Partial, or come from another stage. ``otherwise`` maps an operator to its strategy on axes on which no Partial
    passes through it.
    """
    settled, consumers, producers = list(settled), graph.consumers(), graph.producers()
    placements: dict[str, Placements] = {}
    for operator in graph.operators:
        strategy = strategies[operator.name]
        for axis in [axis for axis, choice in strategy.items() if not choice]:
            del strategy[axis]
        if operator.rule is None:
            continue
        for axis in settled:
            group = len(strategy[axis]) if is_linear(strategy.get(axis, "")) else 0
            crossing = divided.reduced_inputs(operator, producers) if group else set()
            for operand, name in zip(operator.rule.parsed.inputs, operator.inputs, strict=True):
                passes = placements.get(name, {}).get(axis) == Partial("sum") and name not in crossing
                if group and operand.linear == group and not passes:
                    strategy.pop(axis, None)
        for axis in (other for other in axes if other not in settled):
            if axis not in strategy and not (axis == TIME and operator.prologue):
                reduced = divided.reduced_inputs(operator, producers) if axis != TIME else set()
                here = {name: placements.get(name, {}) for name in operator.inputs if name not in reduced}
                group = _linear_group(graph, consumers, operator, axis, here)
                if group:
                    strategy[axis] = "^" * group
                elif choice := (otherwise or {}).get(operator.name, {}).get(axis):
                    strategy[axis] = choice
        for index, output in enumerate(operator.outputs):
            placements[output] = output_placements(operator.rule, strategy, index, axes)
    return placements


def _linear_group(
    graph: Graph, consumers: Consumers, operator: Operator, axis: str, placements: dict[str, Placements]
) -> int:
    rule = operator.rule
    assert rule is not None
    partial = [
        placements.get(tensor, {}).get(axis) == Partial("sum") and (axis == TIME or len(consumers.get(tensor, ())) == 1)
        for tensor in operator.inputs
    ]
    if not any(partial):
        return 0
    groups = {operand.linear for operand, term in zip(rule.parsed.inputs, partial, strict=True) if term}
    if len(groups) != 1 or 0 in groups:
        return 0
    group = groups.pop()
    if axis == TIME:  # nothing is reduced over time; a division turns a whole operand into a term
        return group
    if any(operand.linear == group and not term for operand, term in zip(rule.parsed.inputs, partial, strict=True)):
        return 0
    into = sum(graph.tensors[name].num_elements for name, term in zip(operator.inputs, partial, strict=True) if term)
    out = sum(graph.tensors[name].num_elements for name in operator.outputs)
    return group if out <= into else 0


def take_own_samples(graph: Graph, strategies: dict[str, Strategy], sizes: Mapping[str, int]) -> None:
    """Let batch norms take the statistics of each rank's own samples.

    Raises:
        PlanError: an operator does not support this.
    """
    for operator in graph.operators:
        strategies[operator.name] = owned(operator, strategies[operator.name])
    for operator in graph.operators:
        refuse(PlanError, owned_problems(graph, operator, strategies, sizes), "layout")


def parameter_storage(
    graph: Graph, strategies: dict[str, Strategy], sizes: Mapping[str, int]
) -> dict[str, dict[str, Placement]]:
    """The placements in which every parameter is stored: the placements that its forward operators need. If one
    operator needs the parameter split and another needs it whole, it is stored split."""
    consumers = graph.consumers()
    storage: dict[str, dict[str, Placement]] = {}
    for name in graph.parameters:
        placements: dict[str, Placement] = {}
        for operator, position in consumers.get(name, ()):
            if operator.rule is None or operator.backward:
                continue
            wanted = input_placements(operator.rule, strategies[operator.name], position, sizes)
            for axis, placement in wanted.items():
                if isinstance(placement, Shard):
                    placements.setdefault(axis, placement)
        storage[name] = placements
    return storage


def zero_stages(layout: Layout, divided: Cut, chosen: Mapping[str, int]) -> dict[str, int]:
    """The ZeRO stage of each parameter: the largest of the pipeline stages that hold the parameter, or, with
    ``zero=-1``, the ZeRO stage that the integer program chose (``chosen``)."""
    if layout.zero < 0:
        return {name: chosen.get(name, 0) for name in divided.owners}
    return {name: max(map(layout.zero_of, stages), default=0) for name, stages in divided.owners.items()}


def zero_storage(
    graph: Graph, storage: dict[str, dict[str, Placement]], axis: str, zero: Mapping[str, int],
    whole: Collection[str] = (),
) -> dict[str, dict[str, Placement]]:  # fmt: skip
    """Parameter storage under ZeRO: a parameter that is not split over ``axis`` becomes Flat over this axis. ``zero``
    has the ZeRO stage of each parameter. Untrained parameters have no gradient and no optimizer state, so only stage 3
    makes them Flat. Parameters in ``whole``, which must not be split, are unchanged."""
    trained = _trained(graph)
    kept = {name for name in storage if not zero[name] or (zero[name] < 3 and name not in trained)} | {*whole}
    return {
        name: placements if axis in placements or name in kept else {**placements, axis: Flat()}
        for name, placements in storage.items()
    }


def in_parts(
    graph: Graph, zero: Mapping[str, int], storage: Mapping[str, Placements], base: Stage | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two lists of Flat parameters of a stage: those whose gradients are reduced in every micro-batch, and those that
    are gathered for every use.

    ``storage`` has the parameters of the stage. If ``base`` (the stage of an existing plan) is given, both lists are
    taken from it. Otherwise ``zero``, the ZeRO stage of each parameter, decides.
    """
    flat = [name for name, placements in storage.items() if flat_axis(placements)]
    if base is not None:
        reduced, released = set(base.gradients), set(base.released)
    else:
        reduced = _trained(graph) & {name for name, stage in zero.items() if stage >= 2}
        released = {name for name, stage in zero.items() if stage == 3}
    return tuple(name for name in flat if name in reduced), tuple(name for name in flat if name in released)


def _trained(graph: Graph) -> set[str]:
    return {entry.parameter for entry in graph.gradients if entry.gradient is not None}


def recomputing(plan: Plan, graph: Graph, kind: Recompute) -> Plan:
    """The plan with another kind of recomputation in all stages."""
    divided = cut(graph, plan.firsts)
    stages = tuple(
        msgspec.structs.replace(stage, recompute=recomputed(stage_operators(graph, divided, index), divided, kind))
        for index, stage in enumerate(plan.stages)
    )
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, recompute=kind), stages=stages)


def stage_operators(graph: Graph, divided: Cut, stage: int) -> list[Operator]:
    """The operators of a stage, and the operators that run in every stage."""
    return [operator for operator in graph.operators if divided.stage_of.get(operator.name, stage) == stage]


def recomputed(operators: Iterable[Operator], divided: Cut, kind: str) -> tuple[str, ...]:
    """The attention operators (``selective``) or blocks (``full``) that a stage recomputes in backward. They are given
    by starred names, such as ``h.*`` for ``h.0``, ``h.1`` and so on."""
    forward = [op for op in operators if op.name not in divided.late and not op.prologue]
    if kind == "selective":
        return tuple(dict.fromkeys(starred(op.name) for op in forward if op.target.startswith(_ATTENTION)))
    if kind == "full":
        return tuple(dict.fromkeys(op.repeat.partition("*")[0] + "*" for op in forward if op.repeat))
    return ()


def grouped(strategies: dict[str, Value]) -> dict[str, Value]:
    """Group strategies, or algorithms, by starred name if all repetitions of an operator have the same value, else by
    name.

    A starred name has ``*`` in place of block indices, such as ``h.*.mlp:mm#0``. Operators that are replicated in all
    repetitions are left out.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in strategies:
        groups[starred(name)].append(name)
    result: dict[str, Value] = {}
    for star, members in groups.items():
        agreed = all(strategies[name] == strategies[members[0]] for name in members)
        if not agreed:
            result |= {name: strategies[name] for name in members}
        elif strategies[members[0]]:
            result[star] = strategies[members[0]]
    return result


def algorithms(operators: Iterable[Operator], chosen: Mapping[str, str], base: Stage | None) -> dict[str, str]:
    """The algorithms of a stage's operators: ``chosen``, or the algorithms in ``base`` (the stage of another plan)."""
    texts = {op.name: chosen.get(op.name, "") if base is None else base.operator_algorithm(op.name) for op in operators}
    return {name: text for name, text in grouped(texts).items() if text}
