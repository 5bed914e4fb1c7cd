"""Low precision: equal to torch.autocast in one process, alike under every layout; steps that overflow are skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import CheckpointError, LossScaleError, NonFiniteLossError
from meshwright.models import GPT, GPTConfig, ResNet, classification_loss, language_model_loss
from meshwright.runtime import precision as scaling
from tests.distributed import oracle
from tests.distributed.pool import Ranks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = 4


@dataclass(frozen=True)
class Subject:
    """A float32 model with its loss and a batch."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any]
    batch: dict[str, Tensor]


def gpt() -> Subject:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, vocabulary=64, sequence_length=16))
    tokens = torch.randint(64, (8, 17))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return Subject(model, language_model_loss, batch)


def resnet() -> Subject:
    torch.manual_seed(0)
    batch = {"image": torch.randn(8, 3, 8, 8), "label": torch.randint(10, (8,))}
    return Subject(ResNet(depth=8, width=8), classification_loss, batch)


def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(64, (8, 16))
    return Subject(LlamaForCausalLM(config), oracle.own_loss, {"input_ids": tokens, "labels": tokens.clone()})


SUBJECTS = {"GPT": gpt, "ResNet": resnet, "HF Llama": llama}
LAYOUTS = {
    "one rank": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "pp2": mw.Layout(pp=2, microbatches=2),
    "zero1": mw.Layout(dp=2, zero=1),
    "zero2, m2": mw.Layout(dp=2, zero=2, microbatches=2),
    "zero3, recompute": mw.Layout(dp=2, zero=3, recompute="full"),
    "dp2 x pp2, zero3": mw.Layout(dp=2, pp=2, microbatches=2, zero=3),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def slowly(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def trainer_of(
    subject: Subject, layout: str, precision: Any, max_grad_norm: float | None = 1.0, optimizer: Any = sgd,
    parallelize: Callable[..., mw.Trainer] = mw.parallelize,
) -> mw.Trainer:  # fmt: skip
    return parallelize(
        subject.model, subject.loss_fn, subject.batch, plan=LAYOUTS[layout], precision=precision, optimizer=optimizer,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip


@dataclass
class Run:
    """Losses and gradient norms of some steps, the loss of an evaluation after them, and the model then."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    state: dict[str, Tensor]


def trained(name: str, layout: str, precision: Any) -> Run:
    subject = SUBJECTS[name]()
    trainer = trainer_of(subject, layout, precision, parallelize=oracle.sharing_capture(("precision", name)))
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(trainer.step(subject.batch)))
        norms.append(float(trainer.metrics["grad_norm"]))
    evaluated = float(trainer.evaluate(subject.batch))
    return Run(losses, norms, evaluated, trainer.full_state_dict(all_ranks=True))


@cache
def alone(name: str, precision: str | None) -> Run:
    """In this process."""
    return trained(name, "one rank", precision)


def by_torch(name: str, precision: str | None) -> Run:
    """The same by torch.autocast and torch.amp, in plain eager PyTorch."""
    subject = SUBJECTS[name]()
    model, losses, norms = subject.model.train(), [], []
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")

    def loss_of() -> Tensor:
        low = torch.autocast("cpu", DTYPES[precision]) if precision in DTYPES else nullcontext()
        with low:
            result = subject.loss_fn(model, subject.batch)
        return (result[0] if isinstance(result, tuple) else result).float()

    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        evaluated = float(loss_of())
    return Run(losses, norms, evaluated, {key: value.clone() for key, value in model.state_dict().items()})


def difference(run: Run, other: Run) -> float:
    """The largest relative difference of losses, gradient norms and values."""
    numbers = [*zip(run.losses, other.losses, strict=True), *zip(run.norms, other.norms, strict=True),
               (run.evaluated, other.evaluated)]  # fmt: skip
    errors = [abs(a - b) / max(1.0, abs(b)) for a, b in numbers]
    return max(*errors, oracle.largest_error(run.state, other.state))


# --- equal to torch, and alike under all layouts ---------------------------------------------------------------------

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place of a number near 1."""
ROUNDINGS = {("ResNet", "bfloat16"): 8, ("ResNet", "float16"): 32}
"""How many of them four steps may differ by, if not 2: batch norm divides by what was rounded, nine times one after the
other, and torch.autocast rounds what it makes too."""


def limit(name: str, precision: str) -> float:
    return ROUNDINGS.get((name, precision), 2) * ROUNDING[precision]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_one_rank_equals_autocast(name: str, precision: str) -> None:
    run, expected = alone(name, precision), by_torch(name, precision)
    assert difference(run, expected) <= limit(name, precision)
    assert run.losses != alone(name, None).losses, "products were rounded"


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("GPT", "dp2", "bfloat16"),
        ("GPT", "tp2", "float16"),
        ("GPT", "pp2", "bfloat16"),
        ("GPT", "zero3, recompute", "bfloat16"),
        ("GPT", "dp2 x pp2, zero3", "float16"),
        ("HF Llama", "zero2, m2", "float16"),
        ("ResNet", "zero1", "bfloat16"),
        pytest.param("GPT", "zero1", "float16", marks=pytest.mark.product),
        pytest.param("HF Llama", "tp2", "bfloat16", marks=pytest.mark.product),
        pytest.param("ResNet", "dp2", "float16", marks=pytest.mark.product),
    ],
)
def test_every_layout_computes_the_same(ranks: Ranks, name: str, layout: str, precision: str) -> None:
    results = ranks(LAYOUTS[layout].num_ranks, trained, name, layout, precision)
    assert all(result.losses == results[0].losses and result.norms == results[0].norms for result in results)
    assert difference(results[0], alone(name, precision)) <= limit(name, precision)


@pytest.mark.parametrize("name", ["GPT", "ResNet"])
def test_float32_is_what_a_float32_model_does_anyway(name: str) -> None:
    assert difference(alone(name, "float32"), alone(name, None)) == 0.0


def in_float64(layout: str) -> float:
    """The error of a step whose "float16" is float64: of scaling, unscaling and clipping alone."""
    subject = gpt()
    subject.model.double()
    tracer = "meshwright.capture.tracer"
    with mock.patch(f"{tracer}.check_masters"), mock.patch(f"{tracer}.computing_in", return_value=nullcontext()):
        trainer = trainer_of(subject, layout, "float16", 0.1)
    losses = [float(trainer.step(subject.batch)) for _ in range(STEPS)]
    assert trainer.loss_scale is not None
    assert trainer.loss_scale.value == scaling.FIRST_SCALE
    serial = gpt()
    run = oracle.in_one_process(oracle.Subject(serial.model.double(), serial.loss_fn, [serial.batch] * STEPS), sgd, 0.1)
    errors = [abs(loss - float(other)) for loss, other in zip(losses, run.losses, strict=True)]
    return max(*errors, oracle.largest_error(trainer.full_state_dict(all_ranks=True), run.state))


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "zero2, m2", "zero3, recompute"])
def test_scaling_is_exact(ranks: Ranks, layout: str) -> None:
    assert max(ranks(2, in_float64, layout)) <= oracle.TOLERANCE


