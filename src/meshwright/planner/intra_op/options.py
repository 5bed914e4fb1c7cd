"""The choices of a decision: for each mesh axis a factor or none, and whether Partials pass through unreduced."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.placement import (
    Partial,
    Placement,
    Placements,
    Shard,
    factor_placement,
    input_placements,
    misfit,
    output_placements,
)
from meshwright.ir.plan import Strategy
from meshwright.ir.rule import HALO, OWN
from meshwright.planner.intra_op.decisions import Decision

Choice = tuple[Strategy, ...]
"""A strategy for each member of a decision."""

Allows = Callable[[Operator, str, str], bool]
"""A function that says whether an operator may split a factor (a letter) over an axis."""

JOINED = "+"
"""Separator between the names of the factor classes that a joint factor splits."""
_NONE = ("", 0)


class Options:
    """Makes the choices of decisions. ``partial[axis]`` has the tensors that could be Partial over the axis. A linear
    group is a set of inputs in which an operator is jointly linear. Its number is the number of carets (``^``) in the
    rule."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int], allows: Allows) -> None:
        self.graph, self.sizes, self.allows = graph, dict(sizes), allows
        self._letters = {operator.name: numbered(operator) for operator in graph.operators}
        self._linear = {operator.name: _linear_inputs(operator) for operator in graph.operators}
        self.partial = {axis: self._maybe_partial(axis) for axis in sizes}

    def choices(self, decision: Decision) -> list[Choice]:
        """All choices of a decision that the rules of its members, the sizes of the factors and ``allows`` permit."""
        per_axis = [
            [
                (axis, factor, passes)
                for factor in self._factors(decision, axis)
                for passes in self._passes(decision, axis, factor)
            ]
            for axis in self.sizes
        ]
        choices: dict[object, Choice] = {}
        for picked in itertools.product(*per_axis):
            choice = self._choice(decision, picked)
            if choice is not None:
                choices.setdefault(tuple(tuple(sorted(strategy.items())) for strategy in choice), choice)
        return list(choices.values())

    def _factors(self, decision: Decision, axis: str) -> list[tuple[str, int]]:
        """The factors that the axis can split, and ``_NONE`` for no factor. A factor is a pair: its class, and its
        number among the operator's letters of this class. In self-attention, for example, queries are letter 0 of the
        sequence, and keys letter 1."""
        factors = {_NONE: None}
        for lead in decision.leads:
            for factor, letter in self._letters[lead.name].items():
                if self._splits(lead, letter, axis):
                    factors.setdefault(factor)
        return list(factors)

    def _splits(self, operator: Operator, letter: str, axis: str) -> bool:
        rule = operator.rule
        return (
            rule is not None
            and rule.splittable(letter)
            and misfit(rule, {axis: letter}, self.sizes) is None
            and self.allows(operator, letter, axis)
        )

    def _passes(self, decision: Decision, axis: str, factor: tuple[str, int]) -> list[tuple[bool, bool]]:
        """All possible pairs (forward, backward) that say whether Partials from outside the decision pass through
        unreduced. Only members without the factor let Partials pass. An example is the addition of two terms of a
        shared parameter's gradient."""
        inside = {name for member in decision.members for name in member.outputs}
        open_here = [member for member in decision.members if factor not in self._letters[member.name]]
        forward, backward = (
            (False, True)
            if any(self._arriving(member, axis, inside) for member in open_here if member.backward == late)
            else (False,)
            for late in (False, True)
        )
        return list(itertools.product(forward, backward))

    def _arriving(self, operator: Operator, axis: str, inside: set[str]) -> int:
        """The number of a linear group whose inputs could all be Partial and come partly from outside ``inside``; 0 if
        there is no such group."""
        for group, names in self._linear[operator.name].items():
            if not inside.issuperset(names) and all(name in self.partial[axis] or name in inside for name in names):
                return group
        return 0

    def _choice(
        self, decision: Decision, picked: Sequence[tuple[str, tuple[str, int], tuple[bool, bool]]]
    ) -> Choice | None:
        have: dict[str, Placements] = {}
        inside = {name for member in decision.members for name in member.outputs}
        leads = decision.leads
        result: list[Strategy] = []
        for member in decision.members:
            strategy: Strategy = {}
            letters = self._letters[member.name]
            for axis, factor, _ in picked:
                letter = _meant(letters, factor)
                if letter is None or not self._splits(member, letter, axis):
                    continue
                others = prod(self.sizes[other] for other, choice in strategy.items() if choice == letter)
                assert member.rule is not None
                rows = others > 1 and member.rule.decomposition(letter) == HALO
                if not rows and misfit(member.rule, {**strategy, axis: letter}, self.sizes) is None:
                    strategy[axis] = letter
                elif member in leads:
                    return None
            for axis, _, passes in picked:
                if axis not in strategy:
                    group = self._passed(member, axis, inside, have, passes[member.backward])
                    if group:
                        strategy[axis] = "^" * group
            if member.rule is not None:
                for index, name in enumerate(member.outputs):
                    have[name] = output_placements(member.rule, strategy, index, self.sizes)
            result.append(strategy)
        return tuple(result)

    def _passed(
        self, operator: Operator, axis: str, inside: set[str], have: Mapping[str, Placements], passes: bool
    ) -> int:
        """The number of the linear group whose inputs are Partial and pass through unreduced; 0 if there is none.
        Inputs from outside the decision count only if ``passes``."""
        wanted = self._arriving(operator, axis, inside) if passes else 0
        for group, names in self._linear[operator.name].items():
            if all(
                have.get(name, {}).get(axis) == Partial("sum") if name in inside else group == wanted for name in names
            ):
                return group
        return 0

    def _maybe_partial(self, axis: str) -> set[str]:
        partial: set[str] = set()
        for operator in self.graph.operators:
            if operator.rule is None:
                continue
            if any(partial.issuperset(names) for names in self._linear[operator.name].values()):
                partial.update(operator.outputs)
                continue
            for index, name in enumerate(operator.outputs):
                if operator.rule.reduction == "sum" and any(
                    operator.rule.reduced(letter, index) and self._splits(operator, letter, axis)
                    for letter in self._letters[operator.name].values()
                ):
                    partial.add(name)
        return partial


