"""Plan + traced graph -> one rank's graph: every operator on its part, collectives where placements differ."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from meshwright.capture.builder import Capture
from meshwright.capture.calls import read, target_of
from meshwright.capture.fx_graph import Graph
from meshwright.ir.graph import Operator
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Placements, Shard, input_placements, local_shape, output_placements
from meshwright.ir.plan import Bucket, Plan, Strategy
from meshwright.ir.stages import given_batch
from meshwright.lower import buckets
from meshwright.lower.buckets import Gathers, Value
from meshwright.lower.fuse import fuse, propagate, reuse_memory, separate, write_into_buckets
from meshwright.lower.halo import Exchanged
from meshwright.lower.local import LocalCall
from meshwright.lower.prefetch import join_returned, prefetch, sink_waits
from meshwright.lower.regions import Compiler
from meshwright.lower.reshard import Resharder, Steps
from meshwright.lower.stage import DISPATCHED, BoxedFunction, Kernels, boxed_function
from meshwright.ops import collectives
from meshwright.ops.base import emit_unchanged
from meshwright.ops.table import operator_rule

aten = torch.ops.aten


@dataclass
class Lowered:
    """One rank's step. ``function([*parameters, *buffers, *inputs, random_key])`` returns
    ``[loss, *metrics, *gradients, *buffers]``, all local parts; gradients follow ``differentiable``."""

    function: BoxedFunction
    graph: fx.Graph
    parameters: list[str]
    buffers: list[str]
    inputs: list[str]
    input_placements: dict[str, Placements]
    metrics: list[str]
    differentiable: list[str]


@dataclass
class _Version:
    steps: Steps | None
    node: fx.Node | None = None


def lower(
    capture: Capture,
    plan: Plan,
    groups: dict[str, AxisGroup],
    device: torch.device | None = None,
    turn: Callable[[], None] | None = None,
    compiler: Compiler | None = None,
    kernels: Kernels = DISPATCHED,
) -> Lowered:
    """The graph of the rank that ``groups`` describes, for ``device`` (default: the CPU).

    ``groups`` holds the axes of the plan's mesh that have more than one rank. ``turn`` is called where the backward
    pass begins, if there is one. ``compiler`` joins operators, ``kernels`` run some of them.
    """
    return Lowering(capture, plan, groups, device or torch.device("cpu"), compiler, kernels).lower(turn)


class Lowering:
    """Emits one rank's graph. ``lower/pipeline.py`` emits a stage of it, in phases."""

    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        groups: dict[str, AxisGroup],
        device: torch.device,
        compiler: Compiler | None = None,
        kernels: Kernels = DISPATCHED,
    ) -> None:
        self.compiler, self.kernels = compiler, kernels
        self.capture, self.plan, self.groups, self.device = capture, plan, groups, device
        self.ir = capture.graph
        self.sizes, self.at = sizes_of(groups)
        self.graph = Graph()
        self.values: dict[str, Value] = {}
        self.names: dict[fx.Node, str] = {}
        self.resharder = Resharder(self.emit, groups, plan.links)
        self.meta: dict[str, Any] = {}
        self.random_key: fx.Node | None = None
        self.drawn: dict[str, dict[str, str]] = {}
        self.exchanged = Exchanged()
        self.strategies = {
            name: {axis: choice for axis, choice in strategy.items() if axis in groups}
            for name, strategy in plan.strategies(self.ir).items()
        }
        self.phase = ""
        self.gathers = Gathers(plan, groups, self.ir.tensors, self.emit)

    # --- emission ------------------------------------------------------------------------------------------------

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in collectives.STARTS:
            kwargs.setdefault("label", str(self.meta.get("operator", "")))
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, phase=self.phase)
        return node

    def local_shape(self, shape: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor of the global ``shape``."""
        return local_shape(shape, placements, self.sizes, self.at)

    def lower(self, turn: Callable[[], None] | None = None) -> Lowered:
        inputs = self._placeholders()
        self._plan_uses()
        storages = self._storage_readers()
        # what depends on no parameter comes first: its collectives (label counts) hide under the model
        for operator in sorted(self.ir.operators, key=lambda operator: not operator.prologue):
            self._operator(operator, storages)
        return self._finish(inputs, turn)

    def _placeholders(self) -> dict[str, Placements]:
        traced = self.capture.traced
        names = [*traced.parameters, *traced.buffers, *traced.inputs]
        inputs: dict[str, Placements] = {}
        for index, (source, name) in enumerate(zip(traced.placeholders, names, strict=True)):
            placements = self._known(self.plan.storage(name))
            if name in traced.inputs:
                placements = inputs[name] = self._batch_placements(name) | self._rows_of_input(name)
            node = self.graph.placeholder(f"value_{index}")
            self._record(source, name, node, placements)
        for source in traced.graph.nodes:
            if source.op == "get_attr":
                node = self.graph.create_node("get_attr", source.target)
                self._record(source, f"constant.{source.target}", node, {})
        self.random_key = self.graph.placeholder("random_key")
        return inputs

    def _record(self, source: fx.Node, name: str, node: fx.Node, placements: Placements) -> None:
        tensor = self.ir.tensors[name]
        node.meta["local_shape"] = self.local_shape(tensor.shape, placements)
        node.meta["dtype"] = source.meta["val"].dtype
        self.values[name] = Value(node, placements)
        self.names[source] = name

    def _known(self, placements: Placements) -> Placements:
        return {axis: placement for axis, placement in placements.items() if axis in self.groups}

    def _batch_placements(self, name: str) -> Placements:
        return given_batch(self.ir, name, self.sizes)

    def _rows_of_input(self, name: str) -> Placements:
        """How all that read an input cut it over axes that do not divide the batch: a rank need have no more."""
        if not self.plan.whole_step:
            return {}
        wants = [
            input_placements(rule, self.strategies[operator.name], position, self.sizes) if rule else {}
            for operator in self.ir.operators for rule in (operator.rule,)
            for position, one in enumerate(operator.inputs) if one == name
        ]  # fmt: skip
        first = self._known(wants[0]) if wants else {}
        return {
            axis: one for axis, one in first.items()
            if isinstance(one, Shard) and one.outer == 1 and one.dim and axis not in DATA_AXES
            and all(other.get(axis) == one for other in wants)
        }  # fmt: skip

    def _storage_readers(self) -> dict[str, int]:
        """How often the memory behind a tensor is read, other than by views of it: by operators, as an output, and
        as a gradient in a bucket."""
        readers: dict[str, int] = {}
        for name in (*(name for name, _ in self.outputs), *self.bucket_of):
            storage = self.ir.tensors[name].storage
            readers[storage] = readers.get(storage, 0) + 1
        for operator in self.ir.operators:
            views = {self.ir.tensors[output].storage for output in operator.outputs}
            for name in operator.inputs:
                storage = self.ir.tensors[name].storage
                if storage not in views:
                    readers[storage] = readers.get(storage, 0) + 1
        return readers

    def _plan_uses(self) -> None:
        """For every tensor, the placements in which somebody wants it (so that resharding can start early)."""
        self.uses: dict[str, list[Placements]] = {}
        for operator in self.ir.operators:
            strategy = self.strategies[operator.name]
            for position, name in enumerate(operator.inputs):
                wanted = input_placements(operator.rule, strategy, position, self.sizes) if operator.rule else {}
                self.uses.setdefault(name, []).append(wanted)
        whole = [self.ir.loss, *self.ir.metrics.values(), *self.ir.buffer_updates.values()]
        self.outputs: list[tuple[str, Placements]] = [(name, {}) for name in whole]
        self.bucket_of: dict[str, Bucket] = {}
        gradients = {entry.parameter: entry.gradient for entry in self.ir.gradients}
        for bucket in self.plan.buckets:
            if bucket.axis in self.groups:
                self.bucket_of |= {gradients[parameter] or "": bucket for parameter in bucket.parameters}
        self.gradient_wants: dict[str, Placements] = {
            entry.parameter: self._known(self.plan.storage(entry.parameter)) for entry in self.ir.gradients
        }
        for entry in self.ir.gradients:
            if entry.gradient is not None and entry.gradient not in self.bucket_of:
                self.outputs.append((entry.gradient, self.gradient_wants[entry.parameter]))
        for name, wanted in self.outputs:
            self.uses.setdefault(name, []).append(wanted)
        self.bucket_left = {id(bucket): len(bucket.parameters) for bucket in self.bucket_of.values()}
        self.bucket_nodes: dict[int, tuple[fx.Node, Bucket]] = {}
        self.reduced: dict[str, fx.Node] = {}
        self.gradients = gradients

    def _operator(self, operator: Operator, storages: dict[str, int]) -> None:
        strategy = self.strategies[operator.name]
        self.meta = {"operator": operator.name, "backward": operator.backward}
        arguments = []
        for position, name in enumerate(operator.inputs):
            wanted = input_placements(operator.rule, strategy, position, self.sizes) if operator.rule else {}
            arguments.append(self._want(name, wanted))
        args, kwargs = read(operator.arguments, arguments)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        target = target_of(operator.target)
        assert self.random_key is not None
        local = LocalCall(
            self.ir,
            self.groups,
            operator,
            strategy,
            (target, args, kwargs),
            self.emit,
            self.random_key,
            self.drawn,
            self.exchanged,
            self.plan.computes_interior_first(operator.name),
        )
        rule = operator_rule(target, self.capture.rules)
        emit = rule.local if rule is not None and operator.rule is not None else emit_unchanged
        result = emit(local)
        self._store(operator, strategy, result, storages)

    def _store(self, operator: Operator, strategy: Strategy, result: Any, storages: dict[str, int]) -> None:
        for output, (name, index) in enumerate(zip(operator.outputs, operator.positions or (0,), strict=True)):
            if operator.positions:
                if name not in self.uses and name not in self.bucket_of:
                    continue
                node = result[index] if isinstance(result, tuple) else self.emit(getitem, result, index)
            else:
                node = result
            placements = output_placements(operator.rule, strategy, output, self.sizes) if operator.rule else {}
            tensor = self.ir.tensors[name]
            node.meta.setdefault("local_shape", self.local_shape(tensor.shape, placements))
            node.meta.setdefault("dtype", getattr(torch, tensor.dtype))
            root = self.ir.tensors[tensor.storage]
            owned = root.kind in ("activation", "gradient") and storages.get(tensor.storage, 0) <= 1
            value = self.values[name] = Value(node, placements, owned=owned, phase=self.phase)
            self._start(name, value)

    def _start(self, name: str, value: Value) -> None:
        """Start the resharding that anybody will want, now that the value exists."""
        bucket = self.bucket_of.get(name)
        if bucket is not None:
            self.bucket_left[id(bucket)] -= 1
            if not self.bucket_left[id(bucket)]:
                self._start_bucket(bucket)
            return
        for wanted in self.uses.get(name, ()):
            self._version(name, value, wanted, finish=False)

    def _start_bucket(self, bucket: Bucket) -> None:
        group = self.groups[bucket.axis]
        nodes = [self.values[self.gradients[parameter] or ""].node for parameter in bucket.parameters]
        if buckets.is_cut(self.plan, bucket):
            self._finish_buckets()  # one at a time: gradients are let go when they are reduced
            self.bucket_nodes[id(bucket)] = buckets.start_cut(self.emit, nodes, bucket, self.groups), bucket
            return
        flat = self.emit(aten.cat.default, [self.emit(aten.reshape.default, node, [-1]) for node in nodes])
        flat.meta["device"] = self.device
        self.bucket_nodes[id(bucket)] = (
            self.emit(
                collectives.ALL_REDUCE, flat, "sum", group.name, bucket.algorithm, label=buckets.label_of(bucket)
            ), bucket,
        )  # fmt: skip

    def _want(self, name: str, wanted: Placements) -> fx.Node:
        node = self._version(name, self.values[name], wanted, finish=True)
        assert node is not None
        return node

    def _version(self, name: str, value: Value, wanted: Placements, *, finish: bool) -> fx.Node | None:
        if name in self.gathers and value is self.values[name]:
            value = self.gathers.whole(name, self.values, self.phase)
        have = {axis: placement for axis, placement in value.placements.items() if axis in self.groups}
        if have == wanted or not self.groups:
            return value.node
        key = tuple(sorted(wanted.items(), key=lambda item: item[0]))
        version = value.versions.get(key)
        shape = self.ir.tensors[name].shape
        if version is None:
            exclusive = value.owned and len(value.versions) == 0
            item_bytes = value.node.meta["dtype"].itemsize
            steps = self.resharder.steps(
                value.node, shape, have, wanted, item_bytes=item_bytes, owned=exclusive, label=name
            )
            version = value.versions[key] = _Version(steps)
            self._advance(version)
        while finish and version.node is None:
            self._advance(version)
        if finish and version.node is not None:
            version.node.meta.setdefault("local_shape", self.local_shape(shape, wanted))
            version.node.meta.setdefault("dtype", value.node.meta["dtype"])
        return version.node

    def _advance(self, version: _Version) -> None:
        assert version.steps is not None
        try:
            next(version.steps)
        except StopIteration as stop:
            version.node = stop.value

    # --- the end -------------------------------------------------------------------------------------------------

    def _finish(self, inputs: dict[str, Placements], turn: Callable[[], None] | None) -> Lowered:
        self.meta = {"operator": "outputs", "backward": True}
        traced = self.capture.traced
        self._finish_buckets()
        reduced = self.reduced
        gradients: list[fx.Node | None] = []
        for parameter in traced.differentiable:
            gradient = self.gradients.get(parameter)
            if gradient is None:
                gradients.append(None)
            elif parameter in reduced:
                gradients.append(reduced[parameter])
            else:
                gradients.append(self._want(gradient, self.gradient_wants[parameter]))
        buffers = [self._want(self.ir.buffer_updates.get(name, name), {}) for name in traced.buffers]
        loss = self._want(self.ir.loss, {})
        metrics = [self._want(name, {}) for name in self.ir.metrics.values()]
        self.graph.output([loss, *metrics, *gradients, *buffers])
        join_returned(self.graph, {loss, *metrics, *buffers}, self.device)
        fuse(self.graph)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        shapes: list[Any] = [(node.meta["local_shape"], node.meta["dtype"]) for node in placeholders[:-1]]
        propagate(self.graph, [*shapes, 0], traced.constants)
        first, last = 1 + len(metrics), 1 + len(metrics) + len(gradients)
        written = [first + k for k, name in enumerate(traced.differentiable) if name not in reduced]
        written += [last + k for k, name in enumerate(traced.buffers) if name in self.ir.buffer_updates]
        separate(self.graph, written)
        if self.compiler is not None:
            self.compiler.compile(self.graph)
        write_into_buckets(self.graph)
        prefetch(self.graph)
        sink_waits(self.graph)
        reuse_memory(self.graph)
        forward = [node for node in self.graph.nodes if node.meta.get("backward") is False]
        if turn is not None and self.ir.gradients and forward:
            with self.graph.inserting_after(forward[-1]):
                self.graph.call_function(turn)
        self.graph.lint()
        return Lowered(
            function=boxed_function(
                self.graph, {name: value.to(self.device) for name, value in traced.constants.items()}, self.kernels
            ),
            graph=self.graph,
            parameters=list(traced.parameters),
            buffers=list(traced.buffers),
            inputs=list(traced.inputs),
            input_placements=inputs,
            metrics=list(self.ir.metrics),
            differentiable=list(traced.differentiable),
        )

    def _finish_buckets(self) -> None:
        """Wait for the buckets under way."""
        for started, bucket in self.bucket_nodes.values():
            shapes = [
                self.local_shape(self.ir.tensors[name].shape, self.gradient_wants[name]) for name in bucket.parameters
            ]
            parts = buckets.finish(self.emit, started, bucket, self.groups, shapes)
            self.reduced.update(zip(bucket.parameters, parts, strict=True))
        self.bucket_nodes.clear()
