"""Whole tensors in coded form: one message of coded chunks, whose size is known to sender and receiver."""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.compress.coder import Coder, draw_of


def coded_bytes(coder: Coder, length: int) -> int:
    """Bytes of a vector of ``length`` elements. The coder's codec must have a fixed size."""
    return sum(coder.num_bytes(end - begin) for begin, end in _chunks(coder, length))


def encoded(coder: Coder, value: Tensor, draw: int) -> Tensor:
    """The message (uint8) of a contiguous tensor."""
    flat = value.reshape(-1)
    message, at = torch.empty(coded_bytes(coder, flat.numel()), dtype=torch.uint8, device=value.device), 0
    for begin, end in _chunks(coder, flat.numel()):
        at += coder.encode(flat[begin:end], message[at:], draw_of(draw, begin))
    return message


def decode(coder: Coder, message: Tensor, into: Tensor) -> None:
    """Write the elements of a message to a contiguous tensor."""
    flat, at = into.view(-1), 0
    for begin, end in _chunks(coder, flat.numel()):
        size = coder.num_bytes(end - begin)
        coder.decode(message[at : at + size], flat[begin:end], add=False)
        at += size


def _chunks(coder: Coder, length: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, length, coder.chunk):
        yield begin, min(begin + coder.chunk, length)
