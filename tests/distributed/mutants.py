"""Rules made wrong, one mark at a time: what the property test of rules must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch

from meshwright.ir.rule import Dim, Factor, Pattern, PatternOperand, Rule
from meshwright.ops.base import Call, OperatorRule, Unsplit, emit_unchanged
from tests.distributed.rule_cases import SIZES, Draw

Change = Callable[[Rule], Rule]
FRESH = "zz"


class Chance(Draw):
    """A random call without hypothesis: by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda strategy: seed)

    def _integer(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.generator))

    def pick(self, *options: Any) -> Any:
        return options[self._integer(len(options))]

    def flag(self) -> bool:
        return self.pick(False, True)

    def size(self) -> int:
        return self.pick(*SIZES)

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        return self.sizes(least + self._integer(most - least + 1))

    def dim(self, rank: int) -> int:
        return self._integer(2 * rank) - rank

    def dims(self, rank: int) -> list[int]:
        chosen = [dim for dim in range(rank) if self.flag()] or [self._integer(rank)]
        return [dim - rank if self.flag() else dim for dim in chosen]


def mutants(operator: OperatorRule, call: Call, draw: Draw) -> Iterator[tuple[str, OperatorRule]]:
    """(what was done to it, the operator's rule made wrong for this call), one of each kind that there is."""
    rule = operator.rule(call)
    if isinstance(rule, Unsplit):
        return
    for kind, find in CHANGES.items():
        changes = list(find(rule, call))
        if changes:
            yield kind, replace(operator, rule=_fixed(draw.pick(*changes)))
    if operator.local is not emit_unchanged:
        yield "rewrite forgotten", replace(operator, local=emit_unchanged)
    if operator.contiguous:
        yield "parts need not be one run", replace(operator, contiguous=frozenset())
    if "halo" in rule.decompositions.values():
        yield "halo off by a row", replace(operator, local=lambda local: operator.local(_OffByOne(local)))
    if rule.equal:
        yield "parts may differ", replace(operator, rule=_fixed(msgspec.structs.replace(rule, equal=())))
    if rule.decompositions:
        members = {member for name in rule.decompositions for member in rule.members(name)}
        bare = msgspec.structs.replace(_marks(rule, members, False), decompositions={}, joint={}, equal=())
        yield "decomposition forgotten", replace(operator, rule=_fixed(bare), local=emit_unchanged)


class _OffByOne:
    """What a rewrite may use, but halos begin a row too late."""

    def __init__(self, local: Any) -> None:
        self._local = local

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def halo(self, value: Any, factor: str, dim: int, edges: Any, ranges: Any, fill: float = 0.0) -> Any:
        return self._local.halo(value, factor, dim, edges, [(low + 1, high + 1) for low, high in ranges], fill)

    def halo_sum(self, value: Any, factor: str, dim: int, edges: Any, ranges: Any) -> Any:
        return self._local.halo_sum(value, factor, dim, edges, [(low + 1, high + 1) for low, high in ranges])


def _fixed(rule: Rule) -> Callable[[Call], Rule]:
    return lambda call: rule


def _rewritten(rule: Rule, operands: Callable[[PatternOperand, bool, int], PatternOperand], **changes: Any) -> Rule:
    pattern = rule.parsed
    text = Pattern(
        tuple(operands(operand, False, index) for index, operand in enumerate(pattern.inputs)),
        tuple(operands(output, True, index) for index, output in enumerate(pattern.outputs)),
    )
    return msgspec.structs.replace(rule, pattern=str(text), **changes)


def _renamed(operand: PatternOperand, rename: Callable[[Factor], Factor]) -> PatternOperand:
    dims: tuple[Dim, ...] = tuple(tuple(rename(factor) for factor in dim) for dim in operand.dims)
    return PatternOperand(dims, operand.linear)


def _marks(rule: Rule, letters: Any, fixed: bool) -> Rule:
    def mark(factor: Factor) -> Factor:
        return msgspec.structs.replace(factor, fixed=fixed, stencil=False) if factor.name in letters else factor

    return _rewritten(rule, lambda operand, *_: _renamed(operand, mark))


