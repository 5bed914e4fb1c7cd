"""How uncertain is a forecast? An ensemble of networks says it better than one network, on a toy atmosphere.

    python examples/forecast_ensemble.py
    torchrun --nproc-per-node 2 examples/forecast_ensemble.py

The atmosphere is Lorenz's of 1996: 40 values around a circle of latitude, which are advected, damped and forced, and
are chaotic (E. Lorenz, "Predictability: A Problem Partly Solved", equation 1). A network reads the 40 values, measured
with errors, and predicts mean and standard deviation of those of two days later. Members of an ensemble start from
other random weights, read the measurements in another order, and exchange nothing; the forecast is the mean of their
probability densities (Lakshminarayanan et al., "Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles", 2017). The log score is the mean logarithm of the density at what then happened. Each rank trains a member;
one rank alone trains two, one after the other.
"""

import math
from collections.abc import Callable

import torch
from application import Outcome, Training, parallelized, run
from torch import Tensor, nn

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import MLP
from meshwright.runtime.worlds import place

VALUES, FORCING, TIME_STEP, LEAD_STEPS, SPIN_UP = 40, 8.0, 0.05, 8, 200
MEASUREMENT_ERROR = 0.5
MEMBERS = 2


def tendency(x: Tensor) -> Tensor:
    """The rates of change of states [..., 40]."""
    return (x.roll(-1, -1) - x.roll(2, -1)) * x.roll(1, -1) - x + FORCING


def advanced(x: Tensor, steps: int) -> Tensor:
    """States after ``steps`` time steps of 6 hours, by the classical Runge-Kutta method."""
    for _ in range(steps):
        a = tendency(x)
        b = tendency(x + TIME_STEP / 2 * a)
        c = tendency(x + TIME_STEP / 2 * b)
        x = x + TIME_STEP / 6 * (a + 2 * b + 2 * c + tendency(x + TIME_STEP * c))
    return x


def weather(count: int, seed: int) -> dict[str, Tensor]:
    """Measured states and what they become: ``measured`` and ``later`` [count, 40], scaled to mean 0 and deviation 1 of
    the climate."""
    random = torch.Generator().manual_seed(seed)
    state = advanced(FORCING + torch.randn(count, VALUES, generator=random), SPIN_UP)
    measured = state + MEASUREMENT_ERROR * torch.randn(count, VALUES, generator=random)
    mean, deviation = 2.34, 3.64
    return {"measured": (measured - mean) / deviation, "later": (advanced(state, LEAD_STEPS) - mean) / deviation}


def log_density(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logarithm of the predicted density of each value at what happened: [b, 40], in nats."""
    mean, log_deviation = model(batch["measured"]).chunk(2, dim=-1)
    error = (batch["later"] - mean) * torch.exp(-log_deviation)
    return -log_deviation - 0.5 * error * error - 0.5 * math.log(2 * math.pi)


def score_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log score."""
    return -log_density(model, batch).mean()


def training(ranks: int, member: int | None = None, samples: int = 8000) -> Training:
    """The trainer of a member (default: this rank's), and its batches of 64 pairs."""
    layout = mw.Layout(replicas=ranks, consistency="ensemble") if ranks > 1 else mw.Layout()
    number = place(layout)[0] if member is None else member
    torch.manual_seed(number)
    loader = TensorLoader(weather(samples, seed=0), batch_size=64, seed=number, drop_last=True)
    return parallelized(MLP((VALUES, 256, 256, 2 * VALUES)), score_loss, loader, layout, lr=2e-3, local=True)


def main(ranks: int, steps: int = 1500, samples: int = 8000, goal: float = -1.2) -> list[Outcome]:
    """Train all members, and compute the log scores of their forecasts of what was not trained on."""
    numbers = [None] if ranks > 1 else range(MEMBERS)
    members = [training(ranks, number, samples) for number in numbers]
    for member in members:
        member.run(steps)
    held_out = weather(samples // 8, seed=1)

    def mean(predict: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> Tensor:
        """The mean over the members of what ``predict(model, batch)`` returns."""
        if ranks > 1:
            return mw.joint(members[0].trainer, predict, held_out).mean
        with torch.no_grad():
            return torch.stack([predict(member.model, held_out) for member in members]).mean(dim=0)

    together = float(mean(lambda model, batch: log_density(model, batch).exp()).log().mean())
    single = float(mean(log_density).mean())
    climate = -float((held_out["later"].square() / 2 + math.log(2 * math.pi) / 2).mean())
    return [
        Outcome("log score of the ensemble", together, "one member", single, goal, "nats"),
        Outcome("log score of one member", single, "the climate's mean and deviation", climate, climate, "nats"),
    ]


if __name__ == "__main__":
    run(main, __doc__)
