"""Coders apply a codec of hops to the elements that a rank sends, and to the bytes that it receives.

A vector is coded in chunks. A chunk is small enough to stay in the cache while it is read and written. A coded chunk
begins with the scales of its buckets, if its codec has any, followed by its codes. If the size of a coded chunk depends
on its values, a header (int64) holds the number of bytes after the header, as a negative number if these are compressed
without loss.
"""

from abc import ABC, abstractmethod

import torch
from msgspec import structs
from torch import Tensor

from meshwright.compress.bits import pack, packed_bytes
from meshwright.compress.elias import gamma_bits, read_gamma, write_gamma
from meshwright.compress.lossless import compress, decompress, require_zstandard
from meshwright.compress.onebit import decode_signs, encode_signs
from meshwright.compress.quantize import dequantize, quantize, read_levels
from meshwright.ir.codec import HEADER_BYTES, Cast, Codec, Lossless, OneBit, Quantize
from meshwright.schedules.collectives.coded_bytes import chunk_of


class Coder(ABC):
    """Encodes chunks of a flat vector of one dtype, and decodes them.

    Coders keep nothing between calls: a coder may be used by several threads.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        self.codec = codec
        self.dtype = dtype
        self.is_fixed = codec.is_fixed
        """Whether the number of elements determines the number of bytes of a coded chunk."""
        self.chunk = chunk_of(codec, dtype.itemsize)
        """Elements of a chunk, a multiple of the codec's bucket. The last chunk of a vector may be shorter."""

    def num_bytes(self, length: int) -> int:
        """Bytes of a coded chunk of ``length`` elements. If not ``is_fixed``, this is the maximum."""
        return self.codec.message_bytes(length, self.dtype.itemsize)

    def coded_bytes(self, message: Tensor, length: int) -> int:
        """Bytes of the coded chunk of ``length`` elements at the begin of ``message``."""
        return self.num_bytes(length) if self.is_fixed else HEADER_BYTES + abs(_header(message))

    @abstractmethod
    def encode(self, values: Tensor, into: Tensor, draw: int) -> int:
        """Write ``values`` as a coded chunk.

        Args:
            values: at most ``chunk`` elements, flat and contiguous.
            into: uint8, at least ``num_bytes`` of the values; it may begin at any byte.
            draw: the seed of the random numbers (``draw_of``). Equal draws and values give equal bytes on every rank.

        Returns:
            The number of bytes written.
        """

    @abstractmethod
    def decode(self, message: Tensor, into: Tensor, *, add: bool) -> None:
        """Write the elements of a coded chunk, or ``add`` them.

        Args:
            message: uint8, begins with the bytes that ``encode`` wrote.
            into: as many elements as were encoded, flat and contiguous.
        """


def coder_of(codec: Codec, dtype: torch.dtype) -> Coder:
    """The coder of a codec whose exchange is ``hops``, for elements of ``dtype``.

    Raises:
        PlanError: a bucket is larger than a chunk.
        MeshwrightError: the codec is lossless, and zstandard is not installed.
    """
    assert codec.exchange == "hops", f"{codec} does not code chunks"
    return LosslessCoder(codec, dtype) if codec.lossless else _FIXED[type(codec.values)](codec, dtype)


class PlainCoder(Coder):
    """Elements without a change of their format, for a codec that is only lossless."""

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        super().__init__(codec, dtype)
        self.is_fixed = True

    def num_bytes(self, length: int) -> int:
        """See ``Coder``."""
        return length * self.dtype.itemsize

    def encode(self, values: Tensor, into: Tensor, draw: int) -> int:
        """See ``Coder``; ``draw`` has no effect."""
        num_bytes = len(values) * self.dtype.itemsize
        into[:num_bytes] = values.view(torch.uint8)
        return num_bytes

    def decode(self, message: Tensor, into: Tensor, *, add: bool) -> None:
        """See ``Coder``."""
        num_bytes = len(into) * self.dtype.itemsize
        if add:
            into.add_(message[:num_bytes].clone().view(self.dtype))
        else:
            into.view(torch.uint8).copy_(message[:num_bytes])


class CastCoder(Coder):
    """Elements in a 16-bit format. Elements beyond the range of the format are infinite at the receiver."""

    def encode(self, values: Tensor, into: Tensor, draw: int) -> int:
        """See ``Coder``; ``draw`` has no effect."""
        num_bytes = 2 * len(values)
        if into.storage_offset() % 2:
            into[:num_bytes] = values.to(self._coded).view(torch.uint8)
        else:
            into[:num_bytes].view(self._coded).copy_(values)
        return num_bytes

    def decode(self, message: Tensor, into: Tensor, *, add: bool) -> None:
        """See ``Coder``."""
        message = message[: 2 * len(into)]
        coded = (message.clone() if message.storage_offset() % 2 else message).view(self._coded)
        if add:
            into.add_(coded)
        else:
            into.copy_(coded)

    @property
    def _coded(self) -> torch.dtype:
        assert isinstance(self.codec.values, Cast)
        return torch.float16 if self.codec.values.dtype == "float16" else torch.bfloat16


