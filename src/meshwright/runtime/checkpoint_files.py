"""Checkpoints as files: listed, verified, written anew for another number of ranks, and exported, without a trainer.

Tensors go from file to file chunk by chunk, so that a process needs memory for one chunk, and an export for one tensor.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from meshwright.errors import CheckpointError
from meshwright.runtime import manifest
from meshwright.runtime.agree import convert_errors
from meshwright.runtime.chunk_files import ChunkReader, verify_chunks
from meshwright.runtime.chunk_index import Index, IndexedTensor, joined, read_index, small_files
from meshwright.runtime.chunk_writer import ChunkFile
from meshwright.runtime.manifest import MANIFEST, TRAINER, DamagedCheckpointError, Manifest, SavedFile
from meshwright.runtime.object_path import AnyPath, place_of
from meshwright.runtime.safetensors_files import MAX_FILE_BYTES, Weight, write_folder
from meshwright.runtime.shards import Chunk, StoredPart, chunks_of, cut_chunk

MODEL = "model."
"""What the names of parameters and buffers begin with in a checkpoint."""


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a directory.

    ``problem`` is empty if its manifest and the sizes of its files are right. ``files``: number of files with tensors,
    one for each rank that has written."""

    path: str
    step: int = -1
    model: str = ""
    optimizer: str = ""
    version: int = 0
    files: int = 0
    num_bytes: int = 0
    problem: str = ""


def summaries(path: str) -> list[CheckpointSummary]:
    """The checkpoint at a place, or those in a directory of checkpoints or of a run, the latest first.

    Raises:
        CheckpointError: there is none.
    """
    place = place_of(path)
    for directory in (place, place / "checkpoints"):
        if (directory / MANIFEST).is_file():
            return [_summary(directory)]
        if names := manifest.steps_in(directory):
            return [_summary(directory / name) for name in names]
    manifest.read(place)  # says what is wrong
    return [_summary(place)]


def _summary(path: AnyPath) -> CheckpointSummary:
    try:
        saved = manifest.read(path)
    except CheckpointError as error:
        step = path.name.removeprefix("step-")
        return CheckpointSummary(path=f"{path}", step=int(step) if step.isdigit() else -1, problem=error.problem)
    return CheckpointSummary(
        path=f"{path}", step=saved.step, model=saved.model, optimizer=saved.optimizer or "", version=saved.written_as,
        files=sum(name.endswith(".distcp") for name in saved.files),
        num_bytes=sum(file.num_bytes for file in saved.files.values()),
    )  # fmt: skip


def chosen(path: str) -> AnyPath:
    """The checkpoint at a place, or the latest whole checkpoint in a directory of checkpoints or of a run.

    Raises:
        CheckpointError: there is none.
    """
    checkpoints = summaries(path)
    latest = next((summary for summary in checkpoints if not summary.problem), checkpoints[0])
    return place_of(latest.path)


def verify_files(path: AnyPath) -> int:
    """Read a checkpoint and compare all checksums. Return the number of bytes.

    Raises:
        DamagedCheckpointError: a file is not what was written.
    """
    saved = convert_errors(f"{path}", lambda: manifest.read(path))
    directory = path / saved.data

    def verify() -> None:
        manifest.verify(directory, saved.files)
        index = read_index(directory, saved)
        verify_chunks(directory, index.chunks())
        if saved.tensors.keys() - {name.removeprefix(MODEL) for name in index.tensors}:
            raise DamagedCheckpointError("damaged: the index lacks tensors of the manifest", where=f"{directory}")

    convert_errors(f"{directory}", verify)
    return sum(file.num_bytes for file in saved.files.values())


