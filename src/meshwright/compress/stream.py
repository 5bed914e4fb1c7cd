"""Streams: vectors whose elements are mostly 0, as a rank stores them (SparCML, Renggli et al. 2019, arXiv:1802.08021).

A stream holds indices and values, or all elements as soon as that takes fewer bytes. A message of a stream begins with
the number of its entries (int64), which is -1 if all elements follow.

    sparse      entries | indices (int32) | values
    dense       -1      | values
"""

from __future__ import annotations

import torch
from msgspec import structs
from torch import Tensor

from meshwright.compress.coder import coder_of, draw_of
from meshwright.compress.select import chosen, share_of
from meshwright.ir.codec import HEADER_BYTES, INDEX_BYTES, Codec, Select


class Stream:
    """A vector of ``length`` elements: ``values`` at ``indices`` (int32, ascending), or all (indices are None)."""

    def __init__(self, length: int, indices: Tensor | None, values: Tensor) -> None:
        sparse = indices is not None and not _is_dense(length, len(indices), values.dtype.itemsize)
        self.length = length
        self.indices = indices if sparse else None
        self.values = values if sparse or indices is None else _spread(length, indices, values)

    @staticmethod
    def select(values: Tensor, codec: Codec, share: float | None = None, draw: int = 0) -> Stream:
        """The stream of the elements that a codec selects.

        Args:
            share: replaces the codec's share (``share_of`` in a warm-up).
            draw: the seed for ``randk``.
        """
        assert codec.select is not None
        indices = chosen(values, codec.select, share, draw)
        return Stream(len(values), indices, values.index_select(0, indices))

    @property
    def num_bytes(self) -> int:
        """Bytes of the message of ``write``."""
        item_bytes = self.values.dtype.itemsize + (0 if self.indices is None else INDEX_BYTES)
        return HEADER_BYTES + item_bytes * len(self.values)

    def add_to(self, into: Tensor) -> None:
        """Add the elements to a vector."""
        if self.indices is None:
            into.add_(self.values)
        else:
            into.index_add_(0, self.indices, self.values)

    def dense(self) -> Tensor:
        """All elements."""
        return self.values if self.indices is None else _spread(self.length, self.indices, self.values)

    def cut(self, begin: int, end: int) -> Stream:
        """The stream of the elements from ``begin`` to ``end``."""
        if self.indices is None:
            return Stream(end - begin, None, self.values[begin:end])
        bounds = torch.tensor([begin, end], dtype=torch.int32, device=self.indices.device)
        first, last = torch.searchsorted(self.indices, bounds).tolist()
        return Stream(end - begin, self.indices[first:last] - begin, self.values[first:last])

    def write(self, into: Tensor) -> int:
        """Write the message of the stream. Returns its bytes, ``num_bytes``."""
        return _write(self.indices, self.values.contiguous().view(torch.uint8), into)

    @staticmethod
    def read(message: Tensor, length: int, dtype: torch.dtype) -> Stream:
        """The stream of a message of ``write``, for a vector of ``length`` elements."""
        indices, rest = _read_indices(message)
        count = length if indices is None else len(indices)
        return Stream(length, indices, rest[: count * dtype.itemsize].clone().view(dtype))


def merge(first: Stream, second: Stream) -> Stream:
    """The sum of two streams of equal length. It is dense if a dense stream takes fewer bytes than the union of the
    indices with its values."""
    if first.indices is None or second.indices is None:
        total = first.dense().clone() if first.indices is None else second.dense().clone()
        (second if first.indices is None else first).add_to(total)
        return Stream(first.length, None, total)
    # Sorting the indices of both streams takes less time than searching the indices of one stream in the other.
    indices, places = torch.cat([first.indices, second.indices]).unique(return_inverse=True)
    values = torch.cat([first.values, second.values])
    return Stream(first.length, indices, values.new_zeros(len(indices)).index_add_(0, places, values))


