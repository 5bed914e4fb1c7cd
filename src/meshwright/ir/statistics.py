"""Medians of repeated measurements and their ratios, with the interval that holds 95 % of resampled repetitions."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
RESAMPLES = 2000


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A median, or a ratio of two, and the interval that holds 95 % of it when repetitions are drawn again with
    replacement (the percentile bootstrap: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section
    13.3). Times are not normally distributed, so no deviation from a mean is given."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} (95 %: {self.low:.3f} to {self.high:.3f})"

    @property
    def interval(self) -> tuple[float, float]:
        return (self.low, self.high)

    def times(self, factor: float) -> "Estimate":
        """The estimate in another unit; ``factor`` is positive."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self) -> "Estimate":
        """Of one over the quantity: of a rate, where this is a time."""
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)


def median(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median of ``values``."""
    return _resampled(values, statistics.median, seed)


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Median of ``ours`` over median of ``theirs``, of rounds in which both ran: those are resampled in pairs, for
    they share their time.

    Raises:
        ValueError: the numbers of rounds differ.
    """
    return _resampled(list(zip(ours, theirs, strict=True)), _of_medians, seed)


def _resampled(rounds: Sequence[T], statistic: Callable[[Sequence[T]], float], seed: int) -> Estimate:
    draw = random.Random(seed)
    rising = sorted(statistic(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return Estimate(statistic(rounds), rising[RESAMPLES // 40], rising[-RESAMPLES // 40])


def _of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)
