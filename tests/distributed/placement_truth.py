"""Which placements of an operator are true, by PyTorch's ``strategy_validation``, and which of them our rules allow.

PyTorch's validator runs an operator on the parts of two ranks and compares what comes together with the whole. It is
DTensor's oracle, and knows nothing of our rules. Calls come from PyTorch's own samples of every operator (OpInfo), from
their forward and their backward. A combination is written as the validator writes it: ``S(0), R -> S(0)``.

An operator is seen as capture sees it: its form (canonical form, no mutation) may consist of several operators with
rules. Then placements go through the form without communication. The rules' own splits, with the collectives of their
rewrites, are run by ``lockstep``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._ops import strategy_validation as validation
from torch.distributed.tensor.placement_types import Placement as TheirPlacement
from torch.testing._internal import common_methods_invocations as samples
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.capture.functionalize import functionalized, is_getitem
from meshwright.capture.outputs import fake_mode
from meshwright.capture.recorder import CallRecorder
from meshwright.capture.tracer import Traced
from meshwright.errors import MeshwrightError
from meshwright.ir.placement import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    input_placements,
    is_linear,
    misfit,
    output_placements,
)
from meshwright.ir.rule import OWN, Rule
from meshwright.ops.base import Call, Unsplit
from meshwright.ops.table import CANONICAL, is_random, operator_rule, rule_of
from meshwright.torch_private import FakeStore, TorchDispatchMode
from tests.distributed.lockstep import Subject, WrongRuleError, check, present, subject

aten = torch.ops.aten

RANKS, AXIS = 2, "a"
MESH = {AXIS: RANKS}
EVEN = {"L": 24, "M": 12, "S": 4, "XS": 2}
"""Sizes of OpInfo's samples that two ranks divide, as the validator's command line sets them."""
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
"""The first of these that an operator takes is used."""
MOST_COMBINATIONS = 30_000
"""Calls with more combinations of input placements are only checked for what our rules allow."""
MOST_STATES = 4_000
MOST_SAMPLES = 24
CRASHES = frozenset({"_segment_reduce", "segment_reduce"})
"""Operators whose samples write outside of their tensors with other sizes than OpInfo's own."""
LOOSE = 1e-4
"""The first look at a combination is looser than the validator's own 1e-5, so that it rejects nothing that holds."""

Combination = tuple[tuple[str, ...], tuple[str, ...]]
"""Placements of all inputs, and of all outputs."""


def written(combination: Combination) -> str:
    """``S(0), R -> S(0)``."""
    return " -> ".join(", ".join(side) for side in combination)


# --- calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def validator() -> Iterator[DeviceMesh]:
    """Sizes of samples that two ranks divide, and a mesh of two simulated ranks."""
    before = [(module, name, getattr(module, name)) for module in (core, samples) for name in EVEN]
    for module, name, _ in before:
        setattr(module, name, EVEN[name])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with LocalTensorMode(frozenset(range(RANKS))):
            mesh = init_device_mesh("cpu", (RANKS,))
        yield mesh
    finally:
        dist.destroy_process_group()
        for module, name, value in before:
            setattr(module, name, value)


class _Calls(TorchDispatchMode):
    """Records calls of ATen operators on real tensors, with copies of what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_map(lambda leaf: _copied(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        result = function(*args, **kwargs)
        outputs = tuple(_copied(value) for value in present(result))
        if function.namespace == "aten" and outputs and not function._schema.is_mutable:
            self.calls.append(Call(function, *given, outputs))
        return result


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def names() -> list[str]:
    """The names of all operators with samples."""
    return sorted({info.name for info in samples.op_db})


def calls(name: str, most: int) -> list[Call]:
    """Calls of ATen operators that the samples of one operator make, forward and backward, at most ``most`` of each."""
    found: dict[Any, Call] = {}
    counts: dict[Any, int] = {}
    if name in validation.SKIP_OPS or name in CRASHES:
        return []
    for info in samples.op_db:
        if info.name == name:
            for call in _recorded(info):
                key = call.target, _described((call.args, dict(call.kwargs)))
                if key not in found and counts.get(call.target, 0) < most and not is_random(call.target):
                    found[key] = call
                    counts[call.target] = counts.get(call.target, 0) + 1
    return list(found.values())


def _recorded(info: Any) -> Iterator[Call]:
    dtype = next((dtype for dtype in DTYPES if info.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        return
    trains = dtype.is_floating_point and info.supports_autograd
    torch.manual_seed(0)
    for sample in _samples(info, dtype, trains):
        with _Calls() as recorded:
            try:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
                if trains:
                    differentiable = [value for value in present(result) if value.requires_grad and value.numel()]
                    if differentiable:
                        torch.autograd.backward(differentiable, [torch.randn_like(value) for value in differentiable])
            except Exception:  # noqa: BLE001, S110 - samples for devices, and of sizes that the operator refuses
                pass
        yield from recorded.calls


def _samples(info: Any, dtype: torch.dtype, trains: bool) -> Iterator[Any]:
    """The first samples of an operator; a few operators cannot make them all of other sizes than OpInfo's own."""
    try:
        yield from itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=trains), MOST_SAMPLES)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return


