"""The state that this rank keeps for each of its process groups, and the ranks that are gone."""

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
    """The state that this rank keeps for one group; torch.distributed's table of groups by name cannot hold it.

    ``axis``: the mesh axis of the group (``axis dp``), else empty. ``watch``: measures the group's collectives where
    their algorithm may change. ``begun``: the number of collectives begun. ``blocks``: memory that results reuse.
    ``progress``: this rank's streams, shared by all groups. Only for the world: ``has_links``, whether any watched
    group spans several boxes; ``attendance``, set by ``attend``.
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
        """The description of a collective in errors: axis, label of the tensor, place in the schedule."""
        description = self._told.get((label, where))
        if description is None:
            if len(self._told) >= TOLD:
                self._told.clear()
            description = ", ".join(part for part in (self.axis, label, str(where or "")) if part)
            self._told[label, where] = description
        return description


_MEMBERS: WeakKeyDictionary[dist.ProcessGroup, Member] = WeakKeyDictionary()
"""Each group's state. It ends with the group, or with the process if it refers to the group (as ``TorchLane`` does)."""


def member(group: dist.ProcessGroup) -> Member:
    """The state that this rank keeps for a group; made at the first call."""
    state = _MEMBERS.get(group)
    if state is None:
        world = dist.group.WORLD
        progress = Progress() if world is None or group is world else member(world).progress
        state = _MEMBERS[group] = Member(progress)
    return state


def attend() -> Attendance | None:
    """This rank's attendance, by which ranks see which other ranks are gone; None in a world of one rank."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    state = member(world)
    if state.attendance is None:
        state.attendance = Attendance(world)
    return state.attendance


def close_all() -> None:
    """Close this rank's connections; it no longer communicates."""
    for group in list(_MEMBERS):
        close(group)


def culprit() -> Trouble | None:
    """The rank that caused a lost connection, if it is known."""
    world = dist.group.WORLD
    attendance = member(world).attendance if world is not None else None
    return attendance.culprit() if attendance is not None else None


def naming(awaited: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: if torch.distributed lost a rank, raise a LostRankError with that rank and the ``awaited`` ranks."""

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
