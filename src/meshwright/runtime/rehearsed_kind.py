"""The kind of a device that is not there: its streams and events only note what a dry run's rank asks of them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.record import DeviceOperation, DeviceTimeline
from meshwright.comm.symmetric_memory import rehearsed_groups
from meshwright.ir.mesh import AxisGroup
from meshwright.runtime.cuda_graphs import Graphs
from meshwright.runtime.device import CopyStream, DeviceEvent
from meshwright.runtime.fake_operators import DEVICE
from meshwright.runtime.rehearsal import Rehearsal
from meshwright.runtime.rehearsed_graphs import RehearsedGraphs


class RehearsedKind:
    """Stands in for ``CudaKind``. ``box``: the number of GPUs of a box, which reach each other's memory."""

    is_late = True
    device = DEVICE

    def __init__(self, rehearsal: Rehearsal, box: int = 1) -> None:
        self._rehearsal, self._graphs, self._box = rehearsal, RehearsedGraphs(rehearsal), box

    @property
    def memory_now(self) -> Callable[[], int] | None:
        """Reads the bytes of the fake tensors on the device."""
        return lambda: self._rehearsal.memory.held

    def copies(self) -> CopyStream | None:
        """A stream that runs nothing."""
        return _Copies(self._rehearsal)

    def pinned(self, like: Tensor) -> Tensor:
        """Fake memory of the host that counts as pinned."""
        host = torch.empty_like(like, device="cpu")
        self._rehearsal.pinned.add(host.untyped_storage())
        return host

    def event(self) -> DeviceEvent | None:
        """An event that knows in which step it was recorded."""
        return _Event(self._rehearsal, self._rehearsal.moment)

    def timeline(self) -> DeviceTimeline | None:
        """A clock that notes the order of marks, and that the rank may not read within a step."""
        return _Timeline(self._rehearsal)

    def graphs(self) -> Graphs | None:
        """Graphs that launch nothing."""
        return self._graphs

    def symmetric(self, groups: Iterable[AxisGroup]) -> frozenset[str]:
        """The groups within a box."""
        return rehearsed_groups(groups, self._box)


@dataclass
class _Event:
    """The host may wait for work of an earlier step: the device has later work by then."""

    rehearsal: Rehearsal
    moment: str

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.moment == self.rehearsal.moment:
            self.rehearsal.note("wait", "the host waits for an event of the same step")


@dataclass
class _Timeline:
    rehearsal: Rehearsal

    def mark(self) -> object:
        return self.rehearsal.mark()

    def mark_end(self, lane: str, operations: Sequence[DeviceOperation]) -> object:
        return self.rehearsal.mark_end(lane, operations)

    def times_s(self, marks: Sequence[object]) -> list[float]:
        self.rehearsal.note("wait", "the host reads the times of a trace")
        return [float(index) for index in range(len(marks))]


@dataclass
class _Copies:
    rehearsal: Rehearsal

    def entered(self) -> AbstractContextManager[object]:
        return self.rehearsal.copying()

    def wait_for_kernels(self) -> None:
        pass

    def hold_kernels(self) -> None:
        self.rehearsal.on_their_way.clear()

    def keep(self, value: Tensor) -> None:
        pass

    def lend(self, value: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        self.rehearsal.note("wait", "the host waits for the copies")