def recode(stream: Stream, codec: Codec, draw: int) -> tuple[Stream, Tensor]:
    """The message in which a codec writes a stream, and the stream that its receivers decode.

    Values are quantized, cast or compressed by the codec's chain. In a sparse stream, only the values are encoded.
    """
    dtype = stream.values.dtype
    inner = _values_codec(codec)
    if inner is None:
        message = torch.empty(stream.num_bytes, dtype=torch.uint8, device=stream.values.device)
        stream.write(message)
        return stream, message
    coder = coder_of(inner, dtype)
    parts = []
    decoded = torch.empty_like(stream.values)
    for place, begin in enumerate(range(0, len(decoded), coder.chunk)):
        values, into = (flat[begin : begin + coder.chunk] for flat in (stream.values, decoded))
        part = torch.empty(coder.num_bytes(len(values)), dtype=torch.uint8, device=values.device)
        parts.append(part[: coder.encode(values, part, draw_of(draw, place))])
        coder.decode(parts[-1], into, add=False)
    coded = torch.cat(parts) if parts else stream.values.new_empty(0, dtype=torch.uint8)
    head = HEADER_BYTES + (0 if stream.indices is None else INDEX_BYTES * len(stream.indices))
    message = torch.empty(head + len(coded), dtype=torch.uint8, device=coded.device)
    _write(stream.indices, coded, message)
    return _same_form(stream, decoded), message


def read_coded(message: Tensor, codec: Codec, length: int, dtype: torch.dtype) -> Stream:
    """The stream of a message of ``recode``, for a vector of ``length`` elements."""
    inner = _values_codec(codec)
    if inner is None:
        return Stream.read(message, length, dtype)
    indices, rest = _read_indices(message)
    coder = coder_of(inner, dtype)
    values = torch.empty(length if indices is None else len(indices), dtype=dtype, device=message.device)
    for begin in range(0, len(values), coder.chunk):
        part = values[begin : begin + coder.chunk]
        coder.decode(rest, part, add=False)
        rest = rest[coder.coded_bytes(rest, len(part)) :]
    return Stream(length, indices, values)


def select_with_feedback(
    value: Tensor, state: dict[str, Tensor], codec: Codec, step: int, draw: int = 0,
    before: dict[str, Tensor] | None = None,
) -> Stream:  # fmt: skip
    """The elements that are sent in a step. The other elements stay in the residual: sent + new residual = value + old
    residual.

    With a momentum, this is Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887, equations 4 to 6): the
    momentum instead of the value is added to the residual, and momentum and residual become 0 where an element is sent.

    Args:
        value: flat and contiguous. It does not change.
        state: ``residual`` and ``momentum``, as far as the codec has them. They are overwritten.
        before: ``residual`` and ``momentum`` of the previous step, which do not change; None: they are in ``state``.
        step: counts from 0, for the warm-up.
        draw: the seed for ``randk``.
    """
    share = share_of(codec, step)
    if not codec.feedback:
        return Stream.select(value, codec, share, draw)
    residual, old, added = state["residual"], before or state, value
    if codec.momentum:
        added = torch.mul(old["momentum"], codec.momentum, out=state["momentum"]).add_(value)
    torch.add(old["residual"], added, out=residual)
    assert codec.select is not None
    indices = chosen(residual, codec.select, share, draw)
    sent = Stream(len(value), indices, residual.index_select(0, indices))
    for kept in (state[name] for name in ("residual", "momentum") if name in state):
        kept.index_fill_(0, indices.long(), 0)
    return sent


def _same_form(stream: Stream, values: Tensor) -> Stream:
    """A stream of other values at the same indices."""
    return Stream(stream.length, stream.indices, values)


def _is_dense(length: int, entries: int, item_bytes: int) -> bool:
    return length * item_bytes < entries * (INDEX_BYTES + item_bytes)


def _spread(length: int, indices: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(length).index_copy_(0, indices.long(), values)


def _write(indices: Tensor | None, values: Tensor, into: Tensor) -> int:
    entries = torch.tensor([-1 if indices is None else len(indices)], dtype=torch.int64)
    parts = [entries.view(torch.uint8).to(values.device), values]
    if indices is not None:
        parts.insert(1, indices.view(torch.uint8))
    begin = 0
    for part in parts:
        into[begin : begin + len(part)] = part
        begin += len(part)
    return begin


def _read_indices(message: Tensor) -> tuple[Tensor | None, Tensor]:
    """The indices of a message, and the bytes after them."""
    entries = int(message[:HEADER_BYTES].clone().view(torch.int64))
    if entries < 0:
        return None, message[HEADER_BYTES:]
    end = HEADER_BYTES + INDEX_BYTES * entries
    return message[HEADER_BYTES:end].clone().view(torch.int32), message[end:]


def _values_codec(codec: Codec) -> Codec | None:
    """The codec of a stream's values; None if they are not encoded."""
    parts = tuple(part for part in codec.parts if not isinstance(part, Select))
    return structs.replace(codec, parts=parts, feedback=False, momentum=0.0, warmup=0) if parts else None
