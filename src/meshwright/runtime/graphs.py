"""Launches each phase of a stage as one graph of kernels.

The first step runs operator by operator. It shows which values the phases take, and how many micro-batches are in
flight. Before the second step, the phases are captured for as many slots. A micro-batch has a slot, with memory of its
own, from its forward until the end of its backward:

    slot 0   F0 . . B0 F2 . . B2        a slot's graphs share a pool of memory, and are launched
    slot 1      F1 . .    B1 F3         in the order in which they were captured: forward, backward, forward, ...

Parameters and sums of gradients are read and written where they are. Values that only later phases of the slot read
stay in its pool. All other values are copied: into the slot before a launch, out of it if they outlive the micro-batch.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.record import recording
from meshwright.comm.transport.base import first_line
from meshwright.errors import GraphError, MeshwrightError
from meshwright.ir.program import Program
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import ALTERNATIVES, BACKWARD, CAPTURED, FORWARD, PROLOGUE, STEP, WEIGHT
from meshwright.lower.function import BoxedFunction
from meshwright.lower.partition import PhaseFunction
from meshwright.runtime.cuda_graphs import Graphs, KernelGraph
from meshwright.runtime.phase_clock import Clock

log = logging.getLogger("meshwright")

_ENDS = (BACKWARD, WEIGHT)
"""The phases that end a micro-batch."""


class _InGraph:
    """Stands for a value in the memory of a slot, which only graphs of the slot read."""

    def __repr__(self) -> str:
        return "a value in the memory of a graph"


IN_GRAPH = _InGraph()


class _Layout(NamedTuple):
    """The memory of a value: its shape, strides, dtype and device."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> "_Layout":
        return cls(value.shape, value.stride(), value.dtype, value.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class _Captured(NamedTuple):
    """A captured phase. ``taken``: the positions of arguments that are copied, and the memory for each. ``results``:
    each result, and whether it is copied out of the memory of the graph."""

    graph: KernelGraph
    taken: tuple[tuple[int, Tensor], ...]
    results: tuple[tuple[Any, bool], ...]


class _Slot:
    """The graphs of a micro-batch in flight, the pool of their memory, and the values that are copied for them:
    ``taken`` has their names by phase."""

    def __init__(self, pool: Any, key: Tensor) -> None:
        self.pool, self.key = pool, key
        self.copies: dict[str, Tensor] = {}
        self.taken: dict[str, set[str]] = {}
        self.graphs: dict[str, _Captured] = {}

    def has(self, value_name: str, phase: str) -> bool:
        """Whether a value was copied before ``phase`` runs. A whole backward does not run before a split one."""
        return any(
            value_name in names for other, names in self.taken.items() if phase not in ALTERNATIVES.get(other, ())
        )


class StageGraphs:
    """Runs the phases of a stage, as graphs from the second step on.

    ``step`` returns the values of the whole step, by name (``RunningStage.step``). ``of_step``: the values that the end
    of the step reads. Parameters and the memory of gradients keep their addresses; if a parameter has moved, the phases
    are captured again.
    """

    def __init__(
        self, program: Program, phases: Mapping[str, PhaseFunction], functions: Mapping[str, BoxedFunction],
        of_step: frozenset[str], step: Callable[[], Mapping[str, Any]], graphs: Graphs, device: torch.device,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._program, self._phases, self._functions = program, phases, functions
        self._step, self._graphs, self._device, self._clock = step, graphs, device, clock
        self._names = [name for name in CAPTURED if name in functions and (phases[name].inputs or phases[name].outputs)]
        updated = {held.value for held in program.buffers if held.name in program.buffer_updates}
        self._fixed = {
            *(held.value for held in (*program.parameters, *program.buffers) if held.value not in updated),
            *(gradient.value.name for gradient in program.accumulators),
        } & {name for phase in self._names for name in phases[phase].inputs}  # fmt: skip
        sent = {
            transfer.value.name
            for kind in (ActionKind.SEND_F, ActionKind.SEND_B)
            for transfer in program.crossing(kind)
        }
        # the outputs of several micro-batches, and those that users keep
        self._copied = sent | {join.value for join in program.joins} | {*program.scalars.values()}
        self._leaving = self._copied | of_step | {*program.buffer_updates.values()}
        self._leaving |= {part.source for part in program.slices.values()}
        self._received = {transfer.value.name for transfer in program.crossing(ActionKind.RECV_F)} - sent
        self._seen: dict[str, _Layout] = {}
        self._slot_of: dict[int, int] = {}
        self._num_slots = 0
        self._slots: list[_Slot] = []
        self._addresses: dict[str, int] = {}

    @property
    def captured(self) -> bool:
        """Whether the phases are launched as graphs."""
        return bool(self._slots)

    def holds(self, value_name: str, done: str) -> bool:
        """Whether the slot of a micro-batch has all that phases after ``done`` read of a value: it is not copied there
        later."""
        if not self.captured:
            return False
        later = CAPTURED[CAPTURED.index(done) + 1 :]
        return not any(value_name in self._slots[0].taken.get(name, ()) for name in later)

    def release(self) -> None:
        """Free the graphs and their memory."""
        self._slots.clear()

    def begin(self, repeats: bool) -> bool:
        """Begin a step, whose parameters and inputs are in ``step``. Returns whether the phases must be captured now:
        the same step ran last (``repeats``)."""
        self._slot_of.clear()
        if self._slots and any(self._step()[name].data_ptr() != at for name, at in self._addresses.items()):
            log.info("stage %d: parameters have moved, so that its phases are captured again", self._program.stage)
            self.release()
            return True
        return repeats and bool(self._num_slots) and not self._slots

    def call(self, name: str, microbatch: int, arguments: list[Any]) -> dict[str, Any]:
        """Run a phase with its arguments, a list that is emptied. Returns its results by name. Those that only later
        phases of the same micro-batch read are ``IN_GRAPH``, and so are received values that were copied."""
        phase = self._phases[name]
        if name in self._names:
            number = self._slot(name, microbatch)
            if self._slots:
                return self._replay(self._slots[number], name, arguments)
            for value_name, value in zip(phase.inputs, arguments, strict=True):
                if isinstance(value, Tensor) and value_name not in self._seen:
                    self._seen[value_name] = _Layout.of(value)
        elif name in _ENDS:
            self._slot_of.pop(microbatch, None)
        return dict(zip(phase.outputs, self._functions[name](arguments), strict=True))

    def _slot(self, name: str, microbatch: int) -> int:
        """The slot of a micro-batch. Its forward takes the first free slot, and the end of its backward frees it."""
        if name == PROLOGUE:
            self._num_slots = max(self._num_slots, 1)
            return 0
        if microbatch not in self._slot_of:
            taken = set(self._slot_of.values())
            self._slot_of[microbatch] = next(index for index in range(len(taken) + 1) if index not in taken)
            self._num_slots = max(self._num_slots, 1 + self._slot_of[microbatch])
        return self._slot_of.pop(microbatch) if name in _ENDS else self._slot_of[microbatch]

    def _replay(self, slot: _Slot, name: str, arguments: list[Any]) -> dict[str, Any]:
        captured, inputs = slot.graphs[name], self._phases[name].inputs
        for position, memory in captured.taken:
            memory.copy_(arguments[position])
        if self._program.random_key in inputs:
            slot.key.fill_(arguments[inputs.index(self._program.random_key)])
        arguments.clear()
        if self._program.together:
            self._clock.begin(STEP)
        captured.graph.replay()
        results: dict[str, Any] = {}
        if name == FORWARD:
            results = {inputs[at]: IN_GRAPH for at, _ in captured.taken if inputs[at] in self._received}
        for output, (value, copied) in zip(self._phases[name].outputs, captured.results, strict=True):
            results[output] = value.clone() if copied else value
        return results

    # --- capture -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all phases, between two steps. Nothing runs meanwhile.

        Raises:
            GraphError: a phase cannot be captured on this device.
        """
        fixed = {name: self._step()[name] for name in self._fixed}
        self._addresses = {name: value.data_ptr() for name, value in fixed.items()}
        keys = [torch.zeros((), dtype=torch.int64, device=self._device) for _ in range(self._num_slots)]
        slots = [_Slot(self._graphs.pool(), key) for key in keys]
        whole: dict[str, Any] = {}  # results of the prologue, which live as long as the graphs
        with recording(None):
            if PROLOGUE in self._names:
                whole = self._capture(slots[0], PROLOGUE, fixed, {})
            for slot in slots:
                left: dict[str, Any] = {}
                for name in self._names:
                    if name != PROLOGUE:
                        left |= self._capture(slot, name, fixed | whole, left)
        self._clock.forget()
        self._slots = slots

    def _capture(self, slot: _Slot, name: str, fixed: Mapping[str, Any], left: dict[str, Any]) -> dict[str, Any]:
        """Capture a phase. ``left`` has the values that earlier phases of the slot left in its pool; those that no
        later phase reads are freed within the graph. Returns the values that the phase leaves."""
        phase, later = self._phases[name], self._read_after(name)
        arguments, taken = list[Any](), list[tuple[int, Tensor]]()
        for position, value_name in enumerate(phase.inputs):
            if value_name == self._program.random_key:
                arguments.append(slot.key)
            elif value_name in fixed:
                arguments.append(fixed[value_name])
            elif value_name in left:
                arguments.append(left[value_name] if value_name in later else left.pop(value_name))
            else:
                if value_name not in slot.copies:
                    slot.copies[value_name] = self._seen[value_name].empty()
                if not slot.has(value_name, name):
                    taken.append((position, slot.copies[value_name]))
                arguments.append(slot.copies[value_name])
        slot.taken[name] = {phase.inputs[position] for position, _ in taken}
        results: list[Any] = []

        def work() -> None:
            results.extend(self._functions[name](arguments))

        try:
            graph, _ = self._graphs.capture(work, slot.pool)
        except MeshwrightError:
            raise
        except RuntimeError as error:
            raise GraphError(
                f"the device cannot capture its kernels: {first_line(error)}",
                where=f"stage {self._program.stage}, {name}", remedy="write `graphs: false` in the plan, and report it",
            ) from error  # fmt: skip
        named = dict(zip(phase.outputs, results, strict=True))
        stays = [value if each in self._leaving else IN_GRAPH for each, value in named.items()]
        copied = (each in self._copied for each in phase.outputs)
        slot.graphs[name] = _Captured(graph, tuple(taken), tuple(zip(stays, copied, strict=True)))
        return named if name == PROLOGUE else {each: value for each, value in named.items() if each in later}

    def _read_after(self, name: str) -> set[str]:
        """The values that phases after this one read."""
        after = self._names[self._names.index(name) + 1 :]
        return {value for each in after for value in self._phases[each].inputs}
