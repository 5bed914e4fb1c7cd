"""The part of a trainer that makes a step in pieces, for loops that call backward, clipping and the update themselves.

    loss = trainer.loss(batch)       # forward and backward run here, by the plan
    loss.backward()                  # the gradients of this rank's parameters are in .grad
    trainer.clip_gradients(1.0)
    trainer.update()

The sum of several losses, or a loss that is scaled, has the gradients that autograd would give it.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.groups import look_at_links
from meshwright.errors import LayoutError, OptimizerError
from meshwright.runtime.clip import clip
from meshwright.runtime.executor import StepResult
from meshwright.runtime.resumable import Resumable


class _Gradients:
    """The gradients of a loss, until its ``backward`` hands them out."""

    def __init__(self, values: dict[str, Tensor | None]) -> None:
        self.values: dict[str, Tensor | None] | None = values


class _Loss(torch.autograd.Function):
    """The loss of a step whose backward has already run. ``anchor`` is a leaf that makes autograd call ``backward``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
        """Return the value of the loss."""
        ctx.deliver = deliver
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Any) -> Any:
        """Hand out the gradients, times the gradient of the loss."""
        ctx.deliver(scales[0])
        return None, None, None


class Stepwise(Resumable):
    """A trainer's step in pieces. Every rank must call the same methods in the same order."""

    _run: Callable[[Any, bool, bool], StepResult]
    _is_finite: Callable[[StepResult], bool]
    _finish: Callable[[StepResult], None]
    _recorded: Callable[[], AbstractContextManager[None]]
    _note: Callable[[str, float], None]
    _lent: Callable[[], _Gradients | None] = staticmethod(lambda: None)
    _num_losses = 0

    def loss(self, batch: Any, *, local: bool = False) -> Tensor:
        """Run forward and backward of the global batch (with ``local``, of this rank's part of it) by the plan, and
        return the loss. Its ``backward()`` adds the gradients to ``.grad`` of this rank's parameters: those of the
        whole batch, reduced over all ranks. ``backward`` can be called once.

        Several calls before ``update`` accumulate gradients, which takes the memory of the gradients once more. Fewer
        bytes are sent if the plan accumulates instead: ``Layout(microbatches=...)``.

        Raises:
            LayoutError: replicas exchange their states inside of a step (``Layout.consistency``).
            The errors of ``step``.
        """
        self._refuse_replicas("trainer.loss")
        self._keep_gradients()
        with self._recorded():
            result = self._run(batch, local, True)
            finite = self._is_finite(result)
            if finite:
                self._finish(result)
        self._num_losses += 1
        gradients = _Gradients(result.gradients if finite else {})
        self._lent = weakref.ref(gradients)
        loss = result.scalars["loss"].detach()
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        differentiable: Tensor = _Loss.apply(anchor, loss, partial(self._deliver, gradients))
        return differentiable

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``, and return the norm that
        they had. All ranks get the same norm."""
        begun = time.perf_counter()
        self.metrics["grad_norm"] = norm = clip(self.parameters, max_norm)
        self._note("clip", begun)
        return norm

    def update(self) -> None:
        """Update the parameters by their gradients, and free the gradients. The step is complete.

        Raises:
            OptimizerError: the trainer was made without an optimizer.
            LayoutError: as ``loss``.
        """
        self._refuse_replicas("trainer.update")
        self._update(self.optimizer, self.parameters.trainable)
        self._updated()

    def follow_optimizer(self) -> None:
        """Count each ``optimizer.step()`` that the caller makes himself as this trainer's update, for loops that own
        the optimizer. Such a loop calls neither ``step`` nor ``update``.

        Raises:
            LayoutError: the plan keeps optimizer state on the host, or as ``loss``.
        """
        self._refuse_replicas("trainer.follow_optimizer")
        if self._offloader is not None:
            raise LayoutError(
                "optimizer state on the host comes and goes inside of trainer.update",
                where="offload='optimizer'",
                remedy="plan without offload, or call trainer.update() in place of optimizer.step()",
            )

        def before(*_: Any) -> None:
            self.saver.hold_update()

        def after(*_: Any) -> None:
            self._updated()

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)

    # --- inside --------------------------------------------------------------------------------------------------

    def _update(self, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        """Make an optimizer step with the parameters' gradients."""
        self.saver.hold_update()
        begun, offloader = time.perf_counter(), self._offloader
        offloader.step(optimizer, list(parameters.values())) if offloader is not None else optimizer.step()
        self._note("optimizer", begun)

    def _updated(self) -> None:
        """Complete a step: free the gradients, count the step, and follow changes of links."""
        for parameter in self.parameters.trainable.values():
            parameter.grad = None
        self._num_losses = 0
        self.step_number += 1
        if changes := look_at_links(self.step_number, self.groups):
            self._amend((*self.plan.amendments, *changes))

    def _refuse_replicas(self, where: str) -> None:
        if self.replica is not None:
            raise LayoutError(
                f"replicas joined by {self.plan.layout.consistency} exchange their states inside of a step",
                where=where,
                remedy="call trainer.step(batch), or join the replicas with consistency='sync'",
            )

    def _keep_gradients(self) -> None:
        """Copy gradients that are still needed, because the next run writes into their memory."""
        for parameter in self.parameters.trainable.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        if (gradients := self._lent()) is not None and gradients.values is not None:
            gradients.values = {
                name: None if value is None else value.clone() for name, value in gradients.values.items()
            }

    def _deliver(self, gradients: _Gradients, scale: Tensor) -> None:
        if gradients.values is None:
            raise OptimizerError(
                "its gradients have already been added to .grad",
                where="loss.backward()",
                remedy="call backward once, or trainer.loss(batch) again",
            )
        scaled = scale.device.type != "cpu" or float(scale) != 1.0  # a device is not waited for
        for name, parameter in self.parameters.trainable.items():
            if (value := gradients.values.get(name)) is not None:
                value = value * scale.to(value.dtype) if scaled else value
                parameter.grad = value if parameter.grad is None else parameter.grad + value
        gradients.values = None
