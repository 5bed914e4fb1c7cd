"""Runs an operator, or a step, as the ranks of a mesh would, in threads of one process: cut, execute, put together.

The rules of ``ops`` and the per-rank rewrites are the real ones; only the wires are replaced. Cutting and joining are
written here in the simplest way, index by index, so that they are an oracle and not the code under test.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

import meshwright.comm.backend  # noqa: F401 - the kernel of add_rows, which no wire carries
from meshwright.capture.builder import Capture
from meshwright.capture.factors import Atom, bind, rendered, unify
from meshwright.ir import graph as ir
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import (
    Partial,
    Placements,
    Shard,
    input_placements,
    is_linear,
    local_shape,
    output_placements,
)
from meshwright.ir.plan import Plan
from meshwright.ir.rule import OWN, Rule
from meshwright.lower.local import Emitter, LocalCall
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import lower_stage
from meshwright.ops import collectives, ring
from meshwright.ops.base import Call, OperatorRule, Unsplit
from meshwright.ops.collectives import Exchange
from meshwright.ops.experts import across, across_backward
from meshwright.ops.ring import Permute, Shift
from meshwright.ops.table import operator_rule

TOLERANCE, SINGLE = 1e-9, 1e-5
"""|found - expected| <= TOLERANCE * max(1, max|expected|), in float64; SINGLE in float32."""
RANDOM_KEY = 1234

Coordinates = dict[str, int]
Mesh = dict[str, int]
"""Axis -> size, outermost first."""


class WrongRuleError(AssertionError):
    """The ranks' results, put together, are not the whole operator's."""


# --- cutting and joining, index by index ------------------------------------------------------------------------------


def owned(length: int, dim: int, placements: Placements, mesh: Mesh, at: Coordinates) -> list[int]:
    """Which indices of a dim of that length a rank holds."""
    units: dict[tuple[int, int], Tensor] = {}
    for axis, size in mesh.items():
        placement = placements.get(axis)
        if isinstance(placement, Shard) and placement.dim == dim:
            outer, unit = placement.outer, placement.unit
            every = units.get((outer, unit), torch.arange(length // outer // unit))
            units[outer, unit] = every.tensor_split(size)[at[axis]]
    result = []
    for position in range(length):
        if all(position % (length // outer) // unit in indices for (outer, unit), indices in units.items()):
            result.append(position)
    return result


def cut(value: Tensor, placements: Placements, mesh: Mesh, at: Coordinates) -> Tensor:
    """A rank's shard."""
    for dim in range(value.dim()):
        indices = owned(value.shape[dim], dim, placements, mesh, at)
        if len(indices) != value.shape[dim]:
            value = value.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return value


