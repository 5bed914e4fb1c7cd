"""A training step on this rank: its lowered stages, and the schedule that runs them."""

import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from meshwright.capture.builder import Capture
from meshwright.comm.device_channel import connect
from meshwright.comm.groups import axis_groups, broadcast_along, channels, pipeline_group
from meshwright.comm.member import name_sources
from meshwright.comm.record import WAIT, current
from meshwright.errors import GraphError, PlanError, Problem, ScheduleError, refuse
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Placements
from meshwright.ir.plan import Plan
from meshwright.ir.program import Transfer
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.ir.stages import BACKWARD, CAPTURED, FORWARD, batch_border
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.regions import Compiler
from meshwright.lower.stage import lower_stage
from meshwright.lower.static import moving_parts, open_collectives
from meshwright.ops import collectives
from meshwright.runtime.codec_memory import CodecMemory
from meshwright.runtime.device import DeviceKind, device_kind
from meshwright.runtime.executor import Executor, StepResult
from meshwright.runtime.kernels import CAPTURED_KERNELS, KERNELS
from meshwright.runtime.phase_clock import Clock
from meshwright.runtime.route import Place, Route
from meshwright.schedules.collectives.choice import NATIVE, names
from meshwright.schedules.message_driven import runtime_problems
from meshwright.schedules.pipeline import schedule_of
from meshwright.schedules.reshard import Box, transfer
from meshwright.schedules.timing import PARTNER
from meshwright.torch_private import disable_current_modes

Keys = Callable[[int], int]
"""A function from the number of a micro-batch to its random key."""


def groups_of(plan: Plan, rank: int, device: torch.device) -> dict[str, AxisGroup]:
    """Make the process groups of a plan's axes, and return this rank's groups by axis. Every rank must call it.

    Raises:
        PlanError: the plan has an algorithm that does not run on this device.
    """
    refuse(PlanError, _algorithm_problems(plan, device))
    if not plan.uneven:
        result = axis_groups(plan.mesh, rank, plan.algorithms)
    else:
        result = {"pp": pipeline_group(plan.mesh, rank)}
        for index in range(plan.mesh.num_stages):
            first = plan.mesh.stage_ranks(index).start
            result |= axis_groups(plan.submesh(index), rank, plan.algorithms_of(index), first_rank=first)
    connect(result.values(), device)
    return result


def _algorithm_problems(plan: Plan, device: torch.device) -> Iterator[Problem]:
    """Meshwright's own collectives and MPI's carry tensors of the host."""
    algorithm_tables = [plan.algorithms] if not plan.uneven else map(plan.algorithms_of, range(plan.mesh.num_stages))
    for axis, algorithm in (item for algorithms in algorithm_tables for item in algorithms.items()):
        if device.type != "cpu" and names(algorithm) != {NATIVE}:
            yield (
                f"plan: axis {axis}",
                f"{algorithm!r} runs on CPUs, not on {device.type}",
                "plan for a cluster of GPUs",
            )


