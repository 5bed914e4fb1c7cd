"""Kinds of device: what a trainer asks of a CPU or a CUDA device besides tensors (streams, memory, detection).

A dry run has a kind of its own (``runtime/rehearsal.py``), which stands in for a device that is not there.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.record import DeviceOperation, DeviceTimeline, copying
from meshwright.comm.symmetric_memory import symmetric_groups
from meshwright.ir.mesh import AxisGroup
from meshwright.runtime.cuda_graphs import CudaGraphs, Graphs
from meshwright.runtime.memory import OwnMemory, has_own_memory
from meshwright.torch_private import symmetric_memory_bytes

CPU = torch.device("cpu")


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Let the host wait until the device has reached it."""


class CopyStream(Protocol):
    """A stream of the device that runs beside the stream of its kernels, for copies."""

    def entered(self) -> AbstractContextManager[object]:
        """Put the work that is started in the ``with`` block on this stream."""

    def wait_for_kernels(self) -> None:
        """Let later copies wait for the kernels that were started so far."""

    def hold_kernels(self) -> None:
        """Let later kernels wait for the copies that were started so far."""

    def keep(self, value: Tensor) -> None:
        """Keep the memory of a tensor until the copies that were started so far have read it."""

    def lend(self, value: Tensor) -> None:
        """Keep the memory of a tensor that was made on this stream until the kernels that read it have ended."""

    def synchronize(self) -> None:
        """Let the host wait for all copies."""


class Properties(NamedTuple):
    """A device as its driver reports it: its name, its memory, its number of processors, and the devices of the box."""

    name: str
    memory_bytes: int
    processors: int
    num_devices: int


class DeviceKind(Protocol):
    """The operations of a kind of device.

    ``is_late``: the device runs behind the host, which must not wait for it within a step. ``copies``: a stream for
    copies between host and device; None if both have the same memory.
    """

    device: torch.device
    is_late: bool

    @property
    def memory_now(self) -> Callable[[], int] | None:
        """A function that reads the bytes held now; None if there is no such count."""

    def copies(self) -> CopyStream | None:
        """A new stream for copies; None if host and device have the same memory."""

    def pinned(self, like: Tensor) -> Tensor:
        """Memory of the host for a copy of a tensor, which the device can write while the host goes on."""

    def event(self) -> DeviceEvent | None:
        """The current point of the device's work; None if the device does not run behind the host."""

    def timeline(self) -> DeviceTimeline | None:
        """The clock of the device; None if the device does not run behind the host."""

    def graphs(self) -> Graphs | None:
        """The graphs of a trainer's steps; None if the device does not run behind the host."""

    def symmetric(self, groups: Iterable[AxisGroup]) -> frozenset[str]:
        """The names of the groups whose devices run products in memory that they share. All ranks of the groups must
        call this."""


class CpuKind:
    """A CPU: all work is done when its call returns."""

    is_late = False

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    @property
    def memory_now(self) -> Callable[[], int] | None:
        """Reads the bytes of this process's own pages."""
        return OwnMemory() if has_own_memory() else None

    def copies(self) -> CopyStream | None:
        """None: nothing is copied to another memory."""
        return None

    def pinned(self, like: Tensor) -> Tensor:
        """Ordinary memory."""
        return torch.empty_like(like, device=CPU)

    def event(self) -> DeviceEvent | None:
        """None: there is nothing to wait for."""
        return None

    def timeline(self) -> DeviceTimeline | None:
        """None: work is done when its call returns."""
        return None

    def graphs(self) -> Graphs | None:
        """None: nothing is launched."""
        return None

    def symmetric(self, groups: Iterable[AxisGroup]) -> frozenset[str]:
        """None."""
        return frozenset()


class CudaKind:
    """A CUDA device, which runs its streams while the host goes on."""

    is_late = True

    def __init__(self, device: torch.device) -> None:
        self.device, self._graphs = device, CudaGraphs(device)

    @property
    def memory_now(self) -> Callable[[], int] | None:
        """Reads the bytes that tensors hold on the device, and those of memory that it shares with other GPUs."""
        return lambda: torch.cuda.memory_allocated(self.device) + symmetric_memory_bytes()

    def copies(self) -> CopyStream | None:
        """A stream of the device."""
        return _CudaCopies(self.device)

    def pinned(self, like: Tensor) -> Tensor:
        """Memory of the host that is locked in place."""
        return torch.empty_like(like, device=CPU, pin_memory=True)

    def event(self) -> DeviceEvent | None:
        """An event on the stream of the kernels."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def timeline(self) -> DeviceTimeline | None:
        """Events on the streams of kernels, copies and communication."""
        return _CudaTimeline(self.device)

    def graphs(self) -> Graphs | None:
        """CUDA graphs."""
        return self._graphs

    def symmetric(self, groups: Iterable[AxisGroup]) -> frozenset[str]:
        """The groups within a box whose GPUs reach each other's memory."""
        return symmetric_groups(groups, self.device)


