"""Trains a model by our plan inside the loop of another library.

Such a loop has a model and an optimizer long before it has a batch; ``parallelize`` needs a batch. So the trainer is
made at the first batch, and takes over the loop's own optimizer object:

    loop:     optimizer, scheduler ─▶ batch ─▶ loss ─▶ loss.backward() ─▶ clip ─▶ optimizer.step()
    Planned:                          begin    trainer.loss                trainer.clip_gradients
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.api import parallelize
from meshwright.capture.tracer import LossFunction
from meshwright.errors import OptimizerError, PlanError
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.runtime.trainer import Trainer

_OWN = ("model", "loss_fn", "batch", "plan", "optimizer", "max_grad_norm")
_OPTIONS = tuple(name for name in inspect.signature(parallelize).parameters if name not in _OWN)


class Planned:
    """Trains ``model`` by ``plan`` from the first batch on. ``options`` are further arguments of
    :func:`meshwright.parallelize`.

    Attributes:
        trainer: the trainer; None before the first batch.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, plan: Any, options: Mapping[str, Any]) -> None:
        self.model, self.plan, self.options = model, plan, dict(options)
        self.trainer: Trainer | None = None
        self._loss_fn = loss_fn

    def begin(self, batch: Any, optimizer: Optimizer, step: int = 0) -> Trainer:
        """Return the trainer. The first call makes it, from an example of a batch, and gives it the optimizer with the
        state that the optimizer has. ``step`` is the number of steps done before; dropout goes on from there."""
        if self.trainer is None:
            state = optimizer.state_dict() if optimizer.state else None
            self.trainer = parallelize(
                self.model, self._loss_fn, batch, plan=self.plan, optimizer=adopted(optimizer, self.model),
                **self.options,
            )  # fmt: skip
            self.trainer.follow_optimizer()
            self.trainer.step_number = step
            if state is not None:
                self.trainer.load_optimizer_state_dict(state)
        return self.trainer

    @property
    def is_split(self) -> bool:
        """Whether a parameter is not whole on this rank: then the caller's model holds meta tensors."""
        return self.trainer is not None and bool(self.trainer.parameters.given)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """In this context the caller's model has whole parameters and buffers, so that it can be called. If parameters
        are split, they are gathered on every rank, and every rank must enter the context."""
        if self.trainer is None or not self.is_split:
            yield
            return
        own_parameters = self.trainer.parameters.given
        state = self.trainer.full_state_dict(all_ranks=True)
        device = self.trainer.device
        places = [
            (module, key, value)
            for module in self.model.modules()
            for key, value in module._parameters.items()
            if value is not None
        ]
        names = {id(value): name for name, value in own_parameters.items()}
        wholes = {
            name: nn.Parameter(state[name].to(device), own_parameters[name].requires_grad) for name in own_parameters
        }
        _copy_buffers(self.model, state)
        try:
            for module, key, value in places:
                if id(value) in names:
                    module._parameters[key] = wholes[names[id(value)]]
            yield
        finally:
            for module, key, value in places:
                module._parameters[key] = value

    def give_back(self) -> None:
        """Give the caller's model whole trained parameters, for good: training by the plan is over. Every rank must
        call it."""
        if not self.is_split:
            return
        with self.whole():
            wholes = [(module, dict(module._parameters)) for module in self.model.modules()]
        for module, parameters in wholes:
            module._parameters.update(parameters)


def give_whole_batches(loader: Any, shards: tuple[type, ...]) -> None:
    """Let a loader of accelerate give every rank whole batches. ``shards`` are accelerate's classes that divide batches
    or samples between processes."""
    for part in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if isinstance(part, shards):
            part.num_processes, part.process_index = 1, 0  # type: ignore[attr-defined]


def checked(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options for ``parallelize``. Raise a PlanError if it has no such option."""
    for name in options:
        if name not in _OPTIONS:
            raise PlanError(
                f"there is no option {name!r}", where=where, remedy=f"the options are: plan, {', '.join(_OPTIONS)}"
            )
    return dict(options)


def adopted(optimizer: Optimizer, model: nn.Module) -> OptimizerFactory:
    """Return a function for ``parallelize`` that gives the caller's own optimizer object this rank's parts of its
    parameters. So learning-rate schedules that hold the object still set its options. Its state starts anew.

    Raises:
        OptimizerError: the optimizer has a parameter that is not the model's.
    """
    names = {id(value): name for name, value in model.named_parameters()}
    for value in (value for group in optimizer.param_groups for value in group["params"]):
        if id(value) not in names:
            raise OptimizerError(
                f"it holds a parameter of shape {list(value.shape)} that is not the model's",
                where=f"optimizer {type(optimizer).__name__}",
                remedy="make it from the parameters of the model that is trained",
            )
    groups = [[names[id(value)] for value in group["params"]] for group in optimizer.param_groups]

    def adopt(parameters: Any) -> Optimizer:
        local = dict(parameters)
        fresh = _fresh(optimizer, [[local[name] for name in group if name in local] for group in groups])
        if not any(group["params"] for group in fresh):  # this rank's stages have nothing to train
            fresh[0]["params"] = list(local.values())
        for group, new in zip(optimizer.param_groups, fresh, strict=True):
            group["params"] = new["params"]
            if "param_names" in group:
                held = {id(value): name for name, value in local.items()}
                group["param_names"] = [held[id(value)] for value in new["params"]]
        return optimizer

    return adopt


def _fresh(optimizer: Optimizer, groups: list[list[nn.Parameter]]) -> list[dict[str, Any]]:
    """Return groups of new parameters, and start the optimizer's state anew. An optimizer whose constructor makes state
    (Adagrad) makes it for them."""
    if type(optimizer) is torch.optim.Adagrad:
        options = [{key: value for key, value in group.items() if key not in ("params", "param_names")}
                   for group in optimizer.param_groups]  # fmt: skip
        filled = [{**group, "params": values} for values, group in zip(groups, options, strict=True) if values]
        if filled:
            optimizer.state = torch.optim.Adagrad(filled).state
    else:
        optimizer.state.clear()
    return [{"params": values} for values in groups]


def _copy_buffers(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state and not buffer.is_meta:
                buffer.copy_(state[name])
