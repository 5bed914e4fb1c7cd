"""Saves and loads tensors that are split over ranks, as chunks of whole tensors, with torch.distributed.checkpoint.

A rank's part is not always one block of the whole. GPT-2's fused weight ``[k, (3 h d)]``, split by heads over two
ranks, is ``Shard(1, outer=3)``: each rank holds three blocks side by side. DTensor cannot express this placement. So
each part is given to torch as a list of chunks. A chunk has a place in the whole and a place in the part:

    whole    q0 q1 | k0 k1 | v0 v1        rank 0 holds q0 k0 v0, at 0, 2 and 4 of the whole

A Flat part is a range of elements in row-major order. Its chunks are the end of a row, whole rows, and the beginning of
a row.

All calls of torch's checkpoint code are in this module. These calls use only functions that do not need DTensor.
"""

import io
import itertools
import math
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.comm.groups import from_every_rank
from meshwright.errors import CheckpointError
from meshwright.ir.files import inside
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Placements, Shard, flat_axis, flat_shape, local_shape, unflattened
from meshwright.lower.reshard import local_part
from meshwright.runtime.state import LocalParameters

CHUNK_OVERHEAD_BYTES = 2000
"""Approximate bytes that torch's file format and index add to a chunk."""


@dataclass(frozen=True)
class Chunk:
    """A block of a whole tensor that this rank holds. ``offsets`` is its place in the whole tensor, and ``starts`` its
    place in this rank's part."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredPart:
    """This rank's part of a whole tensor of ``shape``.

    If one axis has a Flat placement, the other axes first cut the whole tensor to a tensor of shape ``local``. The part
    is then a range of the elements of that tensor, from element number ``flat_from`` on. The ``starts`` of the part's
    chunks are positions in that tensor. ``flat_from`` is -1 without a Flat placement.
    """

    value: Tensor
    shape: tuple[int, ...]
    chunks: list[Chunk]
    local: tuple[int, ...] = ()
    flat_from: int = -1

    def view(self, chunk: Chunk) -> Tensor:
        """Return a view of the chunk's elements."""
        value = self.value.detach()
        if self.flat_from >= 0:
            strides = [math.prod(self.local[dim + 1 :]) for dim in range(len(self.local))]
            begin = sum(start * stride for start, stride in zip(chunk.starts, strides, strict=True)) - self.flat_from
            return value.view(-1).as_strided(chunk.sizes, strides, value.storage_offset() + begin)
        return _block(value, chunk.starts, chunk.sizes)


def _block(value: Tensor, starts: Iterable[int], sizes: Iterable[int]) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        value = value.narrow(dim, start, size)
    return value


def chunks_of(shape: tuple[int, ...], placements: Placements, groups: dict[str, AxisGroup]) -> list[Chunk]:
    """Return the fewest blocks of a whole tensor that together form this rank's part, without Flat placements.

    ``local_part``, which also cuts the parameters, determines which indices of a dim this rank holds.
    """
    ranges = []
    for dim, size in enumerate(shape):
        here: Placements = {
            axis: Shard(0, placement.outer, placement.unit)
            for axis, placement in placements.items()
            if isinstance(placement, Shard) and placement.dim == dim
        }
        whole = [(0, 0, size)] if size else []
        ranges.append(_runs(local_part(torch.arange(size), here, groups).tolist()) if here else whole)
    boxes = itertools.product(*ranges)
    return [
        Chunk(
            offsets=tuple(offset for offset, _, _ in box),
            starts=tuple(start for _, start, _ in box),
            sizes=tuple(size for _, _, size in box),
        )
        for box in boxes
    ]


def part_of(parameters: LocalParameters, name: str, value: Tensor) -> StoredPart:
    """Return ``value`` as a ``StoredPart`` that is split like the parameter or buffer ``name``."""
    return part_at(value, parameters.global_shape(name), parameters.placements(name), parameters.groups)


