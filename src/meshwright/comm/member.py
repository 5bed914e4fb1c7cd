"""The state that a rank keeps for each of its process groups, such as which ranks are gone."""

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from meshwright.comm.attendance import Attendance
from meshwright.comm.blocks import BlockPool
from meshwright.comm.collectives import Collectives
from meshwright.comm.transport.base import Channel, Trouble
from meshwright.comm.transport.mpi import Mpi
from meshwright.comm.transport.point_to_point import close
from meshwright.comm.transport.process import box
from meshwright.comm.transport.progress import QUIET_S, RankStreams
from meshwright.comm.watch import Watch
from meshwright.comm.watchdog import Watchdog
from meshwright.errors import RankError
from meshwright.ir.graph import Operator
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
    ``watchdog`` (set by ``attend``) watches over this rank's waits, ``meshes`` has the groups of meshes that are made
    once, and ``directions`` are the groups of the world that carry messages between accelerators to higher and to lower
    ranks.
    """

    def __init__(self, progress: RankStreams) -> None:
        self.axis, self.begun, self.progress, self.has_links = "", 0, progress, False
        self.attendance: Attendance | None = None
        self.watchdog: Watchdog | None = None
        self.watch: Watch | None = None
        self.collectives: Collectives | None = None
        self.by_mpi: Mpi | None = None
        self.blocks = BlockPool()
        self.channels: dict[int, Channel] = {}
        self.coded: dict[str, MeasuredCoding] = {}
        self.meshes: dict[Mesh, dict[str, AxisGroup]] = {}
        self.directions: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._descriptions: dict[tuple[str, object], str] = {}
        self._described: dict[tuple[object, ...], tuple[bytes, int]] = {}
        self._index = -1

    def record(
        self, group: dist.ProcessGroup, what: str, num: int, dtype: torch.dtype | None, label: str = "",
        where: object = None, *, is_alike: bool = True, ranks: Sequence[int] | None = None,
    ) -> int:  # fmt: skip
        """Count an operation of the group, and record it: ``num`` elements of ``dtype``. Returns the number of the
        event, 0 if nothing is recorded. ``is_alike``: ``num`` and ``dtype`` are the same on all ranks. ``ranks`` of the
        group, if torch.distributed does not know them."""
        self.begun += 1
        recorder = self.progress.recorder
        if recorder is None:
            return 0
        if self._index < 0:
            self._index = recorder.group(group.group_name, ranks or dist.get_process_group_ranks(group))
        key = (what, num, dtype, label, where)
        words, signature = self._described.get(key) or self._describe(key, is_alike)
        num_bytes = num * dtype.itemsize if dtype is not None else 0
        return recorder.begin(self._index, self.begun, words, num_bytes, signature)

    def _describe(self, key: tuple[str, int, torch.dtype | None, str, object], is_alike: bool) -> tuple[bytes, int]:
        """An operation in words, and its signature."""
        what, num, dtype, label, where = key
        elements = f"{what} of {num} x {str(dtype).removeprefix('torch.')}" if dtype is not None else what
        description = self.description(label, where)
        words = elements + f" ({description})" * bool(description)
        signature = 1 + zlib.crc32((elements if is_alike else what).encode()) % (2**32 - 1)
        if len(self._described) >= TOLD:
            self._described.clear()
        self._described[key] = words.encode(), signature
        return words.encode(), signature

    def algorithm(self, text: str, operation: str, num_bytes: int) -> str:
        """The algorithm that this group uses for a collective over a vector of ``num_bytes``."""
        watch = self.watch
        return chosen(text, operation, num_bytes) if watch is None else watch.algorithm(text, operation, num_bytes)

    def description(self, label: str, where: object) -> str:
        """The description of a collective in errors: axis, label of the tensor with its source line, place in the
        schedule."""
        description = self._descriptions.get((label, where))
        if description is None:
            if len(self._descriptions) >= TOLD:
                self._descriptions.clear()
            source = self.progress.sources.get(label, "")
            labelled = f"{label} at {source}" if source else label
            description = ", ".join(part for part in (self.axis, labelled, str(where or "")) if part)
            self._descriptions[label, where] = description
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


def attend(folder: Path | None = None) -> Attendance | None:
    """This rank's ``Attendance``, which tells which other ranks are gone; None in a world of one rank. The first call
    also starts the watchdog. ``folder`` keeps the flight recorder of this rank; None: only memory does."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    state = member(world)
    if state.attendance is None:
        state.attendance = attendance = Attendance(world)
        state.watchdog = Watchdog(
            world, box(), state.progress, attendance.timeout_s, close_all, attendance.is_gone, folder
        )
        attendance.recorder = state.watchdog.recorder
    return state.attendance


def name_sources(operators: Iterable[Operator]) -> None:
    """Let descriptions of collectives name the source lines of these operators."""
    world = dist.group.WORLD
    if world is not None:
        sources = member(world).progress.sources
        sources.update({name: each.source for each in operators if each.source for name in (each.name, *each.outputs)})


def close_all() -> None:
    """Close this rank's connections in all groups. The rank cannot communicate afterwards."""
    for group in list(_MEMBERS):
        with suppress(ValueError):  # the group was destroyed before
            close(group)


def culprit() -> Trouble | None:
    """The rank that caused a lost connection, and why; None if unknown."""
    world = dist.group.WORLD
    attendance = member(world).attendance if world is not None else None
    return attendance.culprit() if attendance is not None else None


@contextmanager
def waiting(
    group: dist.ProcessGroup | None, what: str, value: torch.Tensor | None = None, *, is_alike: bool = True
) -> Iterator[None]:
    """Record that this rank runs an operation of torch.distributed, for which it waits, in a group (None: the world),
    on ``value``. Keep streams and collectives moving meanwhile."""
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        yield
        return
    state = member(group)
    num, dtype = (value.numel(), value.dtype) if value is not None else (0, None)
    event, recorder = state.record(group, what, num, dtype, is_alike=is_alike), state.progress.recorder
    with state.progress.moving():
        if recorder is None:
            yield
            return
        recorder.wait(event)
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError) and state.progress.explain is not None:
                for line in state.progress.explain():
                    error.add_note(line)
            recorder.fail(event)
            raise
        recorder.end(event)


def naming(awaited: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a decorator that raises a LostRankError if torch.distributed has lost a rank during the call. The error
    names the lost rank, and says that this rank waits for ``awaited``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
                    raise
                if (verdict := _verdict()) is not None:
                    raise verdict from error
                waits = f"this rank waits for {awaited} ({function.__name__})"
                report = tuple(getattr(error, "__notes__", ()))
                if (trouble := culprit()) is None and not report:
                    raise
                where, _, problem = report[0].partition(": ") if report else ("", "", "")
                lost = trouble or Trouble(where, problem)
                raise lost.error("\n     ".join((waits, *report[1:]))) from error

        return run

    return decorate


def check_verdict() -> float:
    """Raise the error of waits that would never end, if the watchdog has found one. Returns the seconds until the next
    check, as ``RankStreams.move`` does."""
    if (verdict := _verdict()) is not None:
        raise verdict
    return QUIET_S


def leave(group: dist.ProcessGroup) -> None:
    """Let the watchdog watch no more, if ``group`` is the world that it watches."""
    state = _MEMBERS.get(group)
    if state is not None and state.watchdog is not None:
        state.watchdog.stop()
        state.watchdog = state.progress.recorder = state.progress.explain = None


def _verdict() -> RankError | None:
    """The error of waits that would never end, if the watchdog has found one."""
    world = dist.group.WORLD
    return member(world).progress.verdict if world is not None else None