class QuantizeCoder(Coder):
    """Elements rounded at random to multiples of their bucket's scale (``quantize.py``).

    Elias' code is used for a chunk only if it makes the chunk shorter. A chunk with the maximal number of bytes holds
    plain codes.
    """

    def encode(self, values: Tensor, into: Tensor, draw: int) -> int:
        """See ``Coder``."""
        if not self._part.elias:
            return quantize(values, self._part, into, draw)
        fixed = torch.empty(self.num_bytes(len(values)) - HEADER_BYTES, dtype=torch.uint8, device=values.device)
        quantize(values, self._part, fixed, draw)
        head, levels = read_levels(fixed, self._part, len(values))
        size = head + packed_bytes(gamma_bits(levels), 1)
        if size < len(fixed):
            write_gamma(levels, fixed[head:size])
        return _write_sized(fixed[: min(size, len(fixed))], into, min(size, len(fixed)))

    def decode(self, message: Tensor, into: Tensor, *, add: bool) -> None:
        """See ``Coder``."""
        if self._part.elias:
            most = self.num_bytes(len(into)) - HEADER_BYTES
            message = message[HEADER_BYTES : self.coded_bytes(message, len(into))]
            if len(message) < most:
                head = most - packed_bytes(len(into), self._part.bits)
                levels = read_gamma(message[head:], len(into))
                message = torch.cat([message[:head], message.new_empty(most - head)])
                pack(levels, self._part.bits, message[head:])
        dequantize(message, self._part, into, add=add)

    @property
    def _part(self) -> Quantize:
        assert isinstance(self.codec.values, Quantize)
        return self.codec.values


class OneBitCoder(Coder):
    """Signs, and two means for each bucket (``onebit.py``)."""

    def encode(self, values: Tensor, into: Tensor, draw: int) -> int:
        """See ``Coder``; ``draw`` has no effect."""
        return encode_signs(values, self._bucket, into)

    def decode(self, message: Tensor, into: Tensor, *, add: bool) -> None:
        """See ``Coder``."""
        decode_signs(message, self._bucket, into, add=add)

    @property
    def _bucket(self) -> int:
        assert isinstance(self.codec.values, OneBit)
        return self.codec.values.bucket


class LosslessCoder(Coder):
    """The coded chunks of another coder, compressed where this makes them shorter (``lossless.py``)."""

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        require_zstandard()
        parts = tuple(part for part in codec.parts if not isinstance(part, Lossless))
        self._inner = _FIXED[type(codec.values)](structs.replace(codec, parts=parts) if parts else codec, dtype)
        match codec.values:
            case Cast():
                self._item_bytes = 2
            case None:
                self._item_bytes = dtype.itemsize
            case _:
                self._item_bytes = 1
        super().__init__(codec, dtype)

    def encode(self, values: Tensor, into: Tensor, draw: int) -> int:
        """See ``Coder``. Values are on the CPU."""
        plain = torch.empty(self._inner.num_bytes(len(values)), dtype=torch.uint8, device=values.device)
        plain = plain[: self._inner.encode(values, plain, draw)]
        packed = compress(plain, self._item_bytes)
        own = 0 if self._inner.is_fixed else HEADER_BYTES
        if len(packed) < len(plain) - own:
            return _write_sized(packed, into, -len(packed))
        return _write_sized(plain[own:], into, len(plain) - own)

    def decode(self, message: Tensor, into: Tensor, *, add: bool) -> None:
        """See ``Coder``."""
        size = _header(message)
        if size < 0:
            message = decompress(message[HEADER_BYTES : HEADER_BYTES - size], self._item_bytes)
        elif self._inner.is_fixed:
            message = message[HEADER_BYTES : HEADER_BYTES + size]
        self._inner.decode(message, into, add=add)


_FIXED: dict[type, type[Coder]] = {
    type(None): PlainCoder,
    Cast: CastCoder,
    Quantize: QuantizeCoder,
    OneBit: OneBitCoder,
}


def _write_sized(payload: Tensor, into: Tensor, header: int) -> int:
    """Write a header and the payload behind it. Returns the number of bytes."""
    into[:HEADER_BYTES] = torch.tensor([header], dtype=torch.int64).view(torch.uint8).to(into.device)
    into[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    return HEADER_BYTES + len(payload)


def _header(message: Tensor) -> int:
    return int(message[:HEADER_BYTES].clone().view(torch.int64))


def draw_of(*numbers: int) -> int:
    """An integer of 63 bits, used as a seed. It is mixed from integers such as seed, step, rank and chunk.

    The mixing function is that of SplitMix64 (Steele, Lea and Flood 2014).
    """
    mixed = 0
    for number in numbers:
        mixed = (mixed + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


_MASK = 2**64 - 1
