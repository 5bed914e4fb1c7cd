"""Plain data as bytes, for checkpoints and letters."""

import io
from typing import Any

import torch
from torch import Tensor


def to_bytes(value: Any) -> bytes:
    """Numbers, texts, tensors, lists and dicts as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """The inverse of ``to_bytes``. It runs no code that the bytes may contain."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def packed(state: dict[str, Any]) -> Tensor:
    """A state as bytes in a tensor, for a letter."""
    return torch.frombuffer(bytearray(to_bytes(state)), dtype=torch.uint8)


def unpacked(state: Tensor) -> dict[str, Any]:
    """The inverse of ``packed``."""
    result: dict[str, Any] = from_bytes(state.numpy().tobytes())
    return result
