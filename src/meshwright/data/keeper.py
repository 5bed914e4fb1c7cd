"""A keeper holds the samples that a rank owns in memory and in a file on the local disk, for itself and its peers."""

import errno
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from meshwright.data.rates import Rate
from meshwright.data.stores import Raw, Store, fill
from meshwright.errors import DataError
from meshwright.schedules.samples import DISK, FILES, OWN_DISK, OWN_MEMORY, Room, SamplePlacement

log = logging.getLogger("meshwright")

SPARE_BYTES = 64 * 2**20
"""Bytes of a disk that stay free."""


class Keeper:
    """Reads each sample that a rank owns from the file system once, keeps it, and gives it to any thread.

    If the disk is full, samples that no longer fit are read from the file system each time; the log says so once.

    Args:
        store: where samples come from.
        placement: who owns what.
        rank: whose samples are kept here.
        room: the bytes that may be kept.
        directory: the folder on the local disk in which the file of samples lies; None: nothing is kept on disk.
        files: notes how fast the file system is read.
    """

    def __init__(
        self,
        store: Store,
        placement: SamplePlacement,
        rank: int,
        room: Room,
        directory: Path | None,
        files: Rate,
    ) -> None:
        self._store, self._placement, self._rank, self._room = store, placement, rank, room
        self._files = files
        self._memory: dict[int, Raw] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._coming: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._end = 0
        self.reads = self.memory_bytes = self.disk_bytes = 0
        """Reads of the file system, for peers too, and the bytes that are kept."""
        self._disk_full = False
        self._file: IO[bytes] | None = open_file(directory) if directory is not None else None

    def owns(self, sample: int) -> bool:
        """Whether this rank keeps the sample."""
        return int(self._placement.owner[sample]) == self._rank

    def get(self, sample: int) -> tuple[Raw, int]:
        """A sample that this rank owns, and the class that it came from. A thread that asks for a sample that another
        thread reads waits for it.

        Raises:
            DataError: it cannot be read.
        """
        while True:
            with self._lock:
                if (raw := self._memory.get(sample)) is not None:
                    return raw, OWN_MEMORY
                span = self._spans.get(sample)
                coming = self._coming.get(sample)
                if span is None and coming is None:
                    self._coming[sample] = threading.Event()
            if span is not None:
                return self._from_disk(sample, *span)
            if coming is None:
                break
            coming.wait()
        try:
            raw = self.read(sample)
            self._keep(sample, raw)
        finally:
            with self._lock:
                self._coming.pop(sample).set()
        return raw, FILES

    def read(self, sample: int) -> Raw:
        """Read a sample from the file system.

        Raises:
            DataError: it cannot be read.
        """
        with self._files.running():
            raw = self._store.read(sample)
        self._files.count(len(raw))
        with self._lock:
            self.reads += 1
        return raw

    def close(self) -> None:
        """Drop what is kept."""
        with self._lock:
            self._memory.clear()
            self._spans.clear()
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def _keep(self, sample: int, raw: Raw) -> None:
        if int(self._placement.level[sample]) == DISK:
            self._write(sample, raw)
            return
        with self._lock:
            if self.memory_bytes + len(raw) <= self._room.memory_bytes:  # sizes of datasets are estimates
                self._memory[sample] = raw
                self.memory_bytes += len(raw)

    def _write(self, sample: int, raw: Raw) -> None:
        with self._lock:
            file, begin = self._file, self._end
            if file is None or self._disk_full or begin + len(raw) > self._room.disk_bytes:
                return
            self._end += len(raw)
        try:
            write_whole(file.fileno(), raw, begin)
        except OSError as error:
            with self._lock:
                first, self._disk_full = not self._disk_full, True
            if first:
                log.warning("the cache on disk takes no more than %d bytes (%s): what it lacks is read from the file "
                            "system each time", self.disk_bytes, error.strerror)  # fmt: skip
            return
        with self._lock:
            self._spans[sample] = begin, len(raw)
            self.disk_bytes += len(raw)

    def _from_disk(self, sample: int, begin: int, size: int) -> tuple[Raw, int]:
        """A sample from the cache on disk; from the file system if the cache cannot be read, with its class."""
        buffer = bytearray(size)
        file = self._file
        try:
            if file is not None and fill(file.fileno(), buffer, begin) == size:
                return buffer, OWN_DISK
        except OSError as error:
            log.warning("the cache on disk cannot be read (%s): %s is read from the file system", error.strerror,
                        self._store.name(sample))  # fmt: skip
        with self._lock:
            if self._spans.get(sample) == (begin, size):
                del self._spans[sample]
                self.disk_bytes -= size
        return self.read(sample), FILES


def write_whole(descriptor: int, raw: Raw, begin: int) -> None:
    """Write bytes to an open file at a position. Raise an OSError if they do not fit."""
    done, view = 0, memoryview(raw)
    while done < len(raw):
        count = os.pwrite(descriptor, view[done:], begin + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count


def open_file(directory: Path) -> IO[Any]:
    """A new file without a name in a folder, which is made if there is none. It vanishes with the process.

    Raises:
        DataError: the folder cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise DataError(
            f"samples cannot be kept there: {error.strerror}",
            where=f"cache_directory {directory}",
            remedy="give a folder on a local disk that can be written, or none",
        ) from None


def free_bytes(directory: Path, num_ranks: int) -> int:
    """The bytes that each of ``num_ranks`` ranks of this machine may keep on the disk of a folder.

    Raises:
        DataError: the disk is full.
    """
    open_file(directory).close()
    free = (shutil.disk_usage(directory).free - SPARE_BYTES) // num_ranks
    if free <= 0:
        raise DataError(
            "the disk is full",
            where=f"cache_directory {directory}",
            remedy=f"free more than {SPARE_BYTES // 2**20} MiB, or give a folder on another disk, or none",
        )
    return free