def _described(value: Any) -> Any:
    """What two calls of a kind have in common: shapes and dtypes, and whatever is no tensor."""
    described = tree_map(lambda leaf: f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf, value)
    return repr(described)


# --- what is true -----------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """The validator's verdicts on one call."""

    call: Call
    mesh: DeviceMesh
    _parts: dict[tuple[int, str], tuple[Tensor, ...] | None] = field(default_factory=dict)

    @property
    def countable(self) -> bool:
        """Whether the validator looks at such a call: tensors without elements, and results of zeros, tell nothing."""
        tensors, outputs = self.call.tensors, list(self.call.outputs)
        if not tensors or any(not value.numel() for value in tensors) or any(value.is_sparse for value in tensors):
            return False
        return validation._check_ground_truth(outputs) is not None

    def options(self, index: int) -> list[str]:
        """The placements of an input that the validator tries."""
        value = self.call.tensors[index]
        placements = validation.get_1d_input_placements_for_tensor(value, include_partial=True)
        return list(dict.fromkeys(normal(str(placement), value) for placement in placements))

    def valid(self) -> list[Combination]:
        """The combinations that the validator calls valid, one placement for all outputs, as it tries them."""
        tensors, found = self.call.tensors, []
        options = [self.options(index) for index in range(len(tensors))]
        outputs = validation.get_1d_output_placements_for_tensor(self.call.outputs[0])
        ends = list(dict.fromkeys(normal(str(placement), self.call.outputs[0]) for placement in outputs))
        total = 1
        for each in options:
            total *= len(each)
        if total > MOST_COMBINATIONS:
            return []
        with self._validating() as is_valid:
            for inputs in itertools.product(*options):
                if all(placement == "R" for placement in inputs):
                    continue
                results = self._results(inputs)
                if results is None:
                    continue
                for end in ends:
                    if all(
                        _joins(end, parts, whole) for parts, whole in zip(results, self.call.outputs, strict=True)
                    ) and is_valid(inputs, (end,) * len(self.call.outputs)):
                        combination = inputs, tuple(normal(end, whole) for whole in self.call.outputs)
                        found.append(combination)
        return list(dict.fromkeys(found))

    def is_valid(self, combination: Combination) -> bool | None:
        """What the validator says of a combination; None if it cannot say."""
        with self._validating() as is_valid:
            return is_valid(*combination)

    @contextmanager
    def _validating(self) -> Iterator[Any]:
        call, outputs = self.call, list(self.call.outputs)
        truth: Any = outputs if len(outputs) > 1 else outputs[0]
        mitigations = validation._prepare_aten_mitigations(call.target, call.args, dict(call.kwargs))

        def is_valid(inputs: Sequence[str], ends: Sequence[str]) -> bool | None:
            return validation._validate_aten_with_mitigations(
                call.target, call.args, dict(call.kwargs), _theirs(inputs), _theirs(ends), truth, RANKS, self.mesh,
                mitigations,
            )  # fmt: skip

        with LocalTensorMode(frozenset(range(RANKS))):
            yield is_valid

    def _results(self, inputs: Sequence[str], tensors: Sequence[Tensor] | None = None) -> list[list[Tensor]] | None:
        """For each output, what each rank computes from its parts; None if the operator refuses the parts."""
        parts = [self._cut(index, placement, tensors) for index, placement in enumerate(inputs)]
        if any(part is None for part in parts):
            return None
        ranks = []
        for rank in range(RANKS):
            mine = iter([part[rank] for part in parts])  # type: ignore[index]
            try:
                ranks.append(present(_called(self.call, mine)))
            except Exception:  # noqa: BLE001 - an operator may refuse parts in any way
                return None
        if any(len(result) != len(self.call.outputs) for result in ranks):
            return None
        return [list(each) for each in zip(*ranks, strict=True)]

    def _cut(self, index: int, placement: str, tensors: Sequence[Tensor] | None) -> tuple[Tensor, ...] | None:
        """The parts of an input, the validator's own for Partial."""
        key = index, placement
        if tensors is None and key in self._parts:
            return self._parts[key]
        value = (tensors or self.call.tensors)[index]
        (theirs,) = _theirs([placement])
        parts: tuple[Tensor, ...] | None
        if placement == "R":
            parts = (value,) * RANKS
        elif placement.startswith("S("):
            dim = int(placement[2:-1])
            even = value.shape[dim] % RANKS == 0
            parts = tuple(part.contiguous() for part in value.tensor_split(RANKS, dim)) if even else None
        else:
            try:
                local = validation._create_partial_input(value, theirs, RANKS, index)
                parts = tuple(local._local_tensors[rank] for rank in range(RANKS))
            except (RuntimeError, TypeError):
                parts = None
        if tensors is None:
            self._parts[key] = parts
        return parts

    # --- why a true combination need not be allowed ---

    def ignores(self, index: int) -> bool:
        """Whether the operator gives the same for other values of an input."""
        value = self.call.tensors[index]
        if not value.is_floating_point():
            return False
        other = [one if number != index else torch.randn_like(one) for number, one in enumerate(self.call.tensors)]
        try:
            found = present(_called(self.call, iter(other)))
        except Exception:  # noqa: BLE001 - an operator may refuse values
            return False
        return all(map(_same, found, self.call.outputs))

    def holds_by_chance(self, combination: Combination) -> bool:
        """Whether a combination that holds for the sample's values does not hold for random ones."""
        torch.manual_seed(1)
        other = [torch.randn_like(one) if one.is_floating_point() else one for one in self.call.tensors]
        try:
            wholes = present(_called(self.call, iter(other)))
        except Exception:  # noqa: BLE001 - an operator may refuse values
            return False
        results = self._results(combination[0], other)
        return results is None or not all(map(_joins, combination[1], results, wholes))


