"""Runs a schedule on this rank: each kind of action has a method, and values are kept only while they are needed.

A stage's program (``lower/stage.py``) names the values that each function takes and returns. Values of the whole step
(parameters, inputs, results of the prologue) are kept in one dict per stage. Values of a micro-batch are kept in one
dict per stage and micro-batch.
"""

import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.record import COMMUNICATION, COMPUTE, WAIT, Moment, SpanRecorder, be_at, current
from meshwright.comm.transport.base import Arrival, Channel, Work
from meshwright.compress.coder import Coder, coder_of, draw_of
from meshwright.compress.vector import coded_bytes, decode, encoded
from meshwright.ir.codec import codec_of
from meshwright.ir.program import Transfer
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.ir.stages import FINISH, FORWARD, INPUT, PHASE_OF, PROLOGUE, REDUCE, WEIGHT
from meshwright.lower.partition import LoweredStage
from meshwright.runtime.by_rule import by_rule
from meshwright.runtime.codec_memory import CodecMemory
from meshwright.runtime.cuda_graphs import Graphs
from meshwright.runtime.phase_clock import Clock
from meshwright.runtime.route import At, Place, Route
from meshwright.runtime.running_stage import RunningStage, Values, empty
from meshwright.schedules.timing import PARTNER

_JOIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "last": lambda _, new: new,
}


