"""The state that a rank keeps for each of its process groups, such as which ranks are gone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from meshwright.comm.attendance import Attendance, close
from meshwright.comm.blocks import Blocks
from meshwright.comm.collectives import Collectives
from meshwright.comm.transport.base import Channel, Trouble
from meshwright.comm.transport.mpi import Mpi
from meshwright.comm.transport.progress import RankStreams
from meshwright.comm.watch import Watch
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.schedules.collectives.choice import chosen

P = ParamSpec("P")
T = TypeVar("T")

TOLD = 4096
"""Upper limit on the descriptions of collectives that a ``GroupState`` caches."""


@dataclass
class MeasuredCoding:
    """Measurements of the coded collective with a label: the number of runs, and, for the last run, the bytes of the
    vector, the sent bytes and the seconds of coding. ``residual_share``: the norm of the residual divided by the norm
    of the gradients. If vectors are added up in coded form, another library may send them. The sent bytes are then
    those of a ring."""

    count: int = 0
    num_bytes: int = 0
    sent_bytes: int = 0
    coding_s: float = 0.0
    residual_share: float = 0.0


class GroupState:
    """The state that this rank keeps for one process group; torch.distributed's own table of groups cannot hold it.

    ``axis`` is a text such as ``axis dp`` that names the group's mesh axis; it is empty if the group has no axis.
    ``watch`` measures the group's collectives if their algorithm may change. ``begun`` is the number of collectives
    begun so far. ``blocks`` is memory that results of collectives reuse. ``progress`` holds this rank's streams, which
    are shared by all groups. ``coded`` has the last coded collective of every label. For the world only, ``has_links``
    tells whether any watched group spans several boxes, ``attendance`` (set by ``attend``) tells which ranks are gone,
    and ``meshes`` has the groups of meshes that are made once.
    """

    def __init__(self, progress: RankStreams) -> None:
        self.axis, self.begun, self.progress, self.has_links = "", 0, progress, False
        self.attendance: Attendance | None = None
        self.watch: Watch | None = None
        self.collectives: Collectives | None = None
        self.by_mpi: Mpi | None = None
        self.blocks = Blocks()
        self.channels: dict[int, Channel] = {}
        self.coded: dict[str, MeasuredCoding] = {}
        self.meshes: dict[Mesh, dict[str, AxisGroup]] = {}
        self._told: dict[tuple[str, object], str] = {}

    def algorithm(self, text: str, operation: str, num_bytes: int) -> str:
        """The algorithm that this group uses for a collective over a vector of ``num_bytes``."""
        watch = self.watch
        return chosen(text, operation, num_bytes) if watch is None else watch.algorithm(text, operation, num_bytes)

    def told(self, label: str, where: object) -> str:
        """The description of a collective in errors: axis, label of the tensor, place in the schedule."""
        description = self._told.get((label, where))
        if description is None:
            if len(self._told) >= TOLD:
                self._told.clear()
            description = ", ".join(part for part in (self.axis, label, str(where or "")) if part)
            self._told[label, where] = description
        return description


_MEMBERS: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
"""Maps a group to its state. The state lives as long as the group. If the state refers to its group (as ``TorchLane``
does), it lives until the process ends."""


def member(group: dist.ProcessGroup) -> GroupState:
    """The state that this rank keeps for a group; made at the first call."""
    state = _MEMBERS.get(group)
    if state is None:
        world = dist.group.WORLD
        progress = RankStreams() if world is None or group is world else member(world).progress
        state = _MEMBERS[group] = GroupState(progress)
    return state


def attend() -> Attendance | None:
    """This rank's ``Attendance``, which tells which other ranks are gone; None in a world of one rank."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    state = member(world)
    if state.attendance is None:
        state.attendance = Attendance(world)
    return state.attendance


def close_all() -> None:
    """Close this rank's connections in all groups. The rank cannot communicate afterwards."""
    for group in list(_MEMBERS):
        close(group)


def culprit() -> Trouble | None:
    """The rank that caused a lost connection, and why; None if unknown."""
    world = dist.group.WORLD
    attendance = member(world).attendance if world is not None else None
    return attendance.culprit() if attendance is not None else None


def naming(awaited: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a decorator that raises a LostRankError if torch.distributed has lost a rank during the call. The error
    names the lost rank, and says that this rank waits for ``awaited``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                is_lost = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
                trouble = culprit() if is_lost else None
                if trouble is None:
                    raise
                raise trouble.error(f"this rank waits for {awaited} ({function.__name__})") from error

        return run

    return decorate
