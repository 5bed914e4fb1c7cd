"""The memory that a rank holds now."""

import os
import sys
from collections.abc import Callable

import torch


def memory_reader(device: torch.device) -> Callable[[], int] | None:
    """What tells the bytes held now: allocated tensors on CUDA, else the process's resident memory; None where the
    system does not say."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    return ResidentMemory() if sys.platform == "linux" else None


class ResidentMemory:
    """This process's resident memory, in bytes."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page_bytes

    def __del__(self) -> None:
        os.close(self._file)
