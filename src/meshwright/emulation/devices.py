"""Emulated devices: the executor runs on real ranks and channels, but functions wait instead of computing."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from meshwright.comm.clock import on_rank_0
from meshwright.comm.groups import axis_groups, channels, sum_over
from meshwright.comm.record import COMMUNICATION, COMPUTE, WAIT, SpanRecorder, current, recording
from meshwright.comm.transport.base import Arrival, Channel, Work
from meshwright.emulation.stages import Doing, EmulatedStage
from meshwright.errors import LayoutError
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ir.program import Program, Transfer, Value
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.ir.trace import Trace
from meshwright.lower.partition import LoweredStage, PhaseFunction
from meshwright.runtime.executor import Executor
from meshwright.runtime.route import Route
from meshwright.simulate.faults import Faults

CPU = torch.device("cpu")
EARLY_S = 150e-6
"""A sleeping rank is woken this many seconds before its deadline. Until the deadline it yields its core to other
processes."""
_SET_TIMER_SLACK = 29  # prctl's number


def emulate(
    stages: Sequence[EmulatedStage], schedule: Schedule, num_steps: int, faults: Faults | None = None
) -> list[Trace]:
    """Run ``schedule`` for ``num_steps`` steps, with one process for each pipeline rank, all on one machine. Every rank
    of the world must call it. All ranks begin a step together.

    Schedule, executor and channels are those of training. The devices are emulated: functions wait until their
    predicted time is over, and leave the cores to other processes meanwhile. The links are emulated: a message is one
    number, the time at which the receiver may see it. All ranks read the clock of the same machine. ``faults`` make
    computing slower, and vary its time, as in the simulator. Their random numbers continue from step to step.

    Return one trace for each step, with the source ``emulated``. On rank 0 the trace covers all ranks; on other ranks
    it covers only that rank. Raise a LayoutError if the world has another number of ranks than the schedule.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != len(schedule.ranks):
        raise LayoutError(
            f"the schedule has {len(schedule.ranks)} ranks, and {world_size} are there",
            where=f"schedule {schedule.name}",
            remedy="start one rank for each pipeline rank",
        )
    rank = dist.get_rank() if world_size > 1 else 0
    _wake_in_time()
    group = axis_groups(Mesh.of(pp=world_size), rank)["pp"] if world_size > 1 else None
    device = _Device(group, (faults or Faults()).noise(rank))
    own_stages = sorted({action.stage for action in schedule.ranks[rank]})
    executor = _executor(stages, schedule, rank, own_stages, device)
    traces = []
    for _ in range(num_steps):
        recorder = SpanRecorder()
        device.meet()
        with recording(recorder):
            for stage in own_stages:
                device.do(stages[stage].before, stage, named=True)
            executor.run({}, {}, {}, lambda microbatch: microbatch)
            for stage in own_stages:
                device.do(stages[stage].after, stage, named=True)
        traces.append(on_rank_0(recorder.trace(rank, "emulated"), CPU))
    return traces


def wait_until(time_s: float) -> None:
    """Sleep until ``time.perf_counter`` shows this time, to within about 50 µs if some core is idle."""
    if (left := time_s - time.perf_counter() - EARLY_S) > 0:
        time.sleep(left)
    while time.perf_counter() < time_s:
        os.sched_yield()


def _wake_in_time() -> None:
    """Ask Linux to end sleeps of this process on time; by default they may last 50 µs longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


class _Device:
    """An emulated device: it waits for a given number of seconds instead of computing. ``noise`` returns the factor of
    each waiting time."""

    def __init__(self, group: AxisGroup | None, noise: Callable[[], float]) -> None:
        self._group, self._noise = group, noise
        self._ends: dict[tuple[int, str], tuple[float, float]] = {}
        self._free_s: dict[str, float] = {}  # the time at which the collectives of each axis have ended

    def meet(self) -> None:
        """Wait for the other pipeline ranks."""
        if self._group is not None:
            sum_over(torch.zeros(()), self._group)

    def do(self, doings: Iterable[Doing], stage: int, *, named: bool = False) -> None:
        """Spend the time of a stage's ``doings`` in order; ``named``: record a span for each piece of compute."""
        note = current()
        for doing in doings:
            begun = time.perf_counter()
            if doing.role == "meet":
                self.meet()
            started = begun
            seconds = doing.seconds * self._noise() if doing.role == "compute" else doing.seconds
            end = max(time.perf_counter(), self._free_s.get(doing.axis, 0.0)) + seconds
            if doing.axis:
                self._free_s[doing.axis] = end
            if doing.role == "start":
                self._ends[stage, doing.what] = end - doing.seconds, end
                continue
            if doing.role == "until":
                started, end = self._ends.pop((stage, doing.what))
            wait_until(end)
            if note is None:
                continue
            now = time.perf_counter()
            if doing.role != "compute":
                note.span(COMMUNICATION, doing.what, started, max(end, started))
                note.span(WAIT, doing.what, begun, now)
            elif named:
                note.span(COMPUTE, doing.what, begun, now)


