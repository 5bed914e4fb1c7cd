"""Tensors told by their strides show the same elements where what they show is a part, or was gathered from parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture.builder import capture
from meshwright.errors import CaptureError
from tests.distributed.lockstep import run_step
from tests.distributed.oracle import plan_of

SAMPLES, WIDTH = 8, 8


def changed_in_place(y: Tensor) -> Tensor:
    z = y * 1
    z.as_strided((SAMPLES, 4), (WIDTH, 2), 1).mul_(2)
    return z


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.t().as_strided((WIDTH, WIDTH), (1, WIDTH)),
    "columns of a slice": lambda y: y[:, 2:6].as_strided((SAMPLES, 2), (WIDTH, 1), 3),
    "rows of a slice": lambda y: y[2:6].as_strided((3, WIDTH), (WIDTH, 1), 3 * WIDTH),
    "windows": lambda y: y.as_strided((SAMPLES, 3, 4), (WIDTH, 2, 1)),
    "windows of a slice": lambda y: y[2:6].as_strided((4, 3, 4), (WIDTH, 2, 1), 2 * WIDTH),
    "windows over the ends of rows": lambda y: y.as_strided((7, 5), (9, 2), 1),
    "column of an expanded slice": lambda y: y[:, 2:3].expand(-1, 4).as_strided((SAMPLES,), (WIDTH,), 2),
    "expanded slice": lambda y: y[:, 2:3].expand(-1, 4).square(),
    "unfolded slice": lambda y: y[:, 1:7].unfold(1, 2, 2),
    "changed in place": changed_in_place,
}
LAYOUTS = {"one rank": mw.Layout(), "dp2": mw.Layout(dp=2), "tp2": mw.Layout(tp=2), "dp2 x tp2": mw.Layout(dp=2, tp=2)}


class Shows(nn.Module):
    def __init__(self, shown: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.shown = nn.Linear(6, WIDTH), shown

    def forward(self, x: Tensor) -> Tensor:
        return self.shown(self.layer(x))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    loss: Tensor = (output * weights).sin().square().sum()
    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHOWN)
def test_it_shows_the_same_elements_of_a_gathered_tensor(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model, batch = Shows(SHOWN[name]).double(), torch.randn(SAMPLES, 6, dtype=torch.float64)
    expected = loss_of(model, batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    captured = capture(model, loss_of, batch)
    plan = plan_of(captured.graph, LAYOUTS[layout], LAYOUTS[layout].num_ranks)
    values = {name: value.detach() for name, value in model.named_parameters()}
    result, _ = run_step(captured, plan, {**values, "batch": batch})
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(result.gradients[name], gradient, rtol=1e-12, atol=1e-12)


def test_elements_that_a_slice_does_not_have_are_refused() -> None:
    model = Shows(lambda y: y[2:4].as_strided((3, WIDTH), (WIDTH, 1), 0))
    with pytest.raises(CaptureError) as caught:
        capture(model, loss_of, torch.zeros(SAMPLES, 6))
    assert str(caught.value) == (
        "as_strided: it shows [3, 8] by strides [8, 1], -16 elements after the first of a tensor [2, 8] with strides "
        "[8, 1], which has no such elements\n  -> use it on a contiguous tensor (x.contiguous()) that holds all that "
        "it shows"
    )
