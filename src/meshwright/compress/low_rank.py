"""Matrices as products of two thin factors. A step begins with the right factor of the previous step (PowerSGD, Vogels
et al. 2019).

A step of power iteration, arXiv:1905.13727, algorithm 1. The products of the ranks are summed at the arrows:

    left = matrix @ right  -> sum -> orthogonalize        right = matrix^T @ left  -> sum        left @ right^T

The result is the sum of all ranks' matrices, projected on the columns of ``left``. It is exact if the rank of this sum
is at most the number of columns, and ``right`` reaches its whole row space.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def start_right(matrices: Sequence[tuple[int, int]], rank: int, draw: int, dtype: torch.dtype) -> list[Tensor]:
    """The right factors [columns, rank] of the first step: random, and equal on all ranks for equal draws.

    Args:
        matrices: rows and columns of each matrix.
    """
    generator = torch.Generator().manual_seed(draw)
    return [torch.randn(columns, rank, generator=generator, dtype=dtype) for _, columns in matrices]


def renew_right(right: Tensor, draw: int) -> None:
    """Replace columns of the previous step's right factor by random columns, in place, if they are 0 or not finite.

    Without this, such columns would never change. Ranks have equal factors, so they replace the same columns.
    """
    fresh = torch.randn(right.shape, generator=torch.Generator().manual_seed(draw), dtype=right.dtype)
    size = right.abs().amax(0)
    torch.where((size > 0) & size.isfinite(), right, fresh.to(right.device), out=right)


def left_factors(matrices: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
    """The left factors [rows, rank] of this rank, to be summed over ranks."""
    return [matrix @ right for matrix, right in zip(matrices, rights, strict=True)]


def right_factors(matrices: Sequence[Tensor], lefts: Sequence[Tensor]) -> list[Tensor]:
    """The right factors [columns, rank] of this rank, to be summed over ranks. ``lefts`` are orthogonal and summed."""
    return [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]


def orthogonalize(factor: Tensor) -> None:
    """Make the columns of a factor [rows, rank] orthonormal, in place: modified Gram-Schmidt, twice.

    A column that is 0, or nearly in the span of the preceding columns, becomes 0: it adds nothing to the projection.
    The loop is over columns. NaN stays NaN.
    """
    tiny = torch.finfo(factor.dtype).eps * 8
    for place in range(factor.shape[1]):
        column, before = factor[:, place], factor[:, :place]
        # First scale to 1: the squares of tiny elements would be 0.
        largest = column.abs().amax() if len(column) else column.sum()
        column.div_(torch.where(largest == 0, 1.0, largest))
        norm = _norm(column)
        for _ in range(2):
            column.sub_(before @ (before.t() @ column))
        residual_norm = _norm(column)
        keep = ~(residual_norm <= tiny * norm)
        column.mul_(torch.where(keep, 1 / torch.where(keep, residual_norm, 1.0), 0.0))


def _norm(column: Tensor) -> Tensor:
    """The norm of a column, summed in float64: in float32, the norm of a million elements is wrong by 2e-4."""
    return torch.linalg.vector_norm(column, dtype=torch.float64)
