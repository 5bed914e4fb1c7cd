"""Intervals of predictions: the ends between which a quantity lies in most runs, if its logarithm is normally
distributed."""

import math

import msgspec

from meshwright.ir.software import Spread

COVERED = 0.8
"""The fraction of runs whose values lie in an interval."""
NINE_OF_TEN = 1.2815515655446004
"""A normal variable lies less than this number of standard deviations above its mean in 9 of 10 cases. So one tenth of
the values lies above an interval that holds ``COVERED``, and one tenth below."""


class Interval(msgspec.Struct, frozen=True):
    """The ends between which a quantity lies in 80 % of all runs."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in the interval."""
        return self.low <= value <= self.high


def interval(value: float, deviation: float) -> Interval:
    """The interval around ``value``, if the logarithm of the quantity has this standard deviation."""
    factor = math.exp(NINE_OF_TEN * deviation)
    return Interval(value / factor, value * factor)


def step_deviation(spread: Spread, communication: float, host: float = 0.0) -> float:
    """The uncertainty of a step's time: the standard deviation of its logarithm. ``communication`` and ``host`` are the
    fractions of the step's time (0 to 1) that they take."""
    return math.hypot(spread.step, communication * spread.communication, host * spread.host)
