"""The program of each pipeline rank in the simulation: the actions of its schedule, with their pieces of work."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.cost.fabric import Fabric
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.errors import LayoutError, ScheduleError
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.message_driven import RankProgress
from meshwright.schedules.passes import add_communication
from meshwright.schedules.timing import PARTNER, communicates


class Meet(NamedTuple):
    """The arrival of a rank at a collective, which takes ``seconds`` after all ranks of the group have arrived."""

    key: tuple[int, str]
    piece: Communicate
    seconds: float


class Until(NamedTuple):
    """Wait for the end of the collective with this ``key``: its stage and its name."""

    key: tuple[int, str]


class Post(NamedTuple):
    """The send of a message to pipeline rank ``target``. The action ``received`` of that rank receives the message."""

    received: Action
    target: int
    bytes: int
    seconds: float


def name_of(meet: Meet, label: str | Action) -> str:
    """The name of a collective in an action, or outside of the actions."""
    return f"{label} {meet.piece.what}" if isinstance(label, Action) else meet.piece.what


Op = Compute | Meet | Until | Post


class SimulatedAction(NamedTuple):
    """One action of a program. The rank waits for ``receives``, then runs ``ops``. It allocates ``born`` bytes at the
    start, needs ``workspace`` bytes while the action runs, and frees ``dying`` bytes at the end."""

    label: str | Action
    receives: Action | None
    ops: tuple[Op, ...]
    born: int = 0
    workspace: int = 0
    dying: int = 0


class ByRule(NamedTuple):
    """The forwards and backwards of a rank whose order is decided during the simulation. They are inserted at position
    ``at`` of its entries. ``entries`` maps each action to its entries: its computing and its send."""

    at: int
    begin: RankProgress
    entries: dict[Action, tuple[SimulatedAction, ...]]


class RankProgram(NamedTuple):
    """The entries that a pipeline rank runs in a step, and the bytes that it holds during the whole step. Under a
    message-driven schedule, ``by_rule`` has the entries whose order is decided by a rule."""

    entries: tuple[SimulatedAction, ...]
    held_bytes: int
    by_rule: ByRule | None = None


_RECEIVED_BY = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}


def programs(schedule: Schedule, work: StepWork, fabric: Fabric) -> tuple[RankProgram, ...]:
    """The program of every pipeline rank. Sends and receives are added if the schedule has none.

    Raises:
        LayoutError: the mesh's ``pp`` differs from the number of ranks of the schedule.
        ScheduleError: work and schedule have different numbers of stages; the work has no pieces for an action of the
            schedule; or ranks would have a collective within a micro-batch of a message-driven schedule.
    """
    if fabric.size("pp") != len(schedule.ranks):
        raise LayoutError(
            f"pp is {fabric.size('pp')}, and the schedule has {len(schedule.ranks)} ranks",
            where=f"mesh {fabric.mesh}",
            remedy="build the schedule for the mesh",
        )
    if schedule.in_flight and fabric.mesh.stages:
        raise ScheduleError(
            "stages have different numbers of ranks, which meet in every micro-batch",
            where=f"schedule {schedule.name}",
            remedy="take another schedule, such as `1f1b`",
        )
    if len(work.stages) != schedule.num_stages:
        raise ScheduleError(
            f"it has {schedule.num_stages} stages, the work has {len(work.stages)}",
            where=f"schedule {schedule.name}",
            remedy="compute the work of the same plan",
        )
    if len(schedule.ranks) > 1 and not communicates(schedule):
        schedule = add_communication(schedule)
    homes = schedule.homes
    return tuple(_Builder(schedule, work, fabric, homes, rank).program() for rank in range(len(schedule.ranks)))


class _Builder:
    def __init__(self, schedule: Schedule, work: StepWork, fabric: Fabric, homes: dict[int, int], rank: int) -> None:
        self.schedule, self.work, self.fabric, self.homes, self.rank = schedule, work, fabric, homes, rank
        self.stages = sorted(stage for stage, home in homes.items() if home == rank)
        self.alone: set[tuple[int, str]] = set()  # collectives of groups with a single rank
        self.known: dict[tuple[int, ActionKind], SimulatedAction] = {}  # of another micro-batch
        self.sends: dict[tuple[int, ActionKind], tuple[int, int, float]] = {}

    def program(self) -> RankProgram:
        entries = [
            SimulatedAction("before", None, self._ops(self.work.stages[stage].before, stage)) for stage in self.stages
        ]
        begun, decided = len(entries), dict[Action, tuple[SimulatedAction, ...]]()
        for action in self.schedule.ranks[self.rank]:
            kind = action.kind
            if self.schedule.in_flight and kind is not ActionKind.REDUCE_GRAD:
                if kind.computes:
                    decided[action] = (self._without_meetings(self._computing(action)), *self._sends_after(action))
            elif kind.computes:
                entries.append(self._computing(action))
            elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                entries.append(self._sending(action))
            elif kind is ActionKind.REDUCE_GRAD:
                pieces = self.work.stages[action.stage].pieces.get(kind.value, ())
                entries.append(SimulatedAction(action, None, self._ops(pieces, action.stage, joins=True)))
        entries += [
            SimulatedAction("after", None, self._ops(self.work.stages[stage].after, stage)) for stage in self.stages
        ]
        actions = self.schedule.ranks[self.rank].actions
        held_bytes = sum(self.work.held_bytes(stage, actions) for stage in self.stages)
        if not decided:
            return RankProgram(tuple(entries), held_bytes)
        begin = RankProgress(
            self.stages[0], self.schedule.num_stages, self.schedule.num_microbatches, self.schedule.in_flight
        )
        return RankProgram(tuple(entries), held_bytes, ByRule(begun, begin, decided))

    def _without_meetings(self, entry: SimulatedAction) -> SimulatedAction:
        """Return the entry, after checking that it has no collective with other ranks, because ranks would reach it in
        different orders."""
        for op in entry.ops:
            if isinstance(op, Meet):
                raise ScheduleError(
                    f"`{name_of(op, entry.label)}` is a collective over {op.piece.axis} in every micro-batch",
                    where=f"schedule {self.schedule.name}, rank {self.rank}",
                    remedy="take another schedule, such as `1f1b`, or a layout without such collectives",
                )
        return entry

    def _sends_after(self, action: Action) -> tuple[SimulatedAction, ...]:
        """The send of an action's result, if another stage reads it."""
        sends, further = (ActionKind.SEND_F, 1) if action.kind is ActionKind.F else (ActionKind.SEND_B, -1)
        if action.stage + further not in self.homes:
            return ()
        return (self._sending(Action(action.stage, sends, action.microbatch)),)

    def _computing(self, action: Action) -> SimulatedAction:
        receives, receive = None, _RECEIVED_BY.get(action.kind)
        if receive is not None and self.homes.get(action.stage + PARTNER[receive][0], self.rank) != self.rank:
            receives = Action(action.stage, receive, action.microbatch)
        key = action.stage, action.kind
        if key not in self.known:
            self.known[key] = self._of_any_microbatch(action)
        _, _, ops, born, workspace, dying = self.known[key]
        return SimulatedAction(action, receives, ops, born, workspace, dying)

    def _of_any_microbatch(self, action: Action) -> SimulatedAction:
        """The operations and the memory of an action, which are equal for all micro-batches."""
        stage, kind = self.work.stages[action.stage], action.kind
        memory = self.work.memory_of(action.stage, kind.value)
        # A forward allocates what it saves; a received value counts from here on.
        taken = 0 if kind is ActionKind.F else min(memory.taken_bytes, self._kept_bytes(action.stage, kind))
        grows = memory.left_bytes - taken
        return SimulatedAction(
            action,
            None,
            self._ops_of(action, stage),
            max(0, grows),
            max(0, memory.most_bytes - taken - max(0, grows)),
            max(0, -grows),
        )

    def _kept_bytes(self, stage: int, kind: ActionKind) -> int:
        """The bytes that the action before ``kind`` has left for it: the forward, or I if ``kind`` is W."""
        return self.work.memory_of(stage, "I" if kind is ActionKind.W else "F").left_bytes

    def _ops_of(self, action: Action, stage: StageWork) -> tuple[Op, ...]:
        if action.kind.value not in stage.pieces:
            raise ScheduleError(
                f"`{action}`: the work of stage {action.stage} has no pieces for {action.kind.value}",
                where=f"rank {self.rank}",
                remedy=f"it has {', '.join(stage.pieces) or 'none'}: compute the work for this schedule",
            )
        return self._ops(stage.pieces[action.kind.value], action.stage, joins=True)

    def _sending(self, action: Action) -> SimulatedAction:
        step, receive = PARTNER[action.kind]
        received = Action(action.stage + step, receive, action.microbatch)
        key = action.stage, action.kind
        if key not in self.sends:
            stage, target = self.work.stages[action.stage], self.homes[action.stage + step]
            num_bytes = stage.sent_up_bytes if step > 0 else stage.sent_down_bytes
            self.sends[key] = target, num_bytes, self.fabric.send_s(num_bytes, self.rank, target)
        return SimulatedAction(action, None, (Post(received, *self.sends[key]),))

    def _ops(self, pieces: Sequence[Piece], stage: int, *, joins: bool = False) -> tuple[Op, ...]:
        """The operations of ``pieces``. With ``joins``, for an action, successive Computes become one operation."""
        ops: list[Op] = []
        for piece in pieces:
            match piece:
                case Compute():
                    if joins and ops and isinstance(last := ops[-1], Compute):
                        ops[-1] = last + piece
                    else:
                        ops.append(msgspec.structs.replace(piece, what="") if joins else piece)
                case Communicate():
                    key = (stage, piece.what)
                    if self.fabric.size(piece.axis, self.rank) == 1:
                        self.alone.add(key)
                        continue
                    seconds = self.fabric.collective_s(piece, self.rank)
                    ops.append(Meet(key, piece, seconds))
                    if piece.blocking:
                        ops.append(Until(key))
                case Wait() if (stage, piece.what) not in self.alone:
                    ops.append(Until((stage, piece.what)))
        return tuple(ops)
