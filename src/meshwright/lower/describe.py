"""Describes a stage's lowered functions as a ``Program``: its calls as data, with their storages, kernels and frees."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from operator import getitem
from typing import Any

import msgspec
from torch import Tensor, fx

from meshwright.ir import program as ir
from meshwright.ir.placement import flat_shape
from meshwright.ir.stages import BACKWARD, FORWARD, INPUT, LATE, PROLOGUE, WEIGHT
from meshwright.lower.counts import Counter, inside, started
from meshwright.lower.partition import LoweredStage
from meshwright.lower.static import moving_parts
from meshwright.ops import collectives
from meshwright.ops.base import Call
from meshwright.torch_private import OpOverload

_INTO = ("out", "grad_input")
_SENDS_WHOLE = collectives.STARTS - {collectives.HALO_EXCHANGE, collectives.HALO_REDUCE, collectives.HALO_RETURN}
"""The collectives that send their inputs as contiguous blocks of memory."""


@dataclass
class _Function:
    """One function: its calls, the storages of their results, and the last reader of each storage. ``stored`` maps an
    input that does not own its memory to its storage. ``counter`` counts kernels. ``axes`` maps a group to its size.
    ``passed`` maps each output to its storage, by its name for other functions."""

    graph: fx.Graph
    counter: Counter
    axes: Mapping[str, int]
    stored: Mapping[str, str]
    given: list[ir.Value] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    returned: tuple[str, ...] = ()
    passed: dict[str, str] = field(default_factory=dict)
    values: dict[str, ir.Value] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names: dict[fx.Node, tuple[str, ...]] = {}
        self._taken = set(self.stored.values())
        self._storages: dict[int, str] = {}
        self._sent: dict[str, tuple[str, ...]] = {}
        self.sources: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._names[node] = tuple(
                    self._put(name, value, self.stored.get(between, name)).name
                    for between, (name, value) in zip(_between(node), _results(node), strict=True)
                )
                self.given += [self.values[name] for name in self._names[node]]
            elif node.op == "output":
                self.returned = tuple(name for argument in node.all_input_nodes for name in self._names[argument])
                self.passed = {
                    between: self.values[name].storage
                    for argument in node.all_input_nodes
                    for between, name in zip(_between(argument), self._names[argument], strict=True)
                }
            elif node.target is getitem and not isinstance(node.all_input_nodes[0].meta["val"], Tensor):
                source, index = node.all_input_nodes[0], node.args[1]
                places = [at for at, output in enumerate(source.meta["val"]) if isinstance(output, Tensor)]
                self._names[node] = (self._names[source][places.index(index)],) if index in places else ()
                # All results live until the last of them is taken out of their tuple, before the next call.
                self.last.update({self.values[name].storage: len(self.calls) - 1 for name in self._names[source]})
            elif node.meta.get("val") is not None:
                self._call(node)

    def _put(self, name: str, value: Tensor, storage: str) -> ir.Value:
        self._storages.setdefault(value.untyped_storage()._cdata, storage)
        shape, dtype = tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch.")
        self.values[name] = ir.Value(name, shape, dtype, storage)
        return self.values[name]

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        given: Any = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        results = _results(node)
        into = next((memory for key in _INTO if isinstance(memory := node.kwargs.get(key), fx.Node)), None)
        outputs: list[ir.Value] = []
        new = False
        for name, value in results:
            storage = self._storages.get(value.untyped_storage()._cdata)
            if into is not None:
                storage = self.values[self._names[into][0]].storage
                self._storages[value.untyped_storage()._cdata] = storage
            elif storage is None:
                name = f"{name} again" if name in self._taken else name  # recomputed while the first copy is still kept
                new, storage = True, name
            outputs.append(self._put(name, value, storage))
        self._names[node] = tuple(output.name for output in outputs)
        inputs = tuple(name for argument in node.all_input_nodes for name in self._names[argument])
        call = Call(target, tuple(given[0]), dict(given[1]), tuple(value for _, value in results))
        mutable = not isinstance(target, OpOverload) or target._schema.is_mutable
        waits = node.all_input_nodes[0].name if target is collectives.WAIT else ""
        operator = str(node.meta.get("operator", ""))
        starts = started(call, self.axes)
        counted = not waits and starts is None and (new or mutable)
        at = len(self.calls)
        for name in (*inputs, *self._names[node]):
            self.last[self.values[name].storage] = at
        for name in self._sent.get(waits, ()):  # a collective reads what it sends until it is waited for
            self.last[self.values[name].storage] = at
        copied = {
            source: copy for source in node.all_input_nodes
            if starts is not None and (copy := _copied_bytes(target, source.meta["val"], starts.size))
        }  # fmt: skip
        if starts is not None:
            own = (source for source in node.all_input_nodes if source not in copied)
            self._sent[node.name] = tuple(name for source in own for name in self._names[source])
        self.sources.append(node)
        self.calls.append({
            "name": node.name, "target": _text(target), "operator": operator, "inputs": inputs,
            "outputs": tuple(outputs), "kernels": self.counter.kernels(call) if counted else (), "starts": starts,
            "inside": inside(call, operator), "waits": waits, "copied_bytes": sum(copied.values()),
            "backward": bool(node.meta.get("backward")),
        })  # fmt: skip

    def phases(self, cuts: Sequence[tuple[str, int]], kept: Iterable[str]) -> Iterator[ir.Phase]:
        """Split the calls into phases. Each cut is a phase's name and its end position (exclusive). Storages in
        ``kept`` are not freed after their last reader."""
        stays = {*kept, *(self.values[name].storage for name in self.returned)}
        freed: dict[int, list[str]] = {}
        for storage, at in self.last.items():
            if storage not in stays:
                freed.setdefault(at, []).append(storage)
        nodes = [ir.Node(**call, frees=tuple(freed.get(at, ()))) for at, call in enumerate(self.calls)]
        begin = 0
        for name, end in cuts:
            members, after = nodes[begin:end], nodes[end:]
            produced = {output.name for node in members for output in node.outputs}
            taken = dict.fromkeys(value for node in members for value in node.inputs if value not in produced)
            later = {value for node in after for value in node.inputs}.union(self.returned)
            outputs = tuple(output.name for node in members for output in node.outputs if output.name in later)
            yield ir.Phase(name, tuple(self.values[value] for value in taken), tuple(members), outputs)
            begin = end


def _item(node: Any, index: int) -> str:
    """The name of one of several results of a node. It is the name of the getitem node that reads it, or
    ``node.index``."""
    for user in node.users:
        if user.target is getitem and user.args[1] == index:
            return str(user.name)
    return f"{node.name}.{index}"


def _between(node: fx.Node) -> list[str]:
    """The names under which functions pass a node's tensors to each other. They do not depend on the nodes that take a
    tensor out of several results, which differ from function to function."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return [node.name]
    outputs = value if isinstance(value, tuple | list) else ()
    return [f"{node.name}.{index}" for index, output in enumerate(outputs) if isinstance(output, Tensor)]


