"""The memory of a rank: the bytes that it holds now, and the settings of its allocator."""

import ctypes
import os
import sys
from collections.abc import Callable

import torch


def memory_reader(device: torch.device) -> Callable[[], int] | None:
    """Return a function that reads the number of bytes held now (allocated on CUDA, else resident); None if this number
    is not available."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    return ResidentMemory() if sys.platform == "linux" else None


def taken_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that the allocator took from a CUDA device, and all bytes in use on the device now, including the
    context of every process. 0 on a CPU, whose resident memory contains both."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), total - free


class ResidentMemory:
    """Reads this process's resident memory, in bytes, when it is called."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        """The bytes that are resident now."""
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page_bytes

    def __del__(self) -> None:
        os.close(self._file)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of glibc's mallopt(3)


def keep_memory() -> None:
    """Let glibc's allocator keep memory that a step frees, for the next step. Otherwise the memory goes back to the
    system, which zeroes every page before its next use. On a CPU this can cost a tenth of a step's time
    (docs/decisions/0012-memory-is-kept.md). Other allocators stay as they are. Blocks over 20 MiB still come from the
    system: they are few, and would leave the largest holes in the heap."""
    settings = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if settings is not None:
        settings(_TRIM_THRESHOLD, 2**31 - 1)
        settings(_TOP_PAD, 64 * 2**20)
        settings(_MMAP_THRESHOLD, 20 * 2**20)
