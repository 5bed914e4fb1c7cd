"""The part ``parity``: models under the layouts of one GPU, beside one process of eager PyTorch.

In float64, beside the CPU: losses and parameters after a few steps, within 1e-9. In bfloat16, beside float32 on the
same GPU: the error may be at most ``FACTOR`` times that of eager PyTorch under autocast, which rounds alike,
plus ``FLOOR``: the errors of single losses are that small, and random.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.gpu.context import Context
from meshwright.ir.result import Check
from meshwright.models import GPT, GPTConfig, language_model_loss
from tests.distributed import oracle

OPTIONS: Mapping[str, dict[str, Any]] = {
    "one function": {},
    "micro-batches": {"plan": mw.Layout(microbatches=2)},
    "recomputed": {"plan": mw.Layout(recompute="full")},
    "optimizer state on the host": {"plan": mw.Layout(offload="optimizer")},
    "compiled": {"compile": True},
    "compiled, micro-batches, recomputed": {"plan": mw.Layout(microbatches=2, recompute="full"), "compile": True},
}
"""What one GPU can vary."""
MODELS = ("GPT", "GPT, own head", "MLP", "LeNet", "ResNet")
COMPILED = ("GPT", "LeNet")
FACTOR, FLOOR = 1.5, 1e-4
STEPS = 4


def run(context: Context) -> None:
    """Compare every model with every option, the compiled ones last; between them the GPT in bfloat16."""
    expected: dict[str, oracle.Run] = {}
    for model in MODELS:
        expected[model] = oracle.in_one_process(_subject(model), oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM)
    for compiled in (False, True):
        for model in MODELS if not compiled else COMPILED:
            cases = {name: each for name, each in OPTIONS.items() if each.get("compile", False) == compiled}
            if model == "ResNet":  # statistics of batch norm would be those of parts of the batch
                cases = {name: each for name, each in cases.items() if "micro-batches" not in name}
            _float64(context, model, cases, expected[model])
        for name, options in OPTIONS.items():
            if context.left_s > 10 and "host" not in name and options.get("compile", False) == compiled:
                context.notes.tried(f"bfloat16: {name}", functools.partial(_bfloat16, context, name, options))


def _float64(context: Context, model: str, cases: Mapping[str, dict[str, Any]], expected: oracle.Run) -> None:
    """Note the errors of one model."""
    texts: dict[str, str] = {}
    passed = 0
    for name, options in cases.items():
        measure = functools.partial(_error, context, model, options, expected)
        error = context.notes.tried(f"parity in float64: {model}, {name}", measure)
        texts[name] = "failed" if error is None else f"{error:.0e}"
        passed += error is not None and error <= oracle.TOLERANCE
    which = ", compiled" if any(each.get("compile") for each in cases.values()) else ""
    context.notes.add_finding(
        Check(
            target=f"parity in float64 of {model}{which}, with one process on the CPU: within {oracle.TOLERANCE:.0e}",
            verdict="pass" if passed == len(cases) else "fail", passed=passed, total=len(cases),
            measured=", ".join(f"{name} {text}" for name, text in texts.items()),
        )
    )  # fmt: skip


def _subject(model: str) -> oracle.Subject:
    torch.manual_seed(7)
    return oracle.MODELS[model](True)


def _error(context: Context, model: str, options: dict[str, Any], expected: oracle.Run) -> float:
    """The largest error of losses and of the state after the last step."""
    parallelize = functools.partial(
        oracle.sharing_capture(model), device=context.device, compile=options.get("compile", False)
    )
    training_run, _ = oracle.in_parallel(
        _subject(model), options.get("plan", mw.Layout()), oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM, parallelize
    )
    losses = oracle.error_of(torch.stack(training_run.losses).cpu(), torch.stack(expected.losses))
    state = {name: value.cpu() for name, value in training_run.state.items()}
    return max(losses, oracle.largest_error(state, expected.state))


# --- in bfloat16 ------------------------------------------------------------------------------------------------------


def _bfloat16(context: Context, name: str, options: dict[str, Any]) -> None:
    small = context.rehearse
    config = GPTConfig(
        layers=2 if small else 6, width=64 if small else 512, heads=4, vocabulary=512 if small else 8192,
        sequence_length=64 if small else 512,
    )  # fmt: skip
    torch.manual_seed(3)
    model = GPT(config)
    text = torch.randint(config.vocabulary, (4, config.sequence_length + 1))
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    exact = _eager(context, copy.deepcopy(model), batch, low=False)
    rounded = _eager(context, copy.deepcopy(model), batch, low=True)
    given = {"plan": mw.Layout(), **options}
    trainer = mw.parallelize(
        copy.deepcopy(model), language_model_loss, batch, optimizer=_sgd, precision="bfloat16", device=context.device,
        **given,
    )  # fmt: skip
    losses = torch.stack([trainer.step(batch).detach() for _ in range(STEPS)]).cpu().double()
    ours = losses, {key: value.cpu().double() for key, value in trainer.full_state_dict().items()}
    before = {key: value.double() for key, value in model.state_dict().items()}
    errors, usual = _errors(ours, exact, before), _errors(rounded, exact, before)
    passed = sum(error <= FACTOR * theirs + FLOOR for error, theirs in zip(errors, usual, strict=True))
    context.notes.add_finding(
        Check(
            target=f"bfloat16, {name}: the error beside float32 is at most {FACTOR} of that of eager autocast",
            verdict="pass" if passed == len(errors) else "fail",
            passed=passed,
            total=len(errors),
            measured=f"losses {errors[0]:.1e} beside {usual[0]:.1e}, updates {errors[1]:.1e} beside {usual[1]:.1e}",
        )
    )


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


State = tuple[Tensor, dict[str, Tensor]]


def _eager(context: Context, model: nn.Module, batch: Mapping[str, Tensor], *, low: bool) -> State:
    """The losses of some steps, and the state after them."""
    model, there = model.to(context.device), {key: value.to(context.device) for key, value in batch.items()}
    optimizer, losses = _sgd(model.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(context.device.type, torch.bfloat16, enabled=low):
            loss, _ = language_model_loss(model, there)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu().double(), {key: value.cpu().double() for key, value in model.state_dict().items()}


def _errors(state: State, exact: State, before: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest error of a loss, and the error of all updates together, relative to the updates."""
    losses = float(((state[0] - exact[0]).abs() / exact[0].abs()).max())
    off = sum(float((state[1][key] - exact[1][key]).square().sum()) for key in before)
    moved = sum(float((exact[1][key] - before[key]).square().sum()) for key in before)
    return losses, (off / moved) ** 0.5
