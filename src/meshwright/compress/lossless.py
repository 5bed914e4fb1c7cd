"""Lossless compression of bytes on the CPU: bytes of equal significance are grouped, and then compressed with
zstandard.

Only the exponents of gradients can be compressed; the other bytes are noise. Gaussian float32 compresses by at most
1.2, bfloat16 by at most 1.5.
"""

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import MeshwrightError

_LEVEL = 1
"""zstandard's fastest ordinary level: noise does not compress further at higher levels."""


def require_zstandard() -> None:
    """Check that zstandard can be imported.

    Raises:
        MeshwrightError: zstandard cannot be imported.
    """
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise MeshwrightError(
            "zstandard is not installed",
            where="codec 'lossless'",
            remedy="install it with: pip install 'meshwright[lossless]'",
        ) from error


def compress(plain: Tensor, item_bytes: int) -> Tensor:
    """Compress bytes.

    Args:
        plain: uint8, flat, on the CPU. If ``item_bytes`` divides their number, they are items of this size, and the
            bytes of equal significance are grouped.

    Raises:
        MeshwrightError: the bytes are not on the CPU.
    """
    import zstandard

    if plain.device.type != "cpu":
        raise MeshwrightError(
            f"a tensor on {plain.device}",
            where="codec 'lossless'",
            remedy="zstandard compresses on the CPU only: choose another codec for this device",
        )
    if len(plain) % item_bytes == 0:
        plain = plain.view(-1, item_bytes).t().contiguous().view(-1)
    return _tensor(zstandard.ZstdCompressor(level=_LEVEL).compress(plain.numpy().data))


def decompress(message: Tensor, item_bytes: int) -> Tensor:
    """The original bytes of a message of ``compress``."""
    import zstandard

    plain = _tensor(zstandard.ZstdDecompressor().decompress(message.contiguous().numpy().data))
    if len(plain) % item_bytes == 0:
        plain = plain.view(item_bytes, -1).t().contiguous().view(-1)
    return plain


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
