"""Finds stages whose programs differ only in names, so that one of them is lowered for all.

A deep model repeats equal layers. Stages that hold equal layers, split alike, have programs with the same calls and
other names of operators, tensors and parameters. The key of a stage (:func:`stage_key`) has everything on which its
program depends, with numbers in place of these names. Stages with equal keys have equal programs, in which names with
the same number take each other's place (:func:`renamed`). Tensors that a stage only passes on, such as the results of
routers that all later stages send to the loss, are no part of the key: they change nothing but transfers.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from meshwright.ir.graph import Operator
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.plan import Bucket
from meshwright.ir.program import Collective, Held, Node, Phase, Program, Transfer, Value
from meshwright.ir.schedule import ActionKind
from meshwright.lower.gradients import label_of
from meshwright.lower.planned_graph import PlannedGraph, with_time

_CROSSING = (ActionKind.RECV_F, ActionKind.RECV_B, ActionKind.SEND_F, ActionKind.SEND_B)
_WHOLE_STEP = ("constant", "buffer", "input")
"""Kinds of tensors that all stages can read, whose names stay as they are."""


@dataclass
class _Numbers:
    """Numbers names in the order in which they are first given."""

    of: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str) -> int:
        return self.of.setdefault(name, len(self.of))

    def each(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(map(self, names))


@dataclass(frozen=True)
class StageKey:
    """Everything on which the program of a stage depends, among the stages of one plan. ``facts`` have numbers in place
    of names.

    ``operators`` and ``tensors`` are the names, in the order of their numbers. ``labels`` are the labels of collectives
    on gradients and parameters, in an order that is equal for equal ``facts``. ``values`` are the names of the values
    of the stage's parameters in its program. ``crossing`` maps a kind of action to the tensors that it sends or
    receives, and ``passed_values`` maps the tensors that are only passed on to the names of their values."""

    facts: Hashable
    operators: tuple[str, ...]
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    crossing: Mapping[ActionKind, tuple[str, ...]]
    passed_values: Mapping[str, str]
    labels: tuple[str, ...]


def stage_key(
    planned: Sequence[PlannedGraph], stage: int, groups: Mapping[str, AxisGroup], symmetric: Sequence[Collection[str]],
    call_of: Callable[[Operator], Hashable],
) -> StageKey | None:  # fmt: skip
    """The key of a stage, for plans that differ only in recomputation, prefetching and graphs. None if the stage's
    program is unlike all others: the stage makes the loss, or updates buffers.

    Args:
        groups: maps an axis of the stage's mesh to this rank's group.
        symmetric: for each plan, the groups whose ranks share memory.
        call_of: maps an operator to everything that its calls depend on, except names and its strategy.
    """
    first, graph, plan, cut = planned[0], planned[0].graph, planned[0].plan, planned[0].divided
    if stage == cut.num_stages - 1 or any(stage in cut.owners[buffer] for buffer in graph.buffer_updates):
        return None
    own, sizes = plan.stages[stage], sizes_of(with_time(groups, plan.microbatches))[0]
    operators, tensors = _Numbers(), _Numbers()
    crossing = dict(zip(_CROSSING, (*cut.received(stage), *cut.sent(stage)), strict=True))
    terms = {name: by_stage[stage] for name, by_stage in cut.terms.items() if by_stage.get(stage)}
    results = [name for names in (*cut.sent(stage), *terms.values()) for name in names]
    calls = cut.operators(graph, stage, results)
    only_passed = first.passed(stage, calls)
    received = [name for action in _CROSSING[:2] for name in crossing[action] if name in only_passed]
    held = [name for name in graph.parameters if stage in cut.owners[name]]
    members, released = {*held, *terms}, {name for each in plan.stages for name in each.released}
    recomputed = [each.recomputation(stage) for each in planned]

    def at_border(name: str) -> Hashable:
        return tensors(name), tuple(first.border(name, sizes).items())

    def of_bucket(bucket: Bucket) -> Hashable:
        names = bucket.parameters
        ends, inside = (names[0], names[-1]), [name for name in names if name in members]
        settings = bucket.axis, bucket.algorithm, bucket.across, bucket.codings, tuple(plan.storage(names[0]).items())
        return *settings, len(names), tensors.each(ends), tensors.each(inside)

    def of_operator(operator: Operator) -> Hashable:
        name = operator.name
        return (
            operators(name), tensors.each(operator.inputs), tensors.each(operator.outputs), call_of(operator),
            operator.positions, operator.backward, tuple(first.strategy(operator, sizes).items()),
            cut.phase_of(operator), cut.phase_under(operator, own.released),
            plan.computes_interior_first(name), own.operator_algorithm(name),
            operators(f"block {recomputed[0].block(name)}"),
            *((each.holds(name), each.whole_block(name)) for each in recomputed if each.names),
        )  # fmt: skip

    buckets, gathers = (
        [each for each in every if each.axis in groups and not members.isdisjoint(each.parameters)]
        for every in (plan.buckets, plan.gathers)
    )

    facts = [
        tuple(groups.items()), tuple(map(frozenset, symmetric)), tuple(plan.links_of(stage).items()),
        tuple(bool(each.plan.stages[stage].recompute) for each in planned),
        tuple(map(of_operator, calls)),
        tuple(tuple(at_border(name) for name in names if name not in only_passed) for names in crossing.values()),
        tuple((tensors(name), tensors.each(names)) for name, names in terms.items()),
        tuple(map(of_bucket, buckets)), tuple(map(of_bucket, gathers)),
        tuple(
            (
                tensors(name), tuple(plan.storage(name).items()), name in released, name in own.released,
                tuple(own.gradients.get(name, {}).items()),
            )
            for name in held
        ),
    ]  # fmt: skip
    read = [graph.tensors[name] for name in tuple(tensors.of)]
    for tensor in read:
        storage, fixed = graph.tensors[tensor.storage], tensor.kind in _WHOLE_STEP
        facts.append((
            tensor.kind, tensor.shape, tensor.dtype, tensors(storage.name), storage.kind, first.readers[storage.name],
            tensor.name if fixed else "",
        ))  # fmt: skip
    of_buckets = [text for each in (*buckets, *gathers) for text in (each.label, each.reduction)]
    places = {name: f"value_{index}" for index, name in enumerate(graph.parameters)}
    return StageKey(
        facts=tuple(facts),
        operators=tuple(operators.of),
        tensors=tuple(tensors.of),
        values=tuple(places[name] for name in held),
        crossing=crossing,
        passed_values={name: f"passed_{index}" if index else "passed" for index, name in enumerate(received)},
        labels=(*of_buckets, *map(label_of, held)),
    )


def renamed(
    program: Program, key: StageKey, other: StageKey, stage: int, planned: PlannedGraph, groups: Mapping[str, AxisGroup]
) -> Program:
    """The program of ``stage``, whose key is ``other``, made from the program of a stage with the equal ``key``.
    ``planned`` is the graph with the plan of the program, or with a plan that differs only in recomputation,
    prefetching and graphs. ``groups`` are this rank's groups in the stage."""
    operators = dict(zip(key.operators, other.operators, strict=True))
    tensors = dict(zip(key.tensors, other.tensors, strict=True))
    labels = operators | tensors | dict(zip(key.labels, other.labels, strict=True))
    renaming = _Renaming(operators, tensors, dict(zip(key.values, other.values, strict=True)), labels)
    groups = with_time(groups, planned.plan.microbatches)
    passed = {name: planned.transfer(name, value, groups) for name, value in other.passed_values.items()}
    transfers = {}
    for action, names in other.crossing.items():
        read = {each.tensor: each for each in map(renaming.transfer, program.crossing(action)) if each is not None}
        transfers[action] = tuple(passed.get(name) or read[name] for name in names)
    return msgspec.structs.replace(renaming.program(program), stage=stage, transfers=transfers)


