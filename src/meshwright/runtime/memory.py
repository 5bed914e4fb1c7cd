"""Memory: the bytes of this process, the settings of its allocator, and what the machine has left."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def has_own_memory() -> bool:
    """Whether ``OwnMemory`` can be read on this platform."""
    return sys.platform == "linux"


class OwnMemory:
    """Reads the bytes of this process's own resident pages when it is called. Pages of files and of memory that it
    shares with other processes do not count: each would count once in every process that has touched it."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        """The bytes that are resident now."""
        _, resident, shared, *_ = os.pread(self._file, 128, 0).split()
        return (int(resident) - int(shared)) * self._page_bytes

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


def memory_bytes() -> int:
    """The bytes of memory that this process may use: the machine's memory, or the limit of its control group."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        num_bytes = min(num_bytes, int((_CGROUP / "memory.max").read_text()))
    return num_bytes


def available_bytes() -> int:
    """The bytes of memory that programs of this machine, or of this control group, can still use."""
    limits = [memory_bytes()]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):
        used = int((_CGROUP / "memory.current").read_text())
        limits.append(max(0, int((_CGROUP / "memory.max").read_text()) - used))
    return min(limits)


def num_killed() -> int:
    """The number of processes that the kernel has killed for want of memory: of this control group, or else of the
    whole machine; -1 if it does not say."""
    for path, name in ((_CGROUP / "memory.events", "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        with suppress(OSError, ValueError, StopIteration):
            lines = path.read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.split()[0] == name)
    return -1
