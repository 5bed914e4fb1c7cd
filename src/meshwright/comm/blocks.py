"""Memory for the results of collectives on a CPU. A block that no tensor uses any more is reused for a later result."""

import mmap
import weakref

import torch
from torch import Tensor

LEAST_BYTES = 2**20
"""The size in bytes of the smallest tensor that gets a block; torch's allocator serves smaller tensors."""


class BlockPool:
    """Lends blocks of memory to tensors. A block is free again when its tensor and all views of the tensor are gone.

    Gathered parameters are the largest temporary tensors of a step, and two buckets of them exist at a time. In the
    heap, smaller tensors that live longer soon occupy parts of a freed bucket's memory. The next bucket then needs new
    memory: the peak memory of a large GPT under ZeRO-3 was an eighth higher
    (docs/decisions/0026-gathered-parameters-have-blocks.md). With blocks, a bucket reuses the memory of an earlier
    bucket.

    Attributes:
        num_bytes: bytes of all blocks, lent or free.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self.num_bytes = 0

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized vector of ``count`` elements on the CPU.

        The vector gets the smallest free block of 1 to 1.5 times its size. Among blocks of equal size, it gets the
        block that was freed last. If no free block fits, a new block replaces the largest free block that is too small.
        So the number of blocks approaches the largest number of blocks in use at the same time. The limit of 1.5 times
        keeps a reduced bucket, which is only one rank's part, from taking the block of a whole bucket.
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
        lent = memoryview(block)[:size]  # only the tensor's storage keeps this alive
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype)