@dataclass
class StepResult:
    """The results of a step on this rank, by name. The executor returns loss and metrics (``scalars``) only on ranks of
    the last stage."""

    scalars: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Executor:
    """Runs the same schedule in every step. ``routes`` maps a stage and a kind of action to one route for each of its
    transfers. ``channels`` maps a peer rank to the channel for its messages. Functions of ``stages`` that the schedule
    does not run are freed. A function that runs several phases reports the start of each phase to ``clock``. With
    ``graphs``, phases are launched as graphs from the second step on (``runtime/graphs.py``).

    ``live_activations`` is the largest number of (stage, micro-batch) pairs whose values were kept at one time in the
    last run.
    """

    def __init__(
        self,
        stages: Mapping[int, LoweredStage],
        schedule: Schedule,
        pipeline_rank: int,
        routes: Mapping[tuple[int, ActionKind], list[Route]],
        channels: Mapping[int, Channel],
        device: torch.device,
        clock: Clock | None = None,
        codecs: CodecMemory | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.schedule, self.device, self._clock = schedule, device, clock or Clock()
        self._actions = schedule.ranks[pipeline_rank].actions
        kinds = {action.kind for action in self._actions}
        phases = [PROLOGUE, *(phase for kind, phase in PHASE_OF.items() if kind in kinds), FINISH]
        self._codecs = codecs or CodecMemory(device)
        self._graphs, others = graphs, (device, self._codecs, graphs, self._clock)
        self.stages = {stage: RunningStage(lowered, phases, *others) for stage, lowered in stages.items()}
        self._routes, self._channels = routes, channels
        self._live: dict[tuple[int, int], Values] = {}
        # Of stages and micro-batches between I and W: whether the gradients of their inputs have left the stage.
        self._split: dict[tuple[int, int], bool] = {}
        self._coming: dict[tuple[int, int, ActionKind], list[tuple[str, Tensor, Route, list[Arrival]]]] = {}
        self._handed: dict[tuple[int, int, ActionKind], Values] = {}
        self._leaving: list[Work] = []
        self._keys: Callable[[int], int] = lambda microbatch: microbatch
        self._run: dict[ActionKind, Callable[[RunningStage, Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._backward,
            ActionKind.W: self._backward,
            ActionKind.SEND_F: self._send,
            ActionKind.SEND_B: self._send,
            ActionKind.RECV_F: self._receive,
            ActionKind.RECV_B: self._receive,
            ActionKind.REDUCE_GRAD: self._reduce,
        }
        self._recorder = SpanRecorder()
        self._begun: Moment = 0.0  # the start of the current action, after waiting for received values
        self.live_activations = 0

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        keys: Callable[[int], int],
    ) -> StepResult:
        """Run one step. ``keys`` maps the number of a micro-batch to its random key."""
        self._recorder = note = current() or SpanRecorder()
        self.live_activations = 0
        self._keys = keys
        self._begun = begun_s = time.perf_counter()
        self._codecs.begin()
        if self._graphs is not None:
            self._capture(self._graphs, parameters, buffers)
        for number, stage in self.stages.items():
            self._be_at(number)
            self._begin(stage, parameters, buffers, inputs)
        alone = self._clock.note(note, begun_s)
        for action in self._ordered():
            self._begun = time.perf_counter()
            self._be_at(action.stage, action.microbatch)
            self._forget_sent()
            self._run[action.kind](self.stages[action.stage], action)
            end = time.perf_counter()
            if alone:
                continue
            note.span(COMPUTE if action.kind.computes else COMMUNICATION, action, self._begun, end)
            if action.kind.computes:
                note.sample()
            elif action.kind not in (ActionKind.RECV_F, ActionKind.RECV_B):
                note.span(WAIT, action, self._begun, end)
        result = StepResult()
        self._begun = time.perf_counter()
        for number, stage in self.stages.items():
            self._be_at(number)
            self._finish(stage, result)
        be_at(None)
        finished = time.perf_counter()
        if not alone:
            note.span(COMPUTE, FINISH, self._begun, finished)
        for work in self._leaving:
            work.wait()
        if not alone:
            note.span(WAIT, "sends", finished, time.perf_counter())
        self._leaving.clear()
        self._live.clear()
        return result

    @property
    def values_in_flight(self) -> list[Any]:
        """The values of micro-batches that are kept, received or handed over now."""
        coming = (whole for each in self._coming.values() for _, whole, _, _ in each)
        return [*coming, *(value for each in (*self._live.values(), *self._handed.values()) for value in each.values())]

    def _ordered(self) -> Iterable[Action]:
        """Yield the actions of the step. Each must be run before the next is requested."""
        if not self.schedule.in_flight:
            return self._actions
        (stage,) = self.stages
        return by_rule(self.schedule, stage, self._arrivals)

    def _be_at(self, stage: int, microbatch: int | None = None) -> None:
        """Set the place in the schedule that errors name, unless the schedule is one stage with one micro-batch."""
        if self.schedule.num_stages * self.schedule.num_microbatches > 1:
            be_at(At(stage, microbatch))

    # --- a step ----------------------------------------------------------------------------------------------------

    def _capture(self, graphs: Graphs, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Capture the phases as graphs, if this step also ran last and they are not captured yet."""
        repeats, some = graphs.repeats(self), []
        for stage in self.stages.values():
            stage.hold(parameters, buffers)
            assert stage.graphs is not None
            some += [stage.graphs] if stage.graphs.begin(repeats) else []
        if some:
            graphs.own(self)
            graphs.prepare()
            for each in some:
                each.capture()

    def release_graphs(self) -> None:
        """Run the next step operator by operator."""
        for stage in self.stages.values():
            if stage.graphs is not None:
                stage.graphs.release()

    def _begin(
        self,
        stage: RunningStage,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
    ) -> None:
        program, step = stage.program, stage.step
        stage.hold(parameters, buffers)
        step.update({held.value: inputs[held.name] for held in program.inputs if held.value})
        step.update(self._codecs.values(program.codec_states))
        self._call(stage, PROLOGUE)
        for memory in (*stage.buckets.values(), *(t for t in stage.totals.values() if t._base is None)):
            memory.zero_()

    def _finish(self, stage: RunningStage, result: StepResult) -> None:
        program, step = stage.program, stage.step
        step.update(stage.joined)
        self._call(stage, FINISH)
        for name, value in program.gradients.items():
            other = result.gradients.get(name)  # from another chunk of this rank, if weights are tied
            result.gradients[name] = step[value] if other is None else other + step[value]
        result.scalars.update({name: step[value] for name, value in program.scalars.items()})
        result.buffers.update({name: step[stage.holder.get(name, name)] for name in program.buffer_updates})
        result.buffers.update({name: step[value] for name, value in program.buffers_after.items()})
        stage.joined.clear()
        step.clear()

    def _call(self, stage: RunningStage, name: str) -> None:
        """Run the function of phase ``name``, which runs once a step, and keep its results."""
        stage.step.update(stage.call(name, 0, self._arguments(stage, name, 0, {})))

    def _arguments(self, stage: RunningStage, name: str, microbatch: int, given: Values) -> list[Any]:
        return stage.arguments(name, microbatch, self.schedule.num_microbatches, self._keys, given)

    # --- computing -------------------------------------------------------------------------------------------------

    def _forward(self, stage: RunningStage, action: Action) -> None:
        program, microbatch = stage.program, _microbatch(action)
        live = self._arrived(stage, action, ActionKind.RECV_F)
        live.update(stage.call(FORWARD, microbatch, self._arguments(stage, FORWARD, microbatch, live)))
        self._collect(stage, live)
        for join in program.joins:
            new, old = live[join.value], stage.joined.get(join.joined)
            stage.joined[join.joined] = new if old is None else _JOIN[join.join](old, new)
        live.update((name, stage.step[name]) for name in stage.read_late)  # values before the update, for backward
        stage.step.update((stage.holder.get(name, name), live[value]) for name, value in program.buffer_updates.items())
        wanted = stage.kept | (stage.sent if action.stage < self.schedule.num_stages - 1 else set())
        self._live[action.stage, microbatch] = {name: live[name] for name in wanted if name in live}
        self.live_activations = max(self.live_activations, len(self._live))
        self._hand_over(stage, action, ActionKind.SEND_F)

    def _backward(self, stage: RunningStage, action: Action) -> None:
        """Run the whole backward, or one of its two parts. The first part keeps the values that the second needs."""
        microbatch, name = _microbatch(action), PHASE_OF[action.kind]
        if action.kind is not ActionKind.W:
            self._arrived(stage, action, ActionKind.RECV_B)
        key = (action.stage, microbatch)
        left = self._split.pop(key, False)
        live = self._live.pop(key, {})
        arguments = self._arguments(stage, name, microbatch, live)
        wanted = set() if left else {transfer.value.name for transfer in stage.program.crossing(ActionKind.SEND_B)}
        if action.kind is ActionKind.I:
            self._split[key] = False
            wanted.update(stage.phases[WEIGHT].inputs)
        kept = {value_name: value for value_name, value in live.items() if value_name in wanted}
        del live  # values that only the arguments hold are freed at their last use
        results = stage.call(name, microbatch, arguments)
        self._collect(stage, results)
        kept.update((value_name, value) for value_name, value in results.items() if value_name in wanted)
        if kept:
            self._live[key] = kept
        if action.kind is not ActionKind.W:
            self._hand_over(stage, action, ActionKind.SEND_B)

    @staticmethod
    def _collect(stage: RunningStage, values: Values) -> None:
        """Keep the values of a micro-batch that the end of the step reads. A later micro-batch overwrites them."""
        stage.step.update((name, value) for name, value in values.items() if name in stage.of_step)

    # --- sending and receiving ---------------------------------------------------------------------------------------

    def _send(self, stage: RunningStage, action: Action) -> None:
        transfers = stage.program.crossing(action.kind)
        live = self._live.get((action.stage, _microbatch(action)), {})
        for transfer, route in zip(transfers, self._routes[action.stage, action.kind], strict=True):
            for peer, place in route.messages:
                part = live[transfer.value.name][place].contiguous()
                if transfer.codec:
                    part = encoded(coder_at(transfer.codec, part.dtype), part, self._draw(action, transfer))
                self._leaving.append(self._channels[peer].send(part))
        self._let_go(stage, action, action.kind)

    def _forget_sent(self) -> None:
        """Free the memory of an accelerator's messages that have come. They leave while the host goes on."""
        if self._leaving and self.device.type != "cpu":
            self._leaving = [work for work in self._leaving if not (isinstance(work, Arrival) and work.has_come())]

    def _hand_over(self, stage: RunningStage, action: Action, kind: ActionKind) -> None:
        """Give the values that cross a border directly to the neighbouring stage, if this rank holds that stage too. No
        message is sent."""
        further, receive = PARTNER[kind]
        neighbour = self.stages.get(action.stage + further)
        if neighbour is None:
            return
        pairs = zip(stage.program.crossing(kind), neighbour.program.crossing(receive), strict=True)
        live = self._live.get((action.stage, _microbatch(action)), {})
        self._handed[action.stage + further, _microbatch(action), receive] = {
            arrival.value.name: live[sent.value.name].contiguous() for sent, arrival in pairs
        }
        self._let_go(stage, action, kind)

    def _let_go(self, stage: RunningStage, action: Action, kind: ActionKind) -> None:
        """After values have left the stage, keep only those values of the micro-batch that the stage itself still
        needs."""
        key = (action.stage, _microbatch(action))
        live = self._live.pop(key, {})
        done = FORWARD if kind is ActionKind.SEND_F else INPUT
        if kind is ActionKind.SEND_F:
            later = stage.kept
        elif key in self._split:
            later, self._split[key] = set(stage.phases[WEIGHT].inputs), True
        else:
            later = set()
        if kept := {name: stage.after_sending(name, value, done) for name, value in live.items() if name in later}:
            self._live[key] = kept

    def _receive(self, stage: RunningStage, action: Action) -> None:
        transfers = stage.program.crossing(action.kind)
        coming = []
        for transfer, route in zip(transfers, self._routes[action.stage, action.kind], strict=True):
            whole = empty(transfer.value, self.device)
            arrivals = [self._post(peer, whole, place, action, transfer.codec) for peer, place in route.messages]
            coming.append((transfer.value.name, whole, route, arrivals))
        self._coming[action.stage, _microbatch(action), action.kind] = coming

    def _arrived(self, stage: RunningStage, action: Action, kind: ActionKind) -> Values:
        """Wait for the values that the micro-batch receives, and return all values that are kept for it."""
        microbatch = _microbatch(action)
        live = self._live.setdefault((action.stage, microbatch), {})
        live.update(self._handed.pop((action.stage, microbatch, kind), {}))
        coming = self._coming.pop((action.stage, microbatch, kind), ())
        if coming:
            self._begun = self._recorder.moment(time.perf_counter())
        for name, whole, route, arrivals in coming:
            for arrival in arrivals:
                arrival.wait()
            if route.own_box is not None:
                own_box = whole[route.own_box].contiguous()
                self._leaving += [self._channels[peer].send(own_box) for peer, _ in route.others]
            theirs = [self._post(peer, whole, box, action) for peer, box in route.others if box is not None]
            for arrival in theirs:
                arrival.wait()
            live[name] = whole
        if coming:
            arrived = self._recorder.moment(time.perf_counter())
            self._recorder.span(WAIT, f"{action.stage}{kind}{microbatch}", self._begun, arrived)
            self._begun = arrived
        return live

    def _arrivals(self, receive: Action) -> list[Arrival]:
        """The messages of a receive action that was posted."""
        coming = self._coming.get((receive.stage, _microbatch(receive), receive.kind), ())
        return [arrival for _, _, _, arrivals in coming for arrival in arrivals]

    def _draw(self, action: Action, transfer: Transfer) -> int:
        """The seed of a codec's random numbers for a transfer."""
        return draw_of(self._keys(_microbatch(action)), zlib.crc32(f"{action.kind} {transfer.tensor}".encode()))

    def _post(self, peer: int, whole: Tensor, place: Place, action: Action, codec: str = "") -> Arrival:
        box = whole[place]
        received = box if box.is_contiguous() else torch.empty_like(box, memory_format=torch.contiguous_format)
        label = f"stage {action.stage}, micro-batch {action.microbatch}, {action}"
        if codec:
            coder = coder_at(codec, box.dtype)
            message = torch.empty(coded_bytes(coder, box.numel()), dtype=torch.uint8, device=box.device)

            def finish() -> None:
                decode(coder, message, received)
                if received is not box:
                    box.copy_(received)

            return self._channels[peer].receive(message, label).then(finish, message)
        arrival = self._channels[peer].receive(received, label)
        return arrival if received is box else arrival.then(partial(box.copy_, received))

    def _reduce(self, stage: RunningStage, action: Action) -> None:
        """Start the sums of a stage's gradients, after its last backward. Free what no later phase reads."""
        stage.step = {name: value for name, value in stage.step.items() if name in stage.read_at_end}
        stage.step.update(stage.buckets)
        self._call(stage, REDUCE)


@lru_cache(maxsize=64)
def coder_at(codec: str, dtype: torch.dtype) -> Coder:
    """The coder for values that cross a border between stages."""
    return coder_of(codec_of(codec), dtype)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
