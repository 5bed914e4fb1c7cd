"""One stage of a plan -> its program on one rank: functions that the executor calls, and what flows between them.

prologue   once a step       what depends on no parameter, for the whole batch; whole versions of split parameters
forward    each micro-batch  what it returns is sent, or kept for backward
backward   each micro-batch  adds to the gradients in place; or in two parts, ``input`` (what is sent) and ``weight``
reduce     once a step       starts the reduction of gradients over the mesh
finish     once a step       waits for it; loss and metrics
"""

from typing import Any

import torch
from torch import fx

from meshwright.capture.builder import Capture
from meshwright.errors import PlanError
from meshwright.ir.graph import Operator
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Partial, Placements, Shard, input_placements
from meshwright.ir.plan import Plan
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import BACKWARD, FINISH, FORWARD, PROLOGUE, STEP, Cut, border
from meshwright.lower.accumulate import GradientLowering
from meshwright.lower.buckets import Value
from meshwright.lower.fuse import fuse, propagate
from meshwright.lower.partition import partition
from meshwright.lower.program import Scalar, Slice, StageProgram, Transfer
from meshwright.lower.regions import Compiler
from meshwright.lower.stage import DISPATCHED, Kernels
from meshwright.ops import collectives

aten = torch.ops.aten


def lower_stage(
    capture: Capture,
    plan: Plan,
    divided: Cut,
    stage: int,
    groups: dict[str, AxisGroup],
    device: torch.device,
    compiler: Compiler | None = None,
    kernels: Kernels = DISPATCHED,
) -> StageProgram:
    """The program of stage number ``stage`` for the rank that ``groups`` describes (axes of the stage's mesh with more
    than one rank). ``compiler`` joins operators, ``kernels`` run some of them.

    Raises:
        PlanError: an operator would have to communicate with other micro-batches.
    """
    if plan.microbatches > 1:
        groups = {**groups, TIME: AxisGroup(TIME, plan.microbatches, 0)}
    return _StageLowering(capture, plan, divided, stage, groups, device, compiler, kernels).lower_stage()


class _StageLowering(GradientLowering):
    """Emits a stage, phase by phase."""

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
            self.phase = self._phase_of(operator)
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
        whole = self.local_shape(shape, over_time)
        return Transfer(name, node.name, self.local_shape(shape, placements), whole, self._dtype(name))

    def _batch_placements(self, name: str) -> Placements:
        """As ever; but where stages differ, each rank takes its part of every micro-batch, so that all stages have the
        same samples in a micro-batch."""
        found = super()._batch_placements(name)
        if not self.plan.uneven:
            return found
        self.program.input_placements[name] = {
            axis: Shard(one.dim, self.plan.microbatches, one.unit)
            for axis, one in found.items()
            if isinstance(one, Shard)
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
                wanted = input_placements(rule, self.strategies[operator.name], position, self.sizes) if rule else {}
                self.uses.setdefault(name, []).append(wanted)
                self.phase_uses.setdefault(name, []).append((self._phase_of(operator), wanted))
        for name, _ in self.outputs:
            self.uses.setdefault(name, [])

    def _phase_of(self, operator: Operator) -> str:
        return self.divided.phase_under(operator, self.plan.stages[self.stage].released)

    def _made_here(self, name: str) -> bool:
        maker = self.produced.get(name)
        return maker is not None and self.divided.stage_of.get(maker.name) == self.stage

    # --- emission ------------------------------------------------------------------------------------------------

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in collectives.STARTS and TIME in args:
            raise PlanError(
                "it would have to communicate with other micro-batches",
                where=str(self.meta.get("operator", "outputs")),
                remedy="use microbatches=1, or split over dp what is now whole there",
            )
        return super().emit(target, *args, **kwargs)

    def _start(self, name: str, value: Value) -> None:
        stepwise = value.phase in (STEP, PROLOGUE)
        for phase, wanted in self.phase_uses.get(name, ()):
            if stepwise or phase == self.phase:
                self._version(name, value, wanted, finish=False)

    def _version(self, name: str, value: Value, wanted: Placements, *, finish: bool) -> fx.Node | None:
        if value.phase not in (STEP, PROLOGUE) or name in self.plan.stages[self.stage].released:
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
            shape = self.local_shape(self.ir.tensors[name].shape, {**rest, TIME: divided})
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
                shape = self.local_shape(self.ir.tensors[name].shape, placements)
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

    def _update_buffers(self) -> None:
        self.phase = FORWARD
        self.meta = {"operator": "buffers"}
        for buffer, name in self.ir.buffer_updates.items():
            if self._made_here(name):
                self.program.buffer_updates[buffer] = self._returned(self._want(name, {})).name

    # --- results ---------------------------------------------------------------------------------------------------

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
            node = self._reshard(joined, (), placements, {}, label)
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
            compiler=self.compiler,
            kernels=self.kernels,
        )
