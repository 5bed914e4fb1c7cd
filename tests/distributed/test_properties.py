"""Whatever a model does besides multiplying, under every kind of layout: it trains as in one process of plain PyTorch.

A new property is one line of ``PROPERTIES``, a new kind of layout one line of ``LAYOUTS``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import meshwright as mw
from meshwright.errors import LayoutError, MeshwrightError
from tests.distributed.oracle import TOLERANCE, error_of, largest_error, sharing_capture
from tests.distributed.pool import Ranks

WIDTH, BATCH, CLASSES, STEPS = 8, 8, 4, 3
Batch = dict[str, Tensor]


class Net(nn.Module):
    """Four layers. A property changes what :meth:`first` and :meth:`last` do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head: nn.Module = nn.Linear(WIDTH, CLASSES)

    def first(self, x: Tensor) -> Tensor:
        return x

    def last(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.last(x))


def loss_of(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Ragged labels, and metrics: a sum over the batch, a maximum, and a number that does not depend on it."""
    logits, labels = model(batch["x"]), batch["label"]
    known = labels != -100
    right = (logits.argmax(-1) == labels).sum()
    metrics = {"right": right, "known": known.sum(), "largest": logits.detach().amax(), "one": torch.ones(())}
    return F.cross_entropy(logits, labels), metrics


class Counter(Net):
    """Two buffers that are numbers; the loss reads the first, which is always a step behind."""

    before: Tensor
    now: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(()))
        self.register_buffer("now", torch.zeros(()))

    def last(self, x: Tensor) -> Tensor:
        self.before, self.now = self.now, self.now + 1
        return x * (1 + 0.1 * self.before)


class CountedInPlace(Net):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def first(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x


class Flipped(Net):
    """Two buffers that change places; one of them is read."""

    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.rand(WIDTH))
        self.register_buffer("b", torch.rand(WIDTH))

    def last(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return x + self.a


class UnreadFlip(Flipped):
    def last(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return x


class CopyOfWeight(Net):
    copied: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copied", torch.zeros(WIDTH, WIDTH))

    def first(self, x: Tensor) -> Tensor:
        self.copied = dict(self.named_parameters())["layers.0.weight"].detach().clone()
        return x


class WeightsAverage(Net):
    """The moving average of a weight."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(CLASSES, WIDTH))

    def last(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * dict(self.named_parameters())["head.weight"].detach()
        return x


class AverageAcrossStages(Net):
    """The last layer keeps a moving average of a value computed from an early layer's weight. The loss reads it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        norm = dict(self.named_parameters())["layers.0.weight"].detach().norm()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.average = 0.9 * self.average + 0.1 * norm
        return self.head(x) * self.average


class Chained(Net):
    """A buffer that takes the value that another had, which is a sum over the batch; and the average of that."""

    now: Tensor
    before: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("now", "before", "average"):
            self.register_buffer(name, torch.zeros(WIDTH))

    def last(self, x: Tensor) -> Tensor:
        self.before, self.average = self.now, 0.9 * self.average + 0.1 * self.now
        self.now = x.detach().mean(0)
        return x


class ReadInPrologue(Net):
    """A buffer that no step changes, read by nothing that has samples or parameters."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH))

    def last(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


class CastOnce(Net):
    """One cast of a weight, used by several layers."""

    def forward(self, x: Tensor) -> Tensor:
        weight = dict(self.named_parameters())["layers.0.weight"].float()
        for layer in self.layers:
            x = torch.tanh(F.linear(layer(x), weight.double()))
        return self.head(x)


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = spectral_norm(nn.Linear(WIDTH, CLASSES))


class BatchAverage(Net):
    """The moving average of the batch: a sum over it. The value before the step is read."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def first(self, x: Tensor) -> Tensor:
        before = self.average
        self.average = 0.9 * before + 0.1 * x.mean(0)
        return x - before


class HiddenAverage(BatchAverage):
    """The same of what layers make of the batch: a sum over micro-batches."""

    def first(self, x: Tensor) -> Tensor:
        return x

    def last(self, x: Tensor) -> Tensor:
        before = self.average
        self.average = 0.9 * before + 0.1 * x.detach().mean(0)
        return x - before


class UnreadAverage(BatchAverage):
    def first(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return x


class Kept(Net):
    """Buffers that the loss function changes: one is a tensor of the batch, one adds up what no parameter is in."""

    scale: Tensor
    labels: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("labels", torch.zeros((), dtype=torch.int64))


def keeping_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert isinstance(model, Kept)
    model.scale, model.labels = batch["scale"], model.labels + (batch["label"] != -100).sum()
    return loss_of(model, batch)


class Constant(Net):
    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.zeros(WIDTH))

    def last(self, x: Tensor) -> Tensor:
        self.flag = torch.ones(WIDTH, dtype=x.dtype)
        return x


class AliasedBuffer(CountedInPlace):
    """One buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("also", self.steps)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class OneSumForTwo(Net):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.other = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def last(self, x: Tensor) -> Tensor:
        return x + (self.shift + self.other)


class Normalized(Net):
    """Batch norm, in one micro-batch: of several, each has its own statistics (``test_batch_statistics.py``)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def first(self, x: Tensor) -> Tensor:
        return self.norm(x)


PROPERTIES: Mapping[str, Callable[[], Net]] = {
    kind.__name__: kind
    for kind in (
        Net, Counter, CountedInPlace, Flipped, UnreadFlip, CopyOfWeight, WeightsAverage, AverageAcrossStages, Chained,
        ReadInPrologue, CastOnce, Spectral, BatchAverage, HiddenAverage, UnreadAverage, Kept, Constant, AliasedBuffer,
        Tied, Frozen, OneSumForTwo, Normalized,
    )
}  # fmt: skip
LAYOUTS: Mapping[str, mw.Layout] = {
    "one": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "zero1": mw.Layout(dp=2, zero=1),
    "zero2": mw.Layout(dp=2, zero=2),
    "zero3": mw.Layout(dp=2, zero=3),
    "m4": mw.Layout(microbatches=4),
    "recompute": mw.Layout(recompute="full"),
    "dp2 m2": mw.Layout(dp=2, microbatches=2),
    "tp2 m2": mw.Layout(tp=2, microbatches=2),
    "zero3 m2": mw.Layout(dp=2, zero=3, microbatches=2),
    "pp2": mw.Layout(pp=2),
    "pp2 m4": mw.Layout(pp=2, microbatches=4),
    "pp2 m4 zb-h1": mw.Layout(pp=2, microbatches=4, schedule="zb-h1"),
    "pp2 m4 gpipe": mw.Layout(pp=2, microbatches=4, schedule="gpipe"),
    "zero1 pp2 m2": mw.Layout(dp=2, pp=2, microbatches=2, zero=1),
    "tp2 pp2 m2": mw.Layout(tp=2, pp=2, microbatches=2),
    "any factor": mw.Layout(mixed=(2,)),
    "pp2 m4 interleaved": mw.Layout(pp=2, microbatches=4, schedule="interleaved", chunks=2),
    "pp2 m4 zb-v": mw.Layout(pp=2, microbatches=4, schedule="zb-v", chunks=2),
}
REFUSED = {("Normalized", name): "statistics are over the whole batch" for name in LAYOUTS if " m" in f" {name}"}
"""What cannot be, and what is said of it."""
ROUNDED = {"CastOnce": 1e-7}
"""Larger tolerances, for values that are rounded to float32 (as are the gradients of each micro-batch)."""


def batches() -> list[Batch]:
    drawn_batches = []
    for _ in range(STEPS):
        label = torch.randint(CLASSES, (BATCH,))
        label[:3] = -100
        x, scale = torch.randn(BATCH, WIDTH, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
        drawn_batches.append({"x": x, "label": label, "scale": scale})
    return drawn_batches


def errors_of(layout: str) -> dict[str, float | str]:
    """By property, the largest error of losses, metrics, parameters and buffers; or why it is refused."""
    return {name: _error(name, LAYOUTS[layout], as_users=layout == "dp2") for name in PROPERTIES}


def _error(name: str, layout: mw.Layout, *, as_users: bool) -> float | str:
    torch.manual_seed(2)
    model, data = PROPERTIES[name]().double(), batches()
    plain = copy.deepcopy(model)
    loss_fn = keeping_loss if isinstance(model, Kept) else loss_of
    optimizer = torch.optim.SGD(
        (parameter for parameter in plain.parameters() if parameter.requires_grad), lr=0.1, momentum=0.9
    )
    try:
        trainer = (mw.parallelize if as_users else sharing_capture(("properties", name)))(
            model, loss_fn, data[0], plan=layout,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        )  # fmt: skip
    except MeshwrightError as error:
        return str(error)
    errors = []
    for batch in data:
        optimizer.zero_grad()
        loss, metrics = loss_fn(plain, batch)
        loss.backward()
        optimizer.step()
        errors.append(error_of(trainer.step(batch), loss.detach()))
        errors.append(largest_error(trainer.metrics, {"loss": loss.detach(), **metrics}))
    errors.append(largest_error(trainer.full_state_dict(all_ranks=True), plain.state_dict()))
    return max(errors)


TOGETHER = ("zero3", "dp2 m2", "tp2 m2", "pp2", "pp2 m4 gpipe", "zero1 pp2 m2", "tp2 pp2 m2")
"""Layouts whose techniques stand alone, or beside one another, in others."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.product) if name in TOGETHER else name for name in LAYOUTS]
)
def test_every_property_of_a_model_is_kept(ranks: Ranks, layout: str) -> None:
    for result in ranks(LAYOUTS[layout].num_ranks, errors_of, layout):
        wrong = {}
        for name, error in result.items():
            refusal = REFUSED.get((name, layout))
            if refusal is not None and not (isinstance(error, str) and refusal in error):
                wrong[name] = error
            if refusal is None and (isinstance(error, str) or not error <= ROUNDED.get(name, TOLERANCE)):
                wrong[name] = error
        assert not wrong


def test_a_value_that_micro_batches_would_have_to_share_is_refused() -> None:
    class Centered(BatchAverage):
        def last(self, x: Tensor) -> Tensor:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return x - self.average

    with pytest.raises(LayoutError, match="every micro-batch makes a term"):
        mw.parallelize(Centered().double(), loss_of, batches()[0], plan=LAYOUTS["m4"])