def reshard(path: AnyPath, target: AnyPath, num_ranks: int) -> Manifest:
    """Write a checkpoint anew as if ``num_ranks`` ranks had saved it, each its own rows of every tensor. A load under
    such a layout then reads few files, each in order.

    Raises:
        CheckpointError: ``target`` holds other files, the checkpoint is damaged, or there is no room.
    """
    saved = convert_errors(f"{path}", lambda: manifest.read(path))
    source = path / saved.data
    manifest.verify(source, {name: file for name, file in saved.files.items() if not name.endswith(".distcp")})
    index = read_index(source, saved)
    num_bytes = sum(file.num_bytes for file in saved.files.values())
    data = manifest.new_name(f"{saved.data} {num_ranks}")
    manifest.begin(target, num_bytes)
    if (target / MANIFEST).is_file():
        raise CheckpointError("is a checkpoint already", where=f"{target}", remedy="choose another path")

    def write() -> Manifest:
        (target / data).mkdir(parents=True, exist_ok=True)
        written = [_rewrite(source, index, target / data, rank, num_ranks) for rank in range(num_ranks)]
        names = {chunk.file for tensors in written for tensor in tensors.values() for chunk in tensor.chunks}
        sizes = {name: SavedFile(num_bytes=(target / data / name).stat().st_size) for name in names}
        small = small_files(joined(written)) | {TRAINER: (source / TRAINER).read_bytes()}
        return manifest.complete(target, saved, data, sizes, small)

    try:
        return convert_errors(f"{target}", write)
    except BaseException:
        manifest.abandon(target, data)
        raise


def _rewrite(source: AnyPath, index: Index, directory: AnyPath, rank: int, num_ranks: int) -> dict[str, IndexedTensor]:
    with ChunkReader(source, index) as reader:
        file = ChunkFile(directory / f"__{rank}_0.distcp")
        try:
            for name, tensor in index.tensors.items():
                for cut in _rows(tensor, rank, num_ranks):
                    file.add(name, _read(reader, name, cut), cut.offsets)
        except BaseException:
            file.abandon()
            raise
        written = file.close()
    return {name: msgspec.structs.replace(index.tensors[name], chunks=chunks) for name, chunks in written.items()}


def _rows(tensor: IndexedTensor, rank: int, num_ranks: int) -> Iterator[Chunk]:
    """The rows of a tensor that a rank writes, in chunks of at most the usual size. Scalars belong to rank 0."""
    for whole in chunks_of(tensor.shape, {}, {}):
        rows = whole.sizes[0] if whole.sizes else 1
        begin, end = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
        if not whole.sizes and rank == 0:
            yield whole
        elif whole.sizes and begin < end:
            place = (begin, *whole.offsets[1:])
            yield from cut_chunk(Chunk(place, place, (end - begin, *whole.sizes[1:])), tensor.torch_dtype.itemsize)


def _read(reader: ChunkReader, name: str, chunk: Chunk) -> torch.Tensor:
    tensor = reader.index.tensors[name]
    value = torch.empty(chunk.sizes, dtype=tensor.torch_dtype)
    here = Chunk(chunk.offsets, (0,) * len(chunk.sizes), chunk.sizes)
    reader.fill(name, StoredPart(value, tensor.shape, [here]))
    return value


def export(
    path: AnyPath,
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Write a checkpoint's parameters and buffers as a folder of Hugging Face. Return their number.

    Args:
        dtype: the dtype of floating-point tensors in the files; None: their own.

    Raises:
        CheckpointError: the folder holds weights already, or the checkpoint is damaged.
    """
    saved = convert_errors(f"{path}", lambda: manifest.read(path))
    directory = path / saved.data
    index = read_index(directory, saved)
    with ChunkReader(directory, index) as reader:

        def weight(name: str) -> Weight:
            tensor = index.tensors[name]
            own = tensor.torch_dtype
            begin = (0,) * len(tensor.shape)
            whole = Chunk(begin, begin, tensor.shape)
            kind = dtype if dtype is not None and own.is_floating_point else own
            return Weight(name.removeprefix(MODEL), tensor.shape, kind, lambda: _read(reader, name, whole))

        weights = [weight(name) for name in index.tensors if name.startswith(MODEL)]
        convert_errors(f"{folder}", lambda: write_folder(folder, weights, config, max_file_bytes))
    return len(weights)