def join(parts: Mapping[tuple[int, ...], Tensor], shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    """The whole tensor from all ranks' parts; replicas must be equal."""
    axes = list(mesh)
    partial = [axis for axis in axes if isinstance(placements.get(axis), Partial)]
    kinds = {placements[axis] for axis in partial}
    assert len(kinds) <= 1, "terms of two kinds do not commute"
    first = next(iter(parts.values()))
    whole = torch.zeros(tuple(shape), dtype=first.dtype)
    filled = torch.zeros(tuple(shape), dtype=torch.int64)
    rest = [axis for axis in axes if axis not in partial]
    for indices in itertools.product(*(range(mesh[axis]) for axis in rest)):
        at = dict(zip(rest, indices, strict=True))
        terms = [value for key, value in parts.items() if all(key[axes.index(axis)] == at[axis] for axis in rest)]
        value = terms[0]
        for term in terms[1:]:
            operation = next(iter(kinds)).op  # type: ignore[union-attr]
            value = value + term if operation == "sum" else getattr(torch, f"{operation}imum")(value, term)
        expected = local_shape(tuple(shape), placements, mesh, at)
        if tuple(value.shape) != expected:
            raise WrongRuleError(f"a rank's part has shape {tuple(value.shape)}, its placement says {expected}")
        where = [
            owned(shape[dim], dim, placements, mesh, {**dict.fromkeys(axes, 0), **at}) for dim in range(len(shape))
        ]
        indices_of = [torch.tensor(positions, dtype=torch.int64) for positions in where]
        grid = torch.meshgrid(*indices_of, indexing="ij") if where else ()
        if int(filled[grid].sum()):
            compare(value, whole[grid], "replicas")
        whole[grid] = value
        filled[grid] += 1
    assert filled.all()
    return whole


def compare(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise unless equal (exactly, where not floating)."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise WrongRuleError(
            f"{what}: {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    if expected.is_complex():
        actual, expected = (torch.view_as_real(value.resolve_conj()) for value in (actual, expected))
    if not expected.is_floating_point():
        if not torch.equal(actual, expected):
            raise WrongRuleError(f"{what}: {actual.tolist()}, not {expected.tolist()}")
        return
    special = ~torch.isfinite(expected)
    same = torch.equal(special, ~torch.isfinite(actual)) and torch.equal(
        actual[special].nan_to_num(nan=math.pi), expected[special].nan_to_num(nan=math.pi)
    )
    finite = expected[~special]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    error = float((actual[~special] - finite).abs().max()) / scale if same and finite.numel() else 0.0
    if not same or error > (TOLERANCE if expected.dtype == torch.float64 else SINGLE):
        raise WrongRuleError(f"{what}: off by {error:.2g}" if same else f"{what}: NaN or infinity in other places")


# --- the wires --------------------------------------------------------------------------------------------------------


class Wires:
    """What the ranks exchange values over, group by group."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int], tuple[threading.Barrier, dict[int, Tensor]]] = {}
        self._lock = threading.Lock()
        self._barriers: list[threading.Barrier] = []
        self._aborted = False

    def swap(self, group: AxisGroup, turn: int, value: Tensor) -> list[Tensor]:
        """Every rank's value, by index in the group."""
        with self._lock:
            if self._aborted:
                raise threading.BrokenBarrierError
            if (group.name, turn) not in self._slots:
                barrier = threading.Barrier(group.size)
                self._slots[group.name, turn] = barrier, {}
                self._barriers.append(barrier)
            barrier, slots = self._slots[group.name, turn]
        slots[group.index] = value.clone()
        barrier.wait(timeout=20)
        return [slots[index] for index in range(group.size)]

    def abort(self) -> None:
        """Let nobody wait for a rank that failed."""
        with self._lock:
            self._aborted = True
            for barrier in self._barriers:
                barrier.abort()


def execute(
    graph: fx.Graph,
    values: list[Any],
    groups: Mapping[str, AxisGroup],
    wires: Wires,
    constants: Mapping[str, Tensor] | None = None,
) -> Any:
    """Run a rank's graph; collectives go over the wires, and reduce in place as the real ones do."""
    by_name = {group.name: group for group in groups.values()}
    turns = dict.fromkeys(by_name, 0)
    known: dict[fx.Node, Any] = {}
    given = iter(values)

    def swapped(name: str, value: Tensor) -> list[Tensor]:
        turns[name] += 1
        return wires.swap(by_name[name], turns[name], value)

    def rows_over(name: str) -> Exchange:
        def exchange(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
            me, numbers = by_name[name].index, swapped(name, counts)
            sent = zip(swapped(name, rows), numbers, strict=True)
            received = [sender_rows.split(count.sum(1).tolist())[me] for sender_rows, count in sent]
            return torch.cat(received), torch.stack([count[me] for count in numbers])

        return exchange

    def permuted_over(name: str) -> Permute:
        def permute(rows: Tensor, goes: Sequence[int], comes: Sequence[int]) -> Tensor:
            me, every = by_name[name].index, swapped(name, torch.tensor(goes))
            sent = zip(swapped(name, rows), every, strict=True)
            received = [iter(rows[to == me]) for rows, to in sent]
            return torch.stack([next(received[rank]) for rank in comes])

        return permute

    def round_of(name: str) -> Shift:
        def shift(value: Tensor) -> Callable[[], Tensor]:
            group = by_name[name]
            before = swapped(name, value)[(group.index - 1) % group.size]
            return lambda: before

        return shift

    for node in graph.nodes:
        lookup: Callable[[fx.Node], Any] = known.__getitem__
        args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "get_attr":
            known[node] = (constants or {})[str(node.target)]
        elif node.op == "output":
            return args[0]
        elif node.target is collectives.ALL_REDUCE:
            value, operation = args[0].contiguous(), args[1]
            stacked = torch.stack(swapped(args[2], value))
            known[node] = value.copy_(stacked.sum(0) if operation == "sum" else getattr(stacked, f"a{operation}")(0))
        elif node.target is collectives.ALL_GATHER:
            known[node] = torch.stack(swapped(args[1], args[0]))
        elif node.target is collectives.ALL_TO_ALL:
            index = by_name[args[1]].index
            known[node] = torch.stack([part[index] for part in swapped(args[1], args[0])])
        elif node.target is collectives.REDUCE_SCATTER:
            value, operation, name = args[:3]
            index = by_name[name].index
            stacked = torch.stack([part[index] for part in swapped(name, value)])
            known[node] = stacked.sum(0) if operation == "sum" else getattr(stacked, f"a{operation}")(0)
        elif node.target is torch.ops.meshwright.experts_across.default:
            known[node] = across(rows_over(args[-2]), *args[:-2], size=args[-1])
        elif node.target is torch.ops.meshwright.experts_across_backward.default:
            known[node] = across_backward(rows_over(args[-2]), *args[:-2], size=args[-1])
        elif node.target is torch.ops.meshwright.attention_ring.default:
            known[node] = ring.forward(round_of(args[-2]), permuted_over(args[-2]), *args[:-2], size=args[-1])
        elif node.target is torch.ops.meshwright.attention_ring_backward.default:
            known[node] = ring.backward(round_of(args[-2]), permuted_over(args[-2]), *args[:-2], size=args[-1])
        elif node.target is collectives.HALO_EXCHANGE:
            known[node] = halo_rows(args[0], swapped(args[6], args[0]), *args[1:6], part=args[7])
        elif node.target is collectives.HALO_REDUCE:
            known[node] = halo_sums(swapped(args[5], args[0]), *args[1:5], part=args[6])
        elif node.target is collectives.HALO_RETURN:
            known[node] = returned_rows(swapped(args[5], args[0]), *args[1:5], part=args[6])
        elif node.target is collectives.SHIFT:
            known[node] = round_of(args[1])(args[0])().clone()
        elif node.target is collectives.GATHER_MULTIPLY:
            whole = torch.cat(swapped(args[2], args[0]))
            known[node] = [whole, *(whole @ weight for weight in args[1])]
        elif node.target is collectives.MULTIPLY_SCATTER:
            products, group = args[0] @ args[1], by_name[args[2]]
            parts = [part.chunk(group.size)[group.index] for part in swapped(args[2], products)]
            known[node] = torch.stack(parts).sum(0)
        elif node.target is collectives.WAIT:
            known[node] = args[0]
        else:
            known[node] = node.target(*args, **kwargs)
    raise AssertionError("the graph has no output")


def halo_rows(
    own: Tensor, parts: list[Tensor], dim: int, lows: list[int], highs: list[int], edges: list[int], fill: float, *,
    part: int,
) -> Tensor:  # fmt: skip
    """Row by row: what a part reads and does not have."""
    whole = torch.cat(parts, dim)
    own_rows = range(edges[part], edges[part + 1])
    assert len(own_rows) == own.shape[dim]
    wanted = [row for row in range(lows[part], highs[part]) if row not in own_rows]
    result = torch.full([*own.shape[:dim], len(wanted), *own.shape[dim:][1:]], fill, dtype=own.dtype)
    for place, row in enumerate(wanted):
        if 0 <= row < whole.shape[dim]:
            result.select(dim, place).copy_(whole.select(dim, row))
    return result


def returned_rows(
    strips: list[Tensor], dim: int, lows: list[int], highs: list[int], edges: list[int], *, part: int
) -> Tensor:
    """What the part before has for this part's first rows, and the part behind for its last."""
    before, after = edges[part] - lows[part], highs[part] - edges[part + 1]
    result = torch.zeros_like(strips[part])
    if part > 0:
        result.narrow(dim, 0, after).copy_(strips[part - 1].narrow(dim, before, after))
    if part < len(strips) - 1:
        result.narrow(dim, after, before).copy_(strips[part + 1].narrow(dim, 0, before))
    return result


def halo_sums(
    terms: list[Tensor], dim: int, lows: list[int], highs: list[int], edges: list[int], *, part: int
) -> Tensor:
    """Row by row: the sum of what the parts have of this part's rows."""
    first, rows = terms[0], edges[part + 1] - edges[part]
    result = torch.zeros([*first.shape[:dim], rows, *first.shape[dim:][1:]], dtype=first.dtype)
    for term, low, high in zip(terms, lows, highs, strict=True):
        for row in range(low, high):
            if edges[part] <= row < edges[part + 1]:
                result.select(dim, row - edges[part]).add_(term.select(dim, row - low))
    return result


# --- a whole step on a mesh -------------------------------------------------------------------------------------------


@dataclass
class StepResult:
    """What a step gives, put together from all ranks."""

    loss: Tensor
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def run_step(
    capture: Capture, plan: Plan, values: Mapping[str, Tensor], random_key: int = RANDOM_KEY
) -> tuple[StepResult, list[fx.Graph]]:
    """Run a captured step on every rank of the plan's mesh, given whole parameters, buffers and inputs by name.

    Raises:
        WrongRuleError: replicas of a result differ between ranks.
    """
    mesh = {axis.name: axis.size for axis in plan.mesh.axes if axis.size > 1}
    ranks, wires = list(_coordinates(mesh)), Wires()
    programs = [
        lower_stage(PlannedGraph(capture.graph, plan), 0, _groups(mesh, at), rules=capture.rules) for at in ranks
    ]
    first = programs[0].program
    storage = plan.stage.storage
    placed = {name: storage.get(name, {}) | first.input_placements.get(name, {}) for name in values}

    def run(index: int) -> dict[str, Any]:
        program, phase = programs[index].program, programs[index].functions["prologue"]
        names = {
            entry.value: entry.name for entry in (*program.parameters, *program.buffers, *program.inputs) if entry.value
        }
        local_values: dict[str, Any] = {program.random_key: random_key}
        for node, name in names.items():
            local_values[node] = cut(values[name], placed[name], mesh, ranks[index]).clone()
        given, constants = [local_values[name] for name in phase.inputs], capture.constants
        results = execute(phase.graph, given, _groups(mesh, ranks[index]), wires, constants)
        return {**local_values, **dict(zip(phase.outputs, results, strict=True))}

    results = _at_once(run, range(len(ranks)), wires)

    def whole(node: str, shape: Sequence[int], placements: Placements) -> Tensor:
        return join(
            {tuple(at.values()): result[node] for at, result in zip(ranks, results, strict=True)},
            shape, placements, mesh,
        )  # fmt: skip

    scalars = {name: whole(node, (), {}) for name, node in first.scalars.items()}
    gradients: dict[str, Tensor | None] = dict.fromkeys(gradient.parameter for gradient in capture.graph.gradients)
    for name, node in first.gradients.items():
        gradients[name] = whole(node, values[name].shape, placed[name])
    buffers = {name: values[name] for name in capture.graph.buffers}
    buffers |= {name: whole(node, values[name].shape, {}) for name, node in first.buffers_after.items()}
    graphs = [lowered.functions["prologue"].graph for lowered in programs]
    return StepResult(scalars.pop("loss"), scalars, gradients, buffers), graphs


def _at_once(run: Callable[[Any], Any], items: Sequence[Any], wires: Wires) -> list[Any]:
    """The results of all ranks, which run side by side; the first error that is not of a rank that waited."""

    def guarded(item: Any) -> Any:
        try:
            return run(item)
        except BaseException:
            wires.abort()
            raise

    if len(items) == 1:
        return [run(items[0])]
    pending = [_POOL.submit(guarded, item) for item in items]
    errors = [error for future in pending if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in pending]


def _groups(mesh: Mesh, at: Coordinates) -> dict[str, AxisGroup]:
    """The groups that a rank is in."""
    groups = {}
    for axis, size in mesh.items():
        others = ",".join(f"{other}{index}" for other, index in at.items() if other != axis)
        groups[axis] = AxisGroup(f"{axis}({others})", size, at[axis])
    return groups


# --- one operator on a mesh -------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A call with its rule and whole result; ``letters`` tells what the rule's letters were refined to. ``interior``:
    it computes what needs no halo first."""

    call: Call
    operator: OperatorRule
    rule: Rule
    letters: dict[str, tuple[str, ...]]
    outputs: list[Tensor]
    interior: bool = False

    @property
    def factors(self) -> list[str]:
        """Every factor that may be split, and computes the same."""
        return [name for name in self.rule.sizes if self.rule.splittable(name) and name != OWN]

    @property
    def linear_groups(self) -> list[int]:
        """The groups of operands in which the operator is linear."""
        return sorted({operand.linear for operand in self.rule.parsed.inputs if operand.linear})


def present(result: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    return [item for item in tree_leaves(result) if isinstance(item, Tensor)]


def subject(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Mapping[Any, OperatorRule] | None = None
) -> Subject | Unsplit:
    """Run the whole operator and derive its rule."""
    outputs = [value.clone() for value in present(target(*args, **kwargs))]
    call = Call(target, args, kwargs, tuple(outputs))
    operator = operator_rule(target, own)
    assert operator is not None, f"no rule for {target}"
    rule = operator.rule(call)
    if isinstance(rule, Unsplit):
        return rule
    bound = bind(rule, operator.contiguous)
    rule, _, letters = rendered(bound, _AnyName())
    return Subject(call, operator, rule, letters, outputs)


def refined(subject: Subject, cuts: Mapping[str, int]) -> Subject:
    """The same call with letters (of the operator's own rule) taken as products: ``{"f": 3}`` is ``f = (3 rest)``."""
    original = subject.operator.rule(subject.call)
    assert isinstance(original, Rule)
    bound = bind(original, subject.operator.contiguous)
    for letter, outer in cuts.items():
        size = original.sizes[letter]
        assert unify(bound.letters[letter], [Atom(outer), Atom(size // outer)])
    rule, _, letters = rendered(bound, _AnyName())
    return Subject(subject.call, subject.operator, rule, letters, subject.outputs)


class _AnyName(dict[int, str]):
    def __missing__(self, key: int) -> str:
        return "class"


def check(subject: Subject, strategy: Mapping[str, str], mesh: Mesh, generator: torch.Generator) -> None:
    """Run the operator on every rank of the mesh under ``strategy`` and compare what comes together with the whole.

    Raises:
        WrongRuleError: replicas differ, or the joined outputs differ from the operator's own.
    """
    rule, chosen = subject.rule, dict(strategy)
    inputs = subject.call.tensors
    wanted = [input_placements(rule, chosen, index, mesh) for index in range(len(inputs))]
    ranks = list(_coordinates(mesh))
    terms = [_terms(value, placements, mesh, generator) for value, placements in zip(inputs, wanted, strict=True)]
    wires = Wires()

    def run(at: Coordinates) -> list[Tensor]:
        local_inputs = [
            cut(summands[tuple(at[axis] for axis in axes)], placements, mesh, at).clone()
            for (axes, summands), placements in zip(terms, wanted, strict=True)
        ]
        return _on_rank(subject, chosen, mesh, at, local_inputs, wires)

    results = _at_once(run, ranks, wires)
    for index, expected in enumerate(subject.outputs):
        parts = {tuple(at.values()): result[index] for at, result in zip(ranks, results, strict=True)}
        actual = join(parts, expected.shape, output_placements(rule, chosen, index, mesh), mesh)
        compare(actual, expected, f"{subject.call.target} {rule.pattern!r} split {chosen} on {mesh}, output {index}")
    if "convolution" in str(subject.call.target) and not subject.interior:
        check(replace(subject, interior=True), strategy, mesh, generator)


_POOL = ThreadPoolExecutor(max_workers=16)


def _coordinates(mesh: Mesh) -> Iterator[Coordinates]:
    for indices in itertools.product(*map(range, mesh.values())):
        yield dict(zip(mesh, indices, strict=True))


def _terms(
    value: Tensor, placements: Placements, mesh: Mesh, generator: torch.Generator
) -> tuple[list[str], dict[tuple[int, ...], Tensor]]:
    """(the axes on which the value is Partial, random summands by coordinates there)."""
    axes = [axis for axis in mesh if isinstance(placements.get(axis), Partial)]
    keys = list(itertools.product(*(range(mesh[axis]) for axis in axes)))
    summands = {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key in keys[1:]}
    summands[keys[0]] = value - sum(summands.values()) if len(keys) > 1 else value
    return axes, summands


def _on_rank(
    subject: Subject, strategy: dict[str, str], mesh: Mesh, at: Coordinates, inputs: list[Tensor], wires: Wires
) -> list[Tensor]:
    graph, groups = rank_graph(subject, strategy, mesh, at)
    result = execute(graph, [*inputs, RANDOM_KEY], groups, wires)
    return present(result)


def rank_graph(
    subject: Subject, strategy: dict[str, str], mesh: Mesh, at: Coordinates, name: str = "operator"
) -> tuple[fx.Graph, dict[str, AxisGroup]]:
    """The operator's rewrite for one rank, and the groups that the rank is in."""
    call, groups = subject.call, _groups(mesh, at)
    graph = fx.Graph()
    placeholders = iter([graph.placeholder(f"value_{index}") for index in range(len(call.tensors))])
    args, kwargs = tree_map(
        lambda item: next(placeholders) if isinstance(item, Tensor) else item, (call.args, dict(call.kwargs))
    )
    key = graph.placeholder("random_key")
    tensors = {}
    for kind, values in (("input", call.tensors), ("output", subject.outputs)):
        for index, value in enumerate(values):
            dtype = str(value.dtype).removeprefix("torch.")
            tensors[f"{kind}{index}"] = ir.Tensor(
                name=f"{kind}{index}", shape=tuple(value.shape), dtype=dtype, kind="activation", storage=""
            )
    operator = ir.Operator(
        name=name,
        target=str(call.target),
        inputs=tuple(name for name in tensors if name.startswith("input")),
        outputs=tuple(name for name in tensors if name.startswith("output")),
        rule=subject.rule,
        letters=subject.letters,
    )
    empty = ir.Graph(
        model="", batch_size=1, tensors=tensors, operators=(operator,), factor_classes={}, inputs=(), parameters=(),
        buffers=(), loss="",
    )  # fmt: skip
    chosen = {axis: choice for axis, choice in strategy.items() if axis in groups}
    assert all(is_linear(choice) or choice in subject.rule.sizes for choice in chosen.values())
    emitter = Emitter(empty, groups, lambda target, *args, **kwargs: graph.call_function(target, args, kwargs), key)
    local = LocalCall(emitter, operator, chosen, (call.target, tuple(args), kwargs), subject.interior)
    graph.output(subject.operator.local(local))
    return graph, groups
