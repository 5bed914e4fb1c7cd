"""Memory that collectives on a CPU reuse: a block that no tensor holds any more goes to the next result."""

import mmap
import weakref

import torch
from torch import Tensor

LEAST_BYTES = 2**20
"""Smallest tensor, in bytes, that gets a block; torch's allocator serves smaller ones."""


class Blocks:
    """Lends memory from the system, and lends it again when the tensor and all its views are gone.

    Gathered parameters are the largest temporary tensors of a step; two buckets live at a time. In the heap, smaller
    tensors that stay soon split their places, and the next bucket needs new memory: the peak of a large GPT under
    ZeRO-3 was an eighth higher (docs/decisions/0026-gathered-parameters-have-blocks.md). Here a bucket reuses the
    memory of an earlier bucket.

    Attributes:
        num_bytes: bytes of all blocks, lent and free.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self.num_bytes = 0

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized vector of ``count`` elements on the CPU.

        It gets the smallest free block that is 1 to 1.5 times its size; among equal blocks, the last one freed. If no
        block fits, a new one replaces the largest smaller free block. So the number of blocks approaches the largest
        number lent at once, and a reduced bucket, which is only a part, does not take the block of a whole bucket.
        """
        size = count * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(count, dtype=dtype)
        block = min((free for free in reversed(self._free) if size <= len(free) <= 1.5 * size), key=len, default=None)
        if block is not None:
            self._free.remove(block)
        else:
            smaller = max((free for free in self._free if len(free) < size), key=len, default=None)
            if smaller is not None:
                self._free.remove(smaller)
                self.num_bytes -= len(smaller)
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.num_bytes += size
        lent = memoryview(block)[:size]  # the tensor's storage keeps it, and nothing else does
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype)