class _CudaTimeline:
    """The streams of ``mark_end`` have a high priority only to come from another pool than those of copies and of NCCL:
    PyTorch hands out 32 streams in turn, and two users of one stream would wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: dict[str, torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark_end(self, lane: str, operations: Sequence[DeviceOperation]) -> torch.cuda.Event:
        if lane not in self._beside:
            self._beside[lane] = torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(self._beside[lane]):
            for operation in operations:
                operation.block_current_stream()
            return self.mark()

    def times_s(self, marks: Sequence[Any]) -> list[float]:
        for mark in marks:
            mark.synchronize()
        last = self.mark()  # after all others, on whatever streams they are
        last.synchronize()
        now_s = time.perf_counter()
        return [now_s - float(mark.elapsed_time(last)) / 1e3 for mark in marks]


class _CudaCopies:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait_for_kernels(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_kernels(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def keep(self, value: Tensor) -> None:
        value.record_stream(self._stream)

    def lend(self, value: Tensor) -> None:
        value.record_stream(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._stream.synchronize()


def device_kind(device: torch.device) -> DeviceKind:
    """The kind of a device of this machine."""
    return CudaKind(device) if device.type == "cuda" else CpuKind(device)


class InputCopies:
    """Copies the tensors of batches to the device, from pinned memory and on a stream of its own: the host is ahead of
    the device, so that a batch arrives while the device still runs the step before.

        copies     batch 2 |         | batch 3 |
        kernels    step 1  . . . . . . . . . . | step 2
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._kind, self._copies = kind, kind.copies()

    def __call__(self, value: Tensor) -> Tensor:
        """A tensor on the device, for the kernels that are started from now on."""
        if self._copies is None or value.device.type != "cpu":
            return value.to(self._kind.device, non_blocking=True)
        if not value.is_pinned():
            value = self._kind.pinned(value).copy_(value)
        with self._copies.entered(), copying("inputs", value.nbytes):
            copied = value.to(self._kind.device, non_blocking=True)
        self._copies.hold_kernels()
        self._copies.lend(copied)
        return copied


def within(copies: CopyStream | None) -> AbstractContextManager[object]:
    """Put work on a stream for copies, if there is one."""
    return copies.entered() if copies is not None else nullcontext()


def has_cuda() -> bool:
    """Whether this machine has a CUDA device that PyTorch can use."""
    return torch.cuda.is_available()


def num_cuda_devices() -> int:
    """The number of CUDA devices of this machine; 0 if there are none."""
    return torch.cuda.device_count() if has_cuda() else 0


def own_device(local_rank: int) -> torch.device:
    """The device of the rank of this number on its machine. Ray and Slurm may show each rank only its own CUDA device,
    which has the index 0 then."""
    if not has_cuda():
        return torch.device("cpu")
    return torch.device("cuda", local_rank if num_cuda_devices() > 1 else 0)


def use(device: torch.device) -> None:
    """Make a CUDA device the current device of this process, before anything is allocated or NCCL is started."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def properties(device: torch.device) -> Properties:
    """A CUDA device as its driver reports it. A CPU has no such names and sizes: its memory is 0."""
    if device.type != "cuda":
        return Properties(device.type, 0, 1, 1)
    reported = torch.cuda.get_device_properties(device)
    return Properties(reported.name, reported.total_memory, reported.multi_processor_count, num_cuda_devices())


def lacks(device: torch.device, precision: str) -> str:
    """The name of a CUDA device that cannot compute in a low precision; empty if it can."""
    emulated = precision == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False)
    is_old = torch.cuda.get_device_capability(device) < (5, 3)
    return torch.cuda.get_device_name(device) if emulated or is_old else ""


def taken_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that the allocator took from a CUDA device, and all bytes that are taken there now, with the
    context of every process; 0 on a CPU, whose resident memory has both."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), total - free


def peak_allocated_bytes(device: torch.device) -> int:
    """The most bytes that tensors held on a CUDA device."""
    return int(torch.cuda.max_memory_allocated(device))


class CudaSupport(NamedTuple):
    """CUDA, as PyTorch's build and the driver of this machine support it.

    ``build``: the version of CUDA for which PyTorch was built, such as (12, 8); () for a build without CUDA.
    ``driver``: the newest version that the driver supports; () without a driver. ``kernels``: the architectures for
    which PyTorch has kernels, such as ``sm_90``. ``has_nccl``: whether it has NCCL."""

    build: tuple[int, ...] = ()
    driver: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    has_nccl: bool = False


def cuda_support() -> CudaSupport:
    """What PyTorch and the driver of this machine support."""
    build = tuple(map(int, (torch.version.cuda or "").split("."))) if torch.version.cuda else ()
    return CudaSupport(build, _driver_version(), tuple(torch.cuda.get_arch_list()), dist.is_nccl_available())


def _driver_version() -> tuple[int, ...]:
    """The newest version of CUDA that NVIDIA's driver supports. It is asked without starting CUDA in this process."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ()
    return divmod(version.value // 10, 100) if status == 0 else ()


class Processor(NamedTuple):
    """The processor of a CUDA device: its name, and its compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def processor(device: torch.device) -> Processor:
    """The processor of a CUDA device."""
    return Processor(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def device_names() -> list[str]:
    """The names of the CUDA devices that this process sees."""
    return [torch.cuda.get_device_name(torch.device("cuda", index)) for index in range(num_cuda_devices())]
