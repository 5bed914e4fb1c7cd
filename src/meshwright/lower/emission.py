"""A rank's graph under construction: nodes with their phase, and tensors in all placements in which operators read
them.

A tensor of the whole step (a parameter, an input, a result of the prologue) is resharded once per step. A tensor of a
micro-batch is resharded in every micro-batch. In a step with one micro-batch, both kinds of tensors are resharded at
their first use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshwright.capture.fx_graph import FxGraph
from meshwright.errors import PlanError
from meshwright.ir import graph as ir
from meshwright.ir import program
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Partial, Placements, Shard, local_shape
from meshwright.ir.plan import Plan
from meshwright.ir.stages import FINISH, PROLOGUE, STEP
from meshwright.lower.buckets import Codecs, Gathers, LoweredValue
from meshwright.lower.reshard import Resharder, Steps
from meshwright.ops import collectives

aten = torch.ops.aten


@dataclass
class _Version:
    """A copy of a tensor under another placement. ``node`` is set when all ``steps`` of the resharding have been
    emitted."""

    steps: Steps | None
    node: fx.Node | None = None


class Emission:
    """The graph of one rank. ``wants`` maps a tensor to the phases and placements in which it will be read, so that
    resharding can start as soon as the tensor exists. ``groups`` are the mesh axes with more than one rank and, if a
    step has several micro-batches, the axis ``TIME``."""

    def __init__(self, graph: ir.Graph, plan: Plan, stage: int, groups: dict[str, AxisGroup]) -> None:
        self.ir, self.groups, self.plan = graph, groups, plan
        self.sizes, self.at = sizes_of(groups)
        self.released = frozenset(plan.stages[stage].released)
        self.graph = FxGraph()
        self.values: dict[str, LoweredValue] = {}
        self.wants: dict[str, list[tuple[str, Placements]]] = {}
        self.slices: dict[str, program.Slice] = {}
        self.roots: list[fx.Node] = []
        self.meta: dict[str, Any] = {}
        self.phase = STEP
        self._resharder = Resharder(self.emit, groups, plan.links_of(stage))
        self.codecs = Codecs(self.given, self.sizes)
        self._gathers = Gathers(plan, groups, graph.tensors, self.emit, self.codecs)
        self._sliced: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self._shared: dict[str, LoweredValue] = {}

    @property
    def microbatched(self) -> bool:
        """Whether a step has several micro-batches."""
        return TIME in self.groups

    @property
    def places(self) -> dict[str, int]:
        """Maps each group to this rank's index in it."""
        return {group.name: group.index for group in self.groups.values()}

    # --- nodes -------------------------------------------------------------------------------------------------------

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call to the current phase.

        Raises:
            PlanError: the call is a collective over micro-batches.
        """
        if target in collectives.STARTS:
            if TIME in args:
                raise PlanError(
                    "it would have to communicate with other micro-batches",
                    where=str(self.meta.get("operator", "outputs")),
                    remedy="use microbatches=1, or split over dp what is now whole there",
                )
            kwargs.setdefault("label", str(self.meta.get("operator", "")))
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, phase=self.phase)
        return node

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Emit into another phase within this context."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def given(self, name: str, phase: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """Add a placeholder for a value that the executor provides."""
        node = self.graph.placeholder(name)
        node.meta.update(local_shape=shape, dtype=dtype, phase=phase)
        return node

    def returned(self, node: fx.Node) -> fx.Node:
        """Mark a node whose value is returned to the executor, under the name of the node."""
        node.meta["returned"] = True
        self.roots.append(node)
        return node

    # --- tensors -----------------------------------------------------------------------------------------------------

    def known(self, placements: Placements) -> Placements:
        """The placements without the axes that have one rank."""
        return {axis: placement for axis, placement in placements.items() if axis in self.groups}

    def local_shape(self, shape: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor of the global ``shape``."""
        return local_shape(shape, placements, self.sizes, self.at)

    @staticmethod
    def memory(node: fx.Node, storage: str = "") -> program.Value:
        """The program's value for a node whose memory the executor provides. ``storage`` names the owner of the memory
        (empty: the node)."""
        dtype = str(node.meta["dtype"]).removeprefix("torch.")
        return program.Value(node.name, node.meta["local_shape"], dtype, storage or node.name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the graph."""
        dtype: torch.dtype = getattr(torch, self.ir.tensors[name].dtype)
        return dtype

    def make(self, name: str, node: fx.Node, placements: Placements, *, owned: bool = False) -> LoweredValue:
        """Record ``node`` as this rank's part of a tensor. ``owned``: no other node reads the memory of ``node``."""
        node.meta.setdefault("local_shape", self.local_shape(self.ir.tensors[name].shape, placements))
        node.meta.setdefault("dtype", self.dtype(name))
        value = self.values[name] = LoweredValue(node, placements, owned=owned, phase=self.phase)
        return value

    def start(self, name: str) -> None:
        """Start the reshardings of a tensor that was just made."""
        value = self.values[name]
        for phase, wanted in self.wants.get(name, ()):
            ready = phase == self.phase or value.phase in (STEP, PROLOGUE)
            if phase == FINISH:  # with several micro-batches, the tensor is read after the last of them
                ready = not self.microbatched
            if ready:
                self._version(name, value, wanted, finish=False)

    def want(self, name: str, wanted: Placements) -> fx.Node:
        """This rank's part of a tensor under the placements ``wanted``. Emits all calls that the resharding still
        needs."""
        node = self._version(name, self.values[name], wanted, finish=True)
        assert node is not None
        return node

    def reshard(self, node: fx.Node, shape: tuple[int, ...], have: Placements, want: Placements, label: str) -> fx.Node:
        """Start resharding a value in the current phase, and finish it in the phase ``FINISH``."""
        steps = self._resharder.steps(
            node, shape, have, want, item_bytes=node.meta["dtype"].itemsize, owned=True, label=label
        )
        before = self.phase
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                self.phase = before
                result: fx.Node = stop.value
                result.meta.setdefault("local_shape", self.local_shape(shape, want))
                result.meta.setdefault("dtype", node.meta["dtype"])
                return result
            self.phase = FINISH

    def _version(self, name: str, value: LoweredValue, wanted: Placements, *, finish: bool) -> fx.Node | None:
        over_time = wanted.get(TIME)
        again = name in self.released or (name in self.ir.buffer_updates and not isinstance(over_time, Shard))
        if not self.microbatched or value.phase not in (STEP, PROLOGUE) or again:
            if isinstance(over_time, Partial) and TIME not in value.placements:
                value = self._share(name, value)
            return self._resharded(name, value, wanted, finish=finish)
        with self.during(PROLOGUE):
            if isinstance(over_time, Partial):
                value = self._share(name, value)
            whole = {
                axis: placement for axis, placement in wanted.items() if axis != TIME or isinstance(over_time, Partial)
            }
            node = self._resharded(name, value, whole, finish=finish)
        if isinstance(over_time, Shard) and node is not None:
            return self._slice(name, node, over_time, whole)
        return node

    def _resharded(self, name: str, value: LoweredValue, wanted: Placements, *, finish: bool) -> fx.Node | None:
        if name in self._gathers and value is self.values[name]:
            value = self._gathers.whole(name, self.values, self.phase)
        have = self.known(value.placements)
        if have == wanted or not self.groups:
            return value.node
        key = tuple(sorted(wanted.items(), key=lambda item: item[0]))
        version, shape = value.versions.get(key), self.ir.tensors[name].shape
        if version is None:
            steps = self._resharder.steps(
                value.node, shape, have, wanted, item_bytes=value.node.meta["dtype"].itemsize,
                owned=value.owned and not value.versions, label=name,
            )  # fmt: skip
            version = value.versions[key] = _Version(steps)
            self._advance(version)
        while finish and version.node is None:
            self._advance(version)
        if finish and version.node is not None:
            version.node.meta.setdefault("local_shape", self.local_shape(shape, wanted))
            version.node.meta.setdefault("dtype", value.node.meta["dtype"])
        return version.node

    @staticmethod
    def _advance(version: _Version) -> None:
        assert version.steps is not None
        try:
            next(version.steps)
        except StopIteration as stop:
            version.node = stop.value

    def _share(self, name: str, value: LoweredValue) -> LoweredValue:
        """Divide a tensor that is equal in all micro-batches by their number, so that the sum over the micro-batches is
        the tensor."""
        if name not in self._shared:
            node = self.emit(aten.div.Tensor, value.node, self.plan.microbatches)
            node.meta.update({key: value.node.meta[key] for key in ("local_shape", "dtype") if key in value.node.meta})
            self._shared[name] = LoweredValue(node, {**value.placements, TIME: Partial("sum")}, phase=value.phase)
        return self._shared[name]

    def _slice(self, name: str, node: fx.Node, divided: Shard, other_placements: Placements) -> fx.Node:
        """A placeholder for a micro-batch's part of a whole step's value; the executor cuts the part out of the
        value."""
        blocks = divided.outer
        for axis, placement in other_placements.items():
            if isinstance(placement, Shard) and placement.dim == divided.dim and placement.outer < divided.outer:
                blocks //= self.sizes[axis]
        key = (node, divided.dim, blocks)
        if key not in self._sliced:
            if node.op == "get_attr":
                with self.during(PROLOGUE):
                    node = self.emit(aten.alias.default, node)
            shape = self.local_shape(self.ir.tensors[name].shape, {**other_placements, TIME: divided})
            part = self.given("part", STEP, shape, self.dtype(name))
            self.slices[part.name] = program.Slice(node.name, divided.dim, blocks)
            if node.meta.get("phase") == PROLOGUE:
                self.returned(node)
            self._sliced[key] = part
        return self._sliced[key]