def part_at(value: Tensor, shape: tuple[int, ...], placements: Placements, groups: dict[str, AxisGroup]) -> StoredPart:
    """Return ``value`` as this rank's part of a tensor of ``shape`` with these placements."""
    chunks = chunks_of(shape, unflattened(placements), groups)
    axis = flat_axis(placements)
    if not axis:
        return StoredPart(value, shape, chunks)
    axis_sizes, at = sizes_of(groups)
    local = local_shape(shape, unflattened(placements), axis_sizes, at)
    size = math.prod(flat_shape(local, groups[axis].size))
    begin = groups[axis].index * size
    boxes = boxes_of(local, min(begin, math.prod(local)), min(begin + size, math.prod(local)))
    return StoredPart(
        value, shape, [cut for chunk in chunks for box in boxes if (cut := _within(chunk, box))], local, begin
    )


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, int], ...]]:
    """Cover elements ``begin`` to ``end`` of a tensor, in row-major order, with boxes: (start, size) for every dim."""
    if begin >= end:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        return [((last, 1), *box) for box in boxes_of(shape[1:], begin - last * row, end - last * row)]
    before = boxes_of(shape[1:], begin - (first - 1) * row, row) if begin % row else []
    after = boxes_of(shape[1:], 0, end - last * row)
    whole = [((first, last - first), *((0, size) for size in shape[1:]))] if last > first else []
    return [*(((first - 1, 1), *box) for box in before), *whole, *(((last, 1), *box) for box in after)]


