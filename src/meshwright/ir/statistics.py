"""Medians of repeated measurements, and ratios of medians, with 95 % intervals from resampled repetitions."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
RESAMPLES = 2000


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A median, or a ratio of two medians, with its 95 % interval.

    The interval holds 95 % of the values that result when repetitions are drawn again with replacement (the percentile
    bootstrap: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3). There is no standard
    deviation, because times are not normally distributed."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} (95 %: {self.low:.3f} to {self.high:.3f})"

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the interval: (low, high)."""
        return (self.low, self.high)

    def times(self, factor: float) -> "Estimate":
        """The estimate times a positive ``factor``, for example in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self) -> "Estimate":
        """The estimate of 1 / quantity. If this estimate is of a time, the result is of a rate."""
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)


def median(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median of ``values``, with its interval."""
    return _resampled(values, statistics.median, seed)


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """The median of ``ours`` divided by the median of ``theirs``, with its interval.

    Both programs ran in every round, at nearly the same time. So rounds are resampled as pairs.

    Raises:
        ValueError: the numbers of rounds differ.
    """
    return _resampled(list(zip(ours, theirs, strict=True)), _of_medians, seed)


def _resampled(rounds: Sequence[T], statistic: Callable[[Sequence[T]], float], seed: int) -> Estimate:
    draw = random.Random(seed)
    rising = sorted(statistic(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return Estimate(statistic(rounds), rising[RESAMPLES // 40], rising[-RESAMPLES // 40])


def _of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(ours for ours, _ in pairs) / statistics.median(theirs for _, theirs in pairs)