# --- steps that overflow ---------------------------------------------------------------------------------------------


class Amplified(nn.Module):
    """A small net whose gradients are those of its output times what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.second(torch.tanh(self.first(batch["inputs"]))).squeeze(-1) * batch["factor"]).mean()


def amplified(factor: float, last: float | None = None) -> Subject:
    """The gradients' factor of all samples, and of the last one, which lies on the last rank only."""
    torch.manual_seed(1)
    factors = torch.full((8,), factor)
    factors[-1] = factor if last is None else last
    return Subject(Amplified(), lambda model, batch: model(batch), {"inputs": torch.randn(8, 8), "factor": factors})


def skipping(layout: str) -> tuple[list[int], list[float], bool, dict[str, Tensor]]:
    """Which steps are skipped where one gradient is large, the scales, whether nothing changed then; the model."""
    subject = amplified(1.0, last=100.0)
    trainer = trainer_of(subject, layout, "float16", None, slowly)
    before = {name: value.clone() for name, value in trainer.parameters.values().items()}
    skipped, scales, untouched = [], [], True
    for _ in range(8):
        trainer.step(subject.batch)
        skipped.append(int(trainer.metrics["skipped"]))
        scales.append(float(trainer.metrics["loss_scale"]))
        if sum(skipped) == len(skipped):
            same = all(torch.equal(value, before[name]) for name, value in trainer.parameters.values().items())
            untouched = untouched and same and not trainer.optimizer.state
    assert trainer.step_number == 8
    return skipped, scales, untouched, trainer.full_state_dict(all_ranks=True)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "zero2, m2", "pp2"])
def test_a_step_that_overflows_somewhere_is_skipped_everywhere(ranks: Ranks, layout: str) -> None:
    results = ranks(LAYOUTS[layout].num_ranks, skipping, layout)
    skipped, scales, _, state = results[0]
    first = sum(skipped)
    assert 0 < first < 8
    assert skipped == [1] * first + [0] * (8 - first), "the scale falls until it fits"
    assert scales == [scaling.FIRST_SCALE / 2 ** min(step + 1, first) for step in range(8)]
    assert all(result[:3] == (skipped, scales, True) for result in results)
    alone = skipping("one rank")
    assert alone[:2] == (skipped, scales)
    assert oracle.largest_error(state, alone[3]) <= 4 * ROUNDING["float16"]


