"""This rank's share of a save: the chunks that it writes, and their way to a file."""

import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.runtime.chunk_index import IndexedTensor
from meshwright.runtime.chunk_writer import ChunkFile
from meshwright.runtime.device import CopyStream, DeviceKind
from meshwright.runtime.object_path import AnyPath
from meshwright.runtime.shards import Chunk, StoredPart
from meshwright.runtime.share_copy import HostMemory, ShareCopy

CHUNK_OVERHEAD_BYTES = 1500
"""Approximate bytes that the file format and the indices add to a chunk."""


class Share:
    """The chunks that this rank writes. If several ranks hold the same numbers (replicas), one of them writes these.

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
        self._copying: ShareCopy | None = None

    @cached_property
    def num_bytes(self) -> int:
        """The approximate size of all ranks' shares together."""
        parts = self._parts.values()
        whole = sum(part.value.element_size() * torch.Size(part.shape).numel() for part in parts)
        return whole + CHUNK_OVERHEAD_BYTES * sum(len(part.chunks) for part in parts)

    @cached_property
    def _chunks(self) -> list[tuple[str, StoredPart, tuple[Chunk, ...]]]:
        return [(name, part, part.own_chunks(name)) for name, part in self._parts.items()]

    def copy(self, kind: DeviceKind, copies: CopyStream | None, memory: HostMemory) -> ShareCopy:
        """Begin to copy the share, so that training can go on before it is written."""
        now = self._parts.keys() if self._now is None else self._parts.keys() & {*self._now}
        self._copying = ShareCopy(self._parts, now, kind, copies, memory)
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
        file = ChunkFile(directory / f"__{self.rank}_0.distcp")
        try:
            for name, value, offsets in self._values():
                file.add(name, value, offsets, partial(check_finite, name) if name in self._finite else None)
        except BaseException:
            file.abandon()
            raise
        return {
            name: IndexedTensor(
                self._parts[name].shape, str(self._parts[name].value.dtype).removeprefix("torch."), chunks
            )
            for name, chunks in file.close().items()
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
