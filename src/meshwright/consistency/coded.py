"""Parts of vectors in coded form: a message, and the elements that its receivers decode."""

import torch
from torch import Tensor

from meshwright.compress.stream import Stream, read_coded, recode
from meshwright.ir.codec import Codec


def encoded(values: Tensor, codec: Codec, draw: int, *, select: bool) -> tuple[Tensor, Tensor]:
    """The message (uint8) of a flat vector, and the vector that its receivers decode.

    ``select``: the codec selects elements, if it is a selection. Otherwise all elements that are not 0 are sent. This
    is for sums of selections, which are not selected again.
    """
    if not len(values):
        return torch.empty(0, dtype=torch.uint8), values
    if codec.select is None:
        stream = Stream(len(values), None, values)
    elif select:
        stream = Stream.select(values, codec, draw=draw)
    else:
        indices = values.nonzero().view(-1).to(torch.int32)
        stream = Stream(len(values), indices, values.index_select(0, indices))
    sent, message = recode(stream, codec, draw)
    return message, sent.dense()


def decoded(message: Tensor, codec: Codec, length: int, dtype: torch.dtype) -> Tensor:
    """The vector of ``length`` elements in a message of ``encoded``."""
    return read_coded(message, codec, length, dtype).dense() if length else torch.empty(0, dtype=dtype)
