"""Times work on a device."""

import time
from collections.abc import Callable

import torch

from meshwright.torch_private import keep_gpu_busy


class Stopwatch:
    """Measures the seconds of work on a device, by the device's own clock if it runs behind the host."""

    LEAST_S, MOST_CALLS = 2e-3, 200
    QUEUED_CYCLES = 20_000_000
    """Clock cycles of a GPU (about 10 ms) that it spends before queued work, so that the host is ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Let the host wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, work: Callable[[], object]) -> float:
        """The seconds of some work that is launched now."""
        if self._device.type != "cuda":
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._device))
        work()
        end.record(torch.cuda.current_stream(self._device))
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def queued(self, work: Callable[[], object]) -> float:
        """The seconds of work that has been launched before the device begins it."""
        if self._device.type == "cuda":
            keep_gpu_busy(self.QUEUED_CYCLES)
        return self.seconds(work)

    def each(self, call: Callable[[], object], calls: int = 0) -> float:
        """The seconds of a call: the mean over ``calls`` calls that are queued in a row. With 0, as many calls are
        queued as take a few milliseconds together."""
        call()
        once_s = max(self.seconds(call), 1e-7)
        calls = calls or max(2, min(self.MOST_CALLS, int(self.LEAST_S / once_s)))

        def several() -> None:
            for _ in range(calls):
                call()

        return self.queued(several) / calls
