"""Small integers packed into bytes by tensor operations. A vector is cut into planes: as many as a byte has codes.

Each byte holds one code of every plane:

    6 codes a..f of 4 bits      byte 0: d a    byte 1: e b    byte 2: f c      (high bits first)
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def packed_bytes(length: int, bits: int) -> int:
    """Bytes of ``length`` codes of ``bits`` bits each."""
    return -(-length * bits // 8)


def pack(codes: Tensor, bits: int, into: Tensor) -> None:
    """Write the lowest ``bits`` (1, 2, 4 or 8) bits of each code.

    Args:
        codes: int8, or bool for 1 bit, flat and contiguous. Higher bits are dropped.
        into: uint8, ``packed_bytes`` of them.
    """
    per_byte = 8 // bits
    planes = codes.view(torch.uint8)
    if missing := len(into) * per_byte - len(codes):
        planes = F.pad(planes, (0, missing))
    if codes.dtype != torch.bool and bits < 8:
        planes = planes.bitwise_and((1 << bits) - 1)
    # Halves are added up: planes k and k + 4, then k and k + 2, then k and k + 1.
    while per_byte > 1:
        per_byte //= 2
        half = per_byte * len(into)
        planes = torch.add(planes[:half], planes[half:], alpha=1 << (per_byte * bits))
    into.copy_(planes)


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Read codes: int8 [length], each in the highest ``bits`` bits of its byte, so that it has its sign. They are 2**(8
    - bits) times as large as the original codes."""
    if bits == 8:
        return packed.view(torch.int8)
    top = 8 - bits
    lifts = torch.tensor([[1 << (top - shift)] for shift in range(0, 8, bits)], dtype=torch.uint8, device=packed.device)
    codes = (packed * lifts).bitwise_and_((0xFF << top) & 0xFF)
    return codes.view(-1)[:length].view(torch.int8)


def unpack_flags(packed: Tensor, length: int) -> Tensor:
    """Read codes of 1 bit: bool [length]."""
    masks = torch.tensor([[1 << place] for place in range(8)], dtype=torch.uint8, device=packed.device)
    return (packed & masks).view(-1)[:length].to(torch.bool)


def set_places(flags: Tensor) -> Tensor:
    """The positions of the flags (bool, flat) that are set: int64, ascending. On the CPU, words of eight unset flags
    are skipped."""
    if flags.device.type != "cpu" or len(flags) % 8:
        return flags.nonzero().view(-1)
    array = flags.numpy()
    words = np.flatnonzero(array.view(np.int64) != 0)
    places = np.flatnonzero(array.reshape(-1, 8)[words])
    return torch.from_numpy(words[places >> 3] * 8 + (places & 7))
