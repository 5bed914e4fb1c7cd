"""LARS, LARC and LAMB in one process, against their papers' formulas written out in plain Python."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import OptimizerError
from meshwright.models import MLP, classification_loss
from meshwright.optim import LAMB, LARC, LARS, NeedsShardSums

STEPS = 4
Numbers = list[float]


def norm(values: Numbers) -> float:
    return math.sqrt(sum(value * value for value in values))


class Reference:
    """One parameter as a list of numbers; ``step`` gives what it becomes."""

    def __init__(self, weights: Numbers, adapted: bool) -> None:
        self.w, self.adapted, self.count = weights, adapted, 0
        self.v, self.m = [0.0] * len(weights), [0.0] * len(weights)

    def trust(self, g: Numbers, coefficient: float, decay: float) -> float:
        usual = self.adapted and norm(self.w) > 0 and norm(g) > 0
        return coefficient * norm(self.w) / (norm(g) + decay * norm(self.w)) if usual else math.nan

    def lars(self, g: Numbers, lr: float, momentum: float, decay: float, coefficient: float, nesterov: bool) -> None:
        rate = self.trust(g, coefficient, decay)
        rate = lr * (1.0 if math.isnan(rate) else rate)
        for k, gradient in enumerate(g):
            step = rate * (gradient + decay * self.w[k])
            self.v[k] = momentum * self.v[k] + step
            self.w[k] -= step + momentum * self.v[k] if nesterov else self.v[k]

    def larc(self, g: Numbers, lr: float, momentum: float, decay: float, coefficient: float, nesterov: bool) -> None:
        rate = self.trust(g, coefficient, decay)
        scale = 1.0 if math.isnan(rate) else min(rate, lr) / lr
        for k, gradient in enumerate(g):
            step = scale * (gradient + decay * self.w[k])
            self.v[k] = momentum * self.v[k] + step
            self.w[k] -= lr * (step + momentum * self.v[k] if nesterov else self.v[k])

    def lamb(self, g: Numbers, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> None:
        self.count += 1
        self.m = [beta1 * m + (1 - beta1) * gradient for m, gradient in zip(self.m, g, strict=True)]
        self.v = [beta2 * v + (1 - beta2) * gradient**2 for v, gradient in zip(self.v, g, strict=True)]
        update = [
            (m / (1 - beta1**self.count)) / (math.sqrt(v / (1 - beta2**self.count)) + eps) + decay * w
            for m, v, w in zip(self.m, self.v, self.w, strict=True)
        ]
        usual = self.adapted and norm(self.w) > 0 and norm(update) > 0
        ratio = norm(self.w) / norm(update) if usual else 1.0
        self.w = [w - lr * ratio * change for w, change in zip(self.w, update, strict=True)]


def parameters_and_gradients() -> tuple[list[nn.Parameter], Iterator[list[Tensor]]]:
    """A matrix, a vector, one that begins at zero, and one whose gradient is zero, in float64."""
    torch.manual_seed(1)
    shapes = ((3, 4), (5,), (2, 3), (2, 2))
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    parameters[2].data.zero_()
    # The second one's gradients are so small that LARC clips only the others.
    sizes = (1.0, 1e-3, 1.0, 0.0)
    gradients = [
        [size * torch.randn(shape, dtype=torch.float64) for shape, size in zip(shapes, sizes, strict=True)]
        for _ in range(STEPS)
    ]
    return parameters, iter(gradients)


@pytest.mark.parametrize("adapt_vectors", [True, False])
@pytest.mark.parametrize(
    ("make", "rule", "values"),
    [
        (LARS, "lars", {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.02}),
        (LARS, "lars", {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.02, "nesterov": True}),
        (LARS, "lars", {"lr": 2.0, "momentum": 0.0, "weight_decay": 0.0, "trust_coefficient": 0.02}),
        (LARC, "larc", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.02}),
        (LARC, "larc", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.02, "nesterov": True}),
        (LAMB, "lamb", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_the_paper(
    make: Callable[..., torch.optim.Optimizer], rule: str, values: dict[str, Any], adapt_vectors: bool
) -> None:
    parameters, gradients = parameters_and_gradients()
    references = [
        Reference(parameter.detach().flatten().tolist(), adapt_vectors or parameter.dim() > 1)
        for parameter in parameters
    ]
    optimizer = make(parameters, adapt_vectors=adapt_vectors, **values)
    if rule == "lamb":
        settings = {"lr": values["lr"], "eps": values["eps"], "decay": values["weight_decay"]}
        settings |= dict(zip(("beta1", "beta2"), values["betas"], strict=True))
    else:
        settings = {name: values[name] for name in ("lr", "momentum")}
        settings |= {"decay": values["weight_decay"], "coefficient": values["trust_coefficient"]}
        settings["nesterov"] = values.get("nesterov", False)
    for several in gradients:
        for parameter, gradient, reference in zip(parameters, several, references, strict=True):
            parameter.grad = gradient
            getattr(reference, rule)(gradient.flatten().tolist(), **settings)
        optimizer.step()
    for parameter, reference in zip(parameters, references, strict=True):
        assert parameter.detach().flatten().tolist() == pytest.approx(reference.w, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("nesterov", [False, True])
def test_larc_that_never_clips_is_sgd(nesterov: bool) -> None:
    larc_parameters, gradients = parameters_and_gradients()
    sgd_parameters = [nn.Parameter(parameter.detach().clone()) for parameter in larc_parameters]
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    optimizers = (LARC(larc_parameters, trust_coefficient=1e9, **settings), torch.optim.SGD(sgd_parameters, **settings))
    for several in gradients:
        for parameter, other, gradient in zip(larc_parameters, sgd_parameters, several, strict=True):
            parameter.grad, other.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other in zip(larc_parameters, sgd_parameters, strict=True):
        assert torch.allclose(parameter, other, rtol=1e-12, atol=1e-15)


def test_lamb_that_adapts_nothing_is_adamw() -> None:
    values = torch.randn(6, dtype=torch.float64)
    lamb_parameter, adamw_parameter = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizers = (
        LAMB([lamb_parameter], lr=0.01, eps=1e-8, weight_decay=0.0, adapt_vectors=False),
        torch.optim.AdamW([adamw_parameter], lr=0.01, weight_decay=0.0),
    )
    for _ in range(STEPS):
        lamb_parameter.grad = torch.randn(6, dtype=torch.float64)
        adamw_parameter.grad = lamb_parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(lamb_parameter, adamw_parameter, rtol=1e-12)


@pytest.mark.parametrize("make", [LARS, LARC, LAMB])
def test_they_behave_as_optimizers_of_torch(make: Callable[..., Any]) -> None:
    """A group's own options, a closure, a scheduler, no gradient, and a state dict that goes on bit by bit."""
    torch.manual_seed(0)
    used, unused = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make([{"params": [used], "weight_decay": 0.1}, {"params": [unused]}], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert float(closure().detach()) < float(first.detach())
    assert torch.equal(unused, torch.ones(2, 2))

    twin = nn.Parameter(used.detach().clone())
    other = make([{"params": [twin], "weight_decay": 0.1}, {"params": [nn.Parameter(torch.ones(2, 2))]}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.grad = used.grad.clone() if used.grad is not None else None
    optimizer.step()
    other.step()
    assert torch.equal(used, twin)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LARS(p, lr=-1.0), "lr is -1.0, which must be at least 0"),
        (lambda p: LARC(p, trust_coefficient=math.nan), "trust_coefficient is nan"),
        (lambda p: LARS(p, momentum=0.0, nesterov=True), "nesterov needs a momentum above 0"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), r"betas are \(0\.9, 1\.0\)"),
    ],
)
def test_bad_values_are_refused(make: Callable[[Any], torch.optim.Optimizer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(2))])
    batch = {"inputs": torch.randn(4, 6), "label": torch.randint(4, (4,))}
    with pytest.raises(OptimizerError, match=f"optimizer: it could not be made: ValueError: {message}"):
        mw.parallelize(MLP((6, 8, 4)), classification_loss, batch, plan=mw.Layout(), optimizer=make)


@pytest.mark.parametrize("make", [LARS, LARC, LAMB])
def test_a_copy_still_sums_over_shards(make: Callable[..., Any]) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = make([parameter])
    asked: list[int] = []

    def shard_sum(parameters: Any, values: Tensor) -> Tensor:
        asked.append(len(parameters))
        return values

    hears: bool = isinstance(optimizer, NeedsShardSums)
    assert hears
    optimizer.sum_shards_with(shard_sum)
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    twin.step()
    assert asked == [1]
