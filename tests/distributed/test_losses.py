"""Losses under every kind of layout: sums over all labels by global counts, and in float32 where models are halves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from tests.distributed import oracle
from tests.distributed.pool import Ranks

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
SAMPLES, LENGTH, WORDS = 8, 5, 6
WEIGHTS = torch.linspace(0.1, 1.0, WORDS, dtype=torch.float64)


class Words(nn.Module):
    """Scores of the next word, of every place; and what their errors weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=WEIGHTS.clone())
        self.embedding, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        scores: Tensor = self.head(hidden)
        return scores


def padded() -> Batch:
    """Sentences of other lengths in every micro-batch; what follows their ends is ignored."""
    labels = torch.randint(WORDS, (SAMPLES, LENGTH))
    lengths = torch.tensor([5, 1, 2, 3, 4, 5, 1, 1])
    ended = torch.arange(LENGTH) >= lengths.unsqueeze(1)
    return {"tokens": torch.randint(WORDS, (SAMPLES, LENGTH)), "labels": labels.masked_fill(ended, -100)}


def over_words(rows: bool, **settings: Any) -> Loss:
    """Cross entropy over [batch, vocabulary, sequence], or over rows of scores."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        scores, labels = model(batch["tokens"]), batch["labels"]
        if rows:
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **settings)
        return F.cross_entropy(scores.transpose(1, 2), labels, **settings)

    return loss_fn


def of_sentences(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over sentences of the sum over their words."""
    return over_words(False, reduction="none")(model, batch).sum(1).mean()


def weighed_by_a_buffer(model: nn.Module, batch: Batch) -> Tensor:
    criterion: Any = model.criterion
    loss: Tensor = criterion(model(batch["tokens"]).transpose(1, 2), batch["labels"])
    return loss


def masked(model: nn.Module, batch: Batch) -> Tensor:
    counted = batch["labels"] > 0
    return (over_words(False, reduction="none")(model, batch) * counted).sum() / counted.sum()


PADDED: Mapping[str, Loss] = {
    f"{name}, {'rows' if rows else 'vocabulary in the middle'}": over_words(rows, **settings)
    for rows in (True, False)
    for name, settings in dict[str, dict[str, Any]]({
        "mean": {}, "class weights": {"weight": WEIGHTS}, "sum": {"reduction": "sum"},
        "smooth": {"label_smoothing": 0.1}, "smooth, class weights": {"label_smoothing": 0.1, "weight": WEIGHTS},
        "another label ignored": {"ignore_index": 3},
    }).items()
} | {"sentences": of_sentences, "masked": masked, "class weights, a buffer": weighed_by_a_buffer}  # fmt: skip
LAYOUTS = {
    "one rank, m4": mw.Layout(microbatches=4),
    "dp2": mw.Layout(dp=2),
    "dp2, m2": mw.Layout(dp=2, microbatches=2),
    "tp2": mw.Layout(tp=2, pin={"*": "v@tp"}),
    "pp2, m4": mw.Layout(pp=2, microbatches=4),
}


def trained(name: str, layout: mw.Layout) -> tuple[float, int]:
    """The largest error of losses and parameters in three steps beside one process, and how many were split."""
    loss_fn = PADDED[name]
    torch.manual_seed(1)
    model, batch = Words().double(), padded()
    if name.startswith("another"):
        batch["labels"] = batch["labels"].clamp(min=0)
    alone = copy.deepcopy(model)
    subjects = [oracle.Subject(module, loss_fn, [batch] * 3) for module in (alone, model)]
    expected = oracle.reference(subjects[0], oracle.MORE_OPTIMIZERS["plain SGD"])
    run, trainer = oracle.in_parallel(
        subjects[1], layout, oracle.MORE_OPTIMIZERS["plain SGD"], parallelize=oracle.sharing_capture(("losses", name))
    )
    error = oracle.error_of(torch.stack(run.losses), torch.stack(expected.losses))
    if trainer.rank == 0:
        error = max(error, oracle.largest_error(run.state, expected.state))
    return error, sum(trainer.parameters.is_sharded(parameter) for parameter in trainer.parameters)


def all_trained(layout: mw.Layout) -> dict[str, tuple[float, int]]:
    return {name: trained(name, layout) for name in PADDED}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_sentences(ranks: Ranks, layout: str) -> None:
    for result in ranks(LAYOUTS[layout].num_ranks, all_trained, LAYOUTS[layout]):
        assert result.keys() == PADDED.keys()
        assert {name: error for name, (error, _) in result.items() if not error <= oracle.TOLERANCE} == {}
        assert all(bool(num_split) == (layout == "tp2") for _, num_split in result.values())


