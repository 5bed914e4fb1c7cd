"""Files of chunks, as torch.distributed.checkpoint has them: each chunk is a file of torch.save, one after the other.

    __0_0.distcp    ┌ head ┬ numbers of chunk 0 ┬ tail ┐┌ head ┬ numbers of chunk 1 ┬ tail ┐ ...

Head and tail (a zip archive around the numbers) depend only on dtype and sizes, but for the checksum of the numbers. So
a chunk is written from the tensor's own memory (``chunk_writer.py``), and read into memory that is given, without a
copy in between.
"""

import functools
import io
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import add
from typing import IO, Any, Self

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.runtime import manifest
from meshwright.runtime.chunk_index import INDEX, Index, SavedChunk, read_index
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest, damaged
from meshwright.runtime.object_path import AnyPath
from meshwright.runtime.shards import Chunk, StoredPart, block, common_block

PIECE_BYTES = 4 * 2**20
"""Bytes that are read at once."""
ZEROS = 2**18
"""Bytes that are counted at once where a file has none."""
CHANGED = "its checksum is not the one that was written"


@dataclass(frozen=True)
class Frame:
    """The bytes of torch.save around the numbers of a tensor. The checksum of the numbers stands at ``places`` of
    ``tail``."""

    head: bytes
    tail: bytes
    places: tuple[int, int]

    def ending(self, checksum: int) -> bytes:
        """The tail of numbers with this CRC-32."""
        tail = bytearray(self.tail)
        for place in self.places:
            struct.pack_into("<I", tail, place, checksum)
        return bytes(tail)


@functools.lru_cache(maxsize=2**12)
def frame_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """The frame of a tensor: torch.save writes one without numbers, whose records are put around any other's. Neither
    file takes memory for the numbers."""
    archive = io.BytesIO()
    stream: Any = _Stream(archive.write)
    with _hollow_file() as saved:
        with torch.serialization.skip_data():
            torch.save(torch.empty(sizes, dtype=dtype), saved)
        with zipfile.ZipFile(saved) as archive_in, zipfile.ZipFile(stream, "w") as frame:
            numbers = next(info.filename for info in archive_in.infolist() if info.filename.endswith("/data/0"))
            for name in archive_in.namelist():
                if name != numbers and "/." not in name:
                    frame.writestr(zipfile.ZipInfo(name), archive_in.read(name))
            size, zeros = archive_in.getinfo(numbers).file_size, memoryview(bytes(ZEROS))
            with frame.open(zipfile.ZipInfo(numbers), "w") as entry:
                begin = archive.tell()
                stream.write = len
                for start in range(0, size, ZEROS):
                    entry.write(zeros[: size - start])
                stream.write = archive.write
    whole = archive.getvalue()
    tail = whole[begin:]
    # The numbers' record is the last: its checksum stands in the descriptor behind it, and in the last directory entry.
    last = tail.rindex(b"PK\x01\x02")
    return Frame(whole[:begin], tail, (4, last + 16))


def _hollow_file() -> IO[bytes]:
    """A temporary file, in memory if the system can, in which bytes that are left out take no room."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("meshwright-frame"), "w+b")
    return tempfile.TemporaryFile()


class _Stream:
    """A file that zipfile cannot seek in. ``write`` returns the number of the bytes that it was given."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self.write = write

    def flush(self) -> None:
        """Nothing is kept back."""


