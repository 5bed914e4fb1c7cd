"""A claim of a lecture with our number and verdict: a row of a table."""

from typing import Literal

import msgspec

Finding = Literal["agrees", "rounds", "claim wrong", "we differ", "not measured"]
"""The verdict on a claim. ``we differ`` is for measured claims: the error of the prediction is larger than allowed.
``not measured``: the result file with the measurement is not there."""

EXACT = 0.006
"""The largest relative difference that rounding to three digits explains."""

ROUNDED = 0.05
"""The largest relative difference that still counts as rounding."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of a lecture, our number, the verdict, and the source of the number or the reason for the difference."""

    claim: str
    ours: str
    verdict: Finding
    why: str


def compared(claim: str, printed: float, computed: float, ours: str, why: str, *, exact: float = EXACT) -> Line:
    """The line that compares a printed number with a computed number. Their relative difference decides the verdict.
    ``ours`` formats the computed number: ``"{:.1f} GB"``."""
    off = abs(printed / computed - 1)
    verdict: Finding = "agrees" if off <= exact else "rounds" if off <= ROUNDED else "claim wrong"
    return Line(claim=claim, ours=ours.format(computed), verdict=verdict, why=why)


def predicted(claim: str, measured: float, prediction: float, points: float, why: str) -> Line:
    """The line that compares a measured percentage with a predicted percentage. They agree if they differ by at most
    ``points``."""
    verdict: Finding = "agrees" if abs(measured - prediction) <= points else "we differ"
    return Line(claim=claim, ours=f"{prediction:.1f} %", verdict=verdict, why=why)


def held(claim: str, ours: str, true: bool, why: str) -> Line:
    """The line for a claim that is either right or wrong."""
    return Line(claim=claim, ours=ours, verdict="agrees" if true else "claim wrong", why=why)
