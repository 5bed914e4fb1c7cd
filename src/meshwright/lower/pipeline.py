"""One stage of a plan -> its program on one rank: functions that the executor calls, and what flows between them.

prologue   once a step       what depends on no parameter, for the whole batch; whole versions of split parameters
forward    each micro-batch  what it returns is sent, or kept for backward
backward   each micro-batch  adds to the gradients in place; or in two parts, ``input`` (what is sent) and ``weight``
reduce     once a step       starts the reduction of gradients over the mesh
finish     once a step       waits for it; loss and metrics
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import fx

from meshwright.capture.builder import Capture
from meshwright.errors import PlanError
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Partial, Placements, Shard, input_placements, local_shape
from meshwright.ir.plan import Plan
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import BACKWARD, FINISH, FORWARD, PROLOGUE, REDUCE, STEP, Cut, border
from meshwright.lower.fuse import fuse, propagate
from meshwright.lower.partition import partition
from meshwright.lower.program import Accumulator, Scalar, Slice, StageProgram, Transfer
from meshwright.lower.spmd import Lowering, Value
from meshwright.ops import collectives

aten = torch.ops.aten


def lower_stage(
    capture: Capture, plan: Plan, divided: Cut, stage: int, groups: dict[str, AxisGroup], device: torch.device
) -> StageProgram:
    """The program of stage number ``stage`` for the rank that ``groups`` describes (axes of the stage's mesh with more
    than one rank).

    Raises:
        PlanError: an operator would have to communicate with other micro-batches.
    """
    if plan.microbatches > 1:
        groups = {**groups, TIME: AxisGroup(TIME, plan.microbatches, 0)}
    return _StageLowering(capture, plan, divided, stage, groups, device).lower_stage()


class _StageLowering(Lowering):
    def __init__(
        self, capture: Capture, plan: Plan, divided: Cut, stage: int, groups: dict[str, AxisGroup], device: torch.device
    ) -> None:
        super().__init__(capture, plan, groups, device)
        self.divided, self.stage = divided, stage
        self.last = stage == divided.num_stages - 1
        self.program = StageProgram(stage)
        self.produced = {output: one for one in self.ir.operators for output in one.outputs}
        self.sliced: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.scaled: dict[str, Value] = {}
        self.roots: list[fx.Node] = []

    def lower_stage(self) -> StageProgram:
        program = self.program
        self.phase = STEP
        program.input_placements = self._placeholders() | program.input_placements
        for value in self.values.values():
            value.phase = STEP
        self._receive()
        self._plan_uses()
        storages = self._storage_readers()
        for operator in self.operators:
            self.phase = self.divided.phase_of(operator)
            self._operator(operator, storages)
        self._send()
        self._update_buffers()
        self._accumulate_gradients()
        if self.last:
            self._scalars()
        self.graph.output(self.roots)
        fuse(self.graph)
        self._propagate()
        self._partition()
        return program

    # --- what belongs to the stage -------------------------------------------------------------------------------

    def _border(self, name: str) -> Placements:
        maker = self.produced[name]
        return border(self.ir, name, maker, self.strategies[maker.name], self.sizes, uneven=self.plan.uneven)

    def _transfer(self, name: str, node: fx.Node) -> Transfer:
        placements, shape = self._border(name), self.ir.tensors[name].shape
        over_time: Placements = {axis: one for axis, one in placements.items() if axis == TIME}
        whole = local_shape(shape, over_time, self.sizes)
        return Transfer(name, node.name, local_shape(shape, placements, self.sizes), whole, self._dtype(name))

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.ir.tensors[name].dtype)
        return dtype

    def _batch_placements(self, name: str) -> Placements:
        """As ever; but where stages differ, each rank takes its part of every micro-batch, so that all stages have the
        same samples in a micro-batch."""
        found = super()._batch_placements(name)
        if not self.plan.uneven:
            return found
        self.program.input_placements[name] = {
            axis: Shard(one.dim, self.plan.microbatches) for axis, one in found.items() if isinstance(one, Shard)
        }
        return found

    def _plan_uses(self) -> None:
        self.uses = {}
        self.phase_uses: dict[str, list[tuple[str, Placements]]] = {}
        self.bucket_of, self.gradients = {}, {}
        held = self.divided
        up, down = held.sent(self.stage)
        self.outputs = [(name, self._border(name)) for name in (*up, *down)]
        self.outputs += [(name, {}) for name in self.ir.buffer_updates.values() if self._made_here(name)]
        self.outputs += [(name, {}) for terms in held.terms.values() for name in terms.get(self.stage, ())]
        if self.last:
            self.outputs += [(name, {}) for name in (self.ir.loss, *self.ir.metrics.values())]
        self.operators = held.operators(self.ir, self.stage, (name for name, _ in self.outputs))
        for operator in self.operators:
            for position, name in enumerate(operator.inputs):
                rule = operator.rule
                wanted = input_placements(rule, self.strategies[operator.name], position) if rule else {}
                self.uses.setdefault(name, []).append(wanted)
                self.phase_uses.setdefault(name, []).append((held.phase_of(operator), wanted))
        for name, _ in self.outputs:
            self.uses.setdefault(name, [])

    def _made_here(self, name: str) -> bool:
        maker = self.produced.get(name)
        return maker is not None and self.divided.stage_of.get(maker.name) == self.stage

    # --- emission ------------------------------------------------------------------------------------------------

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in collectives.STARTS and TIME in args:
            raise PlanError(
                "it would have to communicate with other micro-batches",
                where=str(self.meta.get("operator", "outputs")),
                remedy="use microbatches=1, or split over dp what is now whole there",
            )
        return super().emit(target, *args, **kwargs)

    def _given(self, name: str, phase: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """A value that the executor provides."""
        node = self.graph.placeholder(name)
        node.meta.update(local_shape=shape, dtype=dtype, phase=phase)
        return node

    def _start(self, name: str, value: Value) -> None:
        stepwise = value.phase in (STEP, PROLOGUE)
        for phase, wanted in self.phase_uses.get(name, ()):
            if stepwise or phase == self.phase:
                self._version(name, value, wanted, finish=False)

    def _version(self, name: str, value: Value, wanted: Placements, *, finish: bool) -> fx.Node | None:
        if value.phase not in (STEP, PROLOGUE):
            if isinstance(wanted.get(TIME), Partial) and TIME not in value.placements:
                value = self._share(name, value)
            return super()._version(name, value, wanted, finish=finish)
        divided = wanted.get(TIME)
        with self._in(PROLOGUE):
            if isinstance(divided, Partial):
                value = self._share(name, value)
            rest = {axis: one for axis, one in wanted.items() if axis != TIME or isinstance(divided, Partial)}
            node = super()._version(name, value, rest, finish=finish)
        if isinstance(divided, Shard) and node is not None:
            return self._slice(name, node, divided, rest)
        return node

    def _share(self, name: str, value: Value) -> Value:
        """What is the same in all micro-batches, as a term of a sum over them."""
        if name not in self.scaled:
            node = self.emit(aten.div.Tensor, value.node, self.plan.microbatches)
            node.meta.update({key: value.node.meta[key] for key in ("local_shape", "dtype") if key in value.node.meta})
            placements = {**value.placements, TIME: Partial("sum")}
            self.scaled[name] = Value(node, placements, phase=value.phase)
        return self.scaled[name]

    def _slice(self, name: str, node: fx.Node, divided: Shard, rest: Placements) -> fx.Node:
        blocks = divided.outer
        for axis, one in rest.items():
            if isinstance(one, Shard) and one.dim == divided.dim and one.outer < divided.outer:
                blocks //= self.sizes[axis]
        key = (node, divided.dim, blocks)
        if key not in self.sliced:
            if node.op == "get_attr":
                with self._in(PROLOGUE):
                    node = self.emit(aten.alias.default, node)
            shape = local_shape(self.ir.tensors[name].shape, {**rest, TIME: divided}, self.sizes)
            part = self._given("part", STEP, shape, self._dtype(name))
            self.program.slices[part.name] = Slice(node.name, divided.dim, blocks)
            if node.meta.get("phase") == PROLOGUE:
                self._returned(node)
            self.sliced[key] = part
        return self.sliced[key]

    # --- borders -------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for names, phase, found in zip(
            self.divided.received(self.stage),
            (FORWARD, BACKWARD),
            (self.program.received_up, self.program.received_down),
            strict=True,
        ):
            for name in names:
                placements = self._border(name)
                shape = local_shape(self.ir.tensors[name].shape, placements, self.sizes)
                node = self._given("received", phase, shape, self._dtype(name))
                self.values[name] = Value(node, placements, phase=phase)
                found.append(self._transfer(name, node))

    def _send(self) -> None:
        for names, phase, found in zip(
            self.divided.sent(self.stage),
            (FORWARD, BACKWARD),
            (self.program.sent_up, self.program.sent_down),
            strict=True,
        ):
            self.phase = phase
            self.meta = {"operator": "sends"}
            for name in names:
                found.append(self._transfer(name, self._returned(self._want(name, self._border(name)))))

    def _returned(self, node: fx.Node) -> fx.Node:
        node.meta["returned"] = True
        self.roots.append(node)
        return node

    def _update_buffers(self) -> None:
        self.phase = FORWARD
        self.meta = {"operator": "buffers"}
        for buffer, name in self.ir.buffer_updates.items():
            if self._made_here(name):
                self.program.buffer_updates[buffer] = self._returned(self._want(name, {})).name

    # --- gradients -----------------------------------------------------------------------------------------------

    def _accumulate_gradients(self) -> None:
        self.meta = {"operator": "gradients"}
        buckets = [one for one in self.plan.buckets if one.axis in self.groups]
        bucket_of = {parameter: index for index, one in enumerate(buckets) for parameter in one.parameters}
        waiting: dict[int, list[tuple[str, fx.Node, tuple[int, ...], torch.dtype]]] = {}
        for parameter, by_stage in self.divided.terms.items():
            terms = by_stage.get(self.stage)
            if not terms:
                continue
            placements = self._summed(parameter, terms)
            shape = local_shape(self.ir.tensors[parameter].shape, placements, self.sizes)
            total = self._given("gradient", STEP, shape, self._dtype(terms[0]))
            divided: Placements = {TIME: Partial("sum")} if TIME in self.groups else {}
            with self._in(BACKWARD):
                for name in terms:
                    node = self._want(name, {**placements, **divided})
                    self.roots.append(self.emit(aten.add_.Tensor, total, node))
                    self.roots[-1].meta["returned"] = True
            if parameter in bucket_of:
                found = waiting.setdefault(bucket_of[parameter], [])
                found.append((parameter, total, shape, self._dtype(terms[0])))
            else:
                self.program.accumulators.append(Accumulator(parameter, total.name, shape, self._dtype(terms[0])))
                self._reduce(parameter, total, placements)
        for index, members in waiting.items():
            self._reduce_bucket(buckets[index].axis, buckets[index].algorithm, members)

    def _summed(self, parameter: str, terms: tuple[str, ...]) -> Placements:
        """As what a gradient is summed up: as its only term is made; several are first reduced."""
        want = self._known(self.plan.storage(parameter))
        if len(terms) > 1:
            return want
        placements = self.values[terms[0]].placements
        return {axis: one for axis, one in placements.items() if axis in self.groups and axis != TIME}

    def _reduce(self, parameter: str, total: fx.Node, placements: Placements) -> None:
        want = self._known(self.plan.storage(parameter))
        node = total
        if placements != want:
            with self._in(REDUCE):
                node = self._reshard(total, self.ir.tensors[parameter].shape, placements, want)
            self._returned(node)
        self.program.gradients[parameter] = node.name

    def _reshard(self, node: fx.Node, shape: tuple[int, ...], have: Placements, want: Placements) -> fx.Node:
        """Start now, and finish in ``finish``."""
        steps = self.resharder.steps(node, shape, have, want, True)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: fx.Node = stop.value
                return result
            self.phase = FINISH

    def _reduce_bucket(
        self, axis: str, algorithm: str, members: list[tuple[str, fx.Node, tuple[int, ...], torch.dtype]]
    ) -> None:
        count = sum(prod(shape) for _, _, shape, _ in members)
        dtype = members[0][3]
        flat = self._given("bucket", STEP, (count,), dtype)
        self.program.buckets[flat.name] = (count, dtype)
        with self._in(REDUCE):
            started = self.emit(collectives.ALL_REDUCE, flat, "sum", self.groups[axis].name, algorithm)
        offset = 0
        with self._in(FINISH):
            done = self.emit(collectives.WAIT, started)
            for parameter, total, shape, _ in members:
                self.program.accumulators.append(
                    Accumulator(parameter, total.name, shape, dtype, bucket=flat.name, offset=offset)
                )
                part = self.emit(aten.slice.Tensor, done, 0, offset, offset + prod(shape))
                part = self._returned(self.emit(aten.view.default, part, list(shape)))
                self.program.gradients[parameter] = part.name
                offset += prod(shape)

    def _scalars(self) -> None:
        """Loss and metrics: of each micro-batch, joined, and reduced over the mesh."""
        self.meta = {"operator": "outputs"}
        for label, name in (("loss", self.ir.loss), *self.ir.metrics.items()):
            value = self.values[name]
            self.phase = FINISH
            if value.phase in (STEP, PROLOGUE):
                node = self._want(name, {})
                self._returned(node)
                self.program.scalars.append(Scalar(label, "", "last", "", node.name))
                continue
            divided = value.placements.get(TIME)
            self._returned(value.node)
            placements = {axis: one for axis, one in value.placements.items() if axis != TIME}
            joined = self._given("joined", STEP, (), self._dtype(name))
            node = self._reshard(joined, (), placements, {})
            self._returned(node)
            join = divided.op if isinstance(divided, Partial) else "last"
            self.program.scalars.append(Scalar(label, value.node.name, join, joined.name, node.name))

    # --- the functions -------------------------------------------------------------------------------------------

    def _propagate(self) -> None:
        given: list[Any] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                given.append(0 if node is self.random_key else (node.meta["local_shape"], node.meta["dtype"]))
        propagate(self.graph, given, self.capture.traced.constants)

    def _partition(self) -> None:
        program, traced = self.program, self.capture.traced
        owners = self.divided.owners
        for name in (*traced.parameters, *traced.buffers, *traced.inputs):
            node = self.values[name].node
            if name in traced.parameters:
                if self.stage in owners[name]:
                    program.parameters[node.name] = name
            elif node.users:
                (program.buffers if name in traced.buffers else program.inputs)[node.name] = name
        for one in program.slices.values():  # inputs that are only read in parts
            for name in traced.inputs:
                if self.values[name].node.name == one.source:
                    program.inputs[one.source] = name
        assert self.random_key is not None
        program.random_key = self.random_key.name
        stage = self.plan.stages[self.stage]
        program.phases = partition(
            self.graph,
            {name: value.to(self.device) for name, value in traced.constants.items()},
            Recomputation(stage.recompute, {one.name: one.module for one in self.ir.operators}),
            sent_down=[one.value for one in program.sent_down],
        )