class Step:
    """A captured step, lowered for this rank: its stages, and the schedule that runs them."""

    def __init__(
        self,
        captured: Capture,
        plan: Plan,
        groups: dict[str, AxisGroup],
        rank: int,
        device: torch.device,
        compiler: Compiler | None = None,
        codecs: CodecMemory | None = None,
        kind: DeviceKind | None = None,
    ) -> None:
        graph = captured.graph
        kind = kind or device_kind(device)
        graphs = kind.graphs() if plan.graphs else None
        name_sources(graph.operators)
        scalars = {"loss": graph.loss, **graph.metrics}
        self._dtypes = {name: getattr(torch, graph.tensors[tensor].dtype) for name, tensor in scalars.items()}
        self._device = device
        planned = PlannedGraph(graph, plan)
        divided = planned.divided
        self._pipeline = groups.get("pp")
        self._places = plan.pipeline
        index = self._pipeline.index if self._pipeline is not None else 0
        stage_groups = {axis: group for axis, group in groups.items() if axis != "pp"}
        self._plan, self._graph = plan, graph
        clock = Clock()
        constants = {name: value.to(device) for name, value in captured.constants.items()}
        own = KERNELS if graphs is None else CAPTURED_KERNELS
        kernels = {**own, **(captured.opaque.kernels if captured.opaque is not None else {})}
        with disable_current_modes():  # lowering has fake tensors of its own
            self.stages = {
                stage: lower_stage(
                    planned, stage, stage_groups, device=device, rules=captured.rules, constants=constants,
                    compiler=compiler, kernels=kernels, note=clock.begin,
                    symmetric=kind.symmetric(stage_groups.values()) if plan.stages[stage].in_pieces else (),
                )
                for stage in self._places.stages_of(index)
            }  # fmt: skip
        self.input_placements: dict[str, Placements] = {}
        for lowered in self.stages.values():
            self.input_placements |= lowered.program.input_placements
        self._shared = {
            name: owners
            for name, owners in divided.pipeline_owners(self._places).items()
            if name in divided.terms and len(owners) > 1 and index in owners
        }
        self._index, self._rank = index, rank
        routes = {
            (stage, kind): [self._route(stage, kind, payload) for payload in transfers]
            for stage, lowered in self.stages.items()
            for kind, transfers in lowered.program.transfers.items()
            if _neighbour(stage, kind) not in self.stages
        }
        sharing = {owner for owners in self._shared.values() for owner in owners if owner != index}
        peers = {peer for owner in sharing for peer in self._linked(owner)}
        self._channels = {}
        if self._pipeline is not None:
            self._channels = channels(peers.union(*(route.peers for some in routes.values() for route in some)), device)
        schedule = schedule_of(plan, backward=bool(graph.gradients))
        if schedule.in_flight:
            calls = (stage.functions[phase].graph for stage in self.stages.values() for phase in (FORWARD, BACKWARD))
            meetings = (node.name for graph in calls for node in graph.nodes if node.target in collectives.STARTS)
            refuse(ScheduleError, runtime_problems(plan, meetings, device.type))
        self.executor = Executor(self.stages, schedule, index, routes, self._channels, device, clock, codecs, graphs)
        if graphs is not None:
            refuse(GraphError, self._moving_parts(schedule))

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor], keys: Keys
    ) -> StepResult:
        """Run the schedule, sum gradients of tied weights over stages, and send loss and metrics to all stages."""
        result = self.executor.run(parameters, buffers, inputs, keys)
        begun = time.perf_counter()
        for name, owners in self._shared.items():
            result.gradients[name] = self._joined(result.gradients.get(name), parameters[name], owners)
        if (note := current()) is not None and self._shared:
            note.span(WAIT, "tied gradients", begun, time.perf_counter())
        if self._pipeline is not None:
            scalars = torch.zeros(len(self._dtypes), dtype=torch.float64, device=self._device)
            for place, name in zip(scalars, self._dtypes, strict=True):
                if name in result.scalars:
                    place.copy_(result.scalars[name])
            broadcast_along(scalars, self._pipeline, self._places.last_rank)
            result.scalars = {
                name: scalar.to(dtype) for scalar, (name, dtype) in zip(scalars, self._dtypes.items(), strict=True)
            }
        return result

    def _moving_parts(self, schedule: Schedule) -> Iterator[Problem]:
        """Why phases cannot be captured as graphs, although the plan says so."""
        remedy = "write `graphs: false` in the plan"
        if schedule.in_flight:
            yield f"schedule {schedule.name}", "the order of its micro-batches is decided while it runs", remedy
        for number, stage in self.executor.stages.items():
            for name in CAPTURED:
                if name in stage.functions:
                    graph = stage.phases[name].graph
                    for reason in (*moving_parts(graph, stage.program.random_key), *open_collectives(graph)):
                        yield f"stage {number}, {name}", f"{reason}, which no graph can hold", remedy

    def _route(self, stage: int, kind: ActionKind, payload: Transfer) -> Route:
        """Return this rank's route to or from the neighbouring stage. If stages have equal submeshes, and the plan
        names no ranks that receive together, each rank exchanges its whole local tensor with one rank. Otherwise a
        transfer plan says which boxes go to which rank."""
        near, places, plan = _neighbour(stage, kind), self._places, self._plan
        sends = kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        receiving, receives = (near, PARTNER[kind][1]) if sends else (stage, kind)
        receivers = plan.stages[receiving].receivers.get(receives, ())
        if not (plan.uneven or receivers):
            whole = tuple(slice(0, size) for size in payload.value.shape)
            return Route(((self._linked(places.rank_of(near))[0], whole),))
        first, own_first = (plan.mesh.stage_ranks(places.rank_of(each)).start for each in (near, stage))
        own_rank, placed = self._rank - own_first, payload.placements
        beside = batch_border(self._graph, payload.tensor, plan.sizes(near)) if plan.uneven else placed
        own_end, near_end = (placed, plan.submesh(stage).sizes), (beside, plan.submesh(near).sizes)
        source, target = (own_end, near_end) if sends else (near_end, own_end)
        crossing = transfer(payload.whole, *source, *target, receivers)
        if sends:
            pairs = [(first + piece.target, piece.source_box) for piece in crossing.pieces if piece.source == own_rank]
            return Route(tuple((peer, _place(box)) for peer, box in pairs))
        pairs = [(first + piece.source, piece.target_box) for piece in crossing.pieces if piece.target == own_rank]
        messages = tuple((peer, _place(box)) for peer, box in pairs)
        gather = next((gather for gather in crossing.gathers if own_rank in gather.ranks), None)
        if gather is None:
            return Route(messages)
        boxes = {
            rank: _place(box) if box is not None else None for rank, box in zip(gather.ranks, gather.boxes, strict=True)
        }
        others = tuple((own_first + rank, box) for rank, box in boxes.items() if rank != own_rank)
        return Route(messages, boxes[own_rank], others)

    def _linked(self, stage: int) -> tuple[int, ...]:
        """The ranks of a pipeline rank that hold the same part of the batch as this rank."""
        return self._plan.mesh.linked_ranks(self._rank, stage)

    def _joined(self, gradient: Tensor | None, parameter: Tensor, owners: tuple[int, ...]) -> Tensor:
        """Return the sum of a tied parameter's gradients over its owners, added in the same order on every rank.

        This rank receives the term of another stage from one of the ranks that are linked to it there. If stages have
        different numbers of ranks, it may send its own term to several ranks, or to none."""
        terms = {self._index: torch.zeros_like(parameter) if gradient is None else gradient.contiguous()}
        works = []
        for owner in owners:
            if owner != self._index:
                terms[owner] = torch.empty_like(terms[self._index])
                linked, mesh = self._linked(owner), self._plan.mesh
                receivers = [peer for peer in linked if mesh.linked_ranks(peer, self._index)[0] == self._rank]
                works += [self._channels[peer].send(terms[self._index]) for peer in receivers]
                works.append(self._channels[linked[0]].receive(terms[owner], "gradient of a tied parameter"))
        for work in works:
            work.wait()
        total = terms[owners[0]]
        for owner in owners[1:]:
            total.add_(terms[owner])  # own memory: no more than the terms is needed
        return total


def _neighbour(stage: int, kind: ActionKind) -> int:
    """The stage to or from which a kind of transfer goes."""
    return stage + PARTNER[kind][0]


def _place(box: Box) -> Place:
    return tuple(slice(start, stop) for start, stop in box)