def _results(node: fx.Node) -> list[tuple[str, Tensor]]:
    """The tensors that a node returns, with their names."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return [(node.name, value)]
    outputs = value if isinstance(value, tuple | list) else ()
    return [(_item(node, index), output) for index, output in enumerate(outputs) if isinstance(output, Tensor)]


def _copied_bytes(target: Any, value: Any, size: int) -> int:
    """The bytes of the copy that the kernel of a collective over ``size`` ranks makes of an input: of a tensor that is
    not contiguous, and of a gradient that does not divide into equal parts, which is padded. 0 if there is none."""
    if target not in _SENDS_WHOLE or not isinstance(value, Tensor):
        return 0
    elements = value.numel()
    if target is collectives.REDUCE_TO_PARTS:
        elements = size * prod(flat_shape(tuple(value.shape), size))
    return elements * value.itemsize if elements > value.numel() or not value.is_contiguous() else 0


def _text(target: Any) -> str:
    return _name(target) if isinstance(target, OpOverload) else getattr(target, "__name__", type(target).__name__)


@cache
def _name(target: OpOverload) -> str:
    return str(target)


def nodes_of(calls: fx.Graph, counter: Counter, axes: Mapping[str, int]) -> tuple[ir.Node, ...]:
    """The calls of a graph as nodes. The graph needs fake values (:func:`meshwright.lower.propagate.propagate`)."""
    return tuple(ir.Node(**call) for call in _Function(calls, counter, axes, {}).calls)


def describe(lowered: LoweredStage, axes: Mapping[str, int], counter: Counter) -> ir.Program:
    """The program of a lowered stage, with its phases. ``axes`` maps a group to its size; stages can share
    ``counter``."""
    phases: Iterable[ir.Phase]
    if lowered.program.together:
        whole = lowered.functions[PROLOGUE].graph
        moving = moving_parts(whole, lowered.program.random_key)
        named = _of_one_function(_Function(whole, counter, axes, {}))
        phases = (msgspec.structs.replace(phase, moving=moving) for phase in named)
    else:
        phases = _of_functions(lowered, counter, axes)
    return msgspec.structs.replace(lowered.program, phases=tuple(phases))


def _of_one_function(function: _Function) -> Iterator[ir.Phase]:
    """The phases of a whole step that runs as one function. Reductions overlap backward, so they belong to the phase
    ``backward``."""
    places = [node.meta["phase"] for node in function.sources]
    first = next((at for at, phase in enumerate(places) if phase != PROLOGUE), len(places))
    last = max((at for at, phase in enumerate(places) if phase == FORWARD), default=first - 1)
    cuts = [(PROLOGUE, first), (FORWARD, max(first, last + 1)), (BACKWARD, len(places))]
    return function.phases(cuts, {value.storage for value in function.given})


def _of_functions(lowered: LoweredStage, counter: Counter, axes: Mapping[str, int]) -> Iterator[ir.Phase]:
    """The phases of a stage whose functions the executor calls one by one."""
    program, functions = lowered.program, lowered.functions
    memory = [*(accumulator.value for accumulator in program.accumulators), *program.buckets]
    stored = {value.name: value.storage for value in memory if not value.owns}
    stored |= {name: piece.source for name, piece in program.slices.items()}
    held = (*program.parameters, *program.buffers, *program.inputs)
    step = {*(tensor.value for tensor in held), *(tensor.name for tensor in memory), *stored.values()}
    for name, taken in functions.items():
        function = _Function(taken.graph, counter, axes, stored)
        kept = set(step)
        if name not in LATE:
            kept |= {value.storage for value in function.given}
        elif name == INPUT:
            kept |= {stored.get(input_name, input_name) for input_name in functions[WEIGHT].inputs}
        (phase,) = function.phases([(name, len(function.calls))], kept)
        moving = moving_parts(taken.graph, lowered.program.random_key)
        yield ir.Phase(name, tuple(function.given), phase.nodes, function.returned, moving)
        stored |= function.passed
        if name == PROLOGUE:
            step |= {function.values[value].storage for value in function.returned}
            stored |= {part: stored.get(piece.source, piece.source) for part, piece in program.slices.items()}
