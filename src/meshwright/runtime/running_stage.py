"""The values of a stage that live for a whole step, and the memory in which its gradients accumulate."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.program import Accumulator, Value
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import FINISH, FORWARD, LATE, REDUCE
from meshwright.lower.partition import LoweredStage
from meshwright.runtime.codec_memory import CodecMemory

Values = dict[str, Any]


class RunningStage:
    """A stage's program with the values of the current step."""

    def __init__(self, lowered: LoweredStage, phases: Iterable[str], device: torch.device, codecs: CodecMemory) -> None:
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

    def _memory(self, accumulator: Accumulator, device: torch.device) -> Tensor:
        value = accumulator.value
        if value.owns:
            return empty(value, device)
        return self.buckets[value.storage][accumulator.offset :][: torch.Size(value.shape).numel()].view(value.shape)


def empty(value: Value, device: torch.device) -> Tensor:
    """Uninitialized memory for a value."""
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
