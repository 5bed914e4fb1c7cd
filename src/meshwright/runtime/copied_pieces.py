"""Pieces of the state in the memory of a slot, as bytes and as tensors."""

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.runtime.copy_plan import Entry, Piece, overlap
from meshwright.runtime.shards import StoredPart

WHERE = "copies in memory"


def within(memory: Tensor, entry: Entry) -> Tensor:
    """The bytes of an entry."""
    return memory[entry.begin : entry.begin + entry.piece.num_bytes]


def shown(memory: Tensor, entry: Entry) -> Tensor:
    """The memory of a piece, as a tensor."""
    return as_tensor(within(memory, entry), entry.piece)


def as_tensor(data: Tensor, piece: Piece) -> Tensor:
    """The bytes of a piece, as a tensor of its dtype and sizes."""
    return data.view(getattr(torch, piece.dtype)).view(piece.sizes)


def put(room: Tensor, data: bytes) -> None:
    """Write data and their length."""
    if len(data) + 8 > room.numel():
        raise CheckpointError(
            f"the plain state has grown to {len(data)} bytes, more than there is room for", where=WHERE
        )
    text = len(data).to_bytes(8, "little") + data
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def got(room: Tensor) -> bytes:
    """The data that ``put`` has written."""
    length = int.from_bytes(room[:8].numpy().tobytes(), "little")
    return room[8 : 8 + length].numpy().tobytes()


def overlapping(part: StoredPart, pieces: list[Piece], name: str) -> list[Piece]:
    """The pieces that a part is filled from.

    Raises:
        CheckpointError: there are none, or they have another dtype.
    """
    dtype = str(part.value.dtype).removeprefix("torch.")
    found = [
        piece
        for piece in pieces
        if piece.dtype == dtype and any(overlap(piece, chunk.offsets, chunk.sizes) for chunk in part.chunks)
    ]
    if part.chunks and not found:
        raise CheckpointError(f"there is no copy of it in {dtype}", where=name)
    return found


def pour(piece: Piece, data: Tensor, part: StoredPart) -> None:
    """Copy what a piece and a part have in common into the part."""
    value = as_tensor(data, piece)
    for chunk in part.chunks:
        common = overlap(piece, chunk.offsets, chunk.sizes)
        if common is None:
            continue
        source, target = value, part.view(chunk)
        for dim, (begin, other, size) in enumerate(zip(*common, strict=True)):
            source, target = source.narrow(dim, begin, size), target.narrow(dim, other, size)
        target.copy_(source)
