"""Simulate a step: every rank runs its program on a compute stream and a communication stream."""

import math
from collections import deque
from functools import partial

from meshwright.cost.fabric import Fabric
from meshwright.cost.work import Communicate, Compute, StepWork
from meshwright.errors import LayoutError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Action, Schedule
from meshwright.simulate.blocks import ActionBlock, GroupKey, RanBlock, block_of
from meshwright.simulate.decisions import RankDecisions
from meshwright.simulate.faults import Faults
from meshwright.simulate.fold import Classes, classes, classes_of_equals
from meshwright.simulate.network import Links
from meshwright.simulate.played import PlayedStep, RankTimeline
from meshwright.simulate.program import Meet, Op, Post, RankProgram, SimulatedAction, Until, name_of, programs
from meshwright.simulate.spans import COMMUNICATION, COMPUTE, HOST, OUTSIDE, WAIT


def play(
    schedule: Schedule,
    work: StepWork,
    mesh: Mesh,
    cluster: Cluster,
    *,
    overlap: bool = True,
    contention: bool = False,
    faults: Faults | None = None,
    fold: bool = True,
) -> PlayedStep:
    """Simulate one step.

    Each rank runs its actions in order, as the executor does. Under a message-driven schedule, it runs the next
    micro-batch that is ready (``schedules/message_driven.py``). A send does not block its rank. A receive does not
    block it either: the forward or backward that needs the value waits. A collective starts when all ranks of its group
    have reached it. A blocking collective stops its rank until the collective ends. Other collectives run while the
    rank computes, until the rank waits for them.

    Collectives and messages take the times of ``cost.collective``, in which all groups of an axis communicate at once.
    Collectives of one group run one after the other, in the order in which they start; other transfers do not slow each
    other. With ``contention``, transfers share the links of the cluster's levels (``network.Links``).

    Without ``overlap``, a rank cannot compute and communicate at the same time, as on CPUs whose computing cores also
    copy and add. A send then blocks the rank for the time of the message, and a collective takes its time when a rank
    waits for it. Shifts that do not block run while the rank computes: between boxes, the system carries them.

    Every rank begins with the software's time that does not depend on micro-batches (``Software.step_s``).

    If several ranks behave identically (such as ranks along dp and tp without stragglers), only one of them is
    simulated; ``fold.classes`` explains why this is exact. With ``contention`` or without ``fold``, every rank is
    simulated.

    Raises:
        ScheduleError: the ranks are stuck (a deadlock, collectives that do not match, or a wait for a collective that
            was never started), or schedule and work do not match.
        LayoutError: mesh, schedule and faults do not match; or ``contention`` is set without ``overlap``.
        ClusterError: the cluster is too small; or ``contention`` is set, and the units of a level are not all equal.
    """
    faults = faults or Faults()
    faults.check(mesh.world_size)
    if contention and not overlap:
        raise LayoutError(
            "ranks that communicate themselves share no links with what they do besides",
            where="simulate",
            remedy="ask for contention with overlap, or for neither",
        )
    fabric = Fabric(cluster, mesh)
    played = programs(schedule, work, fabric)
    op_lists = {id(entry.ops): entry.ops for prog in played for entry in prog.entries}  # many are equal
    axes = {op.piece.axis for ops in op_lists.values() for op in ops if isinstance(op, Meet)}
    if contention or not fold:
        folded = classes(mesh, sorted(axes), range(mesh.world_size))
    elif faults == Faults():
        folded = classes_of_equals(mesh, tuple(sorted(axes)))
    else:
        folded = classes(mesh, sorted(axes), faults.colors(mesh.world_size))
    links = Links(fabric) if contention else None
    return PlayedStep(
        mesh, folded, _Engine(mesh, folded, played, faults, links, overlap, cluster.software.step_s).run()
    )


class _Meeting:
    """A collective of one group: the ranks that have reached it, its start and its end. Without overlap, ``end_s`` is
    its earliest start."""

    __slots__ = ("end_s", "names", "piece", "seconds", "start_s")

    def __init__(self, piece: Communicate, seconds: float) -> None:
        self.piece, self.seconds = piece, seconds
        self.names: dict[int, str] = {}
        self.start_s = 0.0
        self.end_s = math.inf


