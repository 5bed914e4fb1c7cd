"""Sequences of different lengths in one tensor: each attends to itself, as alone in serial attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

import meshwright as mw
from meshwright.capture.builder import capture
from meshwright.ir.attention import Band
from meshwright.ops.attention_scores import ScoreSettings, plain, plain_backward
from meshwright.ops.packed_attention import _hidden
from tests.distributed import oracle
from tests.distributed.lockstep import run_step
from tests.distributed.oracle import plan_of

ours = torch.ops.meshwright
LENGTHS = (3, 1, 5, 3)
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
WINDOWS = {"all keys": (-1, -1), "keys before": (-1, 0), "window": (2, 0)}


class Packed(nn.Module):
    """Attention of packed tokens, in which two query heads share a key head."""

    def __init__(self, window: tuple[int, int], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(8, 4, 8).to(dtype))
        self.shared = nn.Parameter(torch.randn(2, 8, 2, 8).to(dtype))
        self.window = window

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.einsum("tk,khd->thd", x, self.query)
        key, value = torch.einsum("tk,pkhd->pthd", x, self.shared)
        return query, key, value

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        longest = max(LENGTHS)
        result = varlen_attn(*self.parts(x), bounds, bounds, longest, longest, window_size=self.window, enable_gqa=True)
        assert isinstance(result, Tensor)
        return result

    def alone(self, x: Tensor) -> Tensor:
        """Each sequence by itself, with a mask."""
        results = []
        for begin, end in pairwise(BOUNDS.tolist()):
            query, key, value = (part[begin:end].transpose(0, 1) for part in self.parts(x))
            place = torch.arange(end - begin)
            mask = place <= place[:, None] if self.window[1] == 0 else torch.ones(len(place), len(place)) > 0
            if self.window[0] >= 0:
                mask = mask & (place >= place[:, None] - self.window[0])
            results.append(F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(0, 1))
        return torch.cat(results)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"], batch["bounds"]).square().sum()
    return loss


LAYOUTS = {
    "one rank": mw.Layout(),
    "heads": mw.Layout(tp=2, pin={"*": "h@tp"}),
    "shared heads": mw.Layout(tp=2, pin={"*": "r@tp"}),
    "dp": mw.Layout(dp=2),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_sequences_are_attended_to_alone(layout: str, window: str) -> None:
    torch.manual_seed(2)
    model = Packed(WINDOWS[window])
    batch = {"x": torch.randn(sum(LENGTHS), 8, dtype=torch.float64), "bounds": BOUNDS}
    captured = capture(model, loss_of, batch)
    targets = {operator.target for operator in captured.graph.operators}
    assert {"meshwright.attention_packed.default", "meshwright.attention_packed_backward.default"} <= targets
    plan = plan_of(captured.graph, LAYOUTS[layout], LAYOUTS[layout].num_ranks)
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    result, _ = run_step(captured, plan, values | {f"batch.{name}": value for name, value in batch.items()})
    expected = model.alone(batch["x"]).square().sum()
    expected.backward()
    assert oracle.error_of(result.loss, expected.detach()) <= oracle.TOLERANCE
    for name, parameter in model.named_parameters():
        gradient = result.gradients[name]
        assert gradient is not None
        assert parameter.grad is not None
        assert oracle.error_of(gradient, parameter.grad) <= oracle.TOLERANCE


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 2)])
def test_one_mask_hides_the_other_sequences(causal: bool, window: int) -> None:
    """Where a GPU has no fused kernel."""
    key_bounds = torch.tensor([0, 4, 6, 12, 15], dtype=torch.int32)
    query, grad = torch.randn(2, 12, 2, 4, dtype=torch.float64).unbind(0)
    key, value = torch.randn(2, 15, 2, 4, dtype=torch.float64).unbind(0)
    rest = (BOUNDS, key_bounds, 5, 6, causal, 0.5, window)
    output, logsumexp = ours.attention_packed(query, key, value, *rest)
    gradients = ours.attention_packed_backward(grad, query, key, value, output, logsumexp, *rest)
    mask = _hidden(query, key, BOUNDS, key_bounds, causal, window)
    queries, keys, values, turned = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value, grad))
    settings = ScoreSettings(Band(12, 15), 0.5)
    masked, statistics = plain(queries, keys, values, mask, settings)
    expected = plain_backward(turned, queries, keys, values, mask, masked, statistics, settings)
    torch.testing.assert_close(logsumexp, statistics[0])
    for tensor, other in zip((output, *gradients), (masked, *expected), strict=True):
        torch.testing.assert_close(tensor, other[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_neither_waits_for_the_lengths_nor_lacks_a_kernel(dtype: torch.dtype) -> None:
    model, batch = Packed((-1, 0), dtype), {"x": torch.zeros(sum(LENGTHS), 8, dtype=dtype), "bounds": BOUNDS}
    report = mw.dry_run(model, loss_of, batch, mw.Layout(tp=2), "h100-dgx", optimizer=oracle.OPTIMIZERS["SGD"])
    assert report.findings == ()
