"""Memory of a stage from action to action, by the lifetimes of its program's values.

An action takes over values that earlier actions left, needs more while it runs, and leaves some:

    RECV_F   allocates what F takes           B   takes what F left, and what RECV_B allocated
    F        leaves what backward reads       I   leaves what W reads        W   leaves nothing

A step of one micro-batch leaves its gradients after the backward. Gradients of several micro-batches accumulate in
memory that is held for the whole step.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from meshwright.cost.scratch import scratch_bytes
from meshwright.cost.work import ActionBytes
from meshwright.ir.program import Node, Program
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import BACKWARD, FINISH, FORWARD, INPUT, LATE, PROLOGUE, REDUCE, WEIGHT

_COPIES = "copies for "
"""How the names of the copies that a collective keeps begin, before the name of the node that starts it."""
_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
Live = dict[str, int]
"""Maps each storage that lives to its bytes."""


class StageLifetimes(NamedTuple):
    """The memory of a stage's actions. ``saved_bytes`` live from a micro-batch's forward until its backward,
    ``workspace_bytes`` is the most that one of its actions needs in addition. ``actions`` maps a kind of action, or one
    of the moments ``before`` and ``after`` the schedule, to its bytes."""

    saved_bytes: int
    workspace_bytes: int
    actions: dict[str, ActionBytes]


def sizes_of(program: Program) -> dict[str, int]:
    """The bytes of every storage of a program, by the value that owns it. If none does, those of a view."""
    values = [value for phase in program.phases for value in phase.inputs]
    values += [value for phase in program.phases for node in phase.nodes for value in node.outputs]
    sizes = {value.storage: value.num_bytes for value in values}
    return sizes | {value.storage: value.num_bytes for value in values if value.owns}


def lifetimes(program: Program, *, on_cpu: bool, joined_bytes: int = 0) -> StageLifetimes:
    """The memory of the actions of a stage. ``joined_bytes``: what the sum of a tied gradient over stages needs beside
    the gradients, after the schedule."""
    stage = _Lifetimes(program, on_cpu, joined_bytes)
    return stage.together() if program.together else stage.apart()


def slot_bytes(program: Program, late: tuple[str, ...]) -> int:
    """The bytes of a micro-batch whose phases are graphs: the most from its forward to the end of its backward. What
    phases receive, and what is sent, lives in the slot until its next micro-batch. ``late``: the backward phases, which
    are captured for each slot."""
    return _Lifetimes(program, False, 0).slot(late)


class _Lifetimes:
    def __init__(self, program: Program, on_cpu: bool, joined_bytes: int) -> None:
        self.program, self.on_cpu, self.joined_bytes = program, on_cpu, joined_bytes
        self.sizes = sizes_of(program)
        self.accumulates = bool(program.accumulators)

    def together(self) -> StageLifetimes:
        """The memory of a step that runs as one function."""
        live: Live = {}
        rising = self._highest((*self._nodes(PROLOGUE), *self._nodes(FORWARD)), live)
        saved = sum(live.values())
        falling = self._highest(self._nodes(BACKWARD), live)
        actions = {
            "F": ActionBytes(0, rising, saved),
            "B": ActionBytes(saved, falling, self._kept(live, self._results())),
        }
        return StageLifetimes(saved, max(0, rising - saved, falling - saved), actions)

    def apart(self) -> StageLifetimes:
        """The memory of a stage whose functions are called one by one."""
        program, forward = self.program, self._nodes(FORWARD)
        received, returned = self._received(ActionKind.RECV_F), self._received(ActionKind.RECV_B)
        live = dict(received)
        produced = live.keys() | {value.storage for node in forward for value in node.outputs if value.owns}
        rising = self._highest(forward, live)
        saved = self._storages({value.storage for name in LATE for value in program.phase(name).inputs} & produced)
        taken, saved_bytes = saved | returned, sum(saved.values())
        left = dict(taken)
        falling = self._highest(self._nodes(BACKWARD), left)
        ends = self._carried(left)
        first = dict(taken)
        both = self._highest(self._nodes(INPUT), first)
        deferred = {
            value.storage: first[value.storage] for value in program.phase(WEIGHT).inputs if value.storage in first
        }
        deferred_left = dict(deferred)
        weights = self._highest(self._nodes(WEIGHT), deferred_left)
        last = self._carried(deferred_left)
        incoming, deferred_bytes = sum(taken.values()), sum(deferred.values())
        actions = {
            "RECV_F": ActionBytes(0, sum(received.values()), sum(received.values())),
            "RECV_B": ActionBytes(0, sum(returned.values()), sum(returned.values())),
            "F": ActionBytes(sum(received.values()), rising, saved_bytes),
            "B": ActionBytes(incoming, falling, sum(ends.values())),
            "I": ActionBytes(incoming, both, deferred_bytes),
            "W": ActionBytes(deferred_bytes, weights, sum(last.values())),
            **self._once_a_step(ends | last),
        }
        workspace = max(0, rising - saved_bytes, falling - saved_bytes)
        return StageLifetimes(saved_bytes, workspace, actions)

    def slot(self, late: tuple[str, ...]) -> int:
        """The most bytes of forward and the ``late`` phases, one after the other."""
        names = {each.value.name for kind in _SENDS for each in self.program.crossing(kind)}
        nodes = (node for name in (FORWARD, *late) for node in self._nodes(name))
        sent = {value.storage for node in nodes for value in node.outputs if value.name in names}
        taken = {value.name for name in (FORWARD, *late) for value in self.program.phase(name).inputs}
        received = self._received(ActionKind.RECV_F) | self._received(ActionKind.RECV_B)
        live = {name: size for name, size in received.items() if name in taken}
        stays = {*live, *sent}
        peak = 0
        for index, name in enumerate((FORWARD, *late)):
            read = {value.storage for other in late[index:] for value in self.program.phase(other).inputs}
            before = set(live)
            peak = max(peak, self._highest(self._nodes(name), live, stays | (read & before)))
            kept = stays | (read & before if name == BACKWARD else read)  # a split backward has values of its own
            for storage in [storage for storage in live if storage not in kept]:
                del live[storage]
        return peak

    def _once_a_step(self, ends: Live) -> dict[str, ActionBytes]:
        """The memory of the phases that run once a step. ``ends`` are the results of the only micro-batch."""
        begun: Live = {}
        prologue = self._highest(self._nodes(PROLOGUE), begun)
        live = dict(ends)
        reducing = self._highest(self._nodes(REDUCE), live)
        started = sum(live.values())
        finishing = self._highest(self._nodes(FINISH), live)
        left = self._kept(live, self._results())
        return {
            "before": ActionBytes(0, prologue, sum(begun.values())),
            "REDUCE_GRAD": ActionBytes(sum(ends.values()), reducing, started),
            "after": ActionBytes(started, max(finishing, left + self.joined_bytes), left),
        }

    def _carried(self, live: Live) -> Live:
        """What a backward leaves for the end of the step: results, and tensors that are reduced or under way. If
        gradients accumulate, the last micro-batch leaves only scalars, and nothing counts."""
        if self.accumulates:
            return {}
        later = {value.storage for name in (REDUCE, FINISH) for value in self.program.phase(name).inputs}
        later |= self._results()
        return {name: size for name, size in live.items() if name in later or name.startswith(_COPIES)}

    def _nodes(self, phase: str) -> tuple[Node, ...]:
        return self.program.phase(phase).nodes

    def _received(self, kind: ActionKind) -> Live:
        return {transfer.value.name: transfer.value.num_bytes for transfer in self.program.crossing(kind)}

    def _storages(self, names: Collection[str]) -> Live:
        return {name: self.sizes[name] for name in names}

    def _results(self) -> set[str]:
        """The storages of the values that a step returns."""
        program = self.program
        names = {*program.scalars.values(), *program.gradients.values(), *program.buffers_after.values()}
        values = (value for phase in program.phases for node in phase.nodes for value in node.outputs)
        return {value.storage for value in values if value.name in names}

    @staticmethod
    def _kept(live: Mapping[str, int], names: Collection[str]) -> int:
        return sum(size for name, size in live.items() if name in names)

    def _highest(self, nodes: tuple[Node, ...], live: Live, stays: Collection[str] = ()) -> int:
        """The peak of live bytes over the nodes. ``live`` has the storages that live before, and is updated in place.
        Those of ``stays`` are not freed. On a CPU, collectives copy into memory of their own."""
        total = peak = sum(live.values())
        for node in nodes:
            for value in node.outputs:
                if value.owns and value.storage not in live:
                    live[value.storage] = value.num_bytes
                    total += value.num_bytes
            if node.copied_bytes and not self.on_cpu:
                live[_COPIES + node.name] = node.copied_bytes
                total += node.copied_bytes
            peak = max(peak, total + self._scratch_bytes(node))
            for storage in (*node.frees, _COPIES + node.waits):
                total -= live.pop(storage, 0) if storage not in stays else 0
        return peak

    def _scratch_bytes(self, node: Node) -> int:
        """Bytes of temporary memory that a node needs while it runs: the need of its most demanding kernel."""
        return max((scratch_bytes(kernel, self.on_cpu) for kernel in node.kernels), default=0)
