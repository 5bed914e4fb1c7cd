"""Writes a file of chunks (``chunk_files.py``), by threads that compute checksums while others write.

    add        chunk 0   chunk 1   chunk 2 ...      a place depends on sizes only: no chunk waits for another
    thread 0   check, CRC-32 │ write ▸ the disk begins │ check, CRC-32 of chunk 2 ...
    thread 1         check, CRC-32 of chunk 1 │ write ▸ the disk begins ...
    close                                                      all are written │ flush

Numbers go from the tensor's own memory to the system, in one call a chunk. The disk begins to store them at once, so
that little is left to wait for at the end. An object of a store is a stream: one thread writes it, in order.
"""

import ctypes
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from torch import Tensor

from meshwright.runtime.chunk_files import Frame, frame_of, numbers_of
from meshwright.runtime.chunk_index import SavedChunk
from meshwright.runtime.object_path import AnyPath

THREADS = 2
"""Threads that write one file."""
PENDING = 2
"""Largest number of chunks that wait for a thread."""
LARGE_BYTES = 2**20
"""The disk begins to store a chunk of this size as soon as it is written. Smaller ones are stored at the end."""
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE

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
                os.fdatasync(self._number)
        finally:
            self._file.close()
        found: dict[str, tuple[SavedChunk, ...]] = {}
        for name, chunk in filter(None, self._chunks):
            found[name] = (*found.get(name, ()), chunk)
        return found

    def abandon(self) -> None:
        """Close the file as it is."""
        self._end()
        self._file.close()

    def _end(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # --- in a thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    self._write(job)
                except BaseException as error:  # noqa: BLE001 - ``add`` or ``close`` raises it
                    self._error = error
            del job

    def _write(self, job: _Job) -> None:
        if job.check is not None:
            job.check(job.value)
        frame, numbers = job.frame, numbers_of(job.value)
        checksum = zlib.crc32(numbers)
        tail = frame.ending(checksum)
        pieces = [memoryview(frame.head), numbers, memoryview(tail)]
        if self._number is None:
            for piece in pieces:
                self._file.write(piece)
        else:
            write_at(self._number, pieces, job.at)
            if len(numbers) >= LARGE_BYTES:
                begin_to_store(self._number, job.at, sum(map(len, pieces)))
        chunk = SavedChunk(
            job.offsets,
            tuple(job.value.shape),
            self.name,
            job.at,
            sum(map(len, pieces)),
            job.at + len(frame.head),
            len(numbers),
            checksum,
            zlib.crc32(tail, zlib.crc32(frame.head)),
        )
        self._chunks[job.number] = job.name, chunk


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


def begin_to_store(number: int, at: int, num_bytes: int) -> None:
    """Let the disk begin to store a range of a file, without waiting for its end. It is only a hint: errors show when
    the file is flushed."""
    begin: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if begin is not None:
        begin(number, ctypes.c_int64(at), ctypes.c_int64(num_bytes), _BEGIN)


def _file_number(file: IO[bytes]) -> int | None:
    """The descriptor of a file of this machine; None for an object of a store."""
    try:
        return file.fileno() if hasattr(os, "pwritev") else None
    except (AttributeError, OSError):
        return None
