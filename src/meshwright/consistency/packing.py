"""Plain data as bytes in a tensor, for letters."""

import io
from typing import Any

import torch
from torch import Tensor


def packed(state: dict[str, Any]) -> Tensor:
    """A state as bytes in a tensor; ``unpacked`` reads it without running any code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpacked(state: Tensor) -> dict[str, Any]:
    """The inverse of ``packed``."""
    result: dict[str, Any] = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
    return result
