"""Memory that one rank of a machine writes and another one reads.

Each rank owns an anonymous file in memory for each other one, which vanishes with the last process that holds it,
however that ends; it has no name in /dev/shm and does not count against the size of that:

    page 0   published: how many messages its owner has put in   (a futex, on which the peer sleeps)
             consumed:  how many of the peer's it has done with  (another)
             finished:  the collective up to which its owner needs the peer no more
             sleeping:  whether its owner sleeps, so that the peer must wake it
             failed:    whether its owner has given up
             left:      whether its owner will communicate no more
             begun:     the collective that its owner has begun last, for the errors of others
             told:      what that is, in words
             because:   of which rank its owner has given up
    slots    per message: its bytes and its tag
    arena    the messages, each in the slot of its number
"""

import ctypes
import mmap
import os
from typing import Any

import torch

from meshwright.comm.transport.base import MESSAGE_BYTES
from meshwright.errors import RankError

VIEWS = 4096
"""Tensors and arrays over slots that are kept."""

_PUBLISHED, _CONSUMED, _FINISHED, _SLEEPING, _FAILED, _LEFT = 0, 64, 72, 128, 136, 144
TOKEN_AT, _BEGUN = 192, 248
"""A line of the cache for what changes with every message, another for what seldom does: who looks finds it at hand."""
TOLD, BECAUSE = slice(256, 1280), slice(1280, 1344)
"""Where words lie."""
_SLOTS_AT = 4096
_SLOT_BYTES = 16


class Segment:
    """The memory of one rank, seen from either side."""

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
        with torch.inference_mode(False):  # else it could not be written to where gradients are wanted
            self._arena = torch.frombuffer(self.memory, dtype=torch.uint8, offset=arena_at)
        self.heads = memoryview(self.memory)[_SLOTS_AT : _SLOTS_AT + slots * _SLOT_BYTES].cast("Q")
        self._begins = range(0, slots * MESSAGE_BYTES, MESSAGE_BYTES)
        self.views: dict[tuple[int, int, Any], Any] = {}

    def write(self, where: slice, words: bytes) -> None:
        """Lay words there, as far as there is room."""
        words = words[: where.stop - where.start - 1] + b"\0"
        self.memory[where.start : where.start + len(words)] = words

    def read(self, where: slice) -> str:
        """The words that were laid there."""
        return self.memory[where].split(b"\0")[0].decode(errors="replace")

    def view(self, slot: int, num_bytes: int, dtype: Any) -> Any:
        """So many bytes at the start of a slot: a tensor, or an array where the dtype is numpy's. ``views`` keeps
        it."""
        if len(self.views) >= VIEWS:
            self.views.clear()
        begin = self._begins[slot]
        found: Any = self._arena[begin : begin + num_bytes]
        found = found.view(dtype) if isinstance(dtype, torch.dtype) else found.numpy().view(dtype)
        self.views[slot, num_bytes, dtype] = found
        return found


def allocate(slots: int, rank: int) -> int:
    """The file of a segment for a rank, whose memory is given now, where it can be refused: what is missing later kills
    the process.

    Raises:
        RankError: there is not so much.
    """
    descriptor, num_bytes = os.memfd_create("meshwright"), _arena_at(slots) + slots * MESSAGE_BYTES
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise RankError(
            f"no {num_bytes / 2**20:.0f} MiB of memory to share with another rank: {error.strerror}",
            where=f"rank {rank}",
            remedy="free memory, raise the container's limit, or run fewer ranks on this machine",
        ) from None
    return descriptor


def _arena_at(slots: int) -> int:
    return -(-(_SLOTS_AT + slots * _SLOT_BYTES) // 4096) * 4096