class _Rank:
    """The progress of a class of ranks in its program."""

    __slots__ = (
        "bytes", "counts", "death_s", "decides_at", "entries", "noise", "op", "open", "place", "steady", "time_s",
        "timeline",
    )  # fmt: skip

    def __init__(self, program: RankProgram, faults: Faults, rank: int, begins_s: float) -> None:
        self.timeline = RankTimeline(program.held_bytes)
        self.entries = list(program.entries)
        self.decides_at = program.by_rule.at if program.by_rule is not None else -1
        if begins_s:
            self.timeline.parts.append((HOST, OUTSIDE, 0.0, begins_s, 0, 0.0))
        self.place, self.op, self.time_s = 0, -1, begins_s
        self.bytes = program.held_bytes
        self.open: dict[tuple[int, str], _Meeting] = {}
        self.counts: dict[GroupKey, int] = {}
        self.noise = faults.noise(rank)
        self.steady = 0.0 if faults.jitter else self.noise()
        self.death_s = faults.deaths_s.get(rank, math.inf)


_MeetingKey = tuple[str, tuple[int, ...], int]
_MessageKey = tuple[int, Action]
"""The class of a rank that sends or receives, and the action that receives."""


class _Engine:
    """Runs each rank on its own clock until the rank needs a result that another rank has not made. Without ``links``,
    the end of a transfer is known at its start. With ``links``, the end is known when ``links`` advances to it. That
    happens only while all ranks wait, so no rank can start a transfer before that time."""

    def __init__(
        self, mesh: Mesh, folded: Classes, played: tuple[RankProgram, ...], faults: Faults, links: Links | None,
        overlap: bool, begins_s: float,
    ) -> None:  # fmt: skip
        self._folded, self._links, self._overlap = folded, links, overlap
        self._stages = stages = [mesh.coordinates(rank).get("pp", 0) for rank in folded.first]
        self._ranks = [
            _Rank(played[stage], faults, rank, begins_s) for stage, rank in zip(stages, folded.first, strict=True)
        ]
        self._arrivals: dict[_MessageKey, float] = {}
        self._arrived: dict[_MessageKey, list[float]] = {}
        self._meetings: dict[_MeetingKey, _Meeting] = {}
        self._queues: dict[GroupKey, deque[_MeetingKey]] = {}
        self._free_s: dict[GroupKey, float] = {}
        self._messages: dict[_MessageKey, tuple[Action | str, float, int, int]] = {}
        self._waiting: dict[_Meeting | _MessageKey, list[int]] = {}
        self._ready: deque[int] = deque(range(len(self._ranks)))
        # Without contention and faults, operations that meet no other class run as blocks.
        self._unhindered = links is None and overlap and faults == Faults()
        self._blocks: dict[tuple[int, int], ActionBlock | None] = {}
        rules = [played[stage].by_rule for stage in stages]
        self._decisions = RankDecisions(rules, self._arrivals, self._go_on, links)

    def run(self) -> tuple[RankTimeline, ...]:
        while True:
            while self._ready:
                class_id = self._ready.popleft()
                self._play(class_id, self._ranks[class_id])
            if not (self._decisions.advance() or (self._links is not None and self._links.advance())):
                break
        self._check_finished()
        return tuple(rank.timeline for rank in self._ranks)

    def _play(self, class_id: int, rank: _Rank) -> None:
        """Run a rank until its program ends, the rank must wait, or the rank dies."""
        entries, timeline = rank.entries, rank.timeline
        now, place, op = rank.time_s, rank.place, rank.op
        spans, memory, steady = timeline.parts, timeline.memory, rank.steady
        while place < len(entries):
            if place == rank.decides_at and op < 0:
                rank.time_s, rank.place, rank.op = now, place, op
                return self._decisions.wait(class_id, now)
            label, receives, ops, born, workspace, dying = entries[place]
            if op < 0:
                if receives is not None:
                    arrival = self._arrivals.get((class_id, receives))
                    if arrival is None or (arrival > rank.death_s and now < arrival):
                        return self._stop(class_id, rank, now, place, op, (class_id, receives), arrival)
                    if arrival > now:
                        spans.append((WAIT, receives, now, arrival, 0, 0.0))
                        now = arrival
                op = 0
                if born or workspace:
                    rank.bytes += born
                    memory.append((now, rank.bytes + workspace))
                if self._unhindered and (block := self._block(class_id, ops)) is not None:
                    now, op = self._run(block, rank, label, now), len(ops)
            while op < len(ops):
                piece = ops[op]
                if isinstance(piece, Compute):
                    name, end = piece.what or label, now + piece.seconds * (steady or rank.noise())
                    if end > rank.death_s:
                        spans.append((COMPUTE, name, now, max(now, rank.death_s), 0, 0.0))
                        return self._stop(class_id, rank, rank.death_s, place, op, None, None)
                    spans.append((COMPUTE, name, now, end, piece.bytes, piece.flops))
                    now = end
                elif now > rank.death_s:
                    return self._stop(class_id, rank, rank.death_s, place, op, None, None)
                elif isinstance(piece, Post):
                    self._post(class_id, piece, label, now)
                    if not self._overlap:
                        spans.append((WAIT, label, now, now + piece.seconds, 0, 0.0))
                        now += piece.seconds
                elif isinstance(piece, Meet):
                    self._come(class_id, rank, piece, label, now)
                else:
                    meeting = self._meeting(class_id, rank, piece, label)
                    end = meeting.end_s
                    beside = self._runs_beside(meeting)
                    if not beside and end < math.inf:
                        end = max(now, end) + meeting.seconds
                    if end > rank.death_s or end == math.inf:
                        known = None if meeting.end_s == math.inf else end
                        return self._stop(class_id, rank, now, place, op, meeting, known)
                    del rank.open[piece.key]
                    name = meeting.names[class_id]
                    if not beside:
                        spans.append((COMMUNICATION, name, end - meeting.seconds, end, meeting.piece.bytes, 0.0))
                    if end > now:
                        spans.append((WAIT, name, now, end, 0, 0.0))
                        now = end
                op += 1
            if workspace or dying:
                rank.bytes -= dying
                memory.append((now, rank.bytes))
            place, op = place + 1, -1
        rank.place, rank.time_s, timeline.end_s = place, now, now
        return None

    def _block(self, class_id: int, ops: tuple[Op, ...]) -> ActionBlock | None:
        """The block of an action's operations; None if they are no block."""
        key = class_id, id(ops)
        if key not in self._blocks:
            self._blocks[key] = block_of(ops, partial(self._own_group, class_id))
        return self._blocks[key]

    def _own_group(self, class_id: int, meet: Meet) -> GroupKey | None:
        """The group of a collective, if all of its ranks are of one class."""
        members = self._folded.meeting(meet.piece.axis, class_id, meet.piece.members)
        return (meet.piece.axis, members) if members == (class_id,) else None

    def _run(self, block: ActionBlock, rank: _Rank, label: str | Action, now: float) -> float:
        """Run a block. Returns its end."""
        free_s = [self._free_s.get(group, 0.0) for group in block.groups]
        rank.timeline.parts.append(RanBlock(block, label, now, tuple(free_s)))
        end_s = block.run(now, free_s)
        self._free_s.update(zip(block.groups, free_s, strict=True))
        return end_s

    def _go_on(self, class_id: int, entries: tuple[SimulatedAction, ...]) -> None:
        """Run these entries, after which the rank decides again. Without entries, continue after the decisions."""
        rank = self._ranks[class_id]
        rank.entries[rank.place : rank.place] = entries
        rank.decides_at = rank.decides_at + len(entries) if entries else -1
        self._ready.append(class_id)

    def _stop(
        self,
        class_id: int,
        rank: _Rank,
        now: float,
        place: int,
        op: int,
        awaited: _Meeting | _MessageKey | None,
        known_s: float | None,
    ) -> None:
        """Stop a rank: it waits for ``awaited``, or it dies. It dies if ``awaited`` is None. It also dies if
        ``known_s``, the end of the wait, is given: the caller has then found that the rank dies before this time."""
        rank.time_s, rank.place, rank.op = now, place, op
        if awaited is not None and known_s is None:
            self._waiting.setdefault(awaited, []).append(class_id)
            return
        if awaited is not None:
            label = self._label(awaited, class_id)
            rank.timeline.parts.append((WAIT, label, now, max(now, rank.death_s), 0, 0.0))  # now may be after the death
        rank.timeline.end_s = rank.death_s

    # --- messages and collectives ------------------------------------------------------------------------------------

    def _post(self, class_id: int, piece: Post, label: str | Action, now: float) -> None:
        targets = self._folded.linked(class_id, piece.target)
        self._messages[class_id, piece.received] = (label, now, piece.bytes, len(targets))
        for target in targets:
            arrive = partial(self._arrive, class_id, (target, piece.received))
            if self._links is None:
                arrive(now + piece.seconds)
            else:  # every rank is a class by itself
                self._links.start(arrive, now, self._links.message(piece.bytes // len(targets), class_id, target))

    def _arrive(self, sender: int, awaited: _MessageKey, time_s: float) -> None:
        """Record that a message has arrived. A send ends when all its messages have arrived, and a receive when the
        messages of all its senders have."""
        sent = sender, awaited[1]
        label, start_s, num_bytes, left = self._messages.pop(sent)
        if left > 1:
            self._messages[sent] = label, start_s, num_bytes, left - 1
        else:
            self._ranks[sender].timeline.parts.append((COMMUNICATION, label, start_s, time_s, num_bytes, 0.0))
        arrived = self._arrived.setdefault(awaited, [])
        arrived.append(time_s)
        if len(arrived) == len(self._folded.linked(awaited[0], self._stages[sender])):
            self._arrivals[awaited] = max(self._arrived.pop(awaited))
            self._ready.extend(self._waiting.pop(awaited, ()))
            self._decisions.arrive(awaited[0], self._arrivals[awaited])

    def _come(self, class_id: int, rank: _Rank, piece: Meet, label: str | Action, now: float) -> None:
        axis, name = piece.piece.axis, name_of(piece, label)
        members = self._folded.meeting(axis, class_id, piece.piece.members)
        if piece.piece.part and self._links is not None:  # every rank is a class by itself
            first = members.index(class_id) // piece.piece.part * piece.piece.part
            members = members[first : first + piece.piece.part]
        number = rank.counts.get((axis, members), 0)
        rank.counts[axis, members] = number + 1
        key = (axis, members, number)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(piece.piece, piece.seconds)
        expected, arriving = meeting.piece, piece.piece
        if (expected.collective, expected.bytes) != (arriving.collective, arriving.bytes):
            raise ScheduleError(
                f"`{name}` is {arriving.collective} of {arriving.bytes} bytes, and meets `{expected.what}`, "
                f"{expected.collective} of {expected.bytes} bytes",
                where=f"rank {self._folded.first[class_id]}, axis {axis}",
                remedy="give all ranks of a group the same collectives in the same order",
            )
        meeting.names[class_id] = name
        meeting.start_s = max(meeting.start_s, now)
        rank.open[piece.key] = meeting
        if len(meeting.names) < len(members):
            return
        queue = self._queues.setdefault((axis, members), deque())
        queue.append(key)
        if len(queue) == 1:
            self._begin(key)

    def _begin(self, key: _MeetingKey) -> None:
        """Begin the next collective of a group. The group's previous collective has ended."""
        meeting = self._meetings[key]
        meeting.start_s = max(meeting.start_s, self._free_s.get(key[:2], 0.0))
        if self._links is None:
            self._meet(key, meeting.start_s + (meeting.seconds if self._runs_beside(meeting) else 0.0))
        else:
            piece = meeting.piece
            flows = self._links.collective(
                piece.collective, piece.bytes, key[1], meeting.seconds if piece.coding else None
            )
            self._links.start(partial(self._meet, key), meeting.start_s, flows)

    def _meet(self, key: _MeetingKey, end_s: float) -> None:
        meeting = self._meetings.pop(key)
        meeting.end_s = end_s
        for class_id, name in meeting.names.items() if self._runs_beside(meeting) else ():
            span = (COMMUNICATION, name, meeting.start_s, end_s, meeting.piece.bytes, 0.0)
            self._ranks[class_id].timeline.parts.append(span)
        self._ready.extend(self._waiting.pop(meeting, ()))
        self._free_s[key[:2]] = end_s
        queue = self._queues[key[:2]]
        queue.popleft()
        if queue:
            self._begin(queue[0])

    def _runs_beside(self, meeting: _Meeting) -> bool:
        """Whether a collective runs while ranks compute. Between boxes of CPUs, only shifts do."""
        return self._overlap or (meeting.piece.collective == "shift" and not meeting.piece.blocking)

    def _meeting(self, class_id: int, rank: _Rank, piece: Until, label: str | Action) -> _Meeting:
        if piece.key not in rank.open:
            raise ScheduleError(
                f"`{label}` waits for `{piece.key[1]}`, which was not started",
                where=f"rank {self._folded.first[class_id]}",
                remedy="add a Communicate of that name, not blocking, before the Wait",
            )
        return rank.open[piece.key]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _check_finished(self) -> None:
        """Check that all ranks have ended, or that the waiting ranks wait because other ranks have died."""
        stuck = {class_id: awaited for awaited, waiting in self._waiting.items() for class_id in waiting}
        stuck |= self._decisions.awaited()
        if not stuck:
            return
        last = max(rank.time_s for rank in self._ranks)
        for class_id, awaited in stuck.items():
            rank = self._ranks[class_id]
            label = self._label(awaited, class_id)
            if not any(other.timeline.end_s == other.death_s for other in self._ranks):
                raise ScheduleError(
                    f"it waits for ever: `{rank.entries[rank.place].label}` for `{label}`",
                    where=f"rank {self._folded.first[class_id]}",
                    remedy="`schedules.check` finds what is missing, or the circle",
                )
            until = min(max(last, rank.time_s), rank.death_s)
            rank.timeline.parts.append((WAIT, label, rank.time_s, max(rank.time_s, until), 0, 0.0))
            rank.timeline.end_s, rank.timeline.waits_for = max(rank.time_s, until), label

    @staticmethod
    def _label(awaited: "_Meeting | _MessageKey", class_id: int) -> str:
        return awaited.names[class_id] if isinstance(awaited, _Meeting) else str(awaited[1])
