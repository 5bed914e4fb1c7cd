"""Layers whose operators PyTorch keeps whole, in micro-batches and on ranks: weight norm, bags of words, Fourier
transforms, operators of one's own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw
from meshwright.errors import CaptureError, LayoutError
from meshwright.ops.base import OperatorRule, make_rule
from tests.distributed import oracle
from tests.distributed.pool import Ranks

SAMPLES, WIDTH, WORDS, CLASSES = 8, 6, 12, 4


@torch.library.custom_op("tests::tripled", mutates_args=())
def tripled(value: Tensor) -> Tensor:
    return value * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda context, grad: grad * 3)
RULES: dict[Any, OperatorRule] = {
    torch.ops.tests.tripled.default: OperatorRule(lambda call: make_rule(call, "^b k -> b k"))
}


class Between(nn.Module):
    """A layer, what comes between, and scores of classes."""

    def __init__(self, between: Callable[[Tensor], Tensor], first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between = first or nn.Linear(WIDTH, WIDTH), between
        with torch.no_grad():
            width = self.between(self.first(torch.zeros(2, WIDTH))).flatten(1).shape[1]
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.between(self.first(x)).flatten(1))
        return scores


class Filter(nn.Module):
    """A convolution round a circle, by Fourier transforms of values and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(WIDTH))
        self.mixes = nn.Parameter(torch.randn(4, 4, 2))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.fft.rfft(self.weights)
        spectrum = torch.einsum("bi,io->bo", spectrum, torch.view_as_complex(self.mixes))
        scores: Tensor = self.last(torch.fft.irfft(spectrum, n=WIDTH))
        return scores


