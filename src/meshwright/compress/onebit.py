"""The sign of each element, and two means for each bucket (Seide et al. 2014, "1-bit stochastic gradient descent")."""

from math import gcd

import torch
from torch import Tensor

from meshwright.compress.bits import pack, packed_bytes, unpack_flags
from meshwright.compress.quantize import matrices, read_floats, write_floats


def encode_signs(values: Tensor, bucket: int, into: Tensor) -> int:
    """For all buckets, write the mean of the elements without a sign, then the mean of the negative elements (float32),
    then a bit for each element: 1 if it is negative. Returns the number of bytes.

    A bucket with NaN or an infinite element has a mean that is NaN or infinite.

    Args:
        values: flat and contiguous, of any floating dtype. Buckets start at element 0; the last may be shorter.
        into: uint8.
    """
    length = len(values)
    values = values.float()
    below = torch.minimum(values, values.new_zeros(()))
    signs = below.to(torch.bool)
    positive, negative = [], []
    for begin, end, width in matrices(length, bucket):
        rows, rows_below = (flat[begin:end].view(-1, width) for flat in (values, below))
        count = _counts(signs[begin:end], width)
        total_below = rows_below.sum(1)
        positive.append((rows.sum(1) - total_below) / (width - count).clamp(min=1))
        negative.append(total_below / count.clamp(min=1))
    head = write_floats([*positive, *negative], into)
    size = packed_bytes(length, 1)
    pack(signs, 1, into[head : head + size])
    return head + size


def decode_signs(message: Tensor, bucket: int, into: Tensor, *, add: bool) -> None:
    """Write the elements of a message of ``encode_signs``, or ``add`` them. ``into`` has as many elements as the
    encoded vector."""
    length = len(into)
    num_buckets = -(-length // bucket)
    means, head = read_floats(message, 2 * num_buckets)
    positive, negative = means.view(torch.int32).view(2, -1)
    signs = unpack_flags(message[head : head + packed_bytes(length, 1)], length)
    whole = into.dtype == torch.float32 and not add
    values = into if whole else torch.empty(length, device=into.device)
    words = values.view(torch.int32)
    words.copy_(signs)
    for begin, end, width in matrices(length, bucket):
        buckets = slice(begin // bucket, -(-end // bucket))
        rows = words[begin:end].view(-1, width)
        # Select the bits of one mean or of the other, exactly.
        rows.mul_((positive ^ negative)[buckets, None]).bitwise_xor_(positive[buckets, None])
    if add:
        into.add_(values)
    elif not whole:
        into.copy_(values)


def _counts(signs: Tensor, width: int) -> Tensor:
    """The number of set flags in each row of ``width`` flags: int64 [rows]."""
    if width % 8:
        return signs.view(-1, width).sum(1)
    # Count eight flags at once, as the bytes of a word: a byte holds the sum of up to 255 flags.
    group = gcd(width // 8, 128)
    sums = signs.view(torch.int64).view(-1, group).sum(1)
    return sums.view(torch.uint8).view(-1, width // group).sum(1)
