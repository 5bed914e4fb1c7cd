"""1-bit Adam and 0/1 Adam: Adam with a variance that is frozen after some steps. Ranks then exchange only the momentum.

Neither optimizer corrects the bias of its moments, as in the authors' code (DeepSpeed). The weight decay is decoupled,
as in AdamW. The gradient of an element may be 0 in all steps until the variance is frozen. Its variance is then 0, and
the element only decays. Otherwise it would step by the full momentum over ``eps``, because a code of one bit has no
zero.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class _FrozenVariance(Optimizer):
    """The base class: Adam's step, with a rule for the steps in which the variance is updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Parameters without a gradient do not change.

        Returns:
            The result of ``closure``; None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    if value.grad.is_sparse:
                        raise RuntimeError(f"{type(self).__name__} does not take sparse gradients")
                    self._update(group, value, value.grad)
        return loss

    @abstractmethod
    def _updates_variance(self, group: dict[str, Any], step: int) -> bool:
        """Whether a step (counted from 0) updates the variance."""

    def _update(self, group: dict[str, Any], value: Tensor, gradient: Tensor) -> None:
        state, (beta1, beta2) = self.state[value], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        count = int(state["step"])
        state["step"] += 1
        frozen = count >= group["freeze_step"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        if not frozen and self._updates_variance(group, count):
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
        if frozen:
            update.mul_(state["exp_avg_sq"] != 0)
        value.sub_(update.add_(value, alpha=group["weight_decay"]), alpha=group["lr"])


class OneBitAdam(_FrozenVariance):
    """Adam without bias correction. From step ``freeze_step`` on, the variance does not change.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g²  while step < freeze_step
        w = w - lr (m / (√v + eps) + weight_decay w)

    H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
    arXiv:2102.02888, algorithm 1. The codec ``onebit(momentum=b1, warmup=freeze_step)`` exchanges the momentum. It
    gives the optimizer a gradient from which the optimizer computes the exchanged momentum.

    Args:
        lr: the learning rate.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the denominator.
        freeze_step: number of steps that update the variance: 15 to 25 % of all steps.
        weight_decay: decoupled.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        freeze_step: int = 1000,
        weight_decay: float = 0.0,
    ) -> None:
        _check(betas, lr=lr, eps=eps, freeze_step=freeze_step, weight_decay=weight_decay)
        options = {"lr": lr, "betas": betas, "eps": eps, "freeze_step": freeze_step, "weight_decay": weight_decay}
        super().__init__(params, options)

    def _updates_variance(self, group: dict[str, Any], step: int) -> bool:
        return True


class ZeroOneAdam(_FrozenVariance):
    """Adam without bias correction. Its variance is updated more and more rarely, and then frozen.

    Update j + 1 of the variance comes 2**⌊j / ``num_updates``⌋ steps after update j. This is the policy of Y. Lu et
    al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023, arXiv:2202.06009 (κ is
    ``num_updates``). Momentum and step are those of ``OneBitAdam``. With a codec, the variance is computed from decoded
    gradients. The paper's local steps are not part of the optimizer.

    Args:
        num_updates: number of updates of the variance before their distance doubles.
        freeze_step: number of steps after which the variance is not updated any more.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        freeze_step: int = 100_000,
        weight_decay: float = 0.0,
        num_updates: int = 16,
    ) -> None:
        _check(betas, lr=lr, eps=eps, freeze_step=freeze_step, weight_decay=weight_decay, num_updates=num_updates)
        options = {
            "lr": lr, "betas": betas, "eps": eps, "freeze_step": freeze_step, "weight_decay": weight_decay,
            "num_updates": num_updates,
        }  # fmt: skip
        super().__init__(params, options)

    def _updates_variance(self, group: dict[str, Any], step: int) -> bool:
        # Updates at a distance of 2**d begin at step num_updates (2**d - 1).
        distance = 1 << ((step // group["num_updates"] + 1).bit_length() - 1)
        return (step - group["num_updates"] * (distance - 1)) % distance == 0


def _check(betas: tuple[float, float], **values: float) -> None:
    for value in betas:
        if not 0.0 <= value < 1.0:
            raise ValueError(f"betas are {betas}, which must be from 0 to less than 1")
    for name, value in values.items():
        least = 1 if name in ("freeze_step", "num_updates") else 0
        if not value >= least:
            raise ValueError(f"{name} is {value}, which must be at least {least}")
