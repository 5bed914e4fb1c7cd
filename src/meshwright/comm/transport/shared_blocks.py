"""Blocks of memory that carry letters between two processes of a box.

The sender owns the blocks and lends each one to a single letter. The receiver opens a block through ``/proc``, copies
its content, and replies. Then the sender reuses the block. A block vanishes when the last process that uses it ends.
"""

import mmap
import os
from collections import OrderedDict

import torch
from torch import Tensor

from meshwright.comm.transport.segment import reserve

LEAST_BYTES = 64 * 1024
"""Bytes of the smallest block. Smaller letters use no block."""
WASTE = 1.25
"""A block may be larger than its content by this factor."""
IDLE_BYTES = 2**28
"""Upper limit on the bytes of the unused blocks that a sender keeps."""
OPENED = 16
"""Upper limit on the blocks of one sender that a receiver keeps open."""
ALIGNED = 64
"""Tensors in a block begin at multiples of this number of bytes."""

Handle = tuple[int, str, int]
"""The data that a receiver needs to find a block: the sender's file descriptor, the file's name, and the number of
bytes."""


class SharedBlock:
    """Memory that its owner lends to one letter at a time."""

    def __init__(self, num_bytes: int, name: str, where: str) -> None:
        self._descriptor = reserve(num_bytes, name, where)
        self.handle: Handle = (self._descriptor, name, num_bytes)
        self.memory = _mapped(self._descriptor, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self._descriptor)


class SharedBlocks:
    """The blocks of one sender. The names of their files begin with ``name``; ``where`` names the sender in errors."""

    def __init__(self, name: str, where: str) -> None:
        self._name, self._where = name, where
        self._num_made = 0
        self._idle: list[SharedBlock] = []

    def lend(self, num_bytes: int) -> SharedBlock:
        """A block of at least ``num_bytes``. Raise a RankError if the machine lacks memory."""
        fitting = [block for block in self._idle if num_bytes <= block.handle[2] <= max(WASTE * num_bytes, LEAST_BYTES)]
        if fitting:
            block = min(fitting, key=lambda block: block.handle[2])
            self._idle.remove(block)
            return block
        step = max(LEAST_BYTES, 2 ** (num_bytes.bit_length() - 4))
        self._num_made += 1
        return SharedBlock(-(-num_bytes // step) * step, f"{self._name}-{self._num_made}", self._where)

    def take_back(self, block: SharedBlock) -> None:
        """Keep a block that its receiver has read. Blocks that may still be read are not given back. They vanish when
        the last process closes them."""
        self._idle.append(block)
        while sum(block.handle[2] for block in self._idle) > IDLE_BYTES:
            del self._idle[0]


class OpenedBlocks:
    """Blocks of the sender with process id ``process``, as the receiver sees them."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._opened: OrderedDict[str, Tensor] = OrderedDict()

    def find(self, handle: Handle) -> Tensor | None:
        """The bytes of a block. None if it cannot be opened, because the sender has ended or access is refused."""
        descriptor, name, num_bytes = handle
        memory = self._opened.get(name)
        if memory is None:
            memory = self._open(descriptor, name, num_bytes)
            if memory is None:
                return None
            self._opened[name] = memory
            if len(self._opened) > OPENED:
                self._opened.popitem(last=False)
        self._opened.move_to_end(name)
        return memory

    def _open(self, descriptor: int, name: str, num_bytes: int) -> Tensor | None:
        try:
            own = os.open(f"/proc/{self._process}/fd/{descriptor}", os.O_RDWR)
        except OSError:
            return None
        try:
            # the descriptor, or even the process, may have been replaced by now: the file's name is checked
            if os.readlink(f"/proc/self/fd/{own}") != f"/memfd:{name} (deleted)":
                return None
            return _mapped(own, num_bytes)
        except (OSError, ValueError):
            return None
        finally:
            os.close(own)


def offsets(sizes: list[int]) -> tuple[list[int], int]:
    """The offsets in a block at which tensors of these sizes begin, and the total number of bytes."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return begins, end


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    with torch.inference_mode(False):  # as in segment.py
        return torch.frombuffer(memory, dtype=torch.uint8)
