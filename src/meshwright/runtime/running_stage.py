"""The values of a stage that live for a whole step, and the memory in which its gradients accumulate."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.program import Accumulator, Value
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import FINISH, FORWARD, LATE, REDUCE
from meshwright.lower.partition import LoweredStage
from meshwright.runtime.codec_memory import CodecMemory
from meshwright.runtime.cuda_graphs import Graphs
from meshwright.runtime.graphs import IN_GRAPH, StageGraphs
from meshwright.runtime.phase_clock import Clock

Values = dict[str, Any]


class RunningStage:
    """A stage's program with the values of the current step. ``graphs``: its phases as graphs of kernels; None if they
    run operator by operator."""

    def __init__(
        self, lowered: LoweredStage, phases: Iterable[str], device: torch.device, codecs: CodecMemory,
        graphs: Graphs | None, clock: Clock,
    ) -> None:  # fmt: skip
        self.program, self.phases = lowered.program, lowered.functions
        program = self.program
        self.functions = {name: self.phases[name].function for name in phases}
        for phase in self.phases.values():
            phase.forget()
        self.step: Values = {}
        self.joined: dict[str, Tensor] = {}
        self.buckets = {bucket.name: empty(bucket, device) for bucket in program.buckets}
        self.totals = {
            accumulator.value.name: self._memory(accumulator, device) for accumulator in program.accumulators
        }
        for state in program.codec_states:
            codecs.provide(state)
        # If gradients are exchanged in each micro-batch, a micro-batch continues with the codec state that the previous
        # one has left.
        self.goes_on = {state.before.name: state.value.name for state in program.codec_states}
        late = {name for phase in LATE for name in self.phases[phase].inputs}
        ready = (
            *self.phases[FORWARD].outputs,
            *(transfer.value.name for transfer in program.crossing(ActionKind.RECV_F)),
        )
        self.sent = {transfer.value.name for transfer in program.crossing(ActionKind.SEND_F)}
        self.holder = {held.name: held.value for held in program.buffers}
        self.read_late = {self.holder[name] for name in program.buffer_updates if self.holder.get(name) in late}
        self.kept = {name for name in ready if name in late} | self.read_late
        self.of_step = {name for phase in (REDUCE, FINISH) for name in self.phases[phase].inputs}
        self.of_step.update(program.gradients.values(), program.scalars.values(), program.buffers_after.values())
        self.read_at_end = self.of_step | {self.holder.get(name, name) for name in program.buffer_updates}
        self.graphs: StageGraphs | None = None
        if graphs is not None:
            given = program, self.phases, self.functions, frozenset(self.of_step)
            self.graphs = StageGraphs(*given, lambda: self.step, graphs, device, clock)

    def hold(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Provide the values that exist before the step, except its inputs."""
        self.step.update({held.value: parameters[held.name] for held in self.program.parameters})
        self.step.update({held.value: buffers[held.name] for held in self.program.buffers})
        self.step.update(self.totals)

    def arguments(
        self, name: str, microbatch: int, num_microbatches: int, keys: Callable[[int], int], given: Values
    ) -> list[Any]:
        """The arguments of a phase for a micro-batch. ``given`` has the values of the micro-batch. ``keys`` maps it to
        its random key."""
        values, phase = list[Any](), self.phases[name]
        for value_name in phase.inputs:
            if value_name in given:
                values.append(given[value_name])
            elif value_name in self.step:
                values.append(self.step[value_name])
            elif value_name in self.program.slices:
                values.append(self._part(value_name, microbatch, num_microbatches))
            else:
                assert value_name == self.program.random_key, value_name
                values.append(keys(microbatch))
        for value_name in self.goes_on.keys() & phase.inputs:
            self.step[value_name] = self.step[self.goes_on[value_name]]
        return values

    def call(self, name: str, microbatch: int, arguments: list[Any]) -> Values:
        """Run a phase for a micro-batch, and return its results by name. ``arguments`` is emptied."""
        if self.graphs is not None:
            return self.graphs.call(name, microbatch, arguments)
        return dict(zip(self.phases[name].outputs, self.functions[name](arguments), strict=True))

    def after_sending(self, name: str, value: Any, done: str) -> Any:
        """What is kept of a value for the phases of its micro-batch that follow ``done``, after sending: graphs have it
        in their slot, unless they copy it there later."""
        return IN_GRAPH if self.graphs is not None and self.graphs.holds(name, done) else value

    def _part(self, name: str, microbatch: int, num_microbatches: int) -> Tensor:
        """The slice ``name``: a micro-batch's part of a value of the whole step."""
        piece = self.program.slices[name]
        whole: Tensor = self.step[piece.source]
        size = whole.shape[piece.dim] // piece.blocks // num_microbatches
        if piece.blocks == 1:
            return whole.narrow(piece.dim, microbatch * size, size)
        split = whole.unflatten(piece.dim, (piece.blocks, -1)).narrow(piece.dim + 1, microbatch * size, size)
        return split.flatten(piece.dim, piece.dim + 1)

    def _memory(self, accumulator: Accumulator, device: torch.device) -> Tensor:
        value = accumulator.value
        if value.owns:
            return empty(value, device)
        return self.buckets[value.storage][accumulator.offset :][: torch.Size(value.shape).numel()].view(value.shape)


def empty(value: Value, device: torch.device) -> Tensor:
    """Uninitialized memory for a value."""
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
