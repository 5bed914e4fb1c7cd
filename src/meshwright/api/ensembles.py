"""Joint predictions of the members of an ensemble."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.consistency.ensemble import EnsembleExchange, Joint
from meshwright.errors import LayoutError
from meshwright.runtime.trainer import Trainer


def joint(trainer: Trainer, predict: Callable[[nn.Module, Any], Tensor], batch: Any) -> Joint:
    """Return the joint prediction of the members of an ensemble (``Layout(replicas=..., consistency="ensemble")``). It
    has the mean and the standard deviation (the uncertainty) of ``predict(model, batch)`` over all members that are
    alive. ``predict`` may return class probabilities, for example. All members must call this function with equal
    batches, and all get the same bits.

    ``predict`` runs in evaluation mode, without gradients, on this rank's model.

    Raises:
        LayoutError: the trainer is no member of an ensemble, or its parameters are divided among ranks.
        LostRankError: another member does not call this function.
    """
    replica = trainer.replica
    exchange = replica.connected() if replica is not None else None
    if not isinstance(exchange, EnsembleExchange):
        raise LayoutError(
            f"consistency is {trainer.plan.consistency!r}, with {trainer.plan.layout.replicas} replicas",
            where="joint",
            remedy="train with Layout(replicas=..., consistency='ensemble')",
        )
    if trainer.parameters.given:
        raise LayoutError(
            f"{next(iter(trainer.parameters.given))} is divided among the ranks of a member",
            where="joint",
            remedy="give members layouts that leave parameters whole, or predict with trainer.full_state_dict()",
        )
    model = trainer.parameters.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return exchange.joint(predict(model, batch))
    finally:
        model.train(was_training)
