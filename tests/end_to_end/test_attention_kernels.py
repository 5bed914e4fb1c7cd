"""Every algorithm of attention computes what serial attention with a mask computes, forward and backward.

The kernels of GPUs are not here. Their operators are replaced by the plainest functions that keep to the documented
conventions: where the causal mask begins, how windows are counted, which parts of the log-sum-exp are padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from meshwright.errors import PlanError
from meshwright.ir.attention import ATTENTIONS, CUDNN, EFFICIENT, FLASH, PLAIN, Band
from meshwright.ops import attention_fused as fused
from meshwright.ops import attention_kernels as kernels
from tests.tries import tries

ours = torch.ops.meshwright
TOLERANCE = 1e-10


def mask_of(band: Band) -> Tensor:
    i, j = torch.arange(band.queries)[:, None] + band.first, torch.arange(band.keys)[None]
    seen = torch.ones(band.queries, band.keys, dtype=torch.bool)
    if band.causal:
        seen &= j <= i
    return seen & (j > i - band.window) if band.window else seen


def serial(parts: Sequence[Tensor], mask: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, gradients and log-sum-exp of attention with repeated keys and a mask, in the plainest way."""
    query, key, value = parts
    leaves = [part.clone().requires_grad_() for part in (query, key, value)]
    shared = query.shape[1] // key.shape[1]
    keys, values = (leaf.repeat_interleave(shared, 1) for leaf in leaves[1:])
    scores = leaves[0] @ keys.transpose(-2, -1) * 0.3
    terms = (
        torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else mask
    )
    scores = scores + terms
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    logsumexp = scores.logsumexp(-1)
    output = weights @ values
    return [output.detach(), *torch.autograd.grad(output, leaves, grad), logsumexp.detach()]


def compare(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=TOLERANCE, atol=TOLERANCE)


@st.composite
def calls(draw: Any) -> tuple[Band, int, int, int, bool]:
    """A band, batch, key heads, query heads for each key head, and whether there is a mask too."""
    size = st.integers(1, 6)
    band = Band(draw(size), draw(size), draw(st.booleans()))
    if band.causal:
        band = band._replace(window=draw(st.integers(0, 7)), first=draw(st.integers(-6, 6)))
    return band, draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())


def tensors(band: Band, batch: int, groups: int, shared: int, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal(heads: int, length: int) -> Tensor:  # as a joint projection lays them out
        return torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64).transpose(1, 2)

    heads = groups * shared
    return [
        normal(heads, band.queries),
        normal(groups, band.keys),
        normal(groups, band.keys),
        normal(heads, band.queries),
    ]


def whole(band: Band, values: list[Tensor], mask: Tensor | None, algorithm: str) -> list[Tensor]:
    query, key, value, grad = values
    rest = (0.0, band.causal, 0.3, 0, 0, band.window, band.first, algorithm)
    output, logsumexp = ours.attention(query, key, value, mask, *rest)
    gradients = ours.attention_backward(grad, query, key, value, mask, output, logsumexp, *rest)
    return [output, *gradients, logsumexp]


@pytest.mark.parametrize("algorithm", [FLASH, PLAIN])
@tries(60)
@given(calls(), st.data())
def test_an_algorithm_of_cpus_is_serial_attention(algorithm: str, call: Any, data: st.DataObject) -> None:
    band, batch, groups, shared, masked = call
    values = tensors(band, batch, groups, shared)
    mask = None
    if masked:
        lead = (
            [data.draw(st.sampled_from((1, size))) for size in (batch, groups * shared)]
            if data.draw(st.booleans())
            else []
        )
        bits = data.draw(st.lists(st.booleans(), min_size=1, max_size=9))
        count = math.prod(lead) * band.queries * band.keys
        mask = torch.tensor((bits * count)[:count]).reshape(*lead, band.queries, band.keys)
    seen = mask_of(band) if mask is None else mask & mask_of(band)
    compare(whole(band, values, mask, algorithm), serial(values[:3], seen, values[3]))


# --- kernels of GPUs --------------------------------------------------------------------------------------------------


