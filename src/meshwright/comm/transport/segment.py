"""Memory that one rank of a machine writes and another rank reads.

Each rank owns one anonymous file in memory for each peer. The file vanishes when the last process that holds it ends,
for whatever reason. It has no name in /dev/shm and does not count against the size of /dev/shm. The layout of the file:

    page 0   published: number of messages that the owner has put      (a futex, on which the peer sleeps)
             consumed:  number of the peer's messages that the owner has used (another futex)
             finished:  the collective up to which the owner no longer needs the peer
             sleeping:  whether the owner sleeps, so that the peer must wake it
             failed:    whether the owner has given up
             left:      whether the owner no longer communicates
             begun:     the collective that the owner began last, for the peer's errors
             told:      the description of that collective
             because:   the rank because of which the owner has given up
    slots    for each slot: the number of bytes and the tag of its message
    arena    the messages; message n lies in slot n modulo the number of slots
"""

import ctypes
import mmap
import os
from typing import Any

import torch

from meshwright.comm.transport.base import MESSAGE_BYTES
from meshwright.errors import RankError

VIEWS = 4096
"""Upper limit on cached tensors and arrays that show slots."""

_PUBLISHED, _CONSUMED, _FINISHED, _SLEEPING, _FAILED, _LEFT = 0, 64, 72, 128, 136, 144
TOKEN_AT, _BEGUN = 192, 248
"""Byte offsets. Fields that change with every message and fields that seldom change lie in different cache lines."""
TOLD, BECAUSE = slice(256, 1280), slice(1280, 1344)
"""The bytes of the texts ``told`` and ``because``."""
_SLOTS_AT = 4096
_SLOT_BYTES = 16


class Segment:
    """The memory that one rank writes, mapped by both ranks."""

    def __init__(self, descriptor: int, slots: int) -> None:
        arena_at = _arena_at(slots)
        self.memory = mmap.mmap(descriptor, arena_at + slots * MESSAGE_BYTES)
        self.published = ctypes.c_uint32.from_buffer(self.memory, _PUBLISHED)
        self.consumed = ctypes.c_uint32.from_buffer(self.memory, _CONSUMED)
        self.sleeping = ctypes.c_uint32.from_buffer(self.memory, _SLEEPING)
        self.finished = ctypes.c_uint64.from_buffer(self.memory, _FINISHED)
        self.failed = ctypes.c_uint32.from_buffer(self.memory, _FAILED)
        self.left = ctypes.c_uint32.from_buffer(self.memory, _LEFT)
        self.begun = ctypes.c_uint64.from_buffer(self.memory, _BEGUN)
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
            self._arena = torch.frombuffer(self.memory, dtype=torch.uint8, offset=arena_at)
        self.heads = memoryview(self.memory)[_SLOTS_AT : _SLOTS_AT + slots * _SLOT_BYTES].cast("Q")
        self._begins = range(0, slots * MESSAGE_BYTES, MESSAGE_BYTES)
        self.views: dict[tuple[int, int, Any], Any] = {}

    def write(self, where: slice, words: bytes) -> None:
        """Write ``words`` to ``where``, shortened if they do not fit."""
        words = words[: where.stop - where.start - 1] + b"\0"
        self.memory[where.start : where.start + len(words)] = words

    def read(self, where: slice) -> str:
        """The text at ``where``."""
        return self.memory[where].split(b"\0")[0].decode(errors="replace")

    def view(self, slot: int, num_bytes: int, dtype: Any) -> Any:
        """The first ``num_bytes`` of a slot: a tensor, or an array if the dtype is numpy's. ``views`` caches the
        result."""
        if len(self.views) >= VIEWS:
            self.views.clear()
        begin = self._begins[slot]
        with torch.inference_mode(False):  # as above: later calls use the view too
            region: Any = self._arena[begin : begin + num_bytes]
            region = region.view(dtype) if isinstance(dtype, torch.dtype) else region.numpy().view(dtype)
        self.views[slot, num_bytes, dtype] = region
        return region


def allocate(slots: int, rank: int) -> int:
    """Make the file of a rank's segment, and return its descriptor. Raise the errors of ``reserve``."""
    return reserve(_arena_at(slots) + slots * MESSAGE_BYTES, "meshwright", f"rank {rank}")


def reserve(num_bytes: int, name: str, where: str) -> int:
    """Make an anonymous file in memory, and return its descriptor. The memory is reserved now. So a lack of memory is
    an error now; otherwise it would kill the process later. ``where`` names the owner in the error.

    Raises:
        RankError: the machine has too little memory.
    """
    descriptor = os.memfd_create(name)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise RankError(
            f"no {num_bytes / 2**20:.0f} MiB of memory to share with another rank: {error.strerror}",
            where=where,
            remedy="free memory, raise the container's limit, or run fewer ranks on this machine",
        ) from None
    return descriptor


def _arena_at(slots: int) -> int:
    return -(-(_SLOTS_AT + slots * _SLOT_BYTES) // 4096) * 4096
