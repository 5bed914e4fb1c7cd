"""Lowers a stage of a plan to its program on one rank: functions that the executor calls, and the values between them.

prologue   once a step       computes values that depend on no parameter, for the whole batch; gathers split parameters
forward    each micro-batch  computes values that are sent, or kept for backward
backward   each micro-batch  computes gradients; or in two parts, ``input`` (gradients that are sent) and ``weight``
reduce     once a step       starts the reduction of gradients that were accumulated over micro-batches
finish     once a step       waits for reductions; completes the loss, metrics and buffers

With one stage and one micro-batch, the program is the whole step: its phases are one function, unless backward
recomputes values or gathers parameters again.
"""

from collections.abc import Callable, Collection, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.ir.graph import Operator
from meshwright.ir.layout import DATA_AXES, TIME
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Partial, Placements, Shard, input_placements, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.program import Held, Join, Program, Transfer
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import BACKWARD, FINISH, FORWARD, PROLOGUE, STEP, differing_buffers, given_batch
from meshwright.lower.emission import Emission
from meshwright.lower.function import DISPATCHED, Kernels
from meshwright.lower.fuse import fuse, separate
from meshwright.lower.gradients import Gradients
from meshwright.lower.local import Emitter
from meshwright.lower.operator import CPU, emit_operator
from meshwright.lower.partition import EmittedStage, LoweredStage, partition
from meshwright.lower.planned_graph import PlannedGraph, with_time
from meshwright.lower.prefetch import join_returned
from meshwright.lower.propagate import propagate
from meshwright.lower.regions import Compiler
from meshwright.ops.base import OperatorRule, Target

aten = torch.ops.aten

_PHASE_OF = {
    ActionKind.RECV_F: FORWARD, ActionKind.SEND_F: FORWARD, ActionKind.RECV_B: BACKWARD, ActionKind.SEND_B: BACKWARD,
}  # fmt: skip
"""Maps each kind of transfer to its phase."""


def lower_stage(
    planned: PlannedGraph,
    stage: int,
    groups: Mapping[str, AxisGroup],
    *,
    device: torch.device = CPU,
    rules: Mapping[Target, OperatorRule] | None = None,
    constants: Mapping[str, Tensor] | None = None,
    compiler: Compiler | None = None,
    kernels: Kernels = DISPATCHED,
    note: Callable[[str], None] | None = None,
    symmetric: Collection[str] = (),
) -> LoweredStage:
    """Lower stage number ``stage`` of a plan for one rank. ``groups`` maps an axis of the stage's mesh to this rank's
    group; axes with one rank are left out.

    Args:
        rules: maps an operator to the user's rule for it.
        constants: the values of the graph's constants on ``device``; without them the program can be read, but not run.
        compiler: compiles runs of operators; ``kernels`` maps an operator to the function that replaces it.
        note: called with a phase's name where the phase begins in a larger function. ``symmetric``: see ``partition``.

    Raises:
        PlanError: the graph cannot be cut before the stages' first operators, or an operator would have to communicate
            with other micro-batches.
    """
    emitted = emit_stage(planned, stage, groups, device=device, rules=rules)
    options = compiler, kernels, note, symmetric, planned.plan.prefetch, planned.plan.graphs
    return partition(emitted, planned.recomputation(stage), dict(constants or {}), *options)


def emit_stage(
    planned: PlannedGraph, stage: int, groups: Mapping[str, AxisGroup], *, device: torch.device = CPU,
    rules: Mapping[Target, OperatorRule] | None = None,
) -> EmittedStage:  # fmt: skip
    """Emit the calls of a stage. Recomputation matters here only for mixtures of experts
    (``PlannedGraph.mixtures_again``). Arguments and errors are the same as for ``lower_stage``."""
    return _StageLowering(planned, stage, with_time(groups, planned.plan.microbatches), device, rules).emitted()


