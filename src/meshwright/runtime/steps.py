"""How a step is run on this rank: as one piece, or by a schedule of stages and micro-batches."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from meshwright.capture.builder import Capture
from meshwright.comm.groups import broadcast_along, channel
from meshwright.comm.transport.base import Channel
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Placements
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import ActionKind, ActionList, Schedule
from meshwright.ir.stages import cut
from meshwright.lower.pipeline import lower_stage
from meshwright.lower.spmd import Lowered, lower
from meshwright.runtime.executor import Executor, StepResult
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build

Keys = Callable[[int], int]
"""The random key of each micro-batch."""


class Step(Protocol):
    """A captured step, lowered for this rank. ``inputs`` are the names of the batch's tensors, in order."""

    inputs: list[str]
    input_placements: dict[str, Placements]

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor], keys: Keys
    ) -> StepResult:
        """Run it once; loss and metrics are of the whole batch, on every rank."""
        ...


def lowered_step(captured: Capture, plan: Plan, groups: dict[str, AxisGroup], rank: int, device: torch.device) -> Step:
    """The step of ``plan`` on this rank."""
    if plan.whole_step:
        return WholeStep(lower(captured, plan, groups, device))
    return PipelineStep(captured, plan, groups, rank, device)


class WholeStep:
    """One function: forward, backward, and the reduction of gradients."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.inputs, self.input_placements = lowered.inputs, lowered.input_placements

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor], keys: Keys
    ) -> StepResult:
        """Run the function."""
        lowered = self.lowered
        values = [
            *(parameters[name] for name in lowered.parameters),
            *(buffers[name] for name in lowered.buffers),
            *(inputs[name] for name in lowered.inputs),
            keys(0),
        ]
        returned = iter(lowered.function(values))
        return StepResult(
            scalars={name: next(returned) for name in ("loss", *lowered.metrics)},
            gradients={name: next(returned) for name in lowered.differentiable},
            buffers={name: next(returned) for name in lowered.buffers},
        )


class PipelineStep:
    """The stages that this rank holds, and the schedule by which it runs them."""

    def __init__(
        self, captured: Capture, plan: Plan, groups: dict[str, AxisGroup], rank: int, device: torch.device
    ) -> None:
        graph = captured.graph
        self.inputs = list(graph.inputs)
        scalars = {"loss": graph.loss, **graph.metrics}
        self._dtypes = {name: getattr(torch, graph.tensors[one].dtype) for name, one in scalars.items()}
        self._device, self._differentiable = device, tuple(captured.traced.differentiable)
        divided = cut(graph, plan.firsts)
        self._pipeline = groups.get("pp")
        self._count = plan.mesh.size("pp") if self._pipeline is not None else 1
        index = self._pipeline.index if self._pipeline is not None else 0
        mine = range(index, divided.num_stages, self._count)
        stage_groups = {axis: group for axis, group in groups.items() if axis != "pp"}
        programs = {stage: lower_stage(captured, plan, divided, stage, stage_groups, device) for stage in mine}
        self.input_placements: dict[str, Placements] = {}
        for program in programs.values():
            self.input_placements |= program.input_placements
        ranks = plan.mesh.group_ranks("pp", rank) if self._pipeline is not None else (rank,)
        beside = {near for stage in mine for near in (stage - 1, stage + 1) if 0 <= near < divided.num_stages}
        self._shared = {
            name: tuple(sorted({stage % self._count for stage in stages}))
            for name, stages in divided.owners.items()
            if name in divided.terms
        }
        self._shared = {name: owners for name, owners in self._shared.items() if len(owners) > 1 and index in owners}
        others = {*(stage % self._count for stage in beside), *(one for some in self._shared.values() for one in some)}
        self._channels: dict[int, Channel] = {one: channel(ranks[one]) for one in sorted(others - {index})}
        self._index = index
        self.executor = Executor(
            programs,
            schedule_of(plan, backward=bool(graph.gradients)),
            index,
            {stage: self._channels[stage % self._count] for stage in beside if stage % self._count != index},
            device,
        )

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor], keys: Keys
    ) -> StepResult:
        """Run the schedule, add what tied weights get from several stages, and tell all stages loss and metrics."""
        result = self.executor.run(parameters, buffers, inputs, keys)
        for name, owners in self._shared.items():
            result.gradients[name] = self._joined(result.gradients.get(name), parameters[name], owners)
        if self._pipeline is not None:
            told = torch.zeros(len(self._dtypes), dtype=torch.float64, device=self._device)
            for place, name in zip(told, self._dtypes, strict=True):
                if name in result.scalars:
                    place.copy_(result.scalars[name])
            broadcast_along(told, self._pipeline, self._count - 1)
            result.scalars = {
                name: one.to(dtype) for one, (name, dtype) in zip(told, self._dtypes.items(), strict=True)
            }
        return result

    def _joined(self, mine: Tensor | None, parameter: Tensor, owners: tuple[int, ...]) -> Tensor:
        """The sum of the gradients that the owners of a parameter have, in one order everywhere."""
        terms = {self._index: torch.zeros_like(parameter) if mine is None else mine.contiguous()}
        works = []
        for one in owners:
            if one != self._index:
                terms[one] = torch.empty_like(terms[self._index])
                works.append(self._channels[one].send(terms[self._index]))
                works.append(self._channels[one].receive(terms[one], "gradient of a tied parameter"))
        for work in works:
            work.wait()
        total = terms[owners[0]]
        for one in owners[1:]:
            total = total + terms[one]
        return total


def schedule_of(plan: Plan, *, backward: bool = True) -> Schedule:
    """The schedule of a plan; of an evaluation only the forward half."""
    num_ranks = plan.mesh.size("pp") if "pp" in plan.mesh.names else 1
    schedule = build(plan.schedule, num_ranks, plan.microbatches, plan.chunks)
    schedule = add_reduction(add_communication(schedule))
    if backward:
        return schedule
    forward = {ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F}
    ranks = [ActionList(action for action in actions if action.kind in forward) for actions in schedule.ranks]
    return Schedule.of(
        f"{plan.schedule}, forward", ranks, num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches, num_chunks=schedule.num_chunks,
    )  # fmt: skip
