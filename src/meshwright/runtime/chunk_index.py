"""The index of a checkpoint's tensors: in which file and where each saved chunk lies.

index.json     ours: plain data, with checksums. Meshwright reads it.
.metadata      the index of torch.distributed.checkpoint, a pickle: other programs read it. Meshwright reads it in
               checkpoints of others, and in those of Meshwright's first format, which had no index.json.

``torch.distributed.checkpoint`` imports DTensor, FSDP and sympy, which takes most of a second. So only the functions
that need its index import it.
"""

import io
import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from meshwright.errors import CheckpointError, FileFormatError
from meshwright.ir import files
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest
from meshwright.runtime.object_path import AnyPath
from meshwright.torch_private import storage_info

INDEX, TORCH_INDEX = "index.json", ".metadata"
KINDS = ("model", "optimizer", "codec")
"""What the names of our tensors begin with."""


class SavedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A block of a whole tensor in a file. The file has ``num_bytes`` bytes from ``at`` on that torch.load reads.

    The ``numbers_bytes`` bytes from ``numbers_at`` on are the tensor's own; it is -1 if they are unknown. ``checksum``
    is the CRC-32 of the tensor's own bytes, ``frame_checksum`` that of the others.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    num_bytes: int
    numbers_at: int = -1
    numbers_bytes: int = 0
    checksum: int = 0
    frame_checksum: int = 0


class IndexedTensor(msgspec.Struct, frozen=True):
    """A whole tensor, and the chunks that it was saved in."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[SavedChunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the saved numbers."""
        dtype: Any = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.dtype!r} is no dtype", where=INDEX, remedy="restore the checkpoint")
        return dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Index(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint, by name."""

    tensors: dict[str, IndexedTensor]

    def chunks(self) -> list[SavedChunk]:
        """The chunks of all tensors."""
        return [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]


def joined(written: Iterable[dict[str, IndexedTensor]]) -> Index:
    """The index of what all ranks have written.

    Raises:
        CheckpointError: the chunks of a tensor do not cover it exactly once. Ranks disagree about the layout then.
    """
    indexed: dict[str, IndexedTensor] = {}
    chunks: dict[str, dict[tuple[int, ...], SavedChunk]] = {}
    for tensors in written:
        for name, tensor in tensors.items():
            indexed.setdefault(name, tensor)
            known = chunks.setdefault(name, {})
            for chunk in tensor.chunks:
                known.setdefault(chunk.offsets, chunk)
    for name, tensor in indexed.items():
        covered = sum(math.prod(chunk.sizes) for chunk in chunks[name].values())
        if covered != math.prod(tensor.shape):
            raise CheckpointError(
                f"ranks have written {covered:,} elements of it, and it has {math.prod(tensor.shape):,}",
                where=f"tensor {name}",
                remedy="this is a defect of Meshwright: report it with the plan",
            )
    return Index({
        name: msgspec.structs.replace(tensor, chunks=tuple(chunks[name].values())) for name, tensor in indexed.items()
    })  # fmt: skip


def small_files(index: Index) -> dict[str, bytes]:
    """The files of an index, by name."""
    return {INDEX: msgspec.json.encode(index), TORCH_INDEX: _torch_index(index)}


def _torch_index(index: Index) -> bytes:
    """The index as torch.distributed.checkpoint reads it. ``model.`` and so on is a level of its own when torch makes a
    nested state dict of it (``dcp_to_torch_save``)."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.metadata import (
        STORAGE_TYPES,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, STORAGE_TYPES] = {}
    places = {}
    for name, tensor in index.tensors.items():
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.torch_dtype),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks],
        )
        for chunk in tensor.chunks:
            places[MetadataIndex(name, chunk.offsets)] = storage_info(chunk.file, chunk.at, chunk.num_bytes)
    paths = {name: _path(name) for name in tensors}
    return pickle.dumps(Metadata(tensors, paths, places, version=CURRENT_DCP_VERSION))


def _path(name: str) -> tuple[str, ...]:
    kind, dot, rest = name.partition(".")
    return (kind, rest) if dot and kind in KINDS else (name,)


def read_index(directory: AnyPath, manifest: Manifest | None = None) -> Index:
    """Read the index of a data directory: ours if there is one, else that of torch.

    Raises:
        DamagedCheckpointError: our index is not the one that the manifest knows.
        CheckpointError: there is no index, or it holds something else than an index.
    """
    if manifest is None or INDEX in manifest.files:
        file = directory / INDEX
        if manifest is not None or file.is_file():
            try:
                return _checked(files.decode(file.read_bytes(), Index, where=f"{file}"), f"{file}")
            except FileFormatError as error:
                raise DamagedCheckpointError(f"damaged: {error.problem}", where=error.where) from None
    file = directory / TORCH_INDEX
    try:
        metadata = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except FileNotFoundError:
        problem, remedy = f"holds no checkpoint: there is no {TORCH_INDEX}", "check the path"
        raise CheckpointError(problem, where=f"{directory}", remedy=remedy) from None
    except OSError:
        raise
    except Exception as error:
        problem = f"is no index of torch.distributed.checkpoint: {type(error).__name__}: {error}"
        raise CheckpointError(problem, where=f"{file}", remedy="restore it from a copy") from error
    return _checked(_of_torch(metadata, f"{file}"), f"{file}")


def _of_torch(metadata: Any, where: str) -> Index:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("is no index of tensors", where=where, remedy="check the path")
    indexed: dict[str, IndexedTensor] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):  # any other object, pickled: Meshwright reads tensors only
            continue
        chunks = []
        for chunk in saved.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if getattr(place, "transform_descriptors", None):
                problem = f"{name} was written through {', '.join(place.transform_descriptors)}"
                raise CheckpointError(problem, where=where, remedy="save it without extensions")
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            chunks.append(SavedChunk(offsets, sizes, place.relative_path, place.offset, place.length))
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        indexed[name] = IndexedTensor(tuple(saved.size), dtype, tuple(chunks))
    return Index(indexed)


def _checked(index: Index, where: str) -> Index:
    """Refuse an index that leads out of its directory."""
    for name in {chunk.file for chunk in index.chunks()}:
        if name != Path(name).name:
            raise CheckpointError(f"it names a file that is not its own: {name!r}", where=where, remedy="check it")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch's index, which is a pickle, and refuses classes that do not belong in an index."""

    ALLOWED = frozenset({
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        symbol = super().find_class(module, name) if (module, name) in self.ALLOWED or module == "torch" else None
        if (module, name) in self.ALLOWED or isinstance(symbol, torch.dtype):
            return symbol
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's index")
