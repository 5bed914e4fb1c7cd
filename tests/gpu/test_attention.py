"""Attention on one CUDA device: every algorithm gives what plain attention in float64 gives, and shows NaN."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright.ops.attention_kernels  # noqa: F401 - defines meshwright::attention
from meshwright.ir.attention import CUDNN, EFFICIENT, FLASH, AttentionForm, algorithms_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ours = torch.ops.meshwright
LENGTH = 256
BANDS = {"all": (False, 0, 0), "causal": (True, 0, 0), "window": (True, 50, 0), "later queries": (True, 0, 128)}


def inputs(dtype: torch.dtype, first: int, key_heads: int) -> list[Tensor]:
    torch.manual_seed(3)
    sizes = ((4, LENGTH), (key_heads, LENGTH + first), (key_heads, LENGTH + first), (4, LENGTH))
    return [torch.randn(2, heads, length, 64, device="cuda").to(dtype) for heads, length in sizes]


def whole(values: list[Tensor], mask: Tensor | None, band: tuple[bool, int, int], algorithm: str) -> list[Tensor]:
    query, key, value, grad = values
    causal, window, first = band
    rest: tuple[Any, ...] = (0.0, causal, 0.125, 0, 0, window, first, algorithm)
    output, logsumexp = ours.attention(query, key, value, mask, *rest)
    gradients = ours.attention_backward(grad, query, key, value, mask, output, logsumexp, *rest)
    return [output, logsumexp, *gradients]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("algorithm", [FLASH, CUDNN, EFFICIENT])
def test_an_algorithm_equals_plain_attention_in_float64(
    algorithm: str, band: str, masked: bool, key_heads: int
) -> None:
    causal, window, first = BANDS[band]
    dtype = torch.bfloat16
    form = AttentionForm("bfloat16", 64, 64, LENGTH, LENGTH + first, masked=masked, shifted=bool(window or first))
    if algorithm not in algorithms_of(form, False) or (masked and causal):
        pytest.skip("not in the table")
    values = inputs(dtype, first, key_heads)
    mask = torch.rand(LENGTH, LENGTH + first, device="cuda") < 0.7 if masked else None
    if mask is not None:
        mask[3] = False
    expected = whole([value.double() for value in values], mask, BANDS[band], "plain")
    for actual, other in zip(whole(values, mask, BANDS[band], algorithm), expected, strict=True):
        torch.testing.assert_close(actual.double(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("algorithm", [FLASH, CUDNN, EFFICIENT])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_is_seen(algorithm: str, place: int) -> None:
    values = inputs(torch.bfloat16, 0, 4)
    values[place][0, 0, 3, 1] = math.nan
    output, _, *gradients = whole(values, None, (True, 0, 0), algorithm)
    assert output[0, 0].isnan().any()
    seen = [bool(gradient[0, 0].isnan().any()) for gradient in gradients]
    assert seen == [True, True, place != 2]  # the gradient of values does not depend on values
    assert not output[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_8192_tokens_take_no_memory_for_scores(dtype: torch.dtype) -> None:
    shape = (1, 8, 8192, 64)
    values = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole(values, None, (True, 0, 0), "")
    assert torch.cuda.max_memory_allocated() - before < 8192 * 8192 * 4
