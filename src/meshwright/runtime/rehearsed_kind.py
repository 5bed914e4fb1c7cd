"""The kind of a device that is not there: its streams and events only note what a dry run's rank asks of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.record import DeviceTimeline
from meshwright.runtime.cuda_graphs import Graphs
from meshwright.runtime.device import CopyStream, DeviceEvent
from meshwright.runtime.fake_operators import DEVICE
from meshwright.runtime.rehearsal import Rehearsal
from meshwright.runtime.rehearsed_graphs import RehearsedGraphs


class RehearsedKind:
    """Stands in for ``CudaKind``."""

    is_late = True
    device = DEVICE

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal, self._graphs = rehearsal, RehearsedGraphs(rehearsal)

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
        """None: nothing takes time."""
        return None

    def graphs(self) -> Graphs | None:
        """Graphs that launch nothing."""
        return self._graphs


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
