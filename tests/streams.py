"""Streams and events of a CUDA device that is not there: a stand-in for ``torch.cuda`` with a clock for each stream.

The host takes no time unless it waits. Work of a stream begins when the work before it has ended, but not before the
host has launched it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from meshwright.comm import record, started
from meshwright.runtime import device

CPU = torch.device("cpu")


class Device:
    """``host_s`` is the host's clock, ``current`` the current stream."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.kernels = self.current = Stream(self)
        self.communication = Stream(self)

    def perf_counter(self) -> float:
        return self.host_s

    def work(self, seconds: float) -> None:
        """Launch a kernel or a copy on the current stream."""
        self.current.now_s = max(self.current.now_s, self.host_s) + seconds

    def collective(self, seconds: float) -> Collective:
        """Start a collective, as NCCL does: its stream waits for the current stream, which goes on."""
        stream = self.communication
        stream.now_s = max(stream.now_s, self.current.now_s, self.host_s) + seconds
        return Collective(self, stream.now_s)

    @contextmanager
    def there(self) -> Iterator[None]:
        """Replace the streams and events of ``torch.cuda`` by those of this device, and the clock of ``time`` by the
        clock of its host."""
        with ExitStack() as stack:
            for name, value in {
                "Event": lambda enable_timing=False: Event(self), "Stream": lambda *_, **__: Stream(self),
                "stream": self._entered, "current_stream": lambda *_: self.current,
            }.items():  # fmt: skip
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            for module in (record, started, device):
                stack.enter_context(mock.patch.object(module, "time", self))
            yield

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """``now_s``: when all of its work will have ended."""

    def __init__(self, device: Device) -> None:
        self._device, self.now_s = device, 0.0

    def wait_stream(self, other: Stream) -> None:
        self.now_s = max(self.now_s, other.now_s)


class Event:
    """A point in the work of a stream, which the device reaches at ``at_s``."""

    def __init__(self, device: Device) -> None:
        self._device, self.at_s = device, 0.0

    def record(self, stream: Stream) -> None:
        self.at_s = max(stream.now_s, self._device.host_s)

    def synchronize(self) -> None:
        self._device.host_s = max(self._device.host_s, self.at_s)

    def elapsed_time(self, later: Event) -> float:
        assert later.at_s <= self._device.host_s, "the device has not reached the event"
        assert later.at_s >= self.at_s
        return (later.at_s - self.at_s) * 1e3


class Collective(dist.Work):
    """A collective that ends at ``end_s``."""

    def __init__(self, device: Device, end_s: float) -> None:
        super().__init__()
        self._device, self._end_s = device, end_s

    def block_current_stream(self) -> None:
        self._device.current.now_s = max(self._device.current.now_s, self._end_s)

    def wait(self, timeout: Any = None) -> bool:
        self.block_current_stream()
        return True
