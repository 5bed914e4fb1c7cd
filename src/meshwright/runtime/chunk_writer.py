"""Writes a file of chunks (``chunk_files.py``), by threads that compute checksums while others write.

    add        chunk 0   chunk 1   chunk 2 ...      a place depends on sizes only: no chunk waits for another
    thread 0   check │ CRC-32, write, CRC-32, write, ... │ check │ CRC-32, write ... of chunk 2
    thread 1           check │ CRC-32, write, CRC-32, write, ... of chunk 1 │ ...
    close                                                                      all are written │ flush

Large chunks go around the system's cache, which would copy them, and keep them in place of files that are read again:

    pages of the file    │ 0              │ 1        │ 2        │ 3
    the chunk            │ ... head, num──┼──bers────┼──────────┼──, tail ...
    goes                   through cache  │ direct              │ through cache

Only whole pages are written directly, from a small buffer whose address is a multiple of the page size. If the system
has no direct writes, everything goes through the cache. An object of a store is a stream, which one thread writes in
order.
"""

import ctypes
import errno
import mmap
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from meshwright.runtime.chunk_files import Frame, frame_of, numbers_of
from meshwright.runtime.chunk_index import SavedChunk
from meshwright.runtime.object_path import AnyPath

THREADS = 2
"""Threads that write one file."""
PENDING = 2
"""Largest number of chunks that wait for a thread."""
PAGE_BYTES = 4096
PIECE_BYTES = 4 * 2**20
"""Bytes that go to the disk at once."""
LARGE_BYTES = 2**20
"""Chunks of this size go around the cache."""
AHEAD_BYTES = 64 * 2**20
"""The most bytes that are reserved on the disk before they are needed, so that direct writes need not extend the file.
Others lack this room until the file is closed."""

Check = Callable[[Tensor], None]
"""Raises an error if a chunk is not worth writing."""


class _Job(NamedTuple):
    number: int
    name: str
    at: int
    value: Tensor
    offsets: tuple[int, ...]
    frame: Frame
    check: Check | None