def flash_band(queries: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """What FlashAttention 2 shows: the diagonal ends at the last query and key; -1 is no limit."""
    left, right = -1 if left is None else left, 0 if causal else -1 if right is None else right
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if right >= 0:
        seen &= j <= i + right
    return seen & (j >= i - left) if left >= 0 else seen


class Stand:
    """Stands in for ``torch.ops.aten``."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for name in (
            "_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
        ):  # fmt: skip
            setattr(self, name, SimpleNamespace(default=self._noting(name, getattr(self, "on" + name))))

    def _noting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            return function(*args, **kwargs)

        return call

    def on_flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_q: None, cum_k: None, max_q: int, max_k: int,
        dropout: float, causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        parts = [operand.transpose(1, 2) for operand in (query, key, value)]
        assert (max_q, max_k) == (query.shape[1], key.shape[1])
        seen = flash_band(max_q, max_k, causal, window_size_left, window_size_right)
        output, *_, logsumexp = serial(parts, seen, torch.zeros_like(parts[0]))
        return output.transpose(1, 2), logsumexp, None, None, None

    def on_flash_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, cum_q: None,
        cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor, *,
        scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        grad, *parts = (operand.transpose(1, 2) for operand in (grad, query, key, value))
        seen = flash_band(max_q, max_k, causal, window_size_left, window_size_right)
        assert logsumexp.is_contiguous()
        return tuple(gradient.transpose(1, 2) for gradient in serial(parts, seen, grad)[1:4])

    @staticmethod
    def _seen(query: Tensor, key: Tensor, terms: Tensor | None, causal: bool) -> Tensor:
        """The causal flag of cuDNN and of memory-efficient attention begins at the first query and key."""
        assert not (causal and terms is not None)
        assert terms is None or terms.shape == (*query.shape[:3], key.shape[2])
        if terms is not None:
            return terms
        return mask_of(Band(query.shape[2], key.shape[2], causal))

    def on_scaled_dot_product_cudnn_attention(
        self, query: Tensor, key: Tensor, value: Tensor, terms: Tensor | None, wants: bool, dropout: float,
        causal: bool, debug: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        seen = self._seen(query, key, terms, causal)
        output, *_, logsumexp = serial((query, key, value), seen, torch.zeros_like(query))
        empty = (logsumexp == -math.inf).unsqueeze(-1)
        return (
            output.masked_fill(empty, 7.0),
            logsumexp.unsqueeze(-1).masked_fill(empty, 7.0),
            None,
            None,
            1,
            1,
            None,
            None,
            None,
        )

    def on_scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, seed: Tensor,
        offset: Tensor, terms: Tensor | None, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float,
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert logsumexp.isfinite().all()
        return tuple(serial((query, key, value), self._seen(query, key, terms, causal), grad)[1:4])

    def on_scaled_dot_product_efficient_attention(
        self, query: Tensor, key: Tensor, value: Tensor, terms: Tensor | None, wants: bool, dropout: float,
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1], "it has no groups of heads"
        assert terms is None or terms.shape[-1] == 1 or terms.stride(-2) % 16 == 0
        output, *_, logsumexp = serial(
            (query, key, value), self._seen(query, key, terms, causal), torch.zeros_like(query)
        )
        return output, F.pad(logsumexp, (0, -query.shape[2] % 32), value=5.0), None, None

    def on_scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, terms: Tensor | None, output: Tensor,
        logsumexp: Tensor, seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *,
        scale: float,
    ) -> Any:  # fmt: skip
        assert logsumexp.shape[2] == query.shape[2] + -query.shape[2] % 32
        assert wanted == [True, True, True, False]
        return (*serial((query, key, value), self._seen(query, key, terms, causal), grad)[1:4], None)


FUNCTIONS = {
    FLASH: (fused.flash, fused.flash_backward),
    CUDNN: (fused.cudnn, fused.cudnn_backward),
    EFFICIENT: (fused.efficient, fused.efficient_backward),
}


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Kernels of GPUs on a CPU."""
    stand_in = Stand()
    monkeypatch.setattr(fused, "aten", stand_in)
    return stand_in


@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_the_kernels_of_gpus_get_what_they_need(algorithm: str, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", lambda *_: FUNCTIONS[algorithm])

    @settings(max_examples=60, deadline=None)
    @given(calls())
    def check(call: Any) -> None:
        band, batch, groups, shared, masked = call
        if algorithm == CUDNN and band.causal:  # its table has no windows
            band = band._replace(window=0, first=0)
        values, mask = tensors(band, batch, groups, shared), None
        if masked and algorithm != FLASH:
            mask = torch.arange(band.queries * band.keys).reshape(band.queries, band.keys) % 3 != 0
        seen = mask_of(band) if mask is None else mask & mask_of(band)
        compare(whole(band, values, mask, algorithm), serial(values[:3], seen, values[3]))

    check()
    assert all(algorithm in name for name in stand.called)
    assert any("backward" in name for name in stand.called)


def test_an_algorithm_that_a_device_lacks_is_refused_by_name() -> None:
    values = tensors(Band(4, 4), 1, 1, 1)
    for name in set(ATTENTIONS) - {FLASH, PLAIN}:
        with pytest.raises(
            PlanError, match=f"{name} does not compute attention of float64 with heads of 4 on a cpu"
        ) as error:
            whole(Band(4, 4), values, None, name)
        assert error.value.remedy == "use flash or plain, or plan for this device"
