"""LARS, LARC and LAMB: steps in proportion to the norms of whole parameters, also when ranks hold parts of the
parameters.

All three scale the step of each parameter tensor (a "layer") by a ratio of two norms. If one of the norms is 0, the
scale is 1, as in the authors' code. With ``adapt_vectors=False``, parameters with fewer than two dims (biases, gains of
normalization layers) are not scaled, as in MLPerf's ResNet-50 and in the LAMB authors' BERT. It is an option of the
optimizer or of a single parameter group. The papers' algorithms scale all parameters, which is the default.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from meshwright.optim.whole import ShardSum


class _LayerWise(Optimizer):
    """The base class: computes norms of whole parameters, and steps group by group."""

    _shard_sum: ShardSum | None = None

    def sum_shards_with(self, shard_sum: ShardSum) -> None:
        """Use ``shard_sum`` to sum squares over the ranks that hold parts of a parameter (see ``NeedsShardSums``)."""
        self._shard_sum = shard_sum

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_shard_sum": self._shard_sum}  # a copy keeps it

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
            parameters = [value for value in group["params"] if value.grad is not None]
            if any(value.grad.is_sparse for value in parameters):
                raise RuntimeError(f"{type(self).__name__} does not take sparse gradients")
            if parameters:
                self._update(group, parameters)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Step these parameters of a group; all of them have gradients."""

    def _scales(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        others: Sequence[Tensor],
        formula: Callable[[Tensor, Tensor], Tensor],
    ) -> list[Tensor | float]:
        """The scale of each parameter: ``formula(norm of the parameter, norm of its tensor in others)``. The scale is 1
        if a norm is 0, or if the parameter is not adapted (``adapt_vectors``)."""
        adapted = [k for k, value in enumerate(parameters) if group["adapt_vectors"] or value.dim() > 1]
        scales: list[Tensor | float] = [1.0] * len(parameters)
        if adapted:
            weights, updates = ([values[k] for k in adapted] for values in (parameters, others))
            squares = torch.stack([_norms(weights), _norms(updates)]).square()
            if self._shard_sum is not None:
                squares = self._shard_sum(weights, squares)
            first, second = squares.sqrt().unbind()
            ratios = torch.where((first > 0) & (second > 0), formula(first, second), 1.0)
            for k, scale in zip(adapted, ratios.unbind(), strict=True):
                scales[k] = scale
        return scales


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling: momentum SGD with a separate learning rate for every parameter tensor.

        λ = trust_coefficient ‖w‖ / (‖g‖ + weight_decay ‖w‖)
        v = momentum v + lr λ (g + weight_decay w);  w = w - v

    Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, arXiv:1708.03888,
    algorithm 1. ``nesterov`` steps by ``momentum v + lr λ (g + weight_decay w)`` instead.

    Args:
        lr: the global learning rate, which λ multiplies: often 1 to 30.
        adapt_vectors: whether parameters of fewer than two dims are scaled too.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        adapt_vectors: bool = True,
    ) -> None:
        super().__init__(params, _sgd_options(lr, momentum, weight_decay, nesterov, trust_coefficient, adapt_vectors))

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        gradients = [value.grad for value in parameters if value.grad is not None]
        scales = self._scales(
            group, parameters, gradients, lambda w, g: group["trust_coefficient"] * w / (g + decay * w)
        )
        for value, gradient, scale in zip(parameters, gradients, scales, strict=True):
            step = gradient.add(value, alpha=decay).mul_(group["lr"] * scale)
            value.sub_(_with_momentum(self.state[value], step, momentum, group["nesterov"]))


