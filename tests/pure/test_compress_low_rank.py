"""Low-rank factors: exact where the rank suffices, and the projection of the sum elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compress.low_rank import left_factors, orthogonalize, renew_right, right_factors, start_right


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(matrices: list[Tensor], right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step of several ranks: the left and right factor, and the sum that they stand for."""
    left = sum((left_factors([matrix], [right])[0] for matrix in matrices), torch.zeros(()).double())
    orthogonalize(left)
    right = sum((right_factors([matrix], [left])[0] for matrix in matrices), torch.zeros(()).double())
    return left, right, left @ right.t()


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 1000))
def test_sums_of_a_rank_that_suffices_are_exact(rows: int, columns: int, rank: int, seed: int) -> None:
    """The matrices of the ranks alone have full rank; only their sum has few dimensions, or its smaller side has."""
    first = normal(rows, columns, seed=seed)
    total = normal(rows, rank, seed=seed + 1) @ normal(rank, columns, seed=seed + 2)
    (right,) = start_right([(rows, columns)], rank, seed, torch.float64)
    approximation = step([first, total - first], right)[2]
    torch.testing.assert_close(approximation, total, rtol=0, atol=1e-8 * max(1.0, float(total.norm())))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_factors_of_full_rank_are_exact(rows: int, columns: int, seed: int) -> None:
    total = normal(rows, columns, seed=seed)
    (right,) = start_right([(rows, columns)], min(rows, columns), seed, torch.float64)
    torch.testing.assert_close(step([total], right)[2], total, rtol=0, atol=1e-7 * max(1.0, float(total.norm())))


def test_a_step_projects_the_sum_on_the_left_factor() -> None:
    """M' = P P^T M."""
    matrices = [normal(20, 15, seed=1), normal(20, 15, seed=2)]
    (right,) = start_right([(20, 15)], 3, 0, torch.float64)
    left, _, approximation = step(matrices, right)
    torch.testing.assert_close(left.T @ left, torch.eye(3).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(approximation, left @ left.T @ sum(matrices), rtol=0, atol=1e-12)


def test_a_warm_start_finds_the_largest_singular_vectors() -> None:
    u, _, v = torch.linalg.svd(normal(20, 15))
    singular = torch.cat([torch.tensor([10.0, 8.0, 6.0]), torch.full((12,), 0.5)]).double()
    matrix = u[:, :15] @ singular.diag() @ v
    (right,) = start_right([(20, 15)], 3, 0, torch.float64)
    errors = []
    for _ in range(8):
        _, right, approximation = step([matrix], right)
        errors.append(float((matrix - approximation).norm()))
    assert errors[-1] == pytest.approx(math.sqrt(12) * 0.5, rel=1e-6)
    assert errors[0] > 1.01 * errors[-1]


def test_zero_columns_and_dependent_columns_become_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        factor = normal(10, 4).to(dtype)
        factor[:, 1] = 0
        factor[:, 3] = 2 * factor[:, 0]
        orthogonalize(factor)
        gram = torch.diag(torch.tensor([1.0, 0, 1, 0])).to(dtype)
        torch.testing.assert_close(factor.T @ factor, gram, rtol=0, atol=1e-6)
    long = normal(300_000, 3).float()
    orthogonalize(long)
    torch.testing.assert_close(long.double().T @ long.double(), torch.eye(3).double(), rtol=0, atol=1e-6)
    zeros = torch.zeros(5, 2)
    orthogonalize(zeros)
    assert torch.equal(zeros, torch.zeros(5, 2))
    for tiny in (1e-30, 1e30):
        factor = normal(10, 2).float() * tiny
        orthogonalize(factor)
        torch.testing.assert_close(factor.T @ factor, torch.eye(2), rtol=0, atol=1e-6)


def test_nan_arrives_and_does_not_stay_in_the_warm_start() -> None:
    matrix = normal(6, 5)
    matrix[0, 0] = math.nan
    (right,) = start_right([(6, 5)], 2, 0, torch.float64)
    _, right, approximation = step([matrix], right)
    assert approximation.isnan().any()
    right[:, 1] = 0
    renew_right(right, 1)
    assert right.isfinite().all()
    assert right.abs().amax(0).gt(0).all()
    kept = right.clone()
    renew_right(right, 2)
    assert torch.equal(right, kept)
    assert torch.equal(start_right([(6, 5)], 2, 3, torch.float64)[0], start_right([(6, 5)], 2, 3, torch.float64)[0])