def until_it_ends(layout: str, precision: str, factor: float) -> tuple[str, str, bool]:
    """The error that training ends with, and whether the parameters are as they were."""
    subject = amplified(1.0, last=factor)
    if precision == "bfloat16":
        subject = Subject(subject.model, lambda model, batch: (model(batch) * 0).abs().sqrt(), subject.batch)
    trainer = trainer_of(subject, layout, precision, None)
    before = {name: value.clone() for name, value in trainer.parameters.values().items()}
    try:
        for _ in range(50):
            trainer.step(subject.batch)
    except (LossScaleError, NonFiniteLossError) as error:
        same = all(torch.equal(value, before[name]) for name, value in trainer.parameters.values().items())
        return type(error).__name__, str(error), same
    return "", "it trained", False


def test_a_scale_that_runs_to_zero_says_so(ranks: Ranks) -> None:
    for kind, error, same in ranks(2, until_it_ends, "zero1", "float16", float("inf")):
        assert (kind, same) == ("LossScaleError", True)
        assert error == (
            "step 31: the loss scale fell to 3.05176e-05 at step 31: the step overflows in float16 at any scale, or "
            "its loss is not finite\n  -> look at this step's batch and learning rate, or use precision 'bfloat16', "
            "whose range is that of float32; parameters are as they were before step 1"
        )
    kind, error, same = until_it_ends("one rank", "bfloat16", 1.0)
    assert (kind, same) == ("LossScaleError", True)
    assert error.startswith("step 8: 8 steps in a row up to step 8 had gradients that are not finite: the step")


def test_a_loss_that_is_not_finite_is_refused_in_bfloat16_as_in_float32() -> None:
    subject = amplified(float("inf"))
    trainer = trainer_of(subject, "one rank", "bfloat16")
    with pytest.raises(NonFiniteLossError, match="the loss became"):
        trainer.step(subject.batch)


def test_the_scale_grows_again_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GROWTH_STEPS", 3)
    subject = amplified(0.1)
    trainer = trainer_of(subject, "one rank", "float16", None, slowly)
    scales = []
    for _ in range(7):
        trainer.step(subject.batch)
        scales.append(float(trainer.metrics["loss_scale"]) / scaling.FIRST_SCALE)
    assert scales == [1, 1, 2, 2, 2, 4, 4]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_the_scale_is_in_the_checkpoint(tmp_path: Path) -> None:
    subject = amplified(1.0, last=100.0)
    trainer = trainer_of(subject, "one rank", "float16", None)
    for _ in range(6):
        trainer.step(subject.batch)
    trainer.save(tmp_path / "ckpt")
    other = trainer_of(amplified(1.0, last=100.0), "one rank", "float16", None)
    other.load(tmp_path / "ckpt")
    assert trainer.loss_scale is not None
    assert other.loss_scale is not None
    assert other.loss_scale.state_dict() == trainer.loss_scale.state_dict()
    assert other.loss_scale.value < scaling.FIRST_SCALE
    assert float(other.step(subject.batch)) == float(trainer.step(subject.batch))


def test_a_checkpoint_goes_on_in_another_precision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    subject = gpt()
    trainer = trainer_of(subject, "one rank", "float16")
    trainer.step(subject.batch)
    trainer.save(tmp_path / "ckpt")
    for precision, named in (("bfloat16", "bfloat16"), (None, "the model's own dtypes")):
        other = trainer_of(gpt(), "one rank", precision)
        with caplog.at_level(logging.INFO, logger="meshwright"):
            other.load(tmp_path / "ckpt")
        assert f"was trained in float16, and goes on in {named}: parameters and" in caplog.text
        assert oracle.largest_error(other.full_state_dict(), trainer.full_state_dict()) == 0.0
    back = trainer_of(gpt(), "one rank", None)
    back.save(tmp_path / "plain")
    trainer.load(tmp_path / "plain", optimizer=False)
    assert trainer.loss_scale is not None
    assert trainer.loss_scale.value == scaling.FIRST_SCALE


def test_a_checkpoint_of_parameters_in_another_dtype_is_refused(tmp_path: Path) -> None:
    subject = gpt()
    trainer_of(subject, "one rank", None).save(tmp_path / "ckpt")
    half = gpt()
    half.model.bfloat16()
    other = trainer_of(half, "one rank", None)
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path / "ckpt", optimizer=False)
    assert "the checkpoint is in another precision: token_embedding.weight is float32, in this model bfloat16" in str(
        caught.value
    )
    assert "build the model in float32 (model.to(torch.float32)) and load it there" in str(caught.value)