def _unfixed(rule: Rule, call: Call) -> Iterator[Rule]:
    """A letter that cannot be split can."""
    for letter in sorted(rule.parsed.fixed_names() - set(rule.decompositions)):
        if rule.sizes[letter] > 1:
            yield _marks(rule, {letter}, False)


def _dropped(rule: Rule, call: Call) -> Iterator[Rule]:
    """An output loses a letter: it would be a sum, and is a part."""
    for index, output in enumerate(rule.parsed.outputs):
        for dim in output.dims:
            for lost in (factor for factor in dim if factor.name and rule.splittable(factor.name)):
                if lost.name in rule.decompositions or rule.sizes[lost.name] == 1:
                    continue

                def drop(
                    operand: PatternOperand, out: bool, at: int, index: int = index, lost: Factor = lost
                ) -> PatternOperand:
                    fresh = Factor(FRESH, fixed=True)
                    same = (out, at) == (True, index)
                    return _renamed(operand, lambda letter: fresh if same and letter.name == lost.name else letter)

                yield _rewritten(rule, drop, sizes={**rule.sizes, FRESH: rule.sizes[lost.name]})


def _swapped(rule: Rule, call: Call) -> Iterator[Rule]:
    """Two letters of one operand change places."""
    pattern = rule.parsed
    for out, operands in ((False, pattern.inputs), (True, pattern.outputs)):
        for index, operand in enumerate(operands):
            letters = [factor.name for dim in operand.dims for factor in dim if factor.name]
            for letter in letters:
                for two in letters[letters.index(letter) + 1 :]:
                    if rule.sizes[letter] != rule.sizes[two] or rule.sizes[letter] == 1:
                        continue
                    if not (rule.splittable(letter) or rule.splittable(two)):
                        continue
                    yield _rewritten(rule, _swap(rule, (out, index), {letter: two, two: letter}))


def _swap(
    rule: Rule, here: tuple[bool, int], other: dict[str, str]
) -> Callable[[PatternOperand, bool, int], PatternOperand]:
    def rename(factor: Factor) -> Factor:
        name = other.get(factor.name, factor.name)
        return msgspec.structs.replace(factor, name=name, fixed=name in rule.parsed.fixed_names())

    return lambda operand, out, at: _renamed(operand, rename) if (out, at) == here else operand


def _linear(rule: Rule, call: Call) -> Iterator[Rule]:
    """An operand is linear that is not."""
    fresh = 1 + max((operand.linear for operand in rule.parsed.inputs), default=0)
    for index, (operand, tensor) in enumerate(zip(rule.parsed.inputs, call.tensors, strict=True)):
        if operand.linear or not tensor.is_floating_point():
            continue

        def mark(candidate: PatternOperand, out: bool, at: int, index: int = index) -> PatternOperand:
            return msgspec.structs.replace(candidate, linear=fresh) if (out, at) == (False, index) else candidate

        yield _rewritten(rule, mark)


def _joined(rule: Rule, call: Call) -> Iterator[Rule]:
    """Two operands are linear together that are so one by one, or one by one that are so together."""
    groups = [operand.linear for operand in rule.parsed.inputs]
    if {1, 2} <= set(groups):
        yield _rewritten(rule, lambda operand, *_: msgspec.structs.replace(operand, linear=min(operand.linear, 1)))
    if groups.count(1) > 1:
        first = groups.index(1)

        def apart(operand: PatternOperand, out: bool, at: int) -> PatternOperand:
            return msgspec.structs.replace(operand, linear=9) if (out, at) == (False, first) else operand

        yield _rewritten(rule, apart)


def _other_reduction(rule: Rule, call: Call) -> Iterator[Rule]:
    """Terms are reduced otherwise."""
    outputs = range(len(rule.parsed.outputs))
    if any(rule.splittable(name) and any(rule.reduced(name, at) for at in outputs) for name in rule.sizes):
        yield msgspec.structs.replace(rule, reduction="min" if rule.reduction == "max" else "max")


CHANGES: dict[str, Callable[[Rule, Call], Iterator[Rule]]] = {
    "! left out": _unfixed,
    "letter dropped": _dropped,
    "letters swapped": _swapped,
    "^ added": _linear,
    "^ moved": _joined,
    "reduced otherwise": _other_reduction,
}
