"""Compares a parallel trainer with eager PyTorch in one process, in float64: forward, backward and update."""

import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from meshwright.capture.batch import as_dicts
from meshwright.capture.tracer import LossFunction
from meshwright.errors import CaptureError
from meshwright.runtime.initialize import materialize
from meshwright.runtime.loop import Progress
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.runtime.trainer import Trainer
from meshwright.torch_private import Dropout, pytree

CPU = torch.device("cpu")
TOLERANCE = 1e-9
"""The allowed difference, as a fraction of the largest absolute value (or as an absolute value if that is below 1)."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """One compared quantity: its largest difference over all elements, where it occurs, and the allowed difference."""

    quantity: str
    difference: float
    allowed: float
    where: str
    ok: bool


@dataclass
class Record:
    """The results of some training steps. ``gradients`` are the gradients of the first step, as the optimizer received
    them; ``state`` is the model's state after the last step."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def in_float64(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the model in float64 with dropout off; a model on the meta device gets its initial values."""
    twin = copy.deepcopy(model)
    materialize(twin, torch.device("cpu"), seed)
    for module in twin.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return twin.double()


def batch_in_float64(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return pytree.tree_map_only(
        Tensor, lambda value: value.double() if value.is_floating_point() else value, as_dicts(batch)
    )


def parallel_steps(trainer: Trainer, batch: Any, steps: int, progress: Progress) -> Record:
    """Make ``steps`` training steps of a trainer. Every rank must call it; only rank 0's record is complete."""
    record = Record()
    local: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        if not local:
            for name, parameter in trainer.parameters.trainable.items():
                if parameter.grad is not None:
                    local[name] = parameter.grad.clone()

    assert trainer.optimizer is not None
    handle = trainer.optimizer.register_step_pre_hook(note)
    for _ in range(steps):
        record.losses.append(trainer.step(batch).detach().clone())
        progress.advance()
    handle.remove()
    for entry in trainer.graph.gradients:
        if entry.gradient is not None:
            record.gradients[entry.parameter] = trainer.parameters.whole(entry.parameter, local.get(entry.parameter))
    record.state = trainer.full_state_dict()
    return record


def eager_steps(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    steps: int,
    factory: OptimizerFactory,
    max_grad_norm: float | None,
    progress: Progress,
    device: torch.device = CPU,
) -> Record:
    """Make the same steps with a plain model in one process on ``device``, as the reference. Raise a CaptureError if
    the model draws random numbers, because two runs could not be compared."""
    model.to(device).train()
    batch = pytree.tree_map_only(Tensor, lambda value: value.to(device), batch)
    _check_deterministic(model, loss_fn, batch)
    record = Record()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = factory(list(trained.items()))
    for step in range(steps):
        optimizer.zero_grad()
        loss = _loss(loss_fn, model, batch)
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained.values(), max_grad_norm)
        if step == 0:
            record.gradients = {name: value.grad.clone() for name, value in trained.items() if value.grad is not None}
        optimizer.step()
        record.losses.append(loss.detach())
        progress.advance()
    record.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return record


def compare(parallel: Record, eager: Record) -> tuple[Verification, ...]:
    """Compare two records. Return one row for each compared quantity of forward, backward and update."""
    steps = len(eager.losses)
    # The losses of later steps show that state outside of the state dict (of the optimizer) is right too.
    losses = [{f"step {step + 1}": value for step, value in enumerate(record.losses)} for record in (parallel, eager)]
    first, later = [{"step 1": run["step 1"]} for run in losses], [run for run in losses if len(run) > 1]
    rows = [_compared("forward: loss", *first)]
    rows.append(_compared("backward: gradients", parallel.gradients, eager.gradients))
    if later:
        rows.append(_compared(f"losses of {steps} steps", *later))
    rows.append(_compared(f"update: model after {steps} steps", parallel.state, eager.state))
    return tuple(rows)


def _compared(quantity: str, parallel: dict[str, Tensor], eager: dict[str, Tensor]) -> Verification:
    worst, where, allowed = 0.0, "", TOLERANCE
    for name in [*eager, *(name for name in parallel if name not in eager)]:
        ours, other = parallel.get(name), eager.get(name)
        if ours is None or other is None or ours.shape != other.shape:
            side = "the parallel run" if ours is None else "one process" if other is None else "the same shape"
            return Verification(
                quantity=quantity, difference=float("inf"), allowed=allowed, where=f"{name} (not in {side})", ok=False
            )
        if not ours.numel():
            continue
        difference = float((ours.cpu().double() - other.cpu().double()).abs().max())
        limit = TOLERANCE * max(1.0, float(other.double().abs().max()))
        # Not "<=": NaN must not pass.
        if not difference / limit <= worst / allowed or not where:
            worst, where, allowed = difference, name, limit
    return Verification(quantity=quantity, difference=worst, allowed=allowed, where=where, ok=worst <= allowed)


def _loss(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    result = loss_fn(model, batch)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def _check_deterministic(model: nn.Module, loss_fn: LossFunction, batch: Any) -> None:
    values = []
    for seed in (0, 1):
        twin = copy.deepcopy(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            values.append(float(_loss(loss_fn, twin, batch)))
    if values[0] != values[1]:
        raise CaptureError(
            f"the model draws random numbers: two seeds give the losses {values[0]:.6g} and {values[1]:.6g}",
            where="model",
            remedy="set its dropout to 0 to verify it (dropout modules are switched off, functional dropout is not)",
        )
