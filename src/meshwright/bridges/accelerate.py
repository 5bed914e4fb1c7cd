"""A subclass of accelerate's Accelerator, whose ``prepare`` returns a model that trains by our plan.

    accelerator = PlannedAccelerator(plan=mw.Layout(dp=-1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss       # forward and backward, by the plan
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

accelerate has no register of plugins, so this is a subclass. A loader's batch is the batch of all ranks together
(``split_batches``), and every rank gets it whole: the plan divides it.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwright.bridges.extras import missing
from meshwright.bridges.planned import Planned, checked, give_whole_batches
from meshwright.errors import CaptureError, CheckpointError, LayoutError, PlanError
from meshwright.ir.layout import Layout
from meshwright.runtime.trainer import Trainer

try:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
except ImportError as error:
    raise missing("accelerate", "accelerate") from error

LossOfCall = Callable[..., Any]
"""A function ``loss_fn(model, *args, **kwargs)`` of the arguments with which the prepared model is called."""

_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
_PRECISIONS = {"no": None, "bf16": "bfloat16"}


class Output(dict[str, Any]):
    """The result of a training call: only the loss comes back from a planned step."""

    @property
    def loss(self) -> Tensor:
        """The loss of the global batch. Its ``backward`` hands out the gradients."""
        result: Tensor = self["loss"]
        return result

    def __missing__(self, key: Any) -> Any:
        if key == 0:
            return self["loss"]
        raise _only_the_loss(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _only_the_loss(name)


def _only_the_loss(name: Any) -> CaptureError:
    return CaptureError(
        f"a training call of a planned model returns its loss, and no {name!r}",
        where="PlannedModel",
        remedy="compute the loss in the model, or give PlannedAccelerator(loss_fn=...); in eval mode, all is returned",
    )


class PlannedModel(nn.Module):
    """A prepared model. In training mode, with gradients, a call runs a step's forward and backward by the plan. Else
    the plain model runs, with whole parameters.

    Attributes:
        module: the caller's model.
        planned: its training by the plan. ``planned.trainer`` is our trainer; it exists from the first batch on.
    """

    def __init__(self, module: nn.Module, loss_fn: LossOfCall, plan: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        returned = self._returned = SimpleQueue[bool]()  # a queue, since a step may not change what it reads
        self._returns_loss = False

        def loss_of(module: nn.Module, batch: Any) -> Any:
            result = loss_fn(module, *batch["args"], **batch["kwargs"])
            returned.put(isinstance(result, Tensor))
            return _loss_in(result)

        self.module, self.planned = module, Planned(module, loss_of, plan, options)
        self.optimizer: torch.optim.Optimizer | None = None
        self._whole = ExitStack()

    def train(self, mode: bool = True) -> Self:
        """Switch the mode. In evaluation mode the caller's model has whole parameters. Split parameters are gathered,
        so that every rank must call it."""
        if mode:
            self._whole.close()
        elif self.training:
            self._whole.enter_context(self.planned.whole())
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss in training, within an ``Output`` if the model returns more; else the model's own result."""
        if not self.training:
            return self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            with self.planned.whole():
                return self.module(*args, **kwargs)
        if self.optimizer is None:
            raise PlanError("no optimizer was prepared", where="PlannedAccelerator.prepare",
                            remedy="prepare the model together with its optimizer")  # fmt: skip
        batch = {"args": args, "kwargs": kwargs}
        loss = self.planned.begin(batch, self.optimizer).loss(batch)
        while not self._returned.empty():
            self._returns_loss = self._returned.get()
        return loss if self._returns_loss else Output(loss=loss)

    def state_dict(self, *positional: Any, **others: Any) -> Any:
        """Return the state of the caller's model, by its own names."""
        return self.module.state_dict(*positional, **others)

    def load_state_dict(self, *positional: Any, **others: Any) -> Any:
        """Load the state of the caller's model."""
        return self.module.load_state_dict(*positional, **others)