class _StageLowering:
    """Emits the graph of one stage, and makes its program."""

    def __init__(
        self, planned: PlannedGraph, stage: int, groups: dict[str, AxisGroup], device: torch.device,
        rules: Mapping[Target, OperatorRule] | None,
    ) -> None:  # fmt: skip
        self.planned, self.ir, self.plan, self.divided = planned, planned.graph, planned.plan, planned.divided
        self.stage, self.device, self.rules = stage, device, rules
        self.last = stage == self.divided.num_stages - 1
        self.emission = Emission(self.ir, self.plan, stage, groups)
        self.sizes = self.emission.sizes
        self.transfers: dict[ActionKind, tuple[Transfer, ...]] = {}
        self.joins: list[Join] = []
        self.input_placements: dict[str, Placements] = {}
        self.buffer_updates: dict[str, str] = {}
        self.makers = planned.makers
        self.gradients = Gradients(self.emission, self.divided, stage, device)
        self.known: dict[str, Strategy] = {}
        self.wanted: dict[tuple[str, int], Placements] = {}
        self.nodes, self.scalars, self.buffers = (dict[str, fx.Node]() for _ in range(3))

    def emitted(self) -> EmittedStage:
        emission, graph = self.emission, self.emission.graph
        self._inputs()
        operators, readers = self._wants()
        self._receive(self.planned.passed(self.stage, operators))
        for operator in operators:
            emission.phase = self._phase_of(operator)
            self._operator(operator, readers)
        self._send()
        self.gradients.finish()
        self._update_buffers()
        if self.last:
            self._scalars()
        graph.output(self._results())
        joined = join_returned(graph, [*self.scalars.values(), *self.buffers.values()], self.device)
        fuse(graph, self.planned.recomputation(self.stage))
        propagate(graph)
        # Without other stages or micro-batches, a step runs all phases once, one after the other.
        alone = self.divided.num_stages == 1 and not emission.microbatched and not emission.released
        return EmittedStage(graph, self._program(self._named_results(joined), alone), emission.places)

    # --- values that exist before the step ---------------------------------------------------------------------------

    def _inputs(self) -> None:
        emission, graph, owners = self.emission, self.ir, self.divided.owners
        for index, name in enumerate((*graph.parameters, *graph.buffers, *graph.inputs)):
            if name in owners and self.stage not in owners[name] and name not in graph.buffers:
                continue  # a parameter of another stage
            placements = emission.known(self.plan.storage(name))
            if name in graph.inputs:
                placements = given_batch(graph, name, self.sizes) | self._rows_of_input(name)
                self.input_placements[name] = self._as_given(placements)
            self.nodes[name] = emission.graph.placeholder(f"value_{index}")
            self._put(name, self.nodes[name], placements)
        for name, tensor in graph.tensors.items():
            if tensor.kind == "constant":
                self._put(name, emission.graph.create_node("get_attr", name.removeprefix("constant.")), {})
        random_key = emission.graph.placeholder("random_key")
        self.emitter = Emitter(graph, emission.groups, emission.emit, random_key)
        emission.codecs.random_key = random_key

    def _put(self, name: str, node: fx.Node, placements: Placements) -> None:
        node.meta["phase"] = self.emission.phase
        self.emission.make(name, node, placements)

    def _as_given(self, placements: Placements) -> Placements:
        """The placements in which a rank receives an input. If stages have different submeshes, a rank receives its
        part of every micro-batch. A micro-batch then has the same samples in all stages."""
        if not self.plan.uneven:
            return placements
        return {
            axis: Shard(shard.dim, self.plan.microbatches, shard.unit)
            for axis, shard in placements.items()
            if isinstance(shard, Shard)
        }

    def _rows_of_input(self, name: str) -> Placements:
        """The shards of an input over axes that do not split the batch, if all of its readers need these shards."""
        if self.plan.uneven:
            return {}
        wants = [self._wanted(operator, position) for operator, position in self.planned.consumers.get(name, ())]
        first = self.emission.known(wants[0]) if wants else {}
        return {
            axis: shard for axis, shard in first.items()
            if isinstance(shard, Shard) and shard.outer == 1 and shard.dim and axis not in (*DATA_AXES, TIME)
            and all(other.get(axis) == shard for other in wants)
        }  # fmt: skip

    def _wanted(self, operator: Operator, position: int) -> Placements:
        key, rule = (operator.name, position), operator.rule
        if key not in self.wanted:
            strategy = self._strategy(operator)
            self.wanted[key] = input_placements(rule, strategy, position, self.sizes) if rule else {}
        return self.wanted[key]

    def _strategy(self, operator: Operator) -> Strategy:
        """An operator's strategy on the axes that have more than one rank."""
        if operator.name not in self.known:
            self.known[operator.name] = self.planned.strategy(operator, self.sizes)
        return self.known[operator.name]

    def _receive(self, passed: Collection[str]) -> None:
        """Add a placeholder for each received tensor. Tensors that are only ``passed`` on have names of their own, so
        that their number changes no other name of the program."""
        received = zip((ActionKind.RECV_F, ActionKind.RECV_B), self.divided.received(self.stage), strict=True)
        for action, names in received:
            phase, transfers = _PHASE_OF[action], []
            for name in names:
                placements = self._border(name)
                shape = self.emission.local_shape(self.ir.tensors[name].shape, placements)
                with self.emission.during(phase):
                    kind = "passed" if name in passed else "received"
                    node = self.emission.given(kind, phase, shape, self.emission.dtype(name))
                    self.emission.make(name, node, placements)
                transfers.append(self._transfer(name, node))
            self.transfers[action] = tuple(transfers)

    def _border(self, name: str) -> Placements:
        return self.planned.border(name, self.sizes)

    def _transfer(self, name: str, node: fx.Node) -> Transfer:
        return self.planned.transfer(name, node.name, self.emission.groups)

    # --- operators ---------------------------------------------------------------------------------------------------

    def _wants(self) -> tuple[list[Operator], dict[str, int]]:
        """Return the stage's operators, and the number of readers of each storage, not counting operators that make
        views of it. Record in ``emission.wants`` the phases and placements in which each tensor is read."""
        emission = self.emission
        up, down = self.divided.sent(self.stage)
        wants = [
            (name, phase, self._border(name)) for names, phase in ((up, FORWARD), (down, BACKWARD)) for name in names
        ]
        ends = [name for buffer, name in self.ir.buffer_updates.items() if self._updates(buffer)]
        ends += [self.ir.loss, *self.ir.metrics.values()] if self.last else []
        wants += [(name, FINISH, {}) for name in ends]
        wants += [(name, FINISH, placements) for name, placements in self.gradients.wants()]
        bucketed = [name for name in self.makers if self.gradients.reads(name)]
        operators = self.divided.operators(self.ir, self.stage, (*(name for name, _, _ in wants), *bucketed))
        for operator in operators:
            for position, name in enumerate(operator.inputs):
                wanted = (self._phase_of(operator), self._wanted(operator, position))
                emission.wants.setdefault(name, []).append(wanted)
        for name, phase, placements in wants:
            emission.wants.setdefault(name, []).append((phase, placements))
        readers = self.planned.readers.copy()
        for name in (*(name for name, _, _ in wants), *bucketed):
            readers[self.ir.tensors[name].storage] += 1
        return operators, readers

    def _phase_of(self, operator: Operator) -> str:
        if not self.emission.microbatched:
            return self.divided.phase_of(operator)
        return self.divided.phase_under(operator, self.emission.released)

    def _operator(self, operator: Operator, readers: Mapping[str, int]) -> None:
        emission, strategy = self.emission, self._strategy(operator)
        emission.meta = {"operator": operator.name, "backward": operator.backward}
        tensors = [
            emission.want(name, self._wanted(operator, position)) for position, name in enumerate(operator.inputs)
        ]
        interior_first = self.plan.computes_interior_first(operator.name)
        options = self.rules, self.device, self.plan.stages[self.stage].operator_algorithm(operator.name)
        result = emit_operator(self.emitter, operator, strategy, tensors, interior_first, *options)
        self._record_results(operator, result, readers)

    def _record_results(self, operator: Operator, result: Any, readers: Mapping[str, int]) -> None:
        """Record an operator's results for their readers. Start the reshardings and reductions that can now start."""
        for name, index in zip(operator.outputs, operator.positions or (0,), strict=True):
            node = result
            if operator.positions:
                if name not in self.emission.wants and not self.gradients.reads(name):
                    continue
                node = result[index] if isinstance(result, tuple) else self.emission.emit(getitem, result, index)
            storage, placements = self.ir.tensors[name].storage, self._placed(name)
            ours = self.ir.tensors[storage].kind in ("activation", "gradient")
            self.emission.make(name, node, placements, owned=ours and readers.get(storage, 0) <= 1)
            self.gradients.note_computed(name)
            self.emission.start(name)

    def _placed(self, name: str) -> Placements:
        """The placements in which an operator makes a tensor."""
        maker = self.makers[name]
        rule, output = maker.rule, maker.outputs.index(name)
        return output_placements(rule, self._strategy(maker), output, self.sizes) if rule else {}

    def _send(self) -> None:
        self.emission.meta = {"operator": "sends"}
        sent = zip((ActionKind.SEND_F, ActionKind.SEND_B), self.divided.sent(self.stage), strict=True)
        for action, names in sent:
            with self.emission.during(_PHASE_OF[action]):
                nodes = [self.emission.returned(self.emission.want(name, self._border(name))) for name in names]
            self.transfers[action] = tuple(map(self._transfer, names, nodes))

    # --- results -----------------------------------------------------------------------------------------------------

    def _updates(self, buffer: str) -> bool:
        """Whether this stage updates a buffer."""
        return self.stage in self.divided.owners[buffer] and buffer in self.ir.buffer_updates

    def _update_buffers(self) -> None:
        """Update a buffer once a step if its new value is equal in all micro-batches or is a sum over them; else update
        it in every micro-batch, which passes the new value to the next micro-batch."""
        self.emission.meta = {"operator": "buffers"}
        updates = {buffer: name for buffer, name in self.ir.buffer_updates.items() if self._updates(buffer)}
        often = differing_buffers(self.ir, self._sums()) if updates and self.emission.microbatched else frozenset()
        for buffer, name in updates.items():
            if buffer in often and self.emission.values[name].phase != PROLOGUE:
                with self.emission.during(FORWARD):
                    node = self.emission.want(name, {})
                    if node.op == "placeholder":  # the new value is the present value of another buffer
                        node = self.emission.emit(aten.clone.default, node)
                self.buffer_updates[buffer] = self.emission.returned(node).name
            else:
                self.buffers[buffer] = self._at_the_end(name, f"buffer {buffer}")

    def _sums(self) -> set[str]:
        """The buffers (of all stages) whose new value is a sum over micro-batches."""
        makers = ((buffer, name) for buffer, name in self.ir.buffer_updates.items() if name in self.makers)
        return {buffer for buffer, name in makers if isinstance(self._placed(name).get(TIME), Partial)}

    def _scalars(self) -> None:
        """Emit the loss and metrics, reduced over the mesh."""
        self.emission.meta = {"operator": "outputs", "backward": True}
        for label, name in (("loss", self.ir.loss), *self.ir.metrics.items()):
            self.scalars[label] = self._at_the_end(name, label)

    def _at_the_end(self, name: str, label: str) -> fx.Node:
        """A whole tensor at the end of the step: the sum, max, min or last of its values in the micro-batches."""
        emission, value = self.emission, self.emission.values[name]
        if not emission.microbatched or value.phase in (STEP, PROLOGUE):
            with emission.during(FINISH):
                return emission.want(name, {})
        divided = value.placements.get(TIME)
        emission.returned(value.node)
        placements = {axis: placement for axis, placement in emission.known(value.placements).items() if axis != TIME}
        shape = self.ir.tensors[name].shape
        joined = emission.given("joined", STEP, emission.local_shape(shape, placements), emission.dtype(name))
        join = divided.op if isinstance(divided, Partial) else "last"
        self.joins.append(Join(value.node.name, join, joined.name))
        with emission.during(FINISH):
            return emission.reshard(joined, shape, placements, {}, label)

    def _results(self) -> list[fx.Node]:
        """The nodes that the graph returns: results of the step, and values that phases hand to the executor."""
        ends = (*self.scalars.values(), *self.gradients.results.values(), *self.buffers.values())
        return [*self.emission.roots, *map(self.emission.returned, dict.fromkeys(ends))]

    def _named_results(self, joined: Mapping[fx.Node, fx.Node]) -> dict[str, Any]:
        """The names of a step's results, by field of ``Program``. Gradients and buffers get memory of their own,
        because users write to them."""
        gradients = self.gradients
        scalars = {label: joined.get(node, node) for label, node in self.scalars.items()}
        buffers = {name: joined.get(node, node) for name, node in self.buffers.items()}
        named = {("gradient", name): node for name, node in gradients.results.items() if name not in gradients.apart}
        named |= {("buffer", name): node for name, node in buffers.items()}
        others = [*scalars.values(), *(gradients.results[name] for name in gradients.apart)]
        own = separate(self.emission.graph, named, others)
        return {
            "scalars": {label: node.name for label, node in scalars.items()},
            "gradients": {name: own.get(("gradient", name), node).name for name, node in gradients.results.items()},
            "buffers_after": {name: own["buffer", name].name for name in buffers},
        }

    # --- the program -------------------------------------------------------------------------------------------------

    def _program(self, results: dict[str, Any], together: bool) -> Program:
        graph, owners = self.ir, self.divided.owners
        return Program(
            stage=self.stage,
            num_stages=self.divided.num_stages,
            together=together,
            parameters=tuple(self._held(name) for name in graph.parameters if self.stage in owners[name]),
            buffers=tuple(held for name in graph.buffers if (held := self._held_whole(name)).value),
            inputs=tuple(map(self._held_whole, graph.inputs)),
            input_placements=self.input_placements,
            random_key=self.emitter.random_key.name,
            slices=self.emission.slices,
            accumulators=tuple(self.gradients.accumulators),
            buckets=tuple(self.gradients.buckets),
            codec_states=tuple(self.emission.codecs.states),
            joins=tuple(self.joins),
            buffer_updates=self.buffer_updates,
            transfers=self.transfers,
            **results,
        )

    def _held(self, name: str) -> Held:
        memory = self.emission.memory(self.nodes[name])
        return Held(name, memory.name, memory.num_bytes)

    def _held_whole(self, name: str) -> Held:
        """A buffer or an input; its value is empty if the stage does not read it."""
        node = self.nodes[name]
        read = node.users or any(part.source == node.name for part in self.emission.slices.values())
        return Held(name, node.name if read else "", self.ir.tensors[name].num_bytes)