class Bags(nn.Module):
    def __init__(self, weighed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(WORDS, WIDTH, **settings), nn.Linear(WIDTH, CLASSES)
        self.weights = nn.Embedding(WORDS, 1) if weighed else None

    def forward(self, words: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights(words).squeeze(-1)
        scores: Tensor = self.last(self.bags(words, per_sample_weights=weights))
        return scores


def normed(layer: nn.Module, *before: nn.Module, dim: Any = 0) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(*before, weight_norm(copy.deepcopy(layer), dim=dim), nn.Tanh(), nn.Flatten())
        width = model(torch.zeros(2, WIDTH)).shape[1]
        return nn.Sequential(*model, nn.Linear(width, CLASSES))

    return build


def halves(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, 3))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "weight norm of rows": normed(nn.Linear(WIDTH, 8)),
    "weight norm of columns": normed(nn.Linear(WIDTH, 8), dim=1),
    "weight norm of all": normed(nn.Linear(WIDTH, 8), dim=None),
    "weight norm of filters": normed(nn.Conv1d(2, 4, 2), nn.Unflatten(1, (2, 3))),
    "magnitudes": lambda: Between(lambda x: torch.fft.rfft(x).abs()),
    "there and back": lambda: Between(lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho")[:, :2], n=WIDTH)),
    "complex numbers": lambda: Between(lambda x: torch.fft.ifft(torch.fft.fft(x) * 1j).imag),
    "two dims": lambda: Between(lambda x: torch.fft.fft2(halves(x)).real),
    "two dims of real numbers": lambda: Between(lambda x: torch.fft.irfft2(torch.fft.rfft2(halves(x)), s=(2, 3))),
    "tokens mixed": lambda: Between(lambda x: torch.fft.fft(torch.fft.fft(halves(x), dim=-1), dim=-2).real),
    "filter": Filter,
    **{
        f"bags, {mode}{', padded' if padding is not None else ''}": partial(Bags, mode=mode, padding_idx=padding)
        for mode in ("sum", "mean", "max")
        for padding in (None, 3)
    },
    "bags, weighed": lambda: Bags(weighed=True, mode="sum"),
    "operator of one's own": lambda: Between(lambda x: tripled(x)),
}  # fmt: skip
LAYOUTS = {
    "one rank, m4": mw.Layout(microbatches=4),
    "dp2, m2": mw.Layout(dp=2, microbatches=2),
    "tp2": mw.Layout(tp=2),
}


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def batch_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    words = torch.randint(WORDS, (SAMPLES, 4))
    words[0] = 3  # a bag of padding alone
    words[1, :2] = 3
    x = words if name.startswith("bags") else torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    return {"x": x, "label": torch.randint(CLASSES, (SAMPLES,))}


def trained(name: str, layout: mw.Layout) -> float:
    """The largest error of losses and parameters in three steps beside one process."""
    torch.manual_seed(1)
    model, batch = MODELS[name]().double(), batch_of(name)
    subjects = [oracle.Subject(module, loss_of, [batch] * 3) for module in (copy.deepcopy(model), model)]
    expected = oracle.reference(subjects[0], oracle.MORE_OPTIMIZERS["plain SGD"])
    run, trainer = oracle.in_parallel(
        subjects[1], layout, oracle.MORE_OPTIMIZERS["plain SGD"],
        parallelize=partial(oracle.sharing_capture(("operators", name)), rules=RULES),
    )  # fmt: skip
    error = oracle.error_of(torch.stack(run.losses), torch.stack(expected.losses))
    return max(error, oracle.largest_error(run.state, expected.state)) if trainer.rank == 0 else error


def all_trained(layout: mw.Layout) -> dict[str, float]:
    return {name: trained(name, layout) for name in MODELS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(ranks: Ranks, layout: str) -> None:
    for result in ranks(LAYOUTS[layout].num_ranks, all_trained, LAYOUTS[layout]):
        assert result.keys() == MODELS.keys()
        assert {name: error for name, error in result.items() if not error <= oracle.TOLERANCE} == {}


class Offsets(Bags):
    """Bags one after the other, that begin at offsets."""

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.last(self.bags(words.flatten(), torch.arange(0, words.numel(), words.shape[1])))
        return scores


@pytest.mark.parametrize(
    ("model", "name"),
    [(Offsets(mode="sum"), "aten._embedding_bag_backward.default"), (Between(tripled), "tests.tripled.default")],
    ids=["offsets", "own"],
)
def test_what_has_no_rule_says_so(model: nn.Module, name: str) -> None:
    batch = batch_of("bags" if isinstance(model, Bags) else "")
    graph = mw.capture(model.double(), loss_of, batch)
    with pytest.raises(LayoutError) as caught:
        mw.plan(graph, layout=mw.Layout(microbatches=4))
    pattern = rf"the step cannot be divided into 4 micro-batches: no rule for {re.escape(name)}, and '.*' differs .*"
    assert re.fullmatch(pattern, caught.value.problem)
    assert caught.value.remedy == (
        "use microbatches=1, or pass a rule (rules=) in which a letter of its inputs and outputs is the batch: "
        "docs/how-to/add-an-operator-rule.md"
    )
    mw.plan(graph, layout=mw.Layout())


def test_bags_of_other_forms_stay_as_they_are() -> None:
    graph = mw.capture(Offsets(mode="sum"), loss_of, batch_of("bags"))
    assert "aten._embedding_bag.default" in {operator.target for operator in graph.operators}


class Refused(Bags):
    """Bags of one length, with more that PyTorch's operator does not take."""

    def __init__(self, mode: str, given: Callable[..., Any]) -> None:
        super().__init__(mode=mode)
        self.given = given

    def forward(self, words: Tensor) -> Tensor:
        bags = F.embedding_bag(words, self.bags.weight, mode=self.bags.mode, **self.given(words))
        scores: Tensor = self.last(bags)
        return scores


def weighed(words: Tensor) -> dict[str, Tensor]:
    return {"per_sample_weights": torch.ones(words.shape, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("mode", "given", "says"),
    [
        ("mean", weighed, r"NotImplementedError: .*only supported for mode='sum' \(got mode='mean'\)"),
        ("max", weighed, r"NotImplementedError: .*only supported for mode='sum' \(got mode='max'\)"),
        ("sum", lambda words: weighed(words[:, :1]), r"ValueError: .*it must have the same shape as the input"),
        ("sum", lambda words: {"offsets": torch.arange(len(words))}, "ValueError: if input is 2D, then offsets has to"),
    ],
    ids=["weights of a mean", "weights of a maximum", "weights of another shape", "offsets"],
)
def test_bags_that_pytorch_refuses_raise_its_error(mode: str, given: Callable[..., Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        mw.capture(Refused(mode, given).double(), loss_of, batch_of("bags"))
