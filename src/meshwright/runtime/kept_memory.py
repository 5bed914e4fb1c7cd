"""Memory of a launcher in which its ranks keep copies of their state: it outlives them, and ends with the launcher.

    launcher   holds two files in memory for each of its ranks, the slots, and does not use them itself
    rank       finds them through /proc, and writes a copy into the one and the other in turn
    its heirs  the ranks of the next attempt, as many as there are, read the copies of all ranks before them

A slot:   step + 1 (0: no complete copy) │ bytes of data │ bytes of the head ║ data ║ head: what lies where
"""

import errno
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.errors import RankError
from meshwright.ir.copies import SLOTS

VARIABLE = "MESHWRIGHT_MEMORY"
"""The environment variable that names a launcher's memory: its process id, the name of its files, and the descriptors
of its slots."""
PAGE_BYTES = 4096
BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""
_FIRST_PAGE = struct.Struct("<QQQ")


@contextmanager
def kept_memory(num_ranks: int) -> Iterator[dict[str, str]]:
    """Hold empty slots for ``num_ranks`` ranks. Yield the environment variables with which the ranks find them; none on
    a system without files in memory."""
    if not hasattr(os, "memfd_create"):
        yield {}
        return
    name = f"meshwright-copy-{secrets.token_hex(8)}"
    descriptors = [os.memfd_create(name) for _ in range(SLOTS * num_ranks)]
    try:
        yield {VARIABLE: " ".join(map(str, (os.getpid(), name, *descriptors)))}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class MemorySlot:
    """A place for one copy, in the memory of the launcher. ``path`` leads to a file called ``name``.

    The data are bytes in a tensor, and ``head`` says what lies where in them."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._memory: mmap.mmap | None = None
        self._data = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the file takes; 0 if the launcher has ended."""
        try:
            descriptor = self._open()
        except OSError:
            return 0
        try:
            return os.fstat(descriptor).st_blocks * BLOCK_BYTES
        finally:
            os.close(descriptor)

    def begin(self, num_bytes: int, head: bytes) -> Tensor:
        """Begin a copy of ``num_bytes``, in place of the slot's copy. Return the memory that it is written to.

        Raises:
            RankError: the machine has too little memory, or the launcher's memory cannot be opened.
        """
        at = _aligned(num_bytes)
        size = PAGE_BYTES + at + len(head)
        if self._memory is None or len(self._memory) != size:
            self._map(size)
        assert self._memory is not None
        self._memory[: _FIRST_PAGE.size] = _FIRST_PAGE.pack(0, num_bytes, len(head))
        begin = PAGE_BYTES + at
        if self._memory[begin : begin + len(head)] != head:
            self._memory[begin : begin + len(head)] = head
        return self._data[:num_bytes]

    def commit(self, step: int) -> None:
        """Say that the copy is complete, and that ``step`` steps were done."""
        assert self._memory is not None
        self._memory[:8] = struct.pack("<Q", step + 1)

    def read(self) -> tuple[int, bytes, Tensor] | None:
        """The step, the head and the data of a complete copy; None if there is none. The data are not to be written
        to."""
        try:
            descriptor = self._open()
        except OSError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            if size < PAGE_BYTES:
                return None
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        step, num_bytes, num_head = _FIRST_PAGE.unpack(memory[: _FIRST_PAGE.size])
        begin = PAGE_BYTES + _aligned(num_bytes)
        if not step or begin + num_head != size:
            return None
        return step - 1, memory[begin:], torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE_BYTES)[:num_bytes]

    def _open(self) -> int:
        """Open the file. The descriptor, or even the process, may be another than it was: the file's name tells."""
        descriptor = os.open(self._path, os.O_RDWR)
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{self._name} (deleted)":
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "the launcher has ended", self._path)
        return descriptor

    def _map(self, size: int) -> None:
        """Give the file a new size, with memory that is reserved now: later, a lack of it would kill this process."""
        self._memory = None
        try:
            descriptor = self._open()
            try:
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)
                self._memory = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RankError(
                f"no {size / 2**20:.0f} MiB of memory for a copy of this rank's state: {error.strerror}",
                where=self._path,
            ) from None
        self._data = torch.frombuffer(self._memory, dtype=torch.uint8, offset=PAGE_BYTES)


def slots_of(text: str) -> list[list[MemorySlot]]:
    """The slots of each rank of a launcher, by the value of ``VARIABLE``; empty if the value is."""
    process, name, *descriptors = text.split() or ["", ""]
    slots = [MemorySlot(f"/proc/{process}/fd/{number}", name) for number in descriptors]
    return [slots[begin : begin + SLOTS] for begin in range(0, len(slots), SLOTS)]


def latest_step(environment: Mapping[str, str]) -> int:
    """The latest step that all ranks have copied to this launcher's memory; -1 if there is none."""
    steps = [
        [read[0] if (read := slot.read()) else -1 for slot in slots]
        for slots in slots_of(environment.get(VARIABLE, ""))
    ]
    return min(map(max, steps), default=-1)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
