"""Pieces of the state in the memory of a slot, as bytes and as tensors."""

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.runtime.copy_plan import SlotEntry, TensorPiece
from meshwright.runtime.shards import StoredPart, common_block

WHERE = "copies in memory"
LENGTH_BYTES = 8
"""Bytes before a rank's plain state that hold its length."""


def within(memory: Tensor, entry: SlotEntry) -> Tensor:
    """The bytes of an entry, as a view of the memory of its slot."""
    return memory[entry.begin : entry.begin + entry.piece.num_bytes]


def tensor_within(memory: Tensor, entry: SlotEntry) -> Tensor:
    """The tensor of an entry, as a view of the memory of its slot."""
    return as_tensor(within(memory, entry), entry.piece)


def as_tensor(data: Tensor, piece: TensorPiece) -> Tensor:
    """The bytes of a piece, as a tensor of its dtype and sizes."""
    return data.view(getattr(torch, piece.dtype)).view(piece.sizes)


def write_sized(room: Tensor, data: bytes) -> None:
    """Write the length of the data, and the data.

    Raises:
        CheckpointError: there is not enough room.
    """
    if LENGTH_BYTES + len(data) > room.numel():
        raise CheckpointError(
            f"the plain state has grown to {len(data):,} bytes, and there is room for "
            f"{room.numel() - LENGTH_BYTES:,}", where=WHERE,
            remedy="give the same command again: the run goes on from the last copy or checkpoint, with more room",
        )  # fmt: skip
    text = len(data).to_bytes(LENGTH_BYTES, "little") + data
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_sized(room: Tensor) -> bytes:
    """The data that ``write_sized`` has written."""
    length = int.from_bytes(room[:LENGTH_BYTES].numpy().tobytes(), "little")
    return room[LENGTH_BYTES : LENGTH_BYTES + length].numpy().tobytes()


def overlapping(part: StoredPart, pieces: list[TensorPiece], name: str) -> list[TensorPiece]:
    """The pieces from which a part of tensor ``name`` is filled.

    Raises:
        CheckpointError: there are none, or they have another dtype.
    """
    dtype = str(part.value.dtype).removeprefix("torch.")
    overlapping_pieces = [
        piece
        for piece in pieces
        if piece.dtype == dtype
        and any(common_block(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes) for chunk in part.chunks)
    ]
    if part.chunks and not overlapping_pieces:
        raise CheckpointError(
            f"there is no copy of it in {dtype}", where=f"{WHERE}: {name}",
            remedy="stop the run and give the same command again: it then goes on from its last checkpoint",
        )  # fmt: skip
    return overlapping_pieces


def fill(part: StoredPart, piece: TensorPiece, data: Tensor) -> None:
    """Copy the elements that a part and a piece have in common into the part. ``data``: the bytes of the piece."""
    value = as_tensor(data, piece)
    for chunk in part.chunks:
        common = common_block(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes)
        if common is None:
            continue
        source, target = value, part.view(chunk)
        for dim, (begin, other, size) in enumerate(zip(*common, strict=True)):
            source, target = source.narrow(dim, begin, size), target.narrow(dim, other, size)
        target.copy_(source)
