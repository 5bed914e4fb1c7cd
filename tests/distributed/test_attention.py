"""Attention with numbers that are none, or too large: what plain PyTorch shows, every kernel and layout shows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw
from meshwright.capture.builder import capture
from tests.distributed.lockstep import run_step
from tests.distributed.oracle import plan_of

ours = torch.ops.meshwright
LENGTH = 6
ALLOWED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ALLOWED[2] = False
SEEN: dict[str, tuple[Tensor | None, bool]] = {
    "every key": (None, False), "keys before": (None, True), "no key of one query": (ALLOWED, False),
}  # fmt: skip
"""By name, the mask, and whether attention is causal."""
PLACES = {"query": 0, "key": 1, "every key": 1, "value": 2}
WITHOUT_FUSED_KERNEL = 1e-12
"""A dropout that drops nothing: kernels that draw numbers form the scores."""


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 2, LENGTH, 4).to(dtype) for _ in range(3)]


def in_pytorch(values: list[Tensor], mask: Tensor | None, causal: bool) -> list[Tensor]:
    """Output and gradients of PyTorch's plainest form."""
    leaves = [value.clone().requires_grad_() for value in values]
    with sdpa_kernel(SDPBackend.MATH):
        query, key, value = leaves
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return [output.detach(), *torch.autograd.grad(output.float().sum(), leaves)]


def in_ours(values: list[Tensor], mask: Tensor | None, causal: bool, dropout: float) -> list[Tensor]:
    settings = (dropout, causal, 0.5, 1, 1)
    output, logsumexp = ours.attention(*values, mask, *settings)
    gradients = ours.attention_backward(torch.ones_like(output), *values, mask, output, logsumexp, *settings)
    return [output, *gradients]


CALLS = pytest.mark.parametrize(
    ("dtype", "dropout"),
    [
        (torch.float64, 0.0), (torch.float64, WITHOUT_FUSED_KERNEL), (torch.float32, 0.0),
        (torch.bfloat16, 0.0), (torch.bfloat16, WITHOUT_FUSED_KERNEL), (torch.float16, 0.0),
    ],
    ids=["double, fused", "double", "float", "bfloat16, fused", "bfloat16", "float16"],
)  # fmt: skip


@CALLS
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("place", PLACES)
def test_nan_is_seen_in_output_and_gradients(dtype: torch.dtype, dropout: float, seen: str, place: str) -> None:
    values = inputs(dtype)
    values[PLACES[place]][0, 0, slice(None) if place == "every key" else 3, 1] = math.nan
    expected, actual = in_pytorch(values, *SEEN[seen]), in_ours(values, *SEEN[seen], dropout)
    for result, other in zip(actual, expected, strict=True):
        assert bool(result.isnan().any()) == bool(other.isnan().any())
        assert not result[1].isnan().any(), "other samples are sound"


@CALLS
@pytest.mark.parametrize("length", [LENGTH, 600])
def test_nan_in_a_key_reaches_only_the_queries_that_see_it(dtype: torch.dtype, dropout: float, length: int) -> None:
    torch.manual_seed(3)
    values = [torch.randn(2, 2, length, 4).to(dtype) for _ in range(3)]
    values[1][0, 0, -1, 1] = math.nan
    output, _ = ours.attention(*values, None, dropout, True, 0.5, 1, 1)
    assert output.isnan().any(-1).nonzero().tolist() == [[0, 0, length - 1]]


@CALLS
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_infinite_keys_are_nan(dtype: torch.dtype, dropout: float, causal: bool) -> None:
    values = inputs(dtype)
    values[1][0, 0] = math.inf
    values[0][0, 0, :, 0], values[0][0, 0, :, 1] = 1.0, -1.0  # inf - inf
    output, _ = ours.attention(*values, None, dropout, causal, 0.5, 1, 1)
    assert output[0, 0].isnan().all()
    assert not output[0, 1].isnan().any()
    assert not output[1].isnan().any()


@CALLS
@pytest.mark.parametrize("seen", SEEN)
def test_a_query_without_keys_gives_zero(dtype: torch.dtype, dropout: float, seen: str) -> None:
    values = inputs(dtype)
    expected, actual = in_pytorch(values, *SEEN[seen]), in_ours(values, *SEEN[seen], dropout)
    tolerance = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    for result, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=tolerance, atol=4 * tolerance)


def test_scores_that_leave_the_range_of_float16_are_those_of_pytorch() -> None:
    query, key, value = inputs(torch.float16)
    values = [query.mul_(1000), key.mul_(1000), value]
    assert float((query @ key.transpose(-2, -1)).abs().max()) == math.inf
    expected, actual = in_pytorch(values, None, True), in_ours(values, None, True, 0.0)
    for result, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-2, atol=1e-2)


class Attends(nn.Module):
    """Causal attention of learned queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 1, 2, 8, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.weights * x.unsqueeze(0)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"]).square().sum()
    return loss


LAYOUTS = {
    "one rank": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "heads": mw.Layout(tp=2, pin={"*": "h@tp"}),
    "keys": mw.Layout(tp=2, pin={"*": "s1@tp"}),
    "sequence": mw.Layout(cp=2),
    "ring": mw.Layout(cp=2, context="ring"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_reaches_the_loss_and_all_gradients(layout: str, place: int) -> None:
    torch.manual_seed(2)
    model, batch = Attends(), {"x": torch.randn(2, 2, 8, 4, dtype=torch.float64)}
    captured = capture(model, loss_of, batch)
    plan = plan_of(captured.graph, LAYOUTS[layout], 1 if layout == "one rank" else 2)
    weights = model.weights.detach().clone()
    values = {"weights": weights, "batch.x": batch["x"]}
    assert run_step(captured, plan, values)[0].loss.isfinite()
    weights[place, 0, 1, 5, 2] = math.nan
    result, _ = run_step(captured, plan, values)
    assert result.loss.isnan()
    gradient = result.gradients["weights"]
    assert gradient is not None
    assert gradient[:, 0, 1].isnan().flatten(1).any(1).all()