@dataclass
class _Renaming:
    """Maps names of operators, of tensors, of the values of parameters, and labels of collectives to other names."""

    operators: dict[str, str]
    tensors: dict[str, str]
    values: dict[str, str]
    labels: dict[str, str]

    def transfer(self, transfer: Transfer) -> Transfer | None:
        """None if the tensor is only passed on."""
        tensor, value = self.tensors.get(transfer.tensor), self._value(transfer.value)
        return msgspec.structs.replace(transfer, tensor=tensor, value=value) if tensor is not None else None

    def program(self, program: Program) -> Program:
        """The program, except its stage and its transfers."""
        tensors, values = self.tensors, self.values
        return msgspec.structs.replace(
            program,
            phases=tuple(map(self._phase, program.phases)),
            parameters=tuple(map(self._held, program.parameters)),
            buffers=tuple(map(self._held, program.buffers)),
            inputs=tuple(map(self._held, program.inputs)),
            slices={
                name: msgspec.structs.replace(part, source=values.get(part.source, part.source))
                for name, part in program.slices.items()
            },
            accumulators=tuple(
                msgspec.structs.replace(each, parameter=tensors[each.parameter]) for each in program.accumulators
            ),
            codec_states=tuple(
                msgspec.structs.replace(each, parameters=tuple(map(tensors.__getitem__, each.parameters)))
                for each in program.codec_states
            ),
            gradients={tensors[name]: values.get(value, value) for name, value in program.gradients.items()},
        )

    def _phase(self, phase: Phase) -> Phase:
        return Phase(
            phase.name, tuple(map(self._value, phase.inputs)), tuple(map(self._node, phase.nodes)),
            self._names(phase.outputs), tuple(map(self._reason, phase.moving)),
        )  # fmt: skip

    def _node(self, node: Node) -> Node:
        changes = {
            "operator": self.operators.get(node.operator, node.operator),
            "inputs": self._names(node.inputs),
            "outputs": tuple(map(self._value, node.outputs)),
            "starts": self._collective(node.starts) if node.starts is not None else None,
            "inside": tuple(map(self._collective, node.inside)),
            "frees": self._names(node.frees),
        }
        return msgspec.structs.replace(node, **changes)

    def _names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        values = self.values
        return tuple([values.get(name, name) for name in names])

    def _value(self, value: Value) -> Value:
        name, storage = self.values.get(value.name), self.values.get(value.storage)
        if name is None and storage is None:
            return value
        return msgspec.structs.replace(value, name=name or value.name, storage=storage or value.storage)

    def _held(self, held: Held) -> Held:
        name, value = self.tensors.get(held.name, held.name), self.values.get(held.value, held.value)
        return Held(name, value, held.bytes)

    def _collective(self, collective: Collective) -> Collective:
        return msgspec.structs.replace(collective, label=self.labels.get(collective.label, collective.label))

    def _reason(self, reason: str) -> str:
        operator, colon, text = reason.partition(": ")
        return f"{self.operators.get(operator, operator)}{colon}{text}"