def _within(chunk: Chunk, box: tuple[tuple[int, int], ...]) -> Chunk | None:
    """The part of a chunk that lies in a box; None if they do not overlap."""
    starts = tuple(max(start, begin) for start, (begin, _) in zip(chunk.starts, box, strict=True))
    ends = tuple(
        min(start + size, begin + length)
        for start, size, (begin, length) in zip(chunk.starts, chunk.sizes, box, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if any(size <= 0 for size in sizes):
        return None
    offsets = tuple(
        offset + start - first for offset, start, first in zip(chunk.offsets, starts, chunk.starts, strict=True)
    )
    return Chunk(offsets, starts, sizes)


def _runs(indices: list[int]) -> list[tuple[int, int, int]]:
    """Group rising indices into runs of consecutive indices. A run is (first index, its position, length)."""
    breaks = [place for place in range(1, len(indices)) if indices[place] != indices[place - 1] + 1]
    ends = [*breaks, len(indices)]
    return [(indices[start], start, end - start) for start, end in zip([0, *breaks], ends, strict=True) if end > start]


class Share:
    """The chunks that this rank writes. If several ranks hold the same chunk (a replica), only one rank writes it.

    All ranks must create their shares together. Each rank then writes its share alone, and one rank writes the index.
    ``num_bytes`` is the approximate size of all ranks' shares together.
    """

    def __init__(self, parts: Mapping[str, StoredPart]) -> None:
        self._planner = _SavePlanner(parts)
        # Every rank computes the same plan from the same offers.
        offers = from_every_rank(self._planner.create_local_plan())
        self._plans, self._metadata = self._planner.create_global_plan(offers)
        self.rank, self.num_ranks = dist.get_rank() if dist.is_initialized() else 0, len(offers)
        items = [item for plan in self._plans for item in plan.items]
        self.num_bytes = sum((item.tensor_storage_size() or 0) + CHUNK_OVERHEAD_BYTES for item in items)

    def stage(self) -> None:
        """Copy the share, so that training can continue before the share is written."""
        self._planner.stage(self._plans[self.rank])

    def write(self, directory: Path) -> list[WriteResult]:
        """Write the share to a directory, and flush it to the disk. Return the results that ``write_index`` needs."""
        writer = _Writer(directory)
        writer.set_up_storage_writer(is_coordinator=self.rank == 0)
        directory.mkdir(parents=True, exist_ok=True)
        plan = writer.prepare_global_plan(self._plans)[self.rank]
        return list(writer.write_data(plan, self._planner).wait())

    def write_index(self, directory: Path, written: list[list[WriteResult]]) -> None:
        """Write the index of all chunks, which says where each chunk lies. ``written``: the results of ``write``, by
        rank."""
        _Writer(directory).finish(self._metadata, written)


def files_of(written: list[WriteResult]) -> list[str]:
    """The names of the files that a rank has written."""
    return sorted({result.storage_data.relative_path for result in written})


def read(directory: Path, parts: Mapping[str, StoredPart]) -> None:
    """Fill the parts from the saved files, which may have been written with other placements. Every rank must call this
    function. Raise a CheckpointError on every rank if a rank could not read; some parts may already be filled then."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                dict(parts),
                storage_reader=_Reader(directory),
                planner=_LoadPlanner(parts),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        remedy = "load this or another checkpoint before training on: parameters may be half read"
        raise _explained(error, directory, remedy) from error


def _explained(error: CheckpointException, directory: Path, remedy: str) -> BaseException:
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, KeyboardInterrupt):
        return KeyboardInterrupt()
    problem = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError):
        problem = cause.strerror or problem
    elif isinstance(cause, CheckpointError):
        problem = f"{cause.where}: {cause.problem}"
    return CheckpointError(f"tensors could not be read (rank {rank}: {problem})", where=f"{directory}", remedy=remedy)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans a save: every rank offers its chunks. If several chunks are equal (replicas), torch's default planner keeps
    one of them, and it balances the chunks over ranks."""

    def __init__(self, parts: Mapping[str, StoredPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._views: dict[MetadataIndex, tuple[StoredPart, Chunk]] = {}
        self._staged: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, part in self._parts.items():
            for chunk in part.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._views[index] = part, chunk
                data = TensorWriteData(
                    chunk=_described(chunk),
                    properties=TensorProperties(dtype=part.value.dtype),
                    size=torch.Size(part.shape),
                )
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def stage(self, plan: SavePlan) -> None:
        """Copy the chunks that a plan writes; each copy is released when it is written."""
        for item in plan.items:
            part, chunk = self._views[item.index]
            copy = torch.empty(chunk.sizes, dtype=part.value.dtype)
            self._staged[item.index] = copy.copy_(part.view(chunk))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if write_item.index in self._staged:
            return self._staged.pop(write_item.index)
        part, chunk = self._views[write_item.index]
        return part.view(chunk)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans a load: every rank requests its chunks; each is assembled from the saved chunks that overlap it."""

    def __init__(self, parts: Mapping[str, StoredPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self._parts.items():
            if not part.chunks:
                continue
            saved = self.metadata.state_dict_metadata.get(name)
            wanted = [_described(chunk) for chunk in part.chunks]
            if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != part.shape:
                raise CheckpointError(f"there is no tensor of shape {list(part.shape)}", where=name)
            reads = create_read_items_for_chunk_list(name, saved, wanted)
            if sum(math.prod(item.lengths) for item in reads) != sum(math.prod(chunk.sizes) for chunk in part.chunks):
                raise CheckpointError("the saved chunks do not cover the tensor", where=name)
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part = self._parts[index.fqn]
        assert index.index is not None
        return part.view(part.chunks[index.index])


def _described(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


class _Writer(dcp.FileSystemWriter):
    """Writes torch's checkpoint files, but no metadata that contains the path of the directory."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class _Reader(dcp.FileSystemReader):
    """Reads torch's checkpoint files. Each saved chunk is read once. Code in the index is not run."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            files.setdefault(name, {}).setdefault(item.storage_index, []).append(item)
        for name, requests in files.items():
            with inside(Path(self.path), name).open("rb") as file:
                for index in sorted(requests, key=lambda storage_index: int(self.storage_data[storage_index].offset)):
                    place = self.storage_data[index]
                    file.seek(place.offset)
                    saved = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
                    for item in requests[index]:
                        planner.resolve_tensor(item).copy_(_block(saved, item.storage_offsets, item.lengths))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch's index, which is a pickle, and refuses classes that do not belong in an index."""

    ALLOWED = frozenset({
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        symbol = super().find_class(module, name) if (module, name) in self.ALLOWED or module == "torch" else None
        if (module, name) in self.ALLOWED or isinstance(symbol, torch.dtype):
            return symbol
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's index")