def _loss_in(result: Any) -> Any:
    """The loss in the result of a model."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        return result.get("loss")
    return result[0] if isinstance(result, tuple) else getattr(result, "loss", None)


class PlannedAccelerator(Accelerator):
    """An Accelerator with a plan. It takes the arguments of ``Accelerator``.

    Args:
        plan: what :func:`meshwright.parallelize` takes. Default: data parallelism over all ranks.
        loss_fn: the loss of a call of the prepared model. Default: the ``loss`` that the model returns.
        plan_options: further arguments of ``parallelize``.

    Raises:
        PlanError: an argument that cannot be honoured, by name.
    """

    def __init__(
        self,
        *,
        plan: Any = None,
        loss_fn: LossOfCall | None = None,
        plan_options: Mapping[str, Any] | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        **others: Any,
    ) -> None:
        for name in _REFUSED:
            if others.get(name) is not None:
                raise PlanError("it would place the model too", where=f"PlannedAccelerator, {name}",
                                remedy="leave it out, and give the plan a layout")  # fmt: skip
        self._optimizers: list[Any]
        loaders = dataloader_config or DataLoaderConfiguration()
        if loaders.dispatch_batches:
            raise PlanError("every rank draws the whole batch", where="DataLoaderConfiguration, dispatch_batches",
                            remedy="leave it out")  # fmt: skip
        loaders.split_batches = True
        self._plan, self._loss_fn = plan if plan is not None else Layout(dp=-1), loss_fn or _call
        self._options = checked(plan_options or {}, "plan_options")
        super().__init__(dataloader_config=loaders, **others)
        if self.mixed_precision not in _PRECISIONS:
            raise PlanError(f"{self.mixed_precision!r} cannot be honoured", where="PlannedAccelerator, mixed_precision",
                            remedy="use 'bf16' or 'no'")  # fmt: skip

    # --- what is prepared ----------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Return the model as one that trains by the plan. Only one model can be prepared."""
        if isinstance(model, PlannedModel) or evaluation_mode:
            return model
        if self._models:
            raise PlanError("a model is prepared already", where="PlannedAccelerator.prepare",
                            remedy="make one module of several models, or one accelerator for each")  # fmt: skip
        precision = _PRECISIONS[self.mixed_precision]
        options = {"device": self.device} | ({"precision": precision} if precision else {})
        model.to(self.device)
        prepared = PlannedModel(model, self._loss_fn, self._plan, options | self._options)
        self._models.append(prepared)
        self._connect()
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Prepare the optimizer of the model. Only one can be prepared."""
        if self._optimizers:
            raise PlanError("an optimizer is prepared already", where="PlannedAccelerator.prepare",
                            remedy="give one optimizer several groups of parameters")  # fmt: skip
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self._connect()
        return prepared

    def _connect(self) -> None:
        if self._models and self._optimizers:
            self._models[0].optimizer = self._optimizers[0].optimizer

    def prepare_data_loader(self, data_loader: Any, *positional: Any, **others: Any) -> Any:
        """Return a loader that gives every rank the whole batch."""
        loader = super().prepare_data_loader(data_loader, *positional, **others)
        give_whole_batches(loader, (BatchSamplerShard, IterableDatasetShard))
        return loader

    def unwrap_model(self, model: Any, *positional: Any, **others: Any) -> Any:
        """Return the caller's model."""
        return super().unwrap_model(getattr(model, "module", model), *positional, **others)

    # --- a step --------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients of the whole model. ``parameters`` are those of the prepared model."""
        if norm_type != 2:
            raise PlanError(f"norm {norm_type} cannot be honoured", where="clip_grad_norm_", remedy="use the 2-norm")
        return self._trained().clip_gradients(max_norm)

    def gather(self, tensor: Any) -> Any:
        """Return the tensor: every rank computes with whole batches, and has whole results."""
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensor, as ``gather``."""
        return tensor

    # --- files ---------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return whole tensors by the plain model's names, on rank 0. Every rank must call it."""
        trainer = model.planned.trainer if isinstance(model, PlannedModel) else None
        if trainer is None:
            return super().get_state_dict(model, unwrap)
        return OrderedDict(trainer.full_state_dict())  # accelerate takes an OrderedDict for a model's state

    def save_state(self, output_dir: Any = None, *positional: Any, **others: Any) -> Any:
        """Save as accelerate does: whole weights and optimizer state, schedules, random states. Every rank must call
        it, and the layout of the load may be another."""
        optimizers = self._optimizers
        if any(model.planned.trainer is not None for model in self._models):
            self._optimizers = [_WholeState(self._trained().full_optimizer_state_dict())]
        try:
            return super().save_state(output_dir, *positional, **others)
        finally:
            self._optimizers = optimizers

    def load_state(self, input_dir: Any = None, *positional: Any, **others: Any) -> Any:
        """Load what ``save_state`` has saved, before the first step.

        Raises:
            CheckpointError: the parameters are split over ranks already.
        """
        if any(model.planned.trainer is not None for model in self._models):
            raise CheckpointError("training has begun", where="load_state", remedy="load before the first step")
        return super().load_state(input_dir, *positional, **others)

    def _trained(self) -> Trainer:
        for model in self._models:
            trainer: Trainer | None = model.planned.trainer
            if trainer is not None:
                return trainer
        raise LayoutError("no step was made yet", where="PlannedAccelerator", remedy="call the model first")


class _WholeState:
    """Stands for an optimizer while its whole state is saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The default ``loss_fn``: the model itself, which returns its loss."""
    return model(*args, **kwargs)
