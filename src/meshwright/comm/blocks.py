"""Memory that collectives on a CPU write into again and again: what nobody holds any more is given to the next."""

import mmap
import weakref

import torch
from torch import Tensor

LEAST_BYTES = 2**20
"""Smaller tensors are left to torch's allocator."""


class Blocks:
    """Gives memory from the system, and gives it again when the tensor and every view of it are gone.

    Gathered parameters are the largest tensors of a step that come and go, two buckets at a time. In the heap their
    places are soon split by what is smaller and stays, and the next bucket takes new ones: the peak of a large GPT
    under ZeRO-3 was an eighth higher (docs/decisions/0026-gathered-parameters-have-blocks.md). Here a bucket comes to
    lie where one before it lay.

    Attributes:
        num_bytes: of all blocks, lent or free.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self.num_bytes = 0

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A vector of ``count`` elements on the CPU, with any values.

        It takes the smallest free block that holds it and is at most half as large again, of equal ones the latest
        used; a new one takes the place of the largest free one that is smaller. So there come to be about as many
        blocks as are ever lent at once, and the sum of a bucket, which is a part, does not take the place of a whole.
        """
        size = count * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(count, dtype=dtype)
        block = min((one for one in reversed(self._free) if size <= len(one) <= 1.5 * size), key=len, default=None)
        if block is not None:
            self._free.remove(block)
        else:
            smaller = max((one for one in self._free if len(one) < size), key=len, default=None)
            if smaller is not None:
                self._free.remove(smaller)
                self.num_bytes -= len(smaller)
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.num_bytes += size
        lent = memoryview(block)[:size]  # the tensor's storage keeps it, and nothing else does
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype)