def _linear_inputs(operator: Operator) -> dict[int, list[str]]:
    """Maps the number of each linear group of an operator to the inputs of the group."""
    groups: dict[int, list[str]] = {}
    operands = operator.rule.parsed.inputs if operator.rule is not None else ()
    for operand, name in zip(operands, operator.inputs, strict=False):
        if operand.linear:
            groups.setdefault(operand.linear, []).append(name)
    return groups


def _meant(letters: Mapping[tuple[str, int], str], factor: tuple[str, int]) -> str | None:
    """An operator's letter for a factor. If the factor joins two classes and the operator lacks it, another joint
    factor that contains one of the classes takes its place, or else the letter of one of the classes."""
    names = factor[0].split(JOINED)
    if factor in letters or len(names) == 1:
        return letters.get(factor)
    joined = (letter for (name, _), letter in letters.items() if JOINED in name and set(names) & {*name.split(JOINED)})
    return next(joined, None) or next((letters[name, 0] for name in names if (name, 0) in letters), None)


def numbered(operator: Operator) -> dict[tuple[str, int], str]:
    """Maps (class, number among the operator's letters of that class) to the letter. A joint factor of input rows and
    output rows (``yy``) counts as a letter. Its class has the names of both classes, separated by ``JOINED``."""
    counts: Counter[str] = Counter()
    letters = {}
    rule = operator.rule
    joint = [name for name in rule.joint if name != OWN] if rule is not None else []
    for letter in (*operator.classes, *joint):
        name = JOINED.join(sorted(classes_of(operator, letter)))
        letters[name, counts[name]] = letter
        counts[name] += 1
    return letters


def classes_of(operator: Operator, factor: str) -> list[str]:
    """The classes that a factor of an operator splits: one class, or several for a joint factor."""
    members = operator.rule.members(factor) if operator.rule is not None else (factor,)
    return [operator.classes[letter] for letter in members]


def follow(operator: Operator, wanted: Placements, sizes: Mapping[str, int]) -> tuple[Strategy, Placements] | None:
    """The strategy of a view whose output should have the placement ``wanted``, and the placement that its input then
    needs. A split that the view cannot make is made after the view. The result is None if the view cannot let a wanted
    Partial pass through."""
    rule = operator.rule
    assert rule is not None
    strategy: Strategy = {}
    linear = rule.parsed.inputs[0].linear
    for axis, placement in wanted.items():
        if isinstance(placement, Partial):
            if not linear:
                return None
            strategy[axis] = "^" * linear
            continue
        parts = prod(sizes[other] for other, shard in wanted.items() if _same_factor(shard, placement))
        for letter in rule.sizes:
            output_placement = factor_placement(rule.parsed.outputs[0].dims, rule.sizes, letter, parts=parts)
            free = rule.splittable(letter) and letter not in rule.decompositions
            if output_placement == placement and free and misfit(rule, {**strategy, axis: letter}, sizes) is None:
                strategy[axis] = letter
                break
    return strategy, input_placements(rule, strategy, 0, sizes)


def _same_factor(left: Placement, right: Placement) -> bool:
    return isinstance(left, Shard) and isinstance(right, Shard) and (left.dim, left.outer) == (right.dim, right.outer)