class LARC(_LayerWise):
    """Layer-wise adaptive rate clipping: momentum SGD that limits each tensor's learning rate to its learning rate
    under LARS.

        λ = trust_coefficient ‖w‖ / (‖g‖ + weight_decay ‖w‖);  s = min(λ / lr, 1)
        v = momentum v + s (g + weight_decay w);  w = w - lr v

    This is the clip variant of NVIDIA's ``apex.parallel.LARC`` around ``torch.optim.SGD``
    (https://github.com/NVIDIA/apex), after Y. You, I. Gitman, B. Ginsburg, 2017, arXiv:1708.03888. With s = 1 it is
    ``torch.optim.SGD``.

    Args:
        lr: the upper limit of every tensor's learning rate.
        adapt_vectors: whether parameters of fewer than two dims are clipped too.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.02,
        adapt_vectors: bool = True,
    ) -> None:
        super().__init__(params, _sgd_options(lr, momentum, weight_decay, nesterov, trust_coefficient, adapt_vectors))

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        momentum, decay, lr = group["momentum"], group["weight_decay"], group["lr"]
        gradients = [value.grad for value in parameters if value.grad is not None]

        def clipped(w: Tensor, g: Tensor) -> Tensor:
            return (group["trust_coefficient"] * w / (g + decay * w) / lr).clamp(max=1.0)

        scales = self._scales(group, parameters, gradients, clipped)
        for value, gradient, scale in zip(parameters, gradients, scales, strict=True):
            step = gradient.add(value, alpha=decay).mul_(scale)
            value.sub_(_with_momentum(self.state[value], step, momentum, group["nesterov"]) * lr)


class LAMB(_LayerWise):
    """Layer-wise adaptive moments: Adam's step, scaled to the norm of each parameter tensor.

        m, v = Adam's first and second moment, corrected for their bias;  u = m / (√v + eps) + weight_decay w
        w = w - lr ‖w‖ / ‖u‖ u

    Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020,
    arXiv:1904.00962, algorithm 2, with φ(z) = z. Parameters that are not adapted take AdamW's step (decoupled decay).

    Args:
        lr: the learning rate. It is the change of a tensor relative to its norm.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the denominator.
        adapt_vectors: whether parameters of fewer than two dims are scaled too.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt_vectors: bool = True,
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        for value in betas:
            if not 0.0 <= value < 1.0:
                raise ValueError(f"betas are {betas}, which must be from 0 to less than 1")
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt_vectors": adapt_vectors}
        super().__init__(params, {"lr": lr, **options})

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        steps = [self._adam_step(group, value) for value in parameters]
        scales = self._scales(group, parameters, steps, lambda w, u: w / u)
        for value, step, scale in zip(parameters, steps, scales, strict=True):
            value.sub_(step.mul_(group["lr"] * scale))

    def _adam_step(self, group: dict[str, Any], value: Tensor) -> Tensor:
        assert value.grad is not None
        state, (beta1, beta2) = self.state[value], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        state["step"] += 1
        count = float(state["step"])
        mean = state["exp_avg"].lerp_(value.grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(value.grad, value.grad, value=1 - beta2)
        root = square.div(1 - beta2**count).sqrt_().add_(group["eps"])
        return (mean / (1 - beta1**count)).div_(root).add_(value, alpha=group["weight_decay"])


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """2-norms [n] of this rank's parts, each computed at least in float32 and returned in float64."""
    norms = (torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in tensors)
    return torch.stack([norm.double() for norm in norms])


def _with_momentum(state: dict[str, Any], step: Tensor, momentum: float, nesterov: bool) -> Tensor:
    """The step with the momentum of earlier steps, which ``state`` keeps."""
    if not momentum:
        return step
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(step)
    moved: Tensor = state["momentum_buffer"].mul_(momentum).add_(step)
    return step.add_(moved, alpha=momentum) if nesterov else moved


def _sgd_options(
    lr: float, momentum: float, weight_decay: float, nesterov: bool, trust_coefficient: float, adapt_vectors: bool
) -> dict[str, Any]:
    _check(lr=lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum above 0")
    return {
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
        "trust_coefficient": trust_coefficient, "adapt_vectors": adapt_vectors,
    }  # fmt: skip


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0.0:
            raise ValueError(f"{name} is {value}, which must be at least 0")
