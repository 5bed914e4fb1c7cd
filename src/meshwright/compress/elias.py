"""Small integers in Elias' gamma code, processed in parallel. The code is cut in two parts, so that a code can be
decoded before the preceding codes.

A level becomes z = 1, 2, 3, 4, 5, ... for 0, 1, -1, 2, -2, ...; its code has 2 floor(log2 z) + 1 bits. The first part
has the lengths of all codes in unary (floor(log2 z) zeros and a one). The second part has the bits of all z below their
highest bit. The positions of the ones give all lengths, and the sums of lengths give the position of each z.
"""

import torch
from torch import Tensor

from meshwright.compress.bits import pack, packed_bytes, set_places, unpack_flags


def gamma_bits(levels: Tensor) -> int:
    """The number of bits of the codes of these levels (int8)."""
    return int(2 * _looked_up(_PLACES, levels).sum()) + len(levels)


def write_gamma(levels: Tensor, into: Tensor) -> None:
    """Write the codes of ``levels`` (int8, from -127 to 127) into the bytes that ``gamma_bits`` need."""
    places = _looked_up(_PLACES, levels)
    ends = (places + 1).cumsum(0)
    start = int(ends[-1]) if len(ends) else 0
    code, place = _low_bits(places)
    bits = torch.zeros(start + len(code), dtype=torch.bool, device=levels.device)
    bits.index_fill_(0, ends - 1, True)
    bits[start:] = (_looked_up(_FOLDED, levels).index_select(0, code) >> place & 1).to(torch.bool)
    pack(bits, 1, into[: packed_bytes(len(bits), 1)])


def read_gamma(message: Tensor, count: int) -> Tensor:
    """Read ``count`` levels (int8) from a message of ``write_gamma``, which has no further bytes."""
    bits = unpack_flags(message, 8 * len(message))
    ends = set_places(bits)[:count] + 1
    places = (ends.diff(prepend=ends.new_zeros(1)) - 1).int()
    start = int(ends[-1]) if len(ends) else 0
    code, place = _low_bits(places)
    folded = torch.ones_like(places) << places
    folded.index_add_(0, code, bits[start : start + len(code)].int() << place)
    return torch.where(folded % 2 == 1, -(folded >> 1), folded >> 1).to(torch.int8)


def _low_bits(places: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of all codes below their highest bit, in the order in which they are written: the index of a bit's code,
    and the bit's place in that code (int32)."""
    code = torch.repeat_interleave(torch.arange(len(places), dtype=torch.int32, device=places.device), places)
    first = (places.cumsum(0) - places).int()
    place = torch.arange(len(code), dtype=torch.int32, device=places.device) - first.index_select(0, code)
    return code, place


def _looked_up(table: Tensor, levels: Tensor) -> Tensor:
    """The entries (int32) of a table that has an entry for each level from -128 on."""
    return table.to(levels.device).index_select(0, levels.int() + 128)


_FOLDED = torch.tensor(
    [2 * level if level > 0 else 1 - 2 * level for level in range(-128, 128)], dtype=torch.int32, device="cpu"
)
"""z of each level."""
_PLACES = torch.tensor([int(z).bit_length() - 1 for z in _FOLDED.tolist()], dtype=torch.int32, device="cpu")
"""floor(log2 z) of each level."""
