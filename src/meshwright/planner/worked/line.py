"""One claim with what we find: the row of a table."""

from typing import Literal

import msgspec

Finding = Literal["agrees", "rounds", "claim wrong", "we differ"]
"""``we differ`` is of claims that were measured: the prediction is not within the points that were asked for."""

EXACT = 0.006
"""Of a number: what rounding to three digits explains."""

ROUNDED = 0.05
"""Of a number: what is still called rounding."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of a lecture, our number, the verdict, and where the number is from or why it differs."""

    claim: str
    ours: str
    verdict: Finding
    why: str


def compared(claim: str, printed: float, found: float, ours: str, why: str, *, exact: float = EXACT) -> Line:
    """The line whose verdict follows from how far the printed number is from the one that was found. ``ours`` is the
    format of the latter: ``"{:.1f} GB"``."""
    off = abs(printed / found - 1)
    verdict: Finding = "agrees" if off <= exact else "rounds" if off <= ROUNDED else "claim wrong"
    return Line(claim=claim, ours=ours.format(found), verdict=verdict, why=why)


def predicted(claim: str, measured: float, found: float, points: float, why: str) -> Line:
    """A line of measured percentages beside predicted ones, which agree within ``points``."""
    verdict: Finding = "agrees" if abs(measured - found) <= points else "we differ"
    return Line(claim=claim, ours=f"{found:.1f} %", verdict=verdict, why=why)


def held(claim: str, ours: str, true: bool, why: str) -> Line:
    """A line that is right or wrong."""
    return Line(claim=claim, ours=ours, verdict="agrees" if true else "claim wrong", why=why)
