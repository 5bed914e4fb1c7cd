"""QSGD: elements rounded at random to multiples of their bucket's scale (Alistarh et al. 2017, arXiv:1610.02132).

An element x of a bucket of scale s becomes s * floor(x / s + u), u uniform on [0, 1): its mean is x, and its variance
s**2 f (1 - f), where f is the fraction of x / s. (The paper rounds the magnitude; the distribution is the same.) The
numbers u are a window of one table. The draw gives the begin of the window. Over all windows, each element meets each
number of the table equally often.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from meshwright.compress.bits import pack, packed_bytes, unpack
from meshwright.ir.codec import SCALE_BYTES, Quantize

_WINDOWS = 2**19
"""The number of windows of the table of random numbers, and the largest number of elements in a window."""
_STEPS = 2**14
"""The number of different values in the table. With so few values, their sums with levels are exact in float32."""
_BIAS = 256.0
"""Added before elements are rounded toward 0, to make all of them positive. It does not change the lowest 8 bits of a
level."""
_LARGEST = 1e38
"""Upper limit of the inverse of a scale. Buckets of magnitudes below 1e-36 decode to (nearly) 0."""


def quantize(values: Tensor, part: Quantize, into: Tensor, draw: int) -> int:
    """Write the scales of all buckets (float32), then the packed levels. Returns the number of bytes.

    A bucket with NaN or an infinite element has no finite scale, and all its elements decode to NaN.

    Args:
        values: flat and contiguous, at most 2**19 elements, of any floating dtype. Buckets start at element 0, and the
            last bucket may be shorter. Magnitudes beyond the range of float32 count as infinite.
        into: uint8.
        draw: the seed of the rounding.
    """
    length, bits = len(values), part.bits
    values = values.float()
    work = torch.empty(length, device=values.device)
    # The largest float32 below the number of levels: rounding cannot move an element beyond the last level.
    below = torch.tensor(part.levels * (1 - 2**-24), device=values.device)
    scales = []
    for begin, end, width in matrices(length, part.bucket):
        rows, own = (flat[begin:end].view(-1, width) for flat in (values, work))
        most = torch.abs(rows, out=own).amax(1, keepdim=True)
        if part.norm == "l2":
            # Rounded sums of squares may be less than the largest square.
            most = torch.maximum(torch.linalg.vector_norm(rows, 2, 1, keepdim=True), most)
        scales.append(most / part.levels)
        inverse = (below / most).clamp_(max=_LARGEST)
        dither = _dither(values.device)[draw % _WINDOWS + begin :][: end - begin].view(-1, width)
        torch.addcmul(dither, rows, inverse, out=own)
    codes = work.to(torch.int16)
    head = write_floats(scales, into)
    size = packed_bytes(length, bits)
    message = into[head : head + size]
    if bits == 8:
        message.view(torch.int8).copy_(codes)
    else:
        pack(codes.to(torch.int8), bits, message)
    return head + size


def dequantize(message: Tensor, part: Quantize, into: Tensor, *, add: bool) -> None:
    """Write the elements of a message of ``quantize``, or ``add`` them. ``into`` has as many elements as the encoded
    vector."""
    length = len(into)
    scales, head = read_floats(message, -(-length // part.bucket))
    codes = unpack(message[head : head + packed_bytes(length, part.bits)], part.bits, length)
    scales = scales / (1 << (8 - part.bits))
    whole = into.dtype == torch.float32 and not add
    values = into if whole else torch.empty(length, device=into.device)
    values.copy_(codes)
    for begin, end, width in matrices(length, part.bucket):
        rows = values[begin:end].view(-1, width)
        rows.mul_(scales[begin // part.bucket :][: len(rows), None])
    if add:
        into.add_(values)
    elif not whole:
        into.copy_(values)


def read_levels(message: Tensor, part: Quantize, length: int) -> tuple[int, Tensor]:
    """The number of bytes of the scales in a message of ``quantize``, and its levels (int8)."""
    head = SCALE_BYTES * -(-length // part.bucket)
    codes = unpack(message[head : head + packed_bytes(length, part.bits)], part.bits, length)
    return head, codes.bitwise_right_shift(8 - part.bits)


def write_floats(columns: list[Tensor], into: Tensor) -> int:
    """Write float32 columns one after the other to a message, from any byte on. Returns the number of bytes."""
    if not columns:
        return 0
    flat = torch.cat(columns).view(-1).view(torch.uint8)
    into[: len(flat)] = flat
    return len(flat)


def read_floats(message: Tensor, count: int) -> tuple[Tensor, int]:
    """Read ``count`` float32 values from the start of a message. Returns the values and their bytes."""
    size = SCALE_BYTES * count
    return message[:size].clone().view(torch.float32), size


def matrices(length: int, bucket: int) -> Iterator[tuple[int, int, int]]:
    """The vector as matrices with a row for each bucket: begin, end and width of a matrix of all whole buckets, and of
    a matrix of the last bucket, if that is shorter."""
    whole = length - length % bucket
    if whole:
        yield 0, whole, bucket
    if whole < length:
        yield whole, length, length - whole


@cache
def _dither(device: torch.device) -> Tensor:
    """The table: numbers uniform on [0, 1) in random order, plus ``_BIAS``. It has them twice, so that a window can
    begin at each of them."""
    order = torch.randperm(_WINDOWS, generator=torch.Generator().manual_seed(0))
    numbers = (order % _STEPS + 0.5) / _STEPS + _BIAS
    return torch.cat([numbers, numbers]).to(device)
