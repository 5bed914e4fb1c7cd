"""What this rank keeps of the process groups that it is in, and which ranks of them are gone."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from meshwright.comm.attendance import Attendance, close
from meshwright.comm.blocks import Blocks
from meshwright.comm.collectives import Collectives
from meshwright.comm.transport.base import Channel, Trouble
from meshwright.comm.transport.mpi import Mpi
from meshwright.comm.transport.progress import Progress
from meshwright.comm.watch import Watch
from meshwright.schedules.collectives.choice import chosen

P = ParamSpec("P")
T = TypeVar("T")

TOLD = 4096
"""Upper limit on cached descriptions of collectives."""


class Member:
    """What this rank keeps of a group, for which torch.distributed's own table of groups by name has no room.

    ``axis``: of which it was made (``axis dp``); nothing for others. ``watch``: who looks at what its collectives take,
    where that may change. ``begun``: how many collectives have. ``blocks``: memory that results take turns in.
    ``progress``: this rank's streams, which all groups share. Of the world: ``has_links``, whether any group of it has;
    ``attendance``, once the rank has begun to ``attend``.
    """

    def __init__(self, progress: Progress) -> None:
        self.axis, self.begun, self.progress, self.has_links = "", 0, progress, False
        self.attendance: Attendance | None = None
        self.watch: Watch | None = None
        self.collectives: Collectives | None = None
        self.by_mpi: Mpi | None = None
        self.blocks = Blocks()
        self.channels: dict[int, Channel] = {}
        self._told: dict[tuple[str, object], str] = {}

    def algorithm(self, text: str, operation: str, num_bytes: int) -> str:
        """The algorithm that this group uses for a collective over a vector of ``num_bytes``."""
        watch = self.watch
        return chosen(text, operation, num_bytes) if watch is None else watch.algorithm(text, operation, num_bytes)

    def told(self, label: str, where: object) -> str:
        """What a collective is of: axis, tensor, stage, micro-batch."""
        found = self._told.get((label, where))
        if found is None:
            if len(self._told) >= TOLD:
                self._told.clear()
            found = ", ".join(part for part in (self.axis, label, str(where or "")) if part)
            self._told[label, where] = found
        return found


_MEMBERS: WeakKeyDictionary[dist.ProcessGroup, Member] = WeakKeyDictionary()
"""An entry ends with its group, or where what it keeps holds that (wires, MPI, a watch) with the process."""


def member(group: dist.ProcessGroup) -> Member:
    """What this rank keeps of a group."""
    found = _MEMBERS.get(group)
    if found is None:
        world = dist.group.WORLD
        progress = Progress() if world is None or group is world else member(world).progress
        found = _MEMBERS[group] = Member(progress)
    return found


def attend() -> Attendance | None:
    """Let other ranks of the world see when this one is gone, and see it of them; None where it is alone."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    mine = member(world)
    if mine.attendance is None:
        mine.attendance = Attendance(world)
    return mine.attendance


def close_all() -> None:
    """Close this rank's connections: it will communicate no more."""
    for group in list(_MEMBERS):
        close(group)


def culprit() -> Trouble | None:
    """The rank that caused a lost connection, if it is known."""
    world = dist.group.WORLD
    attendance = member(world).attendance if world is not None else None
    return attendance.culprit() if attendance is not None else None


def naming(awaited: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Raise as a LostRankError what torch.distributed says of a lost rank; it names that rank and the ``awaited``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                is_lost = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
                found = culprit() if is_lost else None
                if found is None:
                    raise
                raise found.error(f"this rank waits for {awaited} ({function.__name__})") from error

        return run

    return decorate
