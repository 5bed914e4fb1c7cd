"""The most probable numbers of a profile, given runs: least squares of residuals, with normal priors on the numbers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

LEAST_STEP_S = 0.005
"""A scale, in seconds, for ``step_s`` in a profile where it is 0. The number is then this scale times ``exp(x) - 1``,
where x has the width of its prior."""
PRIOR_RUNS = 4.0
"""The weight of the expected error, as a number of runs, when the error of runs is estimated from few runs."""
MOST_STEPS = 40
"""The largest number of iterations of a fit. Later iterations change a number by less than its uncertainty."""
LEAST_KNOWN = 0.25
"""The smallest factor on the widths of priors, so that runs can always change a profile."""
TOLD = 0.7
"""A number counts as learned if the runs reduce its standard deviation to at most this fraction."""


class Number(msgspec.Struct, frozen=True, kw_only=True):
    """A learned number: its value and standard deviation, before and after learning. The deviation refers to the
    logarithm (for ``fragmentation``, to the number itself). ``is_learned``: the runs contain information about it."""

    name: str
    before: float
    value: float
    deviation_before: float
    deviation: float

    @property
    def is_learned(self) -> bool:
        """Whether the runs reduced the number's uncertainty noticeably."""
        return self.deviation <= TOLD * self.deviation_before


@dataclass(frozen=True, eq=False)
class Posterior:
    """The most probable values of the numbers. ``leverage`` is the number of runs that the fit uses up: the sum, over
    all residuals, of how far each residual follows its own run."""

    numbers: tuple[Number, ...]
    leverage: float

    @property
    def values(self) -> dict[str, float]:
        """The value of each number, by name."""
        return {number.name: number.value for number in self.numbers}

    @property
    def deviations(self) -> dict[str, float]:
        """The standard deviation of each number, by name."""
        return {number.name: number.deviation for number in self.numbers}

    def spread(self, errors: np.ndarray, expected: float) -> float:
        """The expected error of a new run, as a standard deviation of the logarithm. It has two parts: the distance of
        the learned runs from the fit (``expected`` counts as ``PRIOR_RUNS`` runs), and the uncertainty of the fit
        itself."""
        runs = len(errors)
        left = max(1.0, runs - self.leverage)
        around = (PRIOR_RUNS * expected**2 + float(errors @ errors)) / (PRIOR_RUNS + left)
        return math.sqrt(around * (1 + self.leverage / runs))


def most_probable(
    start: Mapping[str, float], widths: Mapping[str, float], residuals: Callable[[dict[str, float]], np.ndarray]
) -> Posterior:
    """The numbers with the smallest squared residuals. Normal priors with these ``widths`` hold the logarithms of the
    numbers near ``start`` (for ``fragmentation``, the number itself; ``step_s`` may start from 0). Large residuals
    count less (``soft_l1``), so that a disturbed run does not affect the others."""
    from scipy.optimize import least_squares

    names, deviations = list(widths), np.array(list(widths.values()))

    def values(steps: np.ndarray) -> dict[str, float]:
        return {name: _moved(name, start[name], float(step)) for name, step in zip(names, steps, strict=True)}

    def objective(steps: np.ndarray) -> np.ndarray:
        errors = residuals(values(steps))
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([robust, steps / deviations])

    fit = least_squares(objective, np.zeros(len(names)), x_scale=deviations, diff_step=1e-3, max_nfev=MOST_STEPS)
    covariance = np.linalg.inv(fit.jac.T @ fit.jac)
    of_runs = fit.jac[: -len(names)]
    best = values(fit.x)
    return Posterior(
        numbers=tuple(
            Number(
                name=name,
                before=start[name],
                value=best[name],
                deviation_before=float(deviations[index]),
                deviation=float(math.sqrt(covariance[index, index])),
            )
            for index, name in enumerate(names)
        ),
        leverage=float(np.trace(of_runs @ covariance @ of_runs.T)),
    )


def _moved(name: str, before: float, step: float) -> float:
    """The number after its logarithm (or the number itself) is changed by ``step``."""
    if name == "fragmentation":
        return min(1.0, max(0.0, before + step))
    if name == "step_s" and not before:
        return max(0.0, LEAST_STEP_S * math.expm1(step))
    return before * math.exp(step)


def known(deviation: float, of_unknown: float) -> float:
    """The factor on the widths of a profile's numbers, given the deviation that the profile expects. If the profile is
    more certain than an unknown profile, its numbers are more certain too, but never fully certain."""
    return min(1.0, max(LEAST_KNOWN, deviation / of_unknown))


def scaled(widths: Mapping[str, float], factor: float) -> dict[str, float]:
    """The widths times a factor."""
    return {name: factor * width for name, width in widths.items()}
