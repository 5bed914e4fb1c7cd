"""Which placements of an operator our rules allow, and whether the rules' own splits are right on two ranks.

An operator is seen as capture sees it: its form (canonical form, no mutation) may consist of several operators with
rules. Then placements go through the form without communication. Splits of a rule, with the collectives of its rewrite,
are run by ``lockstep``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from meshwright.capture.functionalize import functionalized, is_getitem
from meshwright.capture.outputs import fake_mode
from meshwright.capture.recorder import CallRecorder
from meshwright.capture.tracer import Traced
from meshwright.errors import MeshwrightError
from meshwright.ir.placement import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    input_placements,
    is_linear,
    misfit,
    output_placements,
)
from meshwright.ir.rule import OWN, Rule
from meshwright.ops.base import Call, Unsplit
from meshwright.ops.table import CANONICAL, rule_of
from tests.distributed.lockstep import Subject, WrongRuleError, check, present, subject
from tests.distributed.placement_truth import MOST_COMBINATIONS, RANKS, Combination, called, normal

aten = torch.ops.aten

AXIS = "a"
MESH = {AXIS: RANKS}
MOST_STATES = 4_000
UNSET = frozenset({aten.empty.memory_format, aten.empty_like.default})
"""Operators whose values are whatever lies in memory."""

# --- what our rules allow ---------------------------------------------------------------------------------------------


@dataclass
class Form:
    """An operator's graph as capture makes it; ``reason``: why it has none, or why it runs whole."""

    graph: fx.Graph | None = None
    reason: str = ""
    refused: bool = False
    """Whether capture refuses the operator."""

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators."""
        graph = self.graph
        return [] if graph is None else [n for n in graph.nodes if n.op == "call_function" and not is_getitem(n)]


def form(call: Call) -> Form:
    """The operators that capture makes of a call."""
    mode = fake_mode()
    with mode:
        fakes = [torch.empty_like(value, device="cpu") for value in call.tensors]
    recorder = CallRecorder(fakes, dict, CANONICAL)
    try:
        with mode, recorder:
            results = present(called(call, iter(fakes)))
        recorder.returns(results)
        traced = Traced(
            recorder.graph, recorder.mutates, parameters=[], buffers=[],
            inputs=[f"input{index}" for index in range(len(fakes))], leaves=None,  # type: ignore[arg-type]
            metrics=[], differentiable=[], tied={}, mode=mode, constants=recorder.constants,
        )  # fmt: skip
        graph = functionalized(traced).graph
    except MeshwrightError as error:
        return Form(reason=f"capture refuses it: {error}".splitlines()[0], refused=True)
    except Exception as error:  # noqa: BLE001 - what fake tensors cannot do, a captured step cannot hold
        return Form(reason=f"fake tensors refuse it: {type(error).__name__}", refused=True)
    result = Form(graph)
    for node in result.nodes:
        rule = _rule(node)
        if isinstance(rule, Unsplit):
            result.reason = rule.reason
    return result


def _call_of(node: fx.Node) -> Call:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda other: other.meta["val"])
    return Call(node.target, args, kwargs, tuple(present(node.meta["val"])))  # type: ignore[arg-type]


def _rule(node: fx.Node) -> Rule | Unsplit:
    try:
        return rule_of(_call_of(node))
    except MeshwrightError as error:
        return Unsplit(f"refused: {error}".splitlines()[0])


def choices(rule: Rule) -> list[str]:
    """Every split of a rule over two ranks: factors that compute the same, and carets."""
    factors = [name for name in rule.sizes if rule.splittable(name) and name != OWN]
    carets = sorted({operand.linear for operand in rule.parsed.inputs if operand.linear})
    return [
        choice
        for choice in (*factors, *("^" * count for count in carets))
        if misfit(rule, {AXIS: choice}, MESH) is None
    ]


def placed(rule: Rule, choice: str) -> tuple[list[Placement], list[Placement]]:
    """The placements of inputs and outputs under a choice; without one, all are whole."""
    strategy = {AXIS: choice} if choice else {}
    inputs = [input_placements(rule, strategy, index, MESH) for index in range(len(rule.parsed.inputs))]
    outputs = [output_placements(rule, strategy, index, MESH) for index in range(len(rule.parsed.outputs))]
    return [each.get(AXIS, REPLICATE) for each in inputs], [each.get(AXIS, REPLICATE) for each in outputs]


def allowed(call: Call, operator_form: Form) -> set[Combination]:
    """The combinations that go through an operator's form without communication between its operators."""
    if operator_form.graph is None:
        return set()
    options: list[list[Placement]] = []
    for value in call.tensors:
        shards: list[Placement] = [Shard(dim) for dim, size in enumerate(value.shape) if size > 1]
        options.append([REPLICATE, *shards, Partial("sum")])
    total = 1
    for each in options:
        total *= len(each)
    if total > MOST_COMBINATIONS:
        return set()
    combinations: set[Combination] = set()
    rules = {node: _rule(node) for node in operator_form.nodes}
    for inputs in itertools.product(*options):
        if all(placement == REPLICATE for placement in inputs):
            continue
        for ends in _through(operator_form.graph, inputs, rules):
            starts = tuple(normal(str(start), value) for start, value in zip(inputs, call.tensors, strict=True))
            combinations.add(
                (starts, tuple(normal(str(end), value) for end, value in zip(ends, call.outputs, strict=True)))
            )
    return combinations


