"""Intervals of predictions: between which ends a quantity lies in most runs, if its logarithm is normal."""

import math

import msgspec

from meshwright.ir.software import Spread

COVERED = 0.8
"""The fraction of runs that an interval is meant to hold."""
NINE_OF_TEN = 1.2815515655446004
"""The number of standard deviations above its mean below which a normal variable lies in 9 of 10 cases: one tenth lies
above an interval that holds ``COVERED``, one tenth below."""


class Interval(msgspec.Struct, frozen=True):
    """The ends between which a quantity lies in 80 % of all runs."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in the interval."""
        return self.low <= value <= self.high


def interval(value: float, deviation: float) -> Interval:
    """The interval around ``value``, whose logarithm has this standard deviation."""
    factor = math.exp(NINE_OF_TEN * deviation)
    return Interval(value / factor, value * factor)


def step_deviation(spread: Spread, communication: float, host: float = 0.0) -> float:
    """How uncertain a step's time is: the standard deviation of its logarithm. ``communication`` and ``host`` are their
    shares of the step (0 to 1)."""
    return math.hypot(spread.step, communication * spread.communication, host * spread.host)
