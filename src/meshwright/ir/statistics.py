"""Medians and ratios of repeated measurements, with 95 % intervals from resampled repetitions."""

import random
import statistics
from collections.abc import Sequence

import msgspec

RESAMPLES = 2000


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A median or a ratio, with its 95 % interval.

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
    draw = random.Random(seed)
    return _estimate(statistics.median(values), [_drawn(values, draw) for _ in range(RESAMPLES)])


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """The median of the rounds' ratios, ``ours`` divided by ``theirs``, with its interval.

    Both programs ran in every round, one after the other. A machine that is slower in one round is slower for both
    programs, and their ratio remains (``docs/decisions/0038-ratios-of-rounds.md``).

    Raises:
        ValueError: the numbers of rounds differ.
    """
    return median([our_s / other for our_s, other in zip(ours, theirs, strict=True)], seed)


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """The median of ``ours`` divided by the median of ``theirs``, with its interval.

    The programs ran at different times. So the repetitions of each program are resampled separately.
    """
    draw = random.Random(seed)
    drawn = [_drawn(ours, draw) / _drawn(theirs, draw) for _ in range(RESAMPLES)]
    return _estimate(statistics.median(ours) / statistics.median(theirs), drawn)


def _drawn(values: Sequence[float], draw: random.Random) -> float:
    return statistics.median(draw.choices(values, k=len(values)))


def _estimate(value: float, drawn: Sequence[float]) -> Estimate:
    rising = sorted(drawn)
    return Estimate(value, rising[RESAMPLES // 40], rising[-RESAMPLES // 40])