State = dict[fx.Node, tuple[Placement, ...]]


def _through(graph: fx.Graph, inputs: Sequence[Placement], rules: Mapping[fx.Node, Rule | Unsplit]) -> set[Any]:
    """The placements of a graph's outputs that follow from those of its inputs without communication."""
    given = iter(inputs)
    states: list[State] = [{}]
    for node in graph.nodes:
        if node.op == "placeholder":
            placement = next(given)
            states = [{**state, node: (placement,)} for state in states]
        elif node.op == "get_attr":
            states = [{**state, node: (REPLICATE,)} for state in states]
        elif is_getitem(node):
            source, index = node.args
            numbers = [number for number, item in enumerate(source.meta["val"]) if isinstance(item, Tensor)]
            states = [{**state, node: (state[source][numbers.index(index)],)} for state in states]
        elif node.op == "call_function":
            following = [state | {node: ends} for state in states for ends in _after(node, state, rules[node])]
            unlike = {
                tuple(sorted((key.name, str(value)) for key, value in state.items())): state for state in following
            }
            states = list(unlike.values())[:MOST_STATES]
        elif node.op == "output":
            results = node.args[0]
            return {tuple(state[result][0] for result in results if result is not None) for state in states}
    raise AssertionError("the graph has no output")


def _after(node: fx.Node, state: State, rule: Rule | Unsplit) -> Iterator[tuple[Placement, ...]]:
    """The placements of an operator's outputs; a whole input may be cut, since that moves nothing."""
    sources = [source for source in tree_leaves((node.args, dict(node.kwargs))) if isinstance(source, fx.Node)]
    current = [state[source][0] for source in sources]
    if all(placement == REPLICATE for placement in current):
        yield (REPLICATE,) * len(present(node.meta["val"]))
        return
    if isinstance(rule, Unsplit):
        return
    for choice in choices(rule):
        wanted, ends = placed(rule, choice)
        if all(
            now == want or (now == REPLICATE and isinstance(want, Shard))
            for now, want in zip(current, wanted, strict=True)
        ):
            yield tuple(ends)


# --- whether what our rules allow is true -----------------------------------------------------------------------------


@dataclass
class Checked:
    """One split of a call by our rule: what was run on two ranks."""

    choice: str
    combination: Combination
    error: str = ""


def splits(call: Call, operator_form: Form) -> list[Checked]:
    """Run every split of an operator's own rule on two ranks, with the rule's rewrite. An empty ``error`` is right.

    A call that capture writes with other operators is not run by its own rule; these operators have calls of their own.
    """
    if operator_form.reason or call.target in UNSET or [node.target for node in operator_form.nodes] != [call.target]:
        return []
    try:
        whole = subject(call.target, call.args, call.kwargs)
    except MeshwrightError:
        return []
    if isinstance(whole, Unsplit):
        return []
    generator, results = torch.Generator().manual_seed(0), []
    for choice in choices(whole.rule):
        inputs, outputs = placed(whole.rule, choice)
        if is_linear(choice) and not _has_terms(whole, inputs):
            continue
        error = ""
        try:
            check(whole, {AXIS: choice}, MESH, generator)
        except (WrongRuleError, RuntimeError, IndexError, ValueError, AssertionError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0]
        texts = (
            tuple(normal(str(placement), value) for placement, value in zip(inputs, call.tensors, strict=True)),
            tuple(normal(str(output), value) for output, value in zip(outputs, call.outputs, strict=True)),
        )
        results.append(Checked(choice, texts, error))
    return results


def _has_terms(whole: Subject, inputs: Sequence[Placement]) -> bool:
    """Whether terms of partial inputs add up without rounding that would show."""
    pairs = zip(inputs, whole.call.tensors, strict=True)
    return all(
        value.dtype in (torch.float64, torch.complex128) for placement, value in pairs if isinstance(placement, Partial)
    )
