"""Meshwright's own operators on a CUDA device: experts in groups, random numbers by counters, numbers in float8."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.ops import experts, float8, philox
from meshwright.ops.grouped_experts import has_grouped_product
from meshwright.runtime.device_check import FLOAT8_CAPABILITY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")
KEY, SALT = 0x5DEECE66D << 16, 0x2545F4914F6CDD1D
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""The largest difference from float64, relative to the largest value."""


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yields a list that has, at the end, each operation for which the host waited for the device, and its line. Ranks
    that take part in one step all go on: an error in the middle of it would leave the others stuck."""
    errors: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield errors
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        text = str(each.message)
        if "synchronizing CUDA operation" in text:
            errors.append(f"{text.splitlines()[0]} ({each.filename}:{each.lineno})")


@contextmanager
def no_waits() -> Iterator[None]:
    """An operator for which the host waits for the device raises a RuntimeError. For steps of one rank (``waits``)."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def given_to_experts() -> tuple[Tensor, ...]:
    """Tokens, experts of each, weights, up and down, and a gradient; an expert has no token."""
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(100)])
    tokens, grad = torch.randn(2, 100, 64, dtype=torch.float64)
    up, down = torch.randn(4, 192, 64, dtype=torch.float64), torch.randn(4, 64, 96, dtype=torch.float64)
    return tokens, index, torch.rand(100, 2, dtype=torch.float64), up, down, grad


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_experts_are_those_of_the_loop(dtype: torch.dtype) -> None:
    """The loop over experts in float64 on the CPU is the oracle. The host waits for nothing."""
    *values, grad = given_to_experts()
    ours: Any = experts.ours
    expected = [ours.experts(*values, "silu", 0), *ours.experts_backward(grad, *values, "silu", 0)]
    moved = [value if value.dtype == torch.int64 else value.to(dtype) for value in (*values, grad)]
    *there, grad_there = [value.to(DEVICE) for value in moved]
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10):
        assert has_grouped_product(there[0], *there[3:])
    ours.experts(*there, "silu", 0)  # libraries may wait when they are loaded
    ours.experts_backward(grad_there, *there, "silu", 0)
    torch.cuda.synchronize()
    with no_waits():
        actual = [ours.experts(*there, "silu", 0), *ours.experts_backward(grad_there, *there, "silu", 0)]
    for here, there_too in zip(expected, actual, strict=True):
        error = (there_too.cpu().double() - here).abs().max() / here.abs().max()
        assert float(error) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 17), (5, 4, 64)])
def test_random_numbers_are_those_of_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Equal words give equal masks; uniform and normal numbers differ by rounding alone."""
    like = torch.empty(shape, dtype=dtype)
    there = like.to(DEVICE)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    masks = [philox.bernoulli(each, 0.7, KEY, SALT).cpu() for each in (like, there)]
    assert torch.equal(*masks)
    for kernel, parameters in ((philox.uniform, (-1.0, 3.0)), (philox.normal, (2.0, 0.5))):
        numbers = [kernel(each, *parameters, KEY, SALT).cpu() for each in (like, there)]
        torch.testing.assert_close(*numbers, rtol=rounding, atol=rounding)


def test_a_key_on_the_device_draws_the_same_numbers() -> None:
    """Graphs read the key whenever they run."""
    like = torch.empty(4, 33, device=DEVICE)
    by_number = philox.bernoulli(like, 0.5, KEY, SALT)
    by_tensor = philox.bernoulli(like, 0.5, torch.tensor(KEY, device=DEVICE), SALT)
    assert torch.equal(by_number, by_tensor)


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((4, 37), ([6, 8000], [1, 4003], [4, 37], 1, -1)),
        ((3, 10), ([6, 3, 9], [2, 1, 4], [3, 2, 5], 2, -1)),
        ((2, 4, 5), ([2, 12, 5], [0, 0, 0], [2, 4, 5], 1, 1)),
    ],
    ids=["columns", "two letters", "micro-batch"],
)
def test_a_part_draws_the_numbers_of_the_cpu(shape: tuple[int, ...], place: Any) -> None:
    like = torch.empty(shape, dtype=torch.float64)
    key = philox.key_of(2, 7, 1)
    numbers = [philox.uniform(each, 0.0, 1.0, key, SALT, *place).cpu() for each in (like, like.to(DEVICE))]
    torch.testing.assert_close(*numbers, rtol=1e-12, atol=1e-12)
    there = torch.tensor(key, device=DEVICE)
    assert torch.equal(philox.uniform(like.to(DEVICE), 0.0, 1.0, there, SALT, *place).cpu(), numbers[1])


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY, reason="the GPU lacks float8"
)
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_are_rounded_to_float8_as_by_pytorch(name: str, dim: int, transposed: bool) -> None:
    torch.manual_seed(0)
    value = torch.randn(70, 130, device=DEVICE, dtype=torch.bfloat16)
    value[3, 5] = torch.nan
    value = value.t() if transposed else value
    scale, dtype = float8.scale_of(float8.largest(value.nan_to_num(), dim), name), float8.FORMATS[name]
    expected = (value.float() / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float()
    for by_columns in (False, True):
        actual = float8.round_to_float8(value, scale, dtype, by_columns=by_columns)
        assert actual.stride(0 if by_columns else 1) == 1
        torch.testing.assert_close(actual.float(), expected, rtol=0.0, atol=0.0, equal_nan=True)