class _Link:
    """A channel with an emulated delay. The value given to ``send`` is the delay in seconds; the message itself is the
    time of arrival."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, tensor: Tensor) -> Work:
        """Send the time at which the emulated message arrives."""
        return self._channel.send(tensor + time.perf_counter())

    def receive(self, into: Tensor, label: str = "") -> Arrival:
        """Receive a message. Waiting for it also waits until its time of arrival."""
        coming = self._channel.receive(into, label)

        def come() -> bool:
            return coming.has_come() and time.perf_counter() >= float(into)

        return Arrival(lambda: wait_until(float(into)), come=come, check=coming.check, works=(coming,))


def _executor(
    stages: Sequence[EmulatedStage], schedule: Schedule, rank: int, own_stages: Sequence[int], device: _Device
) -> Executor:
    """The executor of one pipeline rank."""
    homes = schedule.homes
    lowered = {stage: _lowered(stages[stage], stage, schedule.num_stages, device) for stage in own_stages}
    routes: dict[tuple[int, ActionKind], list[Route]] = {}
    for stage, lowered_stage in lowered.items():
        for kind, transfers in lowered_stage.program.transfers.items():
            beside = stage + (1 if kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)
            if transfers and homes[beside] != rank:
                routes[stage, kind] = [Route(((homes[beside], (slice(0, 1),)),))]
    peer_channels = channels({peer for some in routes.values() for route in some for peer in route.peers})
    links = {peer: _Link(channel) for peer, channel in peer_channels.items()}
    return Executor(lowered, schedule, rank, routes, links, CPU)


def _lowered(stage: EmulatedStage, number: int, num_stages: int, device: _Device) -> LoweredStage:
    """A stage for the executor. It has the same kinds of values as in a real program: received, saved for backward, and
    sent."""
    first, last = number == 0, number == num_stages - 1
    up, down = [f"up{number - 1}"] * (not first), [f"down{number}"] * (not last)
    sent_up, sent_down = [f"up{number}"] * (not last), [f"down{number - 1}"] * (not first)
    saved, rest = f"saved{number}", f"rest{number}"
    seconds = dict.fromkeys(sent_up, stage.sent_up_s) | dict.fromkeys(sent_down, stage.sent_down_s)

    def phase(kind: ActionKind | None, inputs: list[str], outputs: list[str]) -> PhaseFunction:
        doings = stage.actions.get(kind.value, ()) if kind is not None else ()
        results = [torch.full((1,), seconds.get(name, 0.0), dtype=torch.float64) for name in outputs]

        def wait(values: list[Any]) -> list[Any]:
            values.clear()
            device.do(doings, number)
            return results

        return PhaseFunction(inputs, outputs, fx.Graph, lambda graph: wait)

    crossing = {
        ActionKind.RECV_F: up, ActionKind.RECV_B: down, ActionKind.SEND_F: sent_up, ActionKind.SEND_B: sent_down,
    }  # fmt: skip
    transfers = {
        kind: tuple(Transfer(name, Value(name, (1,), "float64", name), (1,)) for name in names)
        for kind, names in crossing.items()
    }
    functions = {
        "prologue": phase(None, [], []),
        "forward": phase(ActionKind.F, up, [saved, *sent_up]),
        "backward": phase(ActionKind.B, [saved, *down], sent_down),
        "input": phase(ActionKind.I, [saved, *down], [rest, *sent_down]),
        "weight": phase(ActionKind.W, [rest], []),
        "reduce": phase(ActionKind.REDUCE_GRAD, [], []),
        "finish": phase(None, [], []),
    }
    return LoweredStage(Program(stage=number, num_stages=num_stages, transfers=transfers), functions)
