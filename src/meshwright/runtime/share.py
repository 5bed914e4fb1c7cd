"""This rank's share of a save: the chunks that it writes, and their way to a file."""

import math
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.runtime.chunk_files import ChunkFile
from meshwright.runtime.chunk_index import IndexedTensor, SavedChunk
from meshwright.runtime.device import CopyStream, DeviceKind
from meshwright.runtime.object_path import AnyPath
from meshwright.runtime.shards import StoredPart
from meshwright.runtime.share_copy import ShareCopy, Wanted

CHUNK_OVERHEAD_BYTES = 1500
"""Approximate bytes that the file format and the indices add to a chunk."""


class Share:
    """The chunks that this rank writes. If several ranks hold the same numbers (replicas), one of them writes these.

    Attributes:
        num_bytes: the approximate size of all ranks' shares together.

    Args:
        finite: names of tensors that are not worth saving if they are not finite.
        now: names of tensors that more than updates write to; None: all.
    """

    def __init__(
        self,
        parts: Mapping[str, StoredPart],
        *,
        finite: Collection[str] = (),
        now: Collection[str] | None = (),
    ) -> None:
        self._parts, self._finite, self._now = parts, finite, now
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._chunks = [(name, part, part.own_chunks(name)) for name, part in parts.items()]
        self._copying: ShareCopy | None = None
        whole = sum(part.value.element_size() * torch.Size(part.shape).numel() for part in parts.values())
        self.num_bytes = whole + CHUNK_OVERHEAD_BYTES * sum(len(part.chunks) for part in parts.values())

    def copy(self, kind: DeviceKind, copies: CopyStream | None, memory: dict[int, Tensor]) -> ShareCopy:
        """Begin to copy the share, so that training can go on before it is written."""
        wanted = [
            Wanted(name, part, chunk, self._now is None or name in self._now)
            for name, part, chunks in self._chunks
            for chunk in chunks
        ]
        self._copying = ShareCopy(wanted, kind, copies, memory)
        self._copying.begin()
        return self._copying

    def complete(self) -> None:
        """Wait until the copies are complete."""
        if self._copying is not None:
            self._copying.finish()

    def release(self) -> None:
        """Let updates go on that wait for the copies."""
        if self._copying is not None:
            self._copying.release()

    def write(self, directory: AnyPath) -> dict[str, IndexedTensor]:
        """Write the share to a directory, and flush it to the disk. Return where each chunk is.

        Raises:
            CheckpointError: a tensor is not finite.
        """
        directory.mkdir(parents=True, exist_ok=True)
        written: dict[str, list[SavedChunk]] = {name: [] for name, _, chunks in self._chunks if chunks}
        file = ChunkFile(directory / f"__{self.rank}_0.distcp")
        try:
            for name, value, offsets in self._values():
                if name in self._finite:
                    check_finite(name, value)
                written[name].append(file.add(value, offsets))
        except BaseException:
            file.abandon()
            raise
        file.close()
        return {
            name: IndexedTensor(
                self._parts[name].shape, str(self._parts[name].value.dtype).removeprefix("torch."), tuple(chunks)
            )
            for name, chunks in written.items()
        }

    def _values(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        if self._copying is not None:
            for wanted, value in self._copying.values():
                yield wanted.name, value, wanted.chunk.offsets
            return
        for name, part, chunks in self._chunks:
            for chunk in chunks:
                yield name, part.view(chunk).cpu(), chunk.offsets


def check_finite(name: str, value: Tensor) -> None:
    """Raise a CheckpointError if a chunk of a parameter holds NaN or infinity: it is not worth saving."""
    numbers = torch.view_as_real(value) if value.is_complex() else value
    if value.numel() and not all(map(math.isfinite, map(float, torch.aminmax(numbers)))):  # both are NaN if one is
        raise NotFiniteError(
            "it holds NaN or infinite values, and is not saved",
            where=f"parameter {name.removeprefix('model.')}",
            remedy="load the last checkpoint, and lower the learning rate or clip gradients (max_grad_norm)",
        )


class NotFiniteError(CheckpointError):
    """Parameters that are not worth saving."""