def _called(call: Call, tensors: Iterator[Tensor]) -> Any:
    args, kwargs = tree_map(
        lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, (call.args, dict(call.kwargs))
    )
    return call.target(*args, **kwargs)


def _theirs(placements: Iterable[str]) -> tuple[TheirPlacement, ...]:
    found = tuple(validation.parse_placement(placement) for placement in placements)
    assert None not in found
    return found  # type: ignore[return-value]


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, atol=LOOSE, rtol=LOOSE, equal_nan=True)


def _joins(placement: str, parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the ranks' results, put together by a placement, are about the whole."""
    first, second = parts
    try:
        if placement == "R":
            return _same(first, whole) and _same(second, whole)
        if placement.startswith("S("):
            dim = int(placement[2:-1])
            return dim < whole.dim() and _same(torch.cat([first, second], dim), whole)
        if first.shape != whole.shape or second.shape != whole.shape or whole.dtype == torch.bool:
            return False
        joined = {
            "P(sum)": lambda: first + second, "P(avg)": lambda: ((first + second) / RANKS).to(whole.dtype),
            "P(min)": lambda: torch.minimum(first, second), "P(max)": lambda: torch.maximum(first, second),
        }[placement]()  # fmt: skip
    except RuntimeError:
        return False
    return _same(joined, whole)


def normal(placement: str, value: Tensor) -> str:
    """A Shard of a dim of size 1 is written as Replicate, as in the validator."""
    return validation.normalize_placement_str(placement, tuple(value.shape))


# --- what our rules allow ---------------------------------------------------------------------------------------------


@dataclass
class Form:
    """An operator's graph as capture makes it; ``reason``: why it has none, or why it runs whole."""

    graph: fx.Graph | None = None
    reason: str = ""

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
            results = present(_called(call, iter(fakes)))
        recorder.returns(results)
        traced = Traced(
            recorder.graph, recorder.mutates, parameters=[], buffers=[],
            inputs=[f"input{index}" for index in range(len(fakes))], leaves=None,  # type: ignore[arg-type]
            metrics=[], differentiable=[], tied={}, mode=mode, constants=recorder.constants,
        )  # fmt: skip
        graph = functionalized(traced).graph
    except MeshwrightError as error:
        return Form(reason=f"capture refuses it: {error}".splitlines()[0])
    except Exception as error:  # noqa: BLE001 - what fake tensors cannot do, a captured step cannot hold
        return Form(reason=f"fake tensors refuse it: {type(error).__name__}")
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
        return Unsplit(str(error).splitlines()[0])


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


def allowed(call: Call, made: Form) -> set[Combination]:
    """The combinations that go through an operator's form without communication between its operators."""
    if made.graph is None:
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
    found: set[Combination] = set()
    rules = {node: _rule(node) for node in made.nodes}
    for inputs in itertools.product(*options):
        if all(placement == REPLICATE for placement in inputs):
            continue
        for ends in _through(made.graph, inputs, rules):
            starts = tuple(normal(str(one), value) for one, value in zip(inputs, call.tensors, strict=True))
            found.add((starts, tuple(normal(str(end), value) for end, value in zip(ends, call.outputs, strict=True))))
    return found


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
            unlike = {tuple(sorted((key.name, str(value)) for key, value in state.items())): state for state in following}
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
    in_table: bool = True
    """Whether the validator knows its placements: blocks of a flattened dim are unknown to it."""


def splits(call: Call) -> list[Checked]:
    """Run every split of an operator's own rule on two ranks, with the rule's rewrite. An empty ``error`` is right."""
    if operator_rule(call.target) is None:
        return []
    try:
        whole = subject(call.target, call.args, call.kwargs)
    except MeshwrightError:
        return []
    if isinstance(whole, Unsplit):
        return []
    generator, found = torch.Generator().manual_seed(0), []
    for choice in choices(whole.rule):
        inputs, outputs = placed(whole.rule, choice)
        if is_linear(choice) and not _has_terms(whole, inputs):
            continue  # integers have no terms here
        error = ""
        try:
            check(whole, {AXIS: choice}, MESH, generator)
        except (WrongRuleError, RuntimeError, IndexError, ValueError, AssertionError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0]
        texts = (
            tuple(normal(str(one), value) for one, value in zip(inputs, call.tensors, strict=True)),
            tuple(normal(str(one), value) for one, value in zip(outputs, call.outputs, strict=True)),
        )
        plain = all(isinstance(one, Replicate | Partial) or str(one) == f"S({one.dim})" for one in (*inputs, *outputs))  # type: ignore[union-attr]
        found.append(Checked(choice, texts, error, plain))
    return found


def _has_terms(whole: Subject, inputs: Sequence[Placement]) -> bool:
    pairs = zip(inputs, whole.call.tensors, strict=True)
    return all(value.is_floating_point() or value.is_complex() for one, value in pairs if isinstance(one, Partial))


def drawn(count: int, seed: int) -> list[str]:
    """Some of the operators with samples."""
    chosen = random.Random(seed).sample(names(), count)
    return sorted(chosen)




# --- both together ----------------------------------------------------------------------------------------------------

AVERAGE = "averages: a mean is a sum over a global count"
EXTREME = "partial maxima and minima are reduced before they are read"
RENAMED = "a whole value under another name"
UNREAD = "a partial input whose values the operator does not read"
CHANCE = "holds for the values of this sample only"
TWO_SPLITS = "two splits on one axis: a partial tensor, to which split rows are added"
ADDS_INTO = frozenset({aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.scatter_reduce.two})


@dataclass
class Verdict:
    """What a call of an operator shows. ``true``: combinations that the validator calls valid."""

    target: str
    true: int = 0
    allowed: int = 0
    listed: dict[str, int] = field(default_factory=dict)
    """Combinations that are true and not allowed, by reason."""
    missing: list[str] = field(default_factory=list)
    """Combinations that are true and not allowed, without a reason."""
    right: int = 0
    """Splits by our rule that gave the whole on two ranks."""
    wrong: list[str] = field(default_factory=list)
    unruled: str = ""
    """Why the operator has no rule, if it has none."""


def judged(call: Call, mesh: DeviceMesh) -> Verdict:
    """Compare what is true of a call with what our rules allow, and run what they allow."""
    truth, made, verdict = Truth(call, mesh), form(call), Verdict(str(call.target))
    verdict.unruled = made.reason
    for split in splits(call):
        if split.error:
            verdict.wrong.append(f"{written(split.combination)}: {split.error}")
        else:
            verdict.right += 1
    if not truth.countable:
        return verdict
    valid, ours = truth.valid(), allowed(call, made)
    every = frozenset(valid)
    for combination in valid:
        verdict.true += 1
        if combination in ours:
            verdict.allowed += 1
        elif reason := _reason(truth, combination, every):
            verdict.listed[reason] = verdict.listed.get(reason, 0) + 1
        else:
            verdict.missing.append(written(combination))
    return verdict


def _reason(truth: Truth, combination: Combination, valid: frozenset[Combination]) -> str:
    """Why our rules do without a true combination; empty without a reason."""
    inputs, outputs = combination
    if "P(avg)" in (*inputs, *outputs):
        return AVERAGE
    if {"P(min)", "P(max)"} & set(inputs):
        return EXTREME
    if (inputs, ("R",) * len(outputs)) in valid:
        return RENAMED
    if any(placement == "P(sum)" and truth.ignores(index) for index, placement in enumerate(inputs)):
        return UNREAD
    if truth.call.target in ADDS_INTO and inputs[0] == "P(sum)":
        return TWO_SPLITS
    return CHANCE if truth.holds_by_chance(combination) else ""