class ChunkFile:
    """A file of chunks that is written. ``name`` is its name in the index.

    The memory of a tensor must not change until ``close``.
    """

    def __init__(self, path: AnyPath) -> None:
        self.name = path.name
        self._file: IO[bytes] = path.open("wb")
        self._number = _file_number(self._file)
        self._direct = _direct_number(path) if self._number is not None else None
        self._reserved = 0
        self._jobs: queue.Queue[_Job | None] = queue.Queue(PENDING)
        self._error: BaseException | None = None
        self._chunks: list[tuple[str, SavedChunk] | None] = []
        self._position = 0
        self._threads: list[threading.Thread] = []
        with suppress(RuntimeError):  # Python starts no thread when the program ends: this one then writes
            for _ in range(THREADS if self._number is not None else 1):
                thread = threading.Thread(target=self._work, name="writes a checkpoint", daemon=True)
                thread.start()
                self._threads.append(thread)

    def add(self, name: str, value: Tensor, offsets: Sequence[int], check: Check | None = None) -> None:
        """Write a chunk of the tensor ``name``, which begins at ``offsets`` of the whole tensor. ``check`` is called
        before."""
        if self._error is not None:
            raise self._error
        frame = frame_of(value.dtype, tuple(value.shape))
        job = _Job(len(self._chunks), name, self._position, value, tuple(offsets), frame, check)
        self._chunks.append(None)
        self._position += len(frame.head) + value.numel() * value.element_size() + len(frame.tail)
        is_large = value.numel() * value.element_size() >= LARGE_BYTES
        if self._direct is not None and is_large and self._position > self._reserved:
            before, self._reserved = self._reserved, self._position + min(AHEAD_BYTES, self._position)
            _reserve(self._direct, before, self._reserved - before)
        if self._threads:
            self._jobs.put(job)
        else:
            self._write(job)

    def close(self) -> dict[str, tuple[SavedChunk, ...]]:
        """Write what is left, and flush it to the disk. Return the chunks of each tensor, in the order of ``add``."""
        try:
            self._end()
            if self._error is not None:
                raise self._error
            self._file.flush()
            if self._number is not None:
                if self._reserved:
                    os.ftruncate(self._number, self._position)
                os.fdatasync(self._number)
        finally:
            self._close()
        by_tensor: dict[str, tuple[SavedChunk, ...]] = {}
        for name, chunk in filter(None, self._chunks):
            by_tensor[name] = (*by_tensor.get(name, ()), chunk)
        return by_tensor

    def abandon(self) -> None:
        """Close the file as it is."""
        self._end()
        self._close()

    def _close(self) -> None:
        self._file.close()
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _end(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # --- in a thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        buffer: mmap.mmap | None = None
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    if self._direct is not None and buffer is None:
                        buffer = mmap.mmap(-1, PIECE_BYTES)
                    self._write(job, buffer)
                except BaseException as error:  # noqa: BLE001 - ``add`` or ``close`` raises it
                    self._error = error
            del job

    def _write(self, job: _Job, buffer: mmap.mmap | None = None) -> None:
        if job.check is not None:
            job.check(job.value)
        frame, numbers = job.frame, numbers_of(job.value)
        begin, end = job.at + len(frame.head), job.at + len(frame.head) + len(numbers)
        first, last = begin, begin  # what lies between goes around the cache
        if self._direct is not None and buffer is not None and len(numbers) >= LARGE_BYTES:
            first, last = -(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        before, behind = numbers[: first - begin], numbers[last - begin :]
        checksum = zlib.crc32(before)
        for at in range(first, last, PIECE_BYTES):
            piece = numbers[at - begin : min(at + PIECE_BYTES, last) - begin]
            checksum = self._write_direct(piece, at, checksum, buffer)
        checksum = zlib.crc32(behind, checksum)
        tail = frame.ending(checksum)
        if first == last:
            self._put([memoryview(frame.head), numbers, memoryview(tail)], job.at)
        else:
            self._put([memoryview(frame.head), before], job.at)
            self._put([behind, memoryview(tail)], last)
        chunk = SavedChunk(
            job.offsets,
            tuple(job.value.shape),
            self.name,
            job.at,
            len(frame.head) + len(numbers) + len(tail),
            begin,
            len(numbers),
            checksum,
            zlib.crc32(tail, zlib.crc32(frame.head)),
        )
        self._chunks[job.number] = job.name, chunk

    def _write_direct(self, piece: memoryview, at: int, checksum: int, buffer: Any) -> int:
        """Write whole pages, and return the checksum of all until their end. It goes through the cache if the
        file's system does not take direct writes of pages."""
        shown = torch.frombuffer(buffer, dtype=torch.uint8)[: len(piece)]
        shown.copy_(torch.frombuffer(piece, dtype=torch.uint8))  # other threads of Python go on
        data = memoryview(buffer)[: len(piece)]
        direct, checksum = self._direct, zlib.crc32(data, checksum)
        try:
            if direct is not None:
                write_at(direct, [data], at)
                return checksum
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._put([data], at)
        return checksum

    def _put(self, pieces: Sequence[memoryview], at: int) -> None:
        if self._number is not None:
            write_at(self._number, pieces, at)
            return
        for piece in pieces:
            self._file.write(piece)


def write_at(number: int, pieces: Sequence[memoryview], at: int) -> None:
    """Write pieces one after the other, from byte ``at`` of the file with this descriptor on."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        count = os.pwritev(number, left, at)
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def _reserve(number: int, at: int, num_bytes: int) -> None:
    """Reserve room for a range of a file. It is only a hint: a disk that is full shows when the range is written."""
    reserve: Any = getattr(ctypes.CDLL(None), "fallocate", None) if sys.platform == "linux" else None
    if reserve is not None:
        reserve(number, 0, ctypes.c_int64(at), ctypes.c_int64(num_bytes))


def _direct_number(path: AnyPath) -> int | None:
    """Another descriptor of a file, whose writes go around the cache; None where there is no such way."""
    if not isinstance(path, Path) or not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _file_number(file: IO[bytes]) -> int | None:
    """The descriptor of a file of this machine; None for an object of a store."""
    try:
        return file.fileno() if hasattr(os, "pwritev") else None
    except (AttributeError, OSError):
        return None
