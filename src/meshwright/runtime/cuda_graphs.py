"""CUDA graphs: kernels that are captured once, and that one launch runs again on the same memory.

A dry run has graphs of its own (``runtime/rehearsed_graphs.py``).
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class KernelGraph(Protocol):
    """Captured kernels."""

    def replay(self) -> None:
        """Launch the kernels again. They read and write the memory that they had when they were captured."""


class Owner(Protocol):
    """A step whose phases are captured."""

    def release_graphs(self) -> None:
        """Free the graphs and their memory."""


class Graphs(ABC):
    """Captures work on a device as graphs. At most one step has graphs at a time, because each has memory of its own:
    the step that ran twice in a row, so that a smaller last batch leaves the graphs of the others as they are."""

    def __init__(self) -> None:
        self._last: Owner | None = None
        self._owner: Owner | None = None

    def repeats(self, step: Owner) -> bool:
        """Whether ``step``, which begins now, also ran last."""
        repeats, self._last = self._last is step, step
        return repeats

    def own(self, step: Owner) -> None:
        """Note that ``step`` captures its phases now; another step's graphs are freed."""
        if self._owner is not None and self._owner is not step:
            self._owner.release_graphs()
        self._owner = step

    @abstractmethod
    def prepare(self) -> None:
        """Let the device finish its work, and free the memory that the allocator keeps for other uses."""

    @abstractmethod
    def pool(self) -> Any:
        """A new pool of memory. The graphs of a pool must be launched in the order in which they were captured, because
        a later graph may have the memory that an earlier one needs no more."""

    @abstractmethod
    def capture(self, work: Callable[[], T], pool: Any) -> tuple[KernelGraph, T]:
        """Capture the kernels that ``work`` launches, instead of running them. What ``work`` allocates comes from
        ``pool``. Returns the graph, and the results of ``work``, whose values exist after a ``replay``."""


class CudaGraphs(Graphs):
    """CUDA graphs. Work is captured on a stream of its own. A collective may run on the stream of its communicator, if
    it is waited for within ``work``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def prepare(self) -> None:
        """Wait for the device, and free what the allocator keeps."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def pool(self) -> Any:
        """A new private pool."""
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T], pool: Any) -> tuple[KernelGraph, T]:
        """Capture on a stream of its own."""
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # other threads, such as those of loaders and of NCCL's watchdog, may go on
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph, result