def numbers_of(value: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in row-major order."""
    if not value.numel():
        return memoryview(b"")
    numbers: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def check_numbers(chunk: SavedChunk, data: Any, file: AnyPath) -> None:
    """Raise a DamagedCheckpointError if the bytes of a chunk's numbers are not those that were written."""
    if zlib.crc32(data) != chunk.checksum:
        raise damaged(CHANGED, file)


def verify_chunks(directory: AnyPath, chunks: Iterable[SavedChunk]) -> None:
    """Raise a DamagedCheckpointError that names the file of the first chunk whose bytes are not those that were
    written. Chunks without checksums (``numbers_at`` is -1) are not read."""
    by_file: dict[str, list[SavedChunk]] = {}
    for chunk in chunks:
        by_file.setdefault(chunk.file, []).append(chunk)
    for name, those in by_file.items():
        with (directory / name).open("rb") as file:
            for chunk in sorted(those, key=lambda saved: saved.at):
                if chunk.numbers_at >= 0 and _checksums(file, chunk) != (chunk.checksum, chunk.frame_checksum):
                    raise damaged(CHANGED, directory / name)


def _checksums(file: IO[bytes], chunk: SavedChunk) -> tuple[int, int]:
    """The checksums of a chunk's numbers and of its frame, as they are in the file."""
    file.seek(chunk.at)
    before = chunk.numbers_at - chunk.at
    frame = _checksum(file, before, 0)
    numbers = _checksum(file, chunk.numbers_bytes, 0)
    return numbers, _checksum(file, chunk.num_bytes - before - chunk.numbers_bytes, frame)


def _checksum(file: IO[bytes], num_bytes: int, before: int) -> int:
    """The CRC-32 of the next bytes of a file, behind bytes whose checksum is ``before``."""
    checksum = before
    while num_bytes > 0 and (piece := file.read(min(PIECE_BYTES, num_bytes))):
        checksum, num_bytes = zlib.crc32(piece, checksum), num_bytes - len(piece)
    return checksum


def verified(directory: AnyPath, saved: Manifest, rank: int, num_ranks: int) -> Index:
    """Read the index of a checkpoint whose files are those that were written. Each of ``num_ranks`` ranks reads and
    compares a part of the files, and the index.

    Raises:
        DamagedCheckpointError: a file, or a chunk in it, is not what was written.
    """
    index_file = {name: file for name, file in saved.files.items() if name == INDEX}
    manifest.verify(directory, index_file | dict([*saved.files.items()][rank::num_ranks]))
    index = read_index(directory, saved)
    verify_chunks(directory, index.chunks()[rank::num_ranks])
    return index


class ChunkReader:
    """Reads saved chunks one by one into memory that it uses again.

    Attributes:
        index: the index of the chunks.
        num_bytes: the bytes that it has read.
    """

    def __init__(self, directory: AnyPath, index: Index) -> None:
        self._directory, self.index = directory, index
        self._files: dict[str, IO[bytes]] = {}
        self._open = ExitStack()
        self._memory = bytearray()
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def fill(self, name: str, part: StoredPart) -> None:
        """Fill a part from the saved chunks that overlap it. The dtype may differ.

        Raises:
            CheckpointError: there is no tensor of this name and shape, or its chunks do not cover the part.
            DamagedCheckpointError: the bytes of a chunk are not those that were written.
        """
        saved = self.index.tensors.get(name)
        if saved is None or saved.shape != part.shape:
            raise CheckpointError(f"there is no tensor of shape {list(part.shape)}", where=name)
        missing = sum(math.prod(chunk.sizes) for chunk in part.chunks)
        for source in saved.chunks:
            overlaps = [cut for chunk in part.chunks if (cut := overlap(chunk, source.offsets, source.sizes))]
            if not overlaps:
                continue
            value = self.read(source, saved.torch_dtype)
            for chunk in overlaps:
                begins = [offset - first for offset, first in zip(chunk.offsets, source.offsets, strict=True)]
                part.view(chunk).copy_(block(value, begins, chunk.sizes))
                missing -= math.prod(chunk.sizes)
        if missing:
            raise CheckpointError("the saved chunks do not cover the tensor", where=name)

    def read(self, chunk: SavedChunk, dtype: torch.dtype) -> Tensor:
        """The numbers of a chunk. The next call may overwrite them."""
        path = self._directory / chunk.file
        if chunk.file not in self._files:
            self._files[chunk.file] = self._open.enter_context(path.open("rb"))
        file = self._files[chunk.file]
        count = math.prod(chunk.sizes)
        if chunk.numbers_at < 0:
            file.seek(chunk.at)
            data = file.read(chunk.num_bytes)
            self.num_bytes += len(data)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes:
                raise CheckpointError(f"it holds no tensor of shape {list(chunk.sizes)}", where=f"{path}")
            return tensor
        if not count:
            return torch.empty(chunk.sizes, dtype=dtype)
        size = count * dtype.itemsize
        if size != chunk.numbers_bytes:
            raise damaged(f"its index says {chunk.numbers_bytes:,} bytes of a chunk that has {size:,}", path)
        if size > len(self._memory):
            self._memory = bytearray(size)
        view = memoryview(self._memory)[:size]
        file.seek(chunk.numbers_at)
        read_into(file, view, path)
        self.num_bytes += size
        check_numbers(chunk, view, path)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(chunk.sizes)


def read_into(file: IO[bytes], view: memoryview, path: AnyPath) -> None:
    """Fill memory from a file. Raise a DamagedCheckpointError if the file ends before."""
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise damaged("it ends before its tensors do", path)
        filled += count


def overlap(chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> Chunk | None:
    """The part of a chunk that lies in a block of the whole tensor; None if they do not overlap."""
    if (common := common_block(chunk.offsets, chunk.sizes, offsets, sizes)) is None:
        return None
    begins, _, lengths = common
    return Chunk(tuple(map(add, chunk.offsets, begins)), tuple(map(add, chunk.starts, begins)), lengths)


def read_parts(directory: AnyPath, index: Index, parts: Mapping[str, StoredPart]) -> None:
    """Fill this rank's parts from saved files, which may have been written with other placements.

    Raises:
        CheckpointError: a tensor could not be read. Some parts may already be filled then.
    """
    remedy = "load this or another checkpoint before training on: parameters may be half read"
    try:
        with ChunkReader(directory, index) as reader:
            for name, part in parts.items():
                if part.chunks:
                    reader.fill(name, part)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(error.problem, where=error.where, remedy=remedy) from error
    except CheckpointError as error:
        problem = f"tensors could not be read ({error.where}: {error.problem})"
        raise CheckpointError(problem, where=f"{directory}", remedy=remedy) from error