# --- halves -----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def halves(dtype: torch.dtype) -> Batch:
    torch.manual_seed(0)
    x, y = (torch.randn(64, 64) + 1).to(dtype), torch.randn(64, 64).to(dtype)
    return {"x": x, "y": y, "label": torch.randint(64, (64,)), "labels": torch.randint(8, (64, 8))}


def distance(function: Callable[..., Tensor], **settings: Any) -> Loss:
    return lambda model, batch: function(model(batch["x"]), batch["y"], **settings)


def entropy(**settings: Any) -> Loss:
    return lambda model, batch: F.cross_entropy(model(batch["x"]), batch["label"], **settings)


def divergence(reduction: str) -> Loss:
    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return F.kl_div(model(batch["x"]).log_softmax(-1), batch["y"].softmax(-1), reduction=reduction).mean()

    return loss_fn


LOSSES: Mapping[str, Loss] = {
    "mse": distance(F.mse_loss), "mse, sum": distance(F.mse_loss, reduction="sum"), "l1": distance(F.l1_loss),
    "smooth l1": distance(F.smooth_l1_loss), "huber": distance(F.huber_loss, delta=0.5),
    "binary": lambda model, batch: F.binary_cross_entropy(model(batch["x"]).sigmoid(), batch["y"].sigmoid()),
    "binary of logits": lambda model, batch: F.binary_cross_entropy_with_logits(
        model(batch["x"]), batch["y"].sigmoid()
    ),
    "soft margin": lambda model, batch: F.soft_margin_loss(model(batch["x"]), batch["y"].sign()),
    "divergence": divergence("none"), "divergence, batch": divergence("batchmean"),
    "cross entropy": entropy(), "cross entropy, sum": entropy(reduction="sum"),
    "cross entropy, smooth": entropy(label_smoothing=0.1),
    "cross entropy, vocabulary in the middle": lambda model, batch: F.cross_entropy(
        model(batch["x"]).unflatten(1, (8, 8)), batch["labels"]
    ),
    "mean": lambda model, batch: model(batch["x"]).square().mean(),
    "sum": lambda model, batch: model(batch["x"]).square().sum(),
}  # fmt: skip
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SUMMED = {
    "one rank": mw.Layout(),
    "one rank, m64": mw.Layout(microbatches=64),
    "dp2, m32": mw.Layout(dp=2, microbatches=32),
}


def errors_in_halves(layout: mw.Layout) -> dict[tuple[str, str], tuple[float, float, str]]:
    """By dtype and loss: the relative error of the loss, that of plain PyTorch, and the loss's dtype."""
    result = {}
    for kind, dtype in DTYPES.items():
        batch = halves(dtype)
        double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        for name, loss_fn in LOSSES.items():
            with torch.no_grad():
                exact, plain = float(loss_fn(Scaled(torch.float64), double)), float(loss_fn(Scaled(dtype), batch))
            parallelize = oracle.sharing_capture(("halves", kind, name))
            loss = parallelize(Scaled(dtype), loss_fn, batch, plan=layout, optimizer=torch.optim.SGD).step(batch)
            result[kind, name] = abs(float(loss) / exact - 1), abs(plain / exact - 1), str(loss.dtype)
    return result


@pytest.mark.parametrize("layout", SUMMED)
def test_halves_are_summed_in_float32(ranks: Ranks, layout: str) -> None:
    """Each error is no larger than PyTorch's in one process, or half a rounding where PyTorch was lucky."""
    for result in ranks(SUMMED[layout].num_ranks, errors_in_halves, SUMMED[layout]):
        assert len(result) == 2 * len(LOSSES)
        for (kind, name), (error, plain, dtype) in result.items():
            assert error <= max(plain, torch.finfo(DTYPES[kind]).eps / 4), (kind, name)
            assert dtype == "torch.float32"


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["mse", "cross entropy"])
def test_a_mean_in_float16_whose_sum_leaves_its_range(name: str, microbatches: int) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(65536, 64).mul_(8).half(), "label": torch.randint(64, (65536,))}
    batch["y"] = -batch["x"]
    layout = mw.Layout(microbatches=microbatches)
    trainer = mw.parallelize(Scaled(torch.float16), LOSSES[name], batch, plan=layout, optimizer=torch.optim.SGD)
    with torch.no_grad():
        expected = LOSSES[name](Scaled(torch.float32), {**batch, "x": batch["x"].float(), "y": batch["y"].float()})
    assert float(expected) * 65536 > 65504
    assert float(trainer.step(batch)) == pytest.approx(float(expected), rel=1e-3)
