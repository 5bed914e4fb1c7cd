"""Every rule is what it says: an operator cut by its rule, run on shards and put together, is the whole operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from meshwright.ir.placement import misfit
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Unsplit, emit_unchanged, make_rule
from meshwright.ops.pointwise import pointwise_rule
from meshwright.ops.random import RULES as RANDOM
from meshwright.ops.table import RULES
from tests.distributed.lockstep import Subject, WrongRuleError, check, refined, subject
from tests.distributed.rule_cases import CASES, POINTWISE, Draw
from tests.tries import tries

aten = torch.ops.aten
ours = torch.ops.meshwright

UNSET = frozenset({aten.empty.memory_format})
"""Operators whose values are whatever lies in memory."""
WHOLE = frozenset(
    {
        aten.scalar_tensor.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
        aten.linspace.default, aten.eye.default, aten.eye.m, aten.tril_indices.default, aten.triu_indices.default,
        aten.any.default, aten.all.default, aten.prod.default, aten.median.default, aten.nanmedian.default,
    }
)  # fmt: skip
"""Operators of which no factor is split: positions, and reductions that no collective finishes."""
PARTS = (2, 3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_everything(subject: Subject, draw: Draw) -> set[str]:
    """Every factor on one axis, every linear group, some pairs on two axes, in equal parts or not; returns what was
    split."""
    done: dict[str, None] = {}
    sizes = subject.rule.sizes
    for factor in subject.factors:
        parts = [count for count in PARTS if misfit(subject.rule, {"a": factor}, {"a": count}) is None]
        if parts:
            check(subject, {"a": factor}, {"a": draw.pick(*parts)}, draw.generator)
            done[factor] = None
    for group in subject.linear_groups:
        check(subject, {"a": "^" * group}, {"a": 2}, draw.generator)
        done["^" * group] = None
    pairs = [(first, second) for first, second in itertools.permutations(done, 2) if {first[0], second[0]} != {"^"}]
    pairs += [(factor, factor) for factor in done if factor in sizes]
    alone = {member for name in subject.rule.joint for member in subject.rule.members(name)} & set(
        subject.rule.decompositions
    )
    pairs = [pair for pair in pairs if not (alone & set(pair) and subject.rule.joint.keys() & set(pair))]
    fitting = [
        (strategy, mesh)
        for strategy in ({"a": first, "b": second} for first, second in pairs)
        for mesh in ({"a": a, "b": b} for a, b in itertools.product(PARTS, PARTS))
        if misfit(subject.rule, strategy, mesh) is None
    ]
    for strategy, mesh in draw.some(fitting, 2):
        check(subject, strategy, mesh, draw.generator)
    return set(done)


def composites(subject: Subject) -> dict[str, int]:
    """The letters of the operator's own rule that can be taken as a product, and by which outer factor."""
    rule = subject.operator.rule(subject.call)
    assert not isinstance(rule, Unsplit)
    return {
        letter: next(outer for outer in (2, 3) if size % outer == 0)
        for letter, size in rule.sizes.items()
        if size in (4, 6, 8, 12)
    }


def property_test(
    target: Any, build: Callable[[Draw], Any], own: Mapping[Any, OperatorRule] | None = None, examples: int = 4
) -> set[str]:
    """Check random calls of an operator; returns every factor (and caret) that was split at least once."""
    seen: set[str] = set()
    phases = (Phase.generate,) if own else tuple(Phase)  # a wrong rule need not be shrunk

    @settings(tries(examples), phases=phases, report_multiple_bugs=False, print_blob=not own, database=None)
    @given(st.data())
    def run(data: Any) -> None:
        draw = Draw(data.draw)
        args, kwargs = build(draw)
        whole = subject(target, args, kwargs, own)
        if isinstance(whole, Unsplit):
            return
        seen.update(check_everything(whole, draw))
        cuts = composites(whole)
        if cuts:
            check_everything(refined(whole, cuts), draw)

    run()
    return seen


def test_every_rule_has_a_case() -> None:
    assert set(RULES) == set(CASES) | set(RANDOM) | UNSET


@pytest.mark.hypothesis
@pytest.mark.parametrize("target", CASES, ids=str)
def test_rule(target: Any) -> None:
    seen = property_test(target, CASES[target])
    if not seen and target not in WHOLE:  # by chance: what hypothesis draws depends on what is imported
        seen = property_test(target, CASES[target], examples=40)
    assert bool(seen) == (target not in WHOLE)


@pytest.mark.hypothesis
@pytest.mark.parametrize("target", POINTWISE, ids=str)
def test_element_by_element_rule(target: Any) -> None:
    # A few random calls may all be scalars, or of size 1, which nothing splits.
    assert property_test(target, POINTWISE[target], examples=2) or property_test(target, POINTWISE[target], examples=40)


# --- the test can fail ------------------------------------------------------------------------------------------------


def pattern(text: str, **rule: Any) -> OperatorRule:
    """A rule that is nothing but a pattern."""
    return OperatorRule(lambda call: make_rule(call, text, **rule))


def without_rewrite(target: Any) -> OperatorRule:
    """The rule of an operator whose rewrite on shards was forgotten."""
    return replace(RULES[target], local=emit_unchanged)


def marked_linear(call: Call) -> Rule:
    return make_rule(call, f"^{pointwise_rule(call).pattern}")


def jointly_linear(call: Call) -> Rule:
    return make_rule(call, pointwise_rule(call).pattern.replace("^^", "^"))


def small(*shape: int, **arguments: Any) -> Callable[[Draw], Any]:
    """A call on one tensor, or on as many as ``count``."""
    return lambda draw: (arguments["call"](*(draw.tensor(*shape) for _ in range(arguments.get("count", 1)))), {})


FORGOTTEN = {
    "global sizes": aten.expand.default,
    "a batch that is counted": aten.native_group_norm.default,
    "statistics of a part": aten._native_batch_norm_legit_functional.default,
    "layer norm of a part": aten.native_layer_norm.default,
    "indices of the whole": aten.embedding.default,
    "keys that do not know each other": ours.attention.default,
    "every rank starts from the sum": aten.index_add.default,
}
"""Operators whose rewrite on shards matters."""
WRONG: dict[str, tuple[Any, OperatorRule, Callable[[Draw], Any]]] = {
    "terms as maxima": (aten.mm.default, pattern("m j, j f -> m f", reduction="max"), CASES[aten.mm.default]),
    "two operands are one group": (aten.mul.Tensor, OperatorRule(jointly_linear), POINTWISE[aten.mul.Tensor]),
    "not linear": (aten.relu.default, OperatorRule(marked_linear), POINTWISE[aten.relu.default]),
    "softmax of a part": (aten._softmax.default, pattern("v w -> v w"), small(4, 4, call=lambda x: (x, 1, False))),
    "scan of a part": (aten.cumsum.default, pattern("a b -> a b"), small(4, 4, call=lambda x: (x, 1))),
    "blocks inside out": (
        aten.cat.default, pattern("a b, a b -> a (b 2)"), small(2, 4, call=lambda x, y: ([x, y], 1), count=2),
    ),
    "order of a view": (aten.view.default, pattern("a b -> (b a)"), small(4, 2, call=lambda x: (x, [8]))),
    "a maximum is a sum": (aten.amax.default, pattern("a b -> a"), small(2, 4, call=lambda x: (x, [1]))),
    "the mean of means": (
        aten.mse_loss.default, pattern("a b, a b -> ."), small(4, 4, call=lambda x, y: (x, y, 1), count=2),
    ),
    "parts that are not one run": (
        aten.embedding.default,
        replace(RULES[aten.embedding.default], contiguous=frozenset()),
        CASES[aten.embedding.default],
    ),
    **{name: (target, without_rewrite(target), CASES[target]) for name, target in FORGOTTEN.items()},
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rule_is_found(mistake: str) -> None:
    target, rule, build = WRONG[mistake]
    with pytest.raises((WrongRuleError, RuntimeError, IndexError)):
        property_test(target, build, {target: rule}, examples=60)
